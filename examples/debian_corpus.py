"""Write a large corpus from Debian packages: sources of C, Go, Rust, Java and Python programs,
manuals in several languages.

    python -m examples.debian_corpus --out runs/corpus
    python -m data_mixtures.prepare examples/debian.toml --out runs/debian

The packages are downloaded as files and unpacked into the folder; nothing is installed. What needs a reader
of its own or is generated is written to text/*.jsonl. A package or file that is there is not fetched or
written again, so the same command continues an interrupted download.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import tarfile
from pathlib import Path

import tyro
from rich.console import Console
from rich.progress import track

from examples import corpus, generated

PACKAGES = (
    "linux-source-6.12",
    "gcc-12-source",
    "binutils-source",
    "glibc-source",
    "golang-1.19-src",
    "rust-src",
    "openjdk-17-source",
    "perl-doc",
    "python3.11-doc",
    "postgresql-doc-15",
    "linux-doc-6.1",
    "libboost1.74-doc",
    "manpages-dev",
    "manpages-de",
    "manpages-es",
    "manpages-fr",
    "manpages-ja",
    "manpages-pl",
    "manpages-pt-br",
    "manpages-ru",
    "manpages-zh",
)
console = Console()


def main(out: Path = Path("runs/corpus")) -> None:
    """Download and unpack PACKAGES into `out` (about 5 GB); needs apt-get and dpkg-deb, but not root."""
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise SystemExit(
                f"{tool} is not on this machine: this corpus is made of Debian packages"
            )
    markers = out / ".unpacked"
    markers.mkdir(parents=True, exist_ok=True)
    missing = [name for name in PACKAGES if not (markers / name).exists()]
    for name in track(missing, description="unpacking", console=console):
        package = download(name, out / ".packages")
        subprocess.run(["dpkg-deb", "-x", str(package), str(out)], check=True)
        package.unlink()
        (markers / name).touch()
    inner = [*out.glob("usr/src/**/*.tar.*"), *out.glob("usr/lib/jvm/**/src.zip")]
    for archive in track(inner, description="archives", console=console):
        unpack(archive)
    corpus.write(out / "text", texts(out))
    files = [path for path in out.rglob("*") if path.is_file()]
    console.print(
        f"{out}: {len(files):,} files, {sum(path.stat().st_size for path in files) / 1e9:.2f} GB"
    )


def texts(out: Path) -> dict[str, list[tuple[corpus.Texts, int | None]]]:
    """Return what debian.toml reads as JSON lines, by source."""
    pages, languages = ("usr/share/man/man[1-8]/*", "usr/share/man/[a-z][a-z]*/man[1-8]/*")
    translated = corpus.read(
        corpus.man, f"{out}/{languages}", f"/{languages}", exclude=("*/share/man/man*",)
    )
    packages = ("{site_packages}/**/*.py", ("*/tests/*", "*/test_*"))
    modules = corpus.read(corpus.doctests, packages[0], exclude=packages[1])
    return {
        "web": [
            (corpus.read(corpus.man, f"/{pages}", f"{out}/{pages}"), None),
            (corpus.read(corpus.docstrings, packages[0], exclude=packages[1]), None),
        ],
        "math": [(map(generated.arithmetic, itertools.count()), 40_000_000)],
        "multilingual": [(translated, None)],
        "qa": [(modules, None)],
    }


def download(name: str, folder: Path) -> Path:
    """Download the .deb of a package into `folder`; SystemExit with apt's own words when there is none."""
    folder.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(
        ["apt-get", "download", "-q", name], cwd=folder, capture_output=True, text=True
    )
    packages = sorted(folder.glob(f"{name}_*.deb"))
    if result.returncode or not packages:
        raise SystemExit(
            f"apt-get download {name} failed; try `apt-get update` first. It said: {result.stderr[-500:]}"
        )
    return packages[-1]


def unpack(archive: Path) -> None:
    """Unpack an inner archive beside itself, then delete it."""
    if archive.suffix == ".zip":
        shutil.unpack_archive(archive, archive.parent)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as tar:
            # test data of compilers holds links that lead out of the archive
            tar.extractall(
                archive.parent, filter=lambda m, to: m if m.isfile() or m.isdir() else None
            )
    else:
        return
    archive.unlink()


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.debian_corpus")
