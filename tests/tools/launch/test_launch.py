"""Tests of launches without Slurm: the snapshot, the batch script with stand-ins, a local run."""

from __future__ import annotations

import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from records.command import run_command
from records.files import append_line, code_version, read_lines
from records.job import LRScheduler, stable_range
from tests.tools.launch.launch_assets import (
    ROOT,
    commit,
    environment,
    git,
    launch,
    stand_in_script,
    write_program,
)
from tools.launch import snapshot as snapshots
from tools.launch.__main__ import decay_branch, final_checkpoint, main, next_phase
from tools.launch.script import WATCHER, Cluster, batch_script, parse_time_s
from tools.synthetic import write_synthetic_lock

PHASE1, PHASE2 = ROOT / "configs/debug_phase1.toml", ROOT / "configs/debug_phase2.toml"
ONE_GPU = ("--nodes", "1", "--gpus-per-node", "1")
CLUSTER = Cluster(
    nodes=24,
    gpus_per_node=8,
    spares=1,
    partition="gpu",
    time="2-00:00:00",
    env=("NCCL_DEBUG=WARN",),
)
# in the place of the trainer's checks, which take many seconds to start
PARSER = """import os, sys
if os.environ["WORLD_SIZE"] == "3":
    raise SystemExit("the job is refused: 3 workers do not form a mesh")
if "--training.stepps" in sys.argv:
    raise SystemExit("there is no option stepps")
lock = sys.argv[len(sys.argv) - 1 - sys.argv[::-1].index("--mixture.lock") + 1]
print("arguments =", sys.argv[1:])
print("[mixture]\\nlock =", repr(lock))
"""
SBATCH = """#!/bin/sh
[ -z "$REFUSE" ] || { echo "Invalid partition" >&2; exit 1; }
echo "41;cluster"
"""
Call = Callable[..., None]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    # in place of this checkout, whose files are many
    folder = tmp_path / "repository"
    for package in ("train", "data_mixtures", "models/laneformer"):
        (folder / package).mkdir(parents=True)
        (folder / package / "__init__.py").write_text('"""As committed."""\n')
    (folder / "train/start_checks.py").write_text(PARSER)
    git(folder, "init", "-q")
    commit(folder, "as tested")
    monkeypatch.setattr(snapshots, "ROOT", folder)
    return folder


@pytest.fixture
def queue(tmp_path, monkeypatch):
    # an sbatch that accepts everything as job 41, or nothing if REFUSE is set
    write_program(tmp_path / "bin/sbatch", SBATCH)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


@pytest.fixture
def lock(tmp_path):
    return write_synthetic_lock(tmp_path / "data", 4, 16, 512)


@pytest.fixture
def call(monkeypatch):
    # in this process, which has everything imported
    def run(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["launch", *map(str, arguments)])
        run_command("launch", main)

    return run


