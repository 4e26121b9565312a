"""docs/start.md: every command names a program, options and files that exist, and its jobs are accepted."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.train.runs import forked

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/start.md").read_text()
COMMANDS = [
    shlex.split(line)
    for block in re.findall(r"```\n(.*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]
JOBS = {"train", "train.supervise", "train.supervise.preflight"}
OWN = ("--standalone", "--nproc_per_node", "--gpus", "--nproc-per-node")  # of what starts a job


def module(command: list[str]) -> str:
    return command[command.index("-m") + 1]


def options(command: list[str]) -> list[str]:
    """Without values, as --help lists them; those of a job (--section.key) are the trainer's."""
    given = [part.partition("=")[0] for part in command[command.index("-m") + 2 :] if part.startswith("--")]
    return [option for option in given if "." not in option]


def test_four_machines_ten_lines_each() -> None:
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    assert [each.splitlines()[0] for each in sections] == ["A laptop", "One GPU", "Eight GPUs", "Slurm"]
    for each in sections:
        lines = [line for line in each.splitlines()[1:] if line and line != "```"]
        assert 8 <= len(lines) <= 11, each
    assert len(COMMANDS) > 15


def test_files_and_links_exist() -> None:
    files = {part for command in COMMANDS for part in command if part.endswith(".toml")}
    assert len(files) > 3
    links = re.findall(r"\]\(([\w-]+\.md)", TEXT)
    assert all((ROOT / name).is_file() for name in files)
    assert all((ROOT / "docs" / name).is_file() for name in links)


@pytest.mark.parametrize(
    "command", [pytest.param(each, id=shlex.join(each)[:80]) for each in COMMANDS if module(each) in JOBS]
)
def test_jobs_are_accepted(command: list[str], tmp_path: Path) -> None:
    """As `python -m train` would, before it reads the data."""
    flags = iter(command[command.index("-m") + 2 :])
    job: list[str] = []
    for flag in flags:
        if flag.startswith(OWN):
            next(flags)
        else:
            job.append(flag)
    status, said = forked(tmp_path, "train.job_config", *job)
    assert status == 0, said[-2000:]


PROGRAMS = {
    " ".join(
        [module(each), *each[each.index("-m") + 2 :][: module(each) in ("tools.check", "tools.bench")]]
    ): each
    for each in COMMANDS
    if module(each) not in JOBS
}


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_options_exist(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *program.split(), "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for command in COMMANDS:
        if command[2 : 2 + len(program.split())] == program.split():
            missing = [option for option in options(command) if option not in done.stdout]
            assert not missing, f"{missing} in {shlex.join(command)}"
