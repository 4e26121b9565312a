"""Take the snapshot of a launch: everything a job runs from, in one read-only folder that later
edits do not affect.

    runs/NAME/snapshot/<time>-<commit>/
        code/             the tracked files of the commit (with --allow-dirty: of the working tree)
        changes.diff      only for a dirty tree: its difference from the commit
        env/              an interpreter whose path is code/ and the installed packages, nothing of the checkout
        job.toml          the resolved job config: file, overrides, defaults; all paths absolute
        mixture/          the lock and its tokenizer as files, the sources as links to the data
        environment.json  python, host, the variables that matter      packages.txt   as `pip freeze` prints
        snapshot.json     commit, command, mixture fingerprint                  submit.sbatch  the job script
        SHA256SUMS        of every file; `sha256sum --check SHA256SUMS` is the first thing that the job does

"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import tomli
import tomli_w

from data_mixtures.mixture import read_lock
from data_mixtures.shards import tokenizer_files
from records.files import file_sha256, write_json
from records.job import job_flags, read_job
from tools import ROOT
from tools.launch.script import SECRET

# environment variables that decide how a job runs
KEPT_VARIABLES = re.compile(
    r"^(CUDA|NCCL|TORCH|PYTORCH|OMP|MKL|GLOO|UCX|FI_|OFI|SLURM|TRITON|WANDB|HF_|LD_LIBRARY_PATH$|PATH$|LOADEDMODULES$)"
)


def take_snapshot(
    run: Path,
    config: Path,
    overrides: list[str],
    ranks: int,
    allow_dirty: bool,
    script: Callable[[Path], str],
) -> Path:
    """Create run/snapshot/<id>/ atomically and return it.

    Args:
        script: returns the text of submit.sbatch for the final folder.

    Raises:
        ValueError: for a dirty tree, a job that cannot start on so many ranks, an edited mixture.
    """
    code = code_tree(allow_dirty)
    final = run / "snapshot" / f"{time.strftime('%Y%m%dT%H%M%S')}-{code['version']}"
    if final.exists():
        raise ValueError(f"{final} exists already: another launch took this second; launch again")
    partial = final.with_name(f".{final.name}.partial")
    partial.mkdir(parents=True)
    try:
        (partial / "code").mkdir()
        archive = git("archive", "--format=tar", code["tree"])
        subprocess.run(["tar", "-xC", str(partial / "code")], input=archive, check=True)
        # records.files.code_version reads it
        (partial / "code/CODE_VERSION").write_text(code["version"] + "\n")
        if code["diff"]:
            (partial / "changes.diff").write_bytes(code["diff"])
        write_interpreter(partial / "env")
        job = resolve_job(partial, run, config, overrides, ranks)
        lock = Path(job["mixture"]["lock"])
        fingerprint = copy_mixture(lock, partial / "mixture")
        job["mixture"]["lock"] = str(final / "mixture" / lock.name)
        (partial / "job.toml").write_text(tomli_w.dumps(job), encoding="utf-8")
        (partial / "packages.txt").write_text("\n".join(packages()) + "\n", encoding="utf-8")
        facts = {
            "code_version": code["version"],
            "commit": code["commit"],
            "mixture_fingerprint": fingerprint,
            "config": str(config),
            "overrides": overrides,
            "argv": sys.argv,
            "time": time.time(),
        }
        for name, value in (("snapshot.json", facts), ("environment.json", environment())):
            write_json(partial / name, value)
        (partial / "submit.sbatch").write_text(script(final), encoding="utf-8")
        # last: a snapshot under its final name is complete and sealed
        seal(partial)
        partial.rename(final)
    except BaseException:
        # Ctrl-C included: a half snapshot is of no use
        remove(partial)
        raise
    return final


def code_tree(allow_dirty: bool) -> dict[str, Any]:
    """Return the git tree to run, HEAD's or the working tree's; ValueError for a dirty one."""
    if not (ROOT / ".git").exists():
        raise ValueError(
            f"{ROOT} is not a git checkout, so its code has no version; launch from a clone"
        )
    commit = git("rev-parse", "HEAD").decode().strip()
    changed = git("status", "--porcelain").decode()
    code: dict[str, Any] = {"commit": commit, "tree": commit, "version": commit[:12], "diff": b""}
    if changed:
        if not allow_dirty:
            raise ValueError(
                f"the checkout differs from its commit {commit[:12]}:\n{changed}commit the changes, so that the run "
                "can be repeated, or launch with --allow-dirty, which keeps the difference in the snapshot"
            )
        # a temporary index keeps the user's staging area unchanged
        with tempfile.TemporaryDirectory() as folder:
            index = {"GIT_INDEX_FILE": f"{folder}/index"}
            git("read-tree", commit, **index)
            git("add", "--all", **index)
            code["tree"] = git("write-tree", **index).decode().strip()
        code["diff"] = git("diff", "--binary", commit, code["tree"])
        code["version"] += "-dirty"
    return code


def git(*arguments: str, **variables: str) -> bytes:
    outcome = subprocess.run(
        ["git", *arguments], cwd=ROOT, env={**os.environ, **variables}, capture_output=True
    )
    if outcome.returncode:
        raise ValueError(f"git {' '.join(arguments)} failed: {outcome.stderr.decode().strip()}")
    return outcome.stdout


def write_interpreter(env: Path) -> None:
    """Write a virtual environment: this Python, the snapshot's code, the installed packages."""
    # an editable install adds an import hook that beats PYTHONPATH and `-P`; this has none, and
    # child processes, such as torchrun's workers, use the same interpreter
    base = Path(sys._base_executable)  # type: ignore[attr-defined]
    (env / "bin").mkdir(parents=True)
    (env / "bin/python").symlink_to(base)
    (env / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
    packages_folder = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(env)}))
    packages_folder.mkdir(parents=True)
    up = os.path.relpath(env.parent / "code", packages_folder)
    ours, standard = {ROOT, ROOT / "models"}, Path(os.__file__).parent
    installed = [
        path
        for path in map(Path, sys.path)
        if path.is_absolute()
        and path.is_dir()
        and path.resolve() not in ours
        and path != standard
        and path.name != "lib-dynload"
    ]
    # a path in a .pth file is searched, but its own .pth files are not executed, so no import
    # hook is inherited
    (packages_folder / "snapshot.pth").write_text(
        "\n".join([f"{up}/models", up, *map(str, installed)]) + "\n"
    )