def test_a_snapshot_holds_all_that_the_job_runs_from_and_nothing_else_runs(
    repository, queue, lock, call, tmp_path, monkeypatch
):
    for name, value in (("HF_TOKEN", "hush"), ("NCCL_DEBUG", "WARN")):
        monkeypatch.setenv(name, value)
    call(PHASE1, "--run", tmp_path / "run", *ONE_GPU, "--mixture.lock", lock)
    (snapshot,) = (tmp_path / "run/snapshot").iterdir()

    version = git(repository, "rev-parse", "HEAD").strip()
    facts = json.loads((snapshot / "snapshot.json").read_text())
    assert facts["commit"] == version
    assert code_version(snapshot / "code/train") == version[:12], (
        "not that of the checkout around it"
    )
    code = {str(p.relative_to(snapshot / "code")) for p in (snapshot / "code").rglob("*.*")}
    assert code >= set(git(repository, "ls-files").split())

    lock_copy = snapshot / "mixture" / lock.name
    assert str(lock_copy) in (snapshot / "job.toml").read_text()
    assert json.loads(lock_copy.read_text())["fingerprint"] == facts["mixture_fingerprint"]
    source = json.loads(lock.read_text())["sources"][0]["name"]
    assert (lock_copy.parent / source).resolve() == lock.parent / source, "data stays where it is"

    variables = json.loads((snapshot / "environment.json").read_text())["variables"]
    assert variables["NCCL_DEBUG"] == "WARN"
    assert "\ntorch==" in (snapshot / "packages.txt").read_text()
    assert "hush" not in "".join(p.read_text() for p in snapshot.glob("*") if p.is_file()), (
        "a secret"
    )

    sums = (snapshot / "SHA256SUMS").read_text().splitlines()
    files = {p for p in snapshot.rglob("*") if p.is_file() and not p.is_symlink()}
    assert {snapshot / line.split("  ", 1)[1] for line in sums} == files - {snapshot / "SHA256SUMS"}
    assert (
        subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=snapshot).returncode
        == 0
    )
    assert not [p for p in snapshot.rglob("*") if not p.is_symlink() and p.stat().st_mode & 0o222]

    # not through the editable install's hook, which PYTHONPATH cannot beat, and not through the
    # working directory
    (tmp_path / "train.py").write_text("raise SystemExit('imported from the working directory')\n")
    look = "import train, data_mixtures, laneformer as l; print(train.__file__, data_mixtures.__file__, l.__file__)"
    python = [str(snapshot / "env/bin/python"), "-P", "-c", look]
    outcome = subprocess.run(
        python, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    folders = ("train", "data_mixtures", "models/laneformer")
    assert outcome.stdout.split() == [f"{snapshot}/code/{folder}/__init__.py" for folder in folders]

    # the job script checks the files first
    (snapshot / "job.toml").chmod(0o644)
    (snapshot / "job.toml").write_text("edited")
    outcome = subprocess.run(
        ["bash", snapshot / "submit.sbatch"], capture_output=True, text=True, timeout=300
    )
    assert outcome.returncode == 1
    assert "was changed after it was made" in outcome.stdout


def test_a_dirty_checkout_is_refused_or_kept_whole(
    repository,
    queue,
    lock,
    call,
    tmp_path,
    monkeypatch,
    capsys,
):
    (repository / "train/new_file.py").write_text("NEW = 1\n")
    (repository / "train/__init__.py").write_text('"""Changed."""\n')
    run = tmp_path / "run"
    arguments = (PHASE1, "--run", run, *ONE_GPU, "--mixture.lock", lock)
    with pytest.raises(SystemExit, match=r"train/new_file\.py[\s\S]*--allow-dirty"):
        call(*arguments)
    assert not run.exists()

    before = git(repository, "status", "--porcelain")
    with monkeypatch.context() as refusing:
        refusing.setenv("REFUSE", "yes")
        with pytest.raises(SystemExit, match="Invalid partition"):
            call(*arguments, "--allow-dirty")
    assert not list((run / "snapshot").iterdir()), "a snapshot that nobody runs does not stay"

    call(*arguments, "--allow-dirty")
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["job_id"] == 41
    (folder,) = (run / "snapshot").iterdir()
    assert folder.name.endswith("-dirty")
    assert (folder / "code/train/new_file.py").read_text() == "NEW = 1\n"
    assert (folder / "code/train/__init__.py").read_text() == '"""Changed."""\n'
    assert "+NEW = 1" in (folder / "changes.diff").read_text()
    assert git(repository, "status", "--porcelain") == before, "the staging area is untouched"


def test_a_refused_launch_leaves_nothing(repository, queue, lock, call, tmp_path):
    edited = tmp_path / "edited.lock.json"
    edited.write_text(lock.read_text().replace('"seed": 1', '"seed": 8'))
    run = tmp_path / "run"
    for arguments, message in (
        (("--training.stepps", "3", "--mixture.lock", lock), "there is no option stepps"),
        (("--job.dump_folder", "elsewhere"), "--run"),
        (("--nodes", "0"), "--nodes is required"),
        (("--nodes", "3"), r"launch: \S+debug_phase1.toml with .* is refused:\n3 workers"),
        (("--decay-from", "somewhere/checkpoint/step-3"), "belong together"),
        (("--env", "WANDB_API_KEY=hush", "--mixture.lock", lock), "sounds like a secret"),
        (("--spares", "-1"), "--spares -1: it should be greater than or equal to 0"),
        (("--signal-before-s", "0"), "--signal-before-s 0: it should be greater than"),
        (("--time", "10:00"), "--time 10:00 is 600 s, but the job is to stop 600 s before its end"),
        (("--time", "2 days"), "--time 2 days is none of Slurm's forms"),
        (("--nodez", "2"), "unknown option --nodez; see --help"),
        (("--checkpoint.initial_load_path", run), "is no checkpoint; give RUN/checkpoint/step-N"),
    ):
        # a dry run creates nothing anyhow, but must refuse the same
        for dry in ((), ("--dry-run",)):
            with pytest.raises(SystemExit, match=message):
                call(PHASE1, "--run", run, *ONE_GPU, *arguments, *dry)
            assert not list(run.glob("snapshot/*")) + list(run.glob("snapshot/.*"))
    with pytest.raises(SystemExit, match="does not match its own fingerprint"):
        call(PHASE1, "--run", run, *ONE_GPU, "--mixture.lock", edited)
    assert not list(run.glob("snapshot/*")) + list(run.glob("snapshot/.*"))


# --- a run that starts from another


def write_parent(run: Path) -> Path:
    (run / "checkpoint/step-40").mkdir(parents=True)
    # the sign of a complete checkpoint
    (run / "checkpoint/step-40/.metadata").touch()
    job = "[training]\nsteps = 40\n[lr_scheduler]\nwarmup_steps = 2\ndecay_ratio = 0.25\n"
    (run / "job.toml").write_text(job)
    cluster = {"nodes": 4, "gpus_per_node": 8, "requeue": False, "partition": "gpu", "env": ["A=1"]}
    record = {"snapshot": str(run), "job_id": None, "cluster": cluster}
    append_line(run / "launches.jsonl", json.dumps(record))
    return run


def test_options_of_the_parent_are_defaults_that_any_value_replaces(
    repository, call, tmp_path, capsys
):
    # also a value that equals the default of a run without a parent
    parent = write_parent(tmp_path / "phase1")
    run = tmp_path / "run"
    start = (
        "--phase-switch",
        parent,
        "--config",
        PHASE2,
        "--run",
        run,
        "--dry-run",
        "--training.steps",
        "10",
    )
    for arguments, nodes, requeue in (
        ((), "4", False),
        (("--nodes", "2"), "2", False),
        (("--requeue",), "4", True),
        (("--no-requeue",), "4", False),
    ):
        call(*start, *arguments)
        script, stderr = capsys.readouterr()
        assert "--training.steps 10" in stderr
        for line in (
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --gpus-per-node=8",
            "#SBATCH --partition=gpu",
        ):
            assert f"{line}\n" in script
        assert "export A=1\n" in script
        assert ("#SBATCH --requeue" in script) == requeue
    with pytest.raises(SystemExit, match="--nodes is required, and must be at least 1"):
        call(*start, "--nodes", "0")
    assert not run.exists(), "a dry run prints, and leaves nothing"


def test_the_next_phase_needs_the_final_checkpoint(tmp_path):
    # of 40 steps, with a checkpoint of the last
    parent = write_parent(tmp_path / "phase1")
    start = next_phase(parent, PHASE2)
    assert start.checkpoint == str(parent / "checkpoint/step-40")
    assert start.dependency is None, "it is written already"
    (parent / "checkpoint/step-40/.metadata").unlink()
    with pytest.raises(ValueError, match=r"step-40 does not exist, and no job that would write it"):
        next_phase(parent, PHASE2)
    with pytest.raises(ValueError, match="is not a run folder"):
        next_phase(tmp_path, PHASE2)


def test_a_decay_starts_in_the_stable_part(tmp_path):
    assert stable_range(LRScheduler(2, None, 0.25), 40) == (3, 31)
    assert stable_range(LRScheduler(2000, None, 0.1), 620_000) == (2001, 558_001)
    assert stable_range(LRScheduler(2, None, 0.0), 40) == (3, 40)
    parent = write_parent(tmp_path / "phase1")
    for name, message in (("step-40", "steps 3 to 31"), ("last", "RUN/checkpoint")):
        with pytest.raises(ValueError, match=message):
            decay_branch(parent / "checkpoint" / name, 4)
    assert decay_branch(parent / "checkpoint/step-24", 4).skip_list is None
    by_hand = tmp_path / "by_hand"
    by_hand.mkdir()
    (parent / "job.toml").rename(by_hand / "config.toml")
    (by_hand / "skip_sequences.json").write_text("[]")
    start = decay_branch(by_hand / "checkpoint/step-24", 4)
    assert start.skip_list == by_hand / "skip_sequences.json", (
        "data that the parent left out stays out"
    )
    assert start.run == tmp_path / "by_hand-decay-24+4"
    (tmp_path / "scratch/step-24").mkdir(parents=True)
    (by_hand / "checkpoint").symlink_to(tmp_path / "scratch")
    linked = decay_branch(by_hand / "checkpoint/step-24", 4)
    assert (linked.parent, linked.checkpoint) == (by_hand, str(by_hand / "checkpoint/step-24"))


@pytest.mark.rotate
def test_decay_branch(run_without_faults, checkout, tmp_path):
    # up to step 24 it is the parent's run, then the rate falls to its minimum at step 28
    run, parent = tmp_path / "branch", run_without_faults / "checkpoint/step-24"
    outcome = launch(
        checkout, "--decay-from", str(parent), "--steps", "4", "--run", str(run), "--local"
    )
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-3000:]
    before = {row["step"]: row for row in read_lines(run_without_faults / "metrics.jsonl")}
    branch = {row["step"]: row for row in read_lines(run / "metrics.jsonl")}
    assert [before[step]["lr"] for step in range(2, 25)] == [3e-3] * 23, (
        "flat after the warmup of 2 steps"
    )
    assert list(branch) == [25, 26, 27, 28]
    # min_lr_factor of the job file
    lowest = 0.1
    expected = [3e-3 * (lowest + (1 - lowest) * (1 - k / 4)) for k in (1, 2, 3, 4)]
    # a factor and a product of the same four numbers, in another order: a few roundings
    assert [branch[s]["lr"] for s in branch] == pytest.approx(
        expected, rel=8 * sys.float_info.epsilon
    )
    assert branch[25]["loss"] == before[25]["loss"], "weights and data position are the parent's"
    assert branch[26]["grad_norm"] != before[26]["grad_norm"], "and then the smaller rate shows"
    assert branch[28]["tokens_total"] == before[28]["tokens_total"]
    assert final_checkpoint(run) == run / "checkpoint/step-28"
    assert (final_checkpoint(run) / ".metadata").is_file()
    assert json.loads((run / "lineage.json").read_text())["parent"] == str(parent)
    assert next_phase(run, PHASE2).checkpoint == str(run / "checkpoint/step-28")


