"""docs/start.md: every command names a program, options and files that exist, and its jobs are accepted; chat and
serving are executed, with a tiny model in the place of the hub's.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laneformer.serve.conftest import write_model
from tests.shared import Shared
from tests.train.runs import forked
from train.supervise.attempt import hold_port

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/start.md").read_text()
SECTIONS = {each.splitlines()[0]: each for each in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]}
BLOCKS = {name: re.findall(r"```\n(.*?)```", each, re.DOTALL)[0] for name, each in SECTIONS.items()}
EXECUTED = ("Chat", "Serving")
COMMANDS = [
    shlex.split(line) for name, block in BLOCKS.items() if name not in EXECUTED for line in block.splitlines()
]
JOBS = {"train", "train.supervise", "train.supervise.preflight"}
OWN = ("--standalone", "--nproc_per_node", "--gpus", "--nproc-per-node")  # of what starts a job


@pytest.fixture(scope="session")
def model_folder(shared: Shared) -> Path:
    return shared("start", lambda folder: write_model(folder, max_position_embeddings=512))


def module(command: list[str]) -> str:
    return command[command.index("-m") + 1]


def options(command: list[str]) -> list[str]:
    """Without values, as --help lists them; those of a job (--section.key) are the trainer's."""
    given = [part.partition("=")[0] for part in command[command.index("-m") + 2 :] if part.startswith("--")]
    return [option for option in given if "." not in option]


def test_four_machines_ten_lines_each() -> None:
    assert [*SECTIONS] == [*EXECUTED, "A laptop", "One GPU", "Eight GPUs", "Slurm"]
    for each in SECTIONS.values():
        lines = [line for line in each.splitlines()[1:] if line and line != "```"]
        assert 6 <= len(lines) <= 11, each
    assert len(COMMANDS) > 15


def test_files_and_links_exist() -> None:
    files = {part for command in COMMANDS for part in command if part.endswith(".toml")}
    assert len(files) > 3
    links = re.findall(r"\]\(([\w-]+\.md)", TEXT)
    assert all((ROOT / name).is_file() for name in files)
    assert all((ROOT / "docs" / name).is_file() for name in links)


@pytest.mark.rotate
@pytest.mark.parametrize("name", EXECUTED)
def test_chat_and_serving_are_executed(name: str, model_folder: Path) -> None:
    """All but `make chat`, which has a test of its own; serving goes on with the model of the chat."""
    lines = [line for line in BLOCKS[name].splitlines() if line != "make chat"]
    script = "\n".join([f"MODEL={model_folder}", *(line for line in lines if not line.startswith("MODEL="))])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with hold_port() as holder:
        script = script.replace("8000", str(holder.getsockname()[1]))
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=ROOT, env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    if name == "Serving":
        assert '{"status":"ok"}' in done.stdout
        assert '"role":"assistant"' in done.stdout
        assert re.search(r"^laneformer_generated_tokens_total [1-9]", done.stdout, re.MULTILINE)


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


@pytest.mark.rotate
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_options_exist(program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *program.split(), "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for command in COMMANDS:
        if command[2 : 2 + len(program.split())] == program.split():
            missing = [option for option in options(command) if option not in done.stdout]
            assert not missing, f"{missing} in {shlex.join(command)}"