def resolve_job(
    snapshot: Path | None, run: Path, config: Path, overrides: list[str], ranks: int
) -> dict[str, Any]:
    """Return the whole job config with absolute paths, read by the snapshot's code or this checkout's.

    ValueError, with the trainer's message, for a job that it would refuse on so many ranks.
    """
    python, code = Path(sys.executable), ROOT
    if snapshot is not None:
        python, code = snapshot / "env/bin/python", snapshot / "code"
    sections = read_job(["--job.config_file", str(config), *overrides])
    paths = {"job.dump_folder": run, "mixture.lock": os.path.abspath(sections.mixture.lock)}
    if parent := sections.checkpoint.initial_load_path:
        paths["checkpoint.initial_load_path"] = os.path.abspath(parent)
    command = [str(python), "-m", "train.start_checks", "--job.config_file", str(config.resolve())]
    command += [*overrides, *job_flags(paths)]
    # either would put this checkout's code in front of the snapshot's
    unset = ("PYTHONPATH", "PYTHONHOME")
    env = {k: v for k, v in os.environ.items() if k not in unset}
    env |= {"PYTHONDONTWRITEBYTECODE": "1", "WORLD_SIZE": str(ranks)}
    outcome = subprocess.run(
        command, cwd=code, env=env, capture_output=True, text=True, timeout=300
    )
    if outcome.returncode:
        # one sentence where the checks say it; else the parser's box, or what failed in its last
        # lines
        reason = outcome.stderr.rpartition("the job is refused: ")[2][-3000:]
        raise ValueError(
            f"{config} with {' '.join(overrides) or 'no overrides'} is refused:\n{reason}"
        )
    return tomli.loads(outcome.stdout)


def copy_mixture(lock_path: Path, folder: Path) -> str:
    """Copy lock and tokenizer, link the sources, return the mixture's fingerprint."""
    lock = read_lock(lock_path)
    folder.mkdir()
    shutil.copy(lock_path, folder / lock_path.name)
    for source in lock["sources"]:
        (folder / source["name"]).symlink_to((lock_path.parent / source["name"]).resolve())
    for path in tokenizer_files(lock_path.parent):
        shutil.copy(path, folder)
    return lock["fingerprint"]


def packages() -> list[str]:
    """Return installed packages, one a line, as `pip freeze` writes them."""
    # without pip, which uv's environments lack
    lines = set()
    for package in metadata.distributions():
        origin = json.loads(package.read_text("direct_url.json") or "{}").get("url")
        name = package.metadata["Name"]
        lines.add(f"{name} @ {origin}" if origin else f"{name}=={package.version}")
    return sorted(lines, key=str.lower)


def environment() -> dict[str, Any]:
    """Return machine, Python and environment variables, without those that look like secrets."""
    variables = {
        k: v
        for k, v in sorted(os.environ.items())
        if KEPT_VARIABLES.match(k) and not SECRET.search(k)
    }
    machine = {"python": sys.version, "executable": sys.executable, "host": list(os.uname())}
    return {**machine, "variables": variables}


def seal(folder: Path) -> None:
    """Write SHA256SUMS of every regular file, then make everything read-only."""
    paths = [p for p in sorted(folder.rglob("*")) if not p.is_symlink()]
    files = [p for p in paths if p.is_file()]
    sums = "".join(f"{file_sha256(p)}  {p.relative_to(folder)}\n" for p in files)
    (folder / "SHA256SUMS").write_text(sums)
    for path in (*paths, folder / "SHA256SUMS", folder):
        path.chmod(path.stat().st_mode & ~0o222)


def remove(folder: Path) -> None:
    """Delete a folder that may be read-only."""
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)
    shutil.rmtree(folder)