# --- the batch script


def test_batch_script_asks_for_what_was_said(tmp_path):
    text = batch_script(tmp_path / "snap", tmp_path / "runs/one", CLUSTER, "afterok:7")
    directives = {
        line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")
    }
    assert directives == {
        "job-name=one",
        "nodes=25",
        "ntasks-per-node=1",
        "gpus-per-node=8",
        "mem=0",
        "partition=gpu",
        "time=2-00:00:00",
        "dependency=afterok:7",
        "signal=B:USR1@600",
        f"output={tmp_path}/runs/one/slurm-%j.log",
        "open-mode=append",
        "exclusive",
        "no-kill",
        "requeue",
    }
    assert "export NCCL_DEBUG=WARN" in text
    with pytest.raises(ValueError, match="is not KEY=VALUE"):
        batch_script(tmp_path, tmp_path, Cluster(1, 1, env=("x",)), None)


STAND_IN = """#!/bin/bash
# in place of the snapshot's python: a supervisor that stops in good order when it is told to
echo "$@" > {folder}/arguments
trap 'exit {code}' USR1 TERM
touch {folder}/ready
while :; do sleep 0.1; done
"""
SCONTROL = """#!/bin/bash
echo "$@" >> {folder}/requests
if [ "$1" = show ]; then printf 'n1\\nn2\\nn3\\n'; else exit 1; fi
"""


def test_paths_of_any_letters_are_words_of_the_script(tmp_path):
    folder = tmp_path / 'it\'s 100% "a" $HOME; `run`'
    output = f"{folder}/ran"
    supervisor = f'#!/bin/sh\nprintf \'%s\\n\' "$0" "$@" > {shlex.quote(output)}\n'
    path = stand_in_script(folder, supervisor, CLUSTER)
    outcome = subprocess.run(["bash", str(path)], env=environment(), capture_output=True, text=True)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    python, *_, job = Path(output).read_text().splitlines()
    assert (python, job) == (f"{folder}/snap/env/bin/python", f"{folder}/snap/job.toml")
    lines = [line for line in path.read_text().splitlines() if line.startswith("#SBATCH")]
    words = {word for line in lines for word in shlex.split(line, comments=False)}
    assert f"--job-name={folder.name}" in words
    assert f"--output={str(folder).replace('%', '%%')}/slurm-%j.log" in words
    (folder / "snap/submit.sbatch").write_text(path.read_text() + "\n")
    outcome = subprocess.run(["bash", str(path)], env=environment(), capture_output=True, text=True)
    assert f"{folder}/snap was changed after it was made" in outcome.stdout


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("1:30:05", 5405),
        ("1-2", 93_600),
        ("1-2:30", 95_400),
        ("1-2:30:05", 95_405),
        ("0", math.inf),
        ("UNLIMITED", math.inf),
    ],
)
def test_times_of_slurm(text, seconds):
    assert parse_time_s(text) == seconds


def run_script(folder: Path, code: int, cluster: Cluster, number: int) -> int:
    path = stand_in_script(folder, STAND_IN.format(folder=folder, code=code), cluster)
    write_program(folder / "scontrol", SCONTROL.format(folder=folder))
    write_program(folder / "srun", "#!/bin/sh\nexec sleep 60\n")
    slurm = {"SLURM_JOB_ID": "9", "RETRY_S": "0", "SLURM_JOB_NODELIST": "n[1-3]"}
    env = {**environment(), "PATH": f"{folder}:{os.environ['PATH']}", **slurm}
    script = subprocess.Popen(["bash", str(path)], env=env, text=True)
    # a signal before the stand-in has its trap would end it
    while not (folder / "ready").exists():
        assert script.poll() is None
        time.sleep(0.01)
    script.send_signal(number)
    return script.wait(timeout=300)


@pytest.mark.parametrize(
    ("number", "code", "requeue", "requests"),
    [
        (signal.SIGUSR1, 85, True, ["requeue 9"]),
        # nothing new was saved: go on from the checkpoint before
        (signal.SIGTERM, 84, True, ["requeue 9"]),
        (signal.SIGUSR1, 85, False, []),
        (signal.SIGUSR1, 86, True, []),
    ],
)
def test_script_hands_signals_on_and_requeues(tmp_path, number, code, requeue, requests):
    cluster = Cluster(nodes=2, gpus_per_node=8, spares=1, requeue=requeue)
    assert run_script(tmp_path, code, cluster, number) == code
    lines = (tmp_path / "requests").read_text().splitlines()
    assert lines[1:] == requests * 60, "a controller that does not answer is asked again"
    arguments = (tmp_path / "arguments").read_text()
    nodes = "--nproc-per-node 8 --nodes n1,n2,n3 --spares 1"
    assert f"-P -m train.supervise {nodes} --job.config_file" in arguments


def test_watch_asks_again_where_the_controller_does_not_answer(tmp_path):
    (tmp_path / "pulse").touch()
    # the controller takes the third request
    requests = tmp_path / "requests"
    write_program(
        tmp_path / "scontrol",
        f'#!/bin/bash\necho "$@" >> {requests}\n[ $(wc -l < {requests}) = 3 ]\n',
    )
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "9"}
    watch = ["bash", "-c", WATCHER, str(tmp_path / "pulse"), "0.01"]
    subprocess.run(watch, env=env, check=True, timeout=300)
    assert requests.read_text().splitlines() == ["requeue 9"] * 3
