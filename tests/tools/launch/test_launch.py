"""Launches without a Slurm: the snapshot, the batch script with stand-ins, a decay branch that really runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from records.files import append_line, code_version
from records.job import LRScheduler
from tests.tools.launch.launch_assets import ROOT, SMALL, environment, git, launch, make_checkout, records
from tools.launch.__main__ import decay_branch, final_checkpoint, main, next_phase, stable_steps
from tools.launch.script import WATCHER, Cluster, batch_script

pytestmark = pytest.mark.job

CLUSTER = Cluster(
    nodes=24, gpus_per_node=8, spares=1, partition="gpu", time="2-00:00:00", env=("NCCL_DEBUG=WARN",)
)


@pytest.fixture(scope="module")
def snapshot(undisturbed: Path) -> Path:
    (folder,) = (undisturbed / "snapshot").iterdir()
    return folder


def test_snapshot_holds_all_that_the_job_runs_from(
    snapshot: Path, checkout: Path, prepared_data: Path
) -> None:
    commit = git(checkout, "rev-parse", "HEAD").strip()
    facts = json.loads((snapshot / "snapshot.json").read_text())
    assert facts["commit"] == commit
    assert snapshot.name.endswith(facts["code_version"])
    assert code_version(snapshot / "code/train") == commit[:12], "not that of the checkout around it"
    tracked = set(git(checkout, "ls-files").splitlines())
    kept = {str(p.relative_to(snapshot / "code")) for p in (snapshot / "code").rglob("*") if p.is_file()}
    assert kept == tracked | {"CODE_VERSION"}
    job = tomllib.loads((snapshot / "job.toml").read_text())
    assert job["training"]["steps"] == 40, "overrides are in"
    assert job["comm"]["init_timeout_seconds"] == 300, "the file is in"
    assert job["training"]["gc_debug"] is False, "defaults are in"
    lock = Path(job["mixture"]["lock"])
    assert lock.is_relative_to(snapshot)
    assert json.loads(lock.read_text())["fingerprint"] == facts["mixture_fingerprint"]
    assert (lock.parent / "web").resolve() == (prepared_data / "web").resolve(), "data stays where it is"
    environment_file = (snapshot / "environment.json").read_text()
    assert sys.executable in environment_file
    assert any(
        line.startswith("torchtitan==0.2") for line in (snapshot / "packages.txt").read_text().splitlines()
    )


def test_every_file_of_a_snapshot_is_hashed_and_read_only(snapshot: Path) -> None:
    sums = (snapshot / "SHA256SUMS").read_text().splitlines()
    files = {str(p.relative_to(snapshot)) for p in snapshot.rglob("*") if p.is_file() and not p.is_symlink()}
    assert {line.split("  ", 1)[1] for line in sums} == files - {"SHA256SUMS"}
    assert subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=snapshot).returncode == 0
    assert not [p for p in snapshot.rglob("*") if not p.is_symlink() and p.stat().st_mode & 0o222]


def test_interpreter_of_a_snapshot_knows_no_other_code(snapshot: Path, tmp_path: Path) -> None:
    """Not through the editable install's hook, which PYTHONPATH cannot beat, and not
    through the working directory.
    """
    look = "import laneformer, train, data_mixtures; print(laneformer.__file__, train.__file__, data_mixtures.__file__)"
    (tmp_path / "train.py").write_text("raise SystemExit('imported from the working directory')\n")
    command = [str(snapshot / "env/bin/python"), "-P", "-c", look]
    found = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True
    )
    code = snapshot / "code"
    assert found.stdout.split() == [
        f"{code}/models/laneformer/__init__.py", f"{code}/train/__init__.py", f"{code}/data_mixtures/__init__.py"
    ]  # fmt: skip


@pytest.fixture
def queue(tmp_path: Path) -> dict[str, str]:
    """An environment with an sbatch that takes everything as job 41, or nothing if REFUSE is set."""
    (tmp_path / "bin").mkdir()
    sbatch = tmp_path / "bin/sbatch"
    sbatch.write_text(
        '#!/bin/sh\n[ -z "$REFUSE" ] || { echo "Invalid partition" >&2; exit 1; }\necho "41;cluster"\n'
    )
    sbatch.chmod(0o755)
    return {**environment(), "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}


def test_environment_holds_no_secrets(snapshot: Path, checkout: Path, tmp_path: Path) -> None:
    """The launch had WANDB_API_KEY and HF_TOKEN in its environment."""
    assert "hush" not in "".join(p.read_text(errors="ignore") for p in snapshot.glob("*") if p.is_file())
    facts = json.loads((snapshot / "environment.json").read_text())
    assert facts["modules"] == ["cuda/13"]
    assert facts["variables"]["NCCL_DEBUG"] == "WARN"
    arguments = ("--run", str(tmp_path / "run"), "--nodes", "1", "--gpus-per-node", "8", "--dry-run")
    said = launch(checkout, "configs/debug_phase1.toml", *arguments, "--env", "WANDB_API_KEY=hush").stderr
    assert "sounds like a secret" in said


def test_dirty_checkout_is_refused_or_kept_whole(
    prepared_data: Path, queue: dict[str, str], tmp_path: Path
) -> None:
    checkout = make_checkout(tmp_path / "checkout")
    (checkout / "train/new_file.py").write_text("NEW = 1\n")
    (checkout / "train/__init__.py").write_text('"""Changed."""\n')
    run = tmp_path / "run"
    lock = ("--mixture.lock", str(prepared_data / "phase1.lock.json"))
    arguments = (
        "configs/debug_phase1.toml",
        "--run",
        str(run),
        "--nodes",
        "1",
        "--gpus-per-node",
        "1",
        *SMALL,
        *lock,
    )
    said = launch(checkout, *arguments, env=queue)
    assert said.returncode != 0
    assert "train/new_file.py" in said.stderr
    assert "--allow-dirty" in said.stderr
    assert not run.exists()
    before = git(checkout, "status", "--porcelain")
    said = launch(checkout, *arguments, "--allow-dirty", env={**queue, "REFUSE": "yes"})
    assert "Invalid partition" in said.stderr
    assert not list((run / "snapshot").iterdir()), "a snapshot that nobody runs does not stay"
    accepted = launch(checkout, *arguments, "--allow-dirty", env=queue)
    assert json.loads(accepted.stdout.splitlines()[-1])["job_id"] == 41
    (folder,) = (run / "snapshot").iterdir()
    assert folder.name.endswith("-dirty")
    assert (folder / "code/train/new_file.py").read_text() == "NEW = 1\n"
    assert (folder / "code/train/__init__.py").read_text() == '"""Changed."""\n'
    assert "+NEW = 1" in (folder / "changes.diff").read_text()
    assert git(checkout, "status", "--porcelain") == before, "the staging area is untouched"


@pytest.mark.parametrize(
    ("arguments", "nodes", "requeue"),
    [
        ((), "4", False),
        (("--nodes", "2"), "2", False),
        (("--requeue",), "4", True),
        (("--no-requeue",), "4", False),
    ],
)
def test_options_of_the_parent_are_defaults_that_any_value_replaces(
    arguments: tuple[str, ...], nodes: str, requeue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Also one that equals the default of a run without a parent."""
    run = tmp_path / "phase1"
    (run / "checkpoint/step-40").mkdir(parents=True)
    (run / "checkpoint/step-40/.metadata").touch()
    (run / "job.toml").write_text("[training]\nsteps = 40\n")
    cluster = {"nodes": 4, "gpus_per_node": 8, "requeue": False, "partition": "gpu", "env": ["A=1"]}
    append_line(
        run / "launches.jsonl", json.dumps({"snapshot": str(run), "job_id": None, "cluster": cluster})
    )
    start = ("--phase-switch", str(run), "--config", str(ROOT / "configs/debug_phase2.toml"), "--dry-run")
    monkeypatch.setattr(sys, "argv", ["launch", *start, *arguments])
    main()
    script = capsys.readouterr().out
    assert f"#SBATCH --nodes={nodes}\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert "export A=1\n" in script
    assert ("#SBATCH --requeue" in script) == requeue
    monkeypatch.setattr(sys, "argv", ["launch", *start, "--nodes", "0"])
    with pytest.raises(SystemExit, match="--nodes 0: it is required, and must be at least 1"):
        main()


def test_refused_launch_leaves_nothing(
    checkout: Path, prepared_data: Path, queue: dict[str, str], tmp_path: Path
) -> None:
    lock = tmp_path / "phase1.lock.json"
    lock.write_text((prepared_data / "phase1.lock.json").read_text().replace('"seed": 7', '"seed": 8'))
    run = tmp_path / "run"
    base = ("configs/debug_phase1.toml", "--run", str(run), "--nodes", "1", "--gpus-per-node", "1")
    for arguments, word in (
        (("--training.stepps", "3", "--mixture.lock", str(prepared_data / "phase1.lock.json")), "stepps"),
        (("--mixture.lock", str(lock)), "does not match its own fingerprint"),
        (("--job.dump_folder", "elsewhere"), "--run"),
        (("--nodes", "0"), "--nodes 0: it is required"),
        (("--decay-from", "somewhere/checkpoint/step-3"), "belong together"),
    ):
        said = launch(checkout, *base, *arguments, env=queue)
        assert said.returncode != 0
        assert word in said.stderr, said.stderr
        assert not list(run.glob("snapshot/*")) + list(run.glob("snapshot/.*"))


def test_batch_script_asks_for_what_was_said(tmp_path: Path) -> None:
    text = batch_script(tmp_path / "snap", tmp_path / "runs/one", CLUSTER, "afterok:7")
    directives = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert directives == {
        "job-name=one", "nodes=25", "ntasks-per-node=1", "gpus-per-node=8", "mem=0", "partition=gpu", "time=2-00:00:00",
        "dependency=afterok:7", "signal=B:USR1@600", f"output={tmp_path}/runs/one/slurm-%j.log", "open-mode=append",
        "exclusive", "no-kill", "requeue",
    }  # fmt: skip
    assert "export NCCL_DEBUG=WARN" in text
    with pytest.raises(ValueError, match="is not KEY=VALUE"):
        batch_script(tmp_path, tmp_path, Cluster(1, 1, env=("x",)), None)


STAND_IN = """#!/bin/bash
# in place of the snapshot's python: a supervisor that stops in good order when it is told to
echo "$@" > {folder}/arguments
trap 'sleep 0.3; exit {code}' USR1 TERM
touch {folder}/ready
while :; do sleep 0.1; done
"""
SCONTROL = """#!/bin/bash
echo "$@" >> {folder}/asked
if [ "$1" = show ]; then printf 'n1\\nn2\\nn3\\n'; else exit 1; fi
"""


def run_script(folder: Path, code: int, cluster: Cluster, number: int) -> int:
    """Run submit.sbatch with stand-ins, send it a signal; returns its exit status."""
    snapshot = folder / "snap"
    (snapshot / "env/bin").mkdir(parents=True)
    (snapshot / "code").mkdir()
    for path, text in (
        (snapshot / "env/bin/python", STAND_IN.format(folder=folder, code=code)),
        (folder / "scontrol", SCONTROL.format(folder=folder)),
        (folder / "srun", "#!/bin/sh\nexec sleep 60\n"),
        (snapshot / "submit.sbatch", batch_script(snapshot, folder, cluster, None)),
    ):
        path.write_text(text)
        path.chmod(0o755)
    subprocess.run("sha256sum submit.sbatch > SHA256SUMS", shell=True, cwd=snapshot, check=True)
    env = {
        **environment(),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "9",
        "RETRY_S": "0",
        "SLURM_JOB_NODELIST": "n[1-3]",
    }
    script = subprocess.Popen(["bash", str(snapshot / "submit.sbatch")], env=env, text=True)
    while not (folder / "ready").exists():
        assert script.poll() is None
    script.send_signal(number)
    return script.wait(timeout=300)


@pytest.mark.parametrize(
    ("number", "code", "requeue", "asked"),
    [
        (signal.SIGUSR1, 85, True, ["requeue 9"]),
        (signal.SIGTERM, 85, True, ["requeue 9"]),
        (signal.SIGTERM, 84, True, ["requeue 9"]),  # nothing new was saved: go on from the checkpoint before
        (signal.SIGUSR1, 85, False, []),
        (signal.SIGUSR1, 86, True, []),
        (signal.SIGUSR1, 0, True, []),
    ],
)
def test_script_hands_signals_on_and_requeues(
    tmp_path: Path, number: int, code: int, requeue: bool, asked: list
) -> None:
    cluster = Cluster(nodes=2, gpus_per_node=8, spares=1, requeue=requeue)
    assert run_script(tmp_path, code, cluster, number) == code
    lines = (tmp_path / "asked").read_text().splitlines()
    assert lines[1:] == asked * 60, "a controller that does not answer is asked again"
    said = (tmp_path / "arguments").read_text()
    assert "-P -m train.supervise --nproc-per-node 8 --nodes n1,n2,n3 --spares 1 --job.config_file" in said


def test_watch_asks_again_where_the_controller_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "pulse").touch()
    stand_in = tmp_path / "scontrol"
    stand_in.write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/asked\n[ $(wc -l < {tmp_path}/asked) = 3 ]\n')
    stand_in.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "9"}
    subprocess.run(["bash", "-c", WATCHER, str(tmp_path / "pulse"), "0.01"], env=env, check=True, timeout=300)
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 9"] * 3


def test_script_refuses_a_snapshot_that_was_changed(tmp_path: Path) -> None:
    snapshot = tmp_path / "snap"
    (snapshot / "code").mkdir(parents=True)
    (snapshot / "file").write_text("as made")
    subprocess.run("sha256sum file > SHA256SUMS", shell=True, cwd=snapshot, check=True)
    (snapshot / "file").write_text("as edited")
    script = batch_script(snapshot, tmp_path, CLUSTER, None)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "was changed after it was made" in done.stdout


def test_dry_run_prints_and_leaves_nothing(checkout: Path, tmp_path: Path) -> None:
    arguments = (
        "--nodes",
        "24",
        "--gpus-per-node",
        "8",
        "--spares",
        "1",
        "--dry-run",
        "--training.steps",
        "10",
    )
    done = launch(checkout, "configs/phase1.toml", "--run", str(tmp_path / "run"), *arguments)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=25" in done.stdout
    assert "--training.steps 10" in done.stderr
    assert not (tmp_path / "run").exists()


def test_next_phase_needs_the_final_checkpoint(undisturbed: Path, tmp_path: Path) -> None:
    start = next_phase(undisturbed, Path("configs/debug_phase2.toml"))
    assert start.checkpoint == str(undisturbed / "checkpoint/step-40")
    assert start.dependency is None, "it is written already"
    stopped = tmp_path / "stopped"
    stopped.mkdir()
    (stopped / "launches.jsonl").write_bytes((undisturbed / "launches.jsonl").read_bytes())
    with pytest.raises(ValueError, match=r"step-40 does not exist, and no job that would write it"):
        next_phase(stopped, Path("configs/debug_phase2.toml"))
    with pytest.raises(ValueError, match="is not a run folder"):
        next_phase(tmp_path, Path("configs/debug_phase2.toml"))


def test_decay_starts_in_the_stable_part(undisturbed: Path, tmp_path: Path) -> None:
    assert stable_steps(LRScheduler(2, None, 0.25), 40) == (3, 31)
    assert stable_steps(LRScheduler(2000, None, 0.1), 620_000) == (2001, 558_001)
    assert stable_steps(LRScheduler(2, None, 0.0), 40) == (3, 40)
    for name, steps, word in (
        ("step-40", 4, "steps 3 to 31"),
        ("step-24", 0, "at least 1"),
        ("last", 4, "RUN/checkpoint"),
    ):
        with pytest.raises(ValueError, match=word):
            decay_branch(undisturbed / "checkpoint" / name, steps)
    assert decay_branch(undisturbed / "checkpoint/step-24", 4).skip_list is None
    skipped = tmp_path / "skipped"
    skipped.mkdir()
    (skipped / "config.toml").write_bytes((undisturbed / "config.toml").read_bytes())  # a run started by hand
    (skipped / "skip_sequences.json").write_text("[]")
    start = decay_branch(skipped / "checkpoint/step-24", 4)
    assert start.skip_list == skipped / "skip_sequences.json", "data that the parent left out stays out"
    assert start.run == tmp_path / "skipped-decay-24+4"


@pytest.mark.rotate
def test_decay_branch(undisturbed: Path, checkout: Path, tmp_path: Path) -> None:
    """From step 24 of the stable part the rate falls to its minimum at step 28; up to 24 it
    is the parent's run.
    """
    run = tmp_path / "branch"
    parent = undisturbed / "checkpoint/step-24"
    done = launch(checkout, "--decay-from", str(parent), "--steps", "4", "--run", str(run), "--local")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    before = {row["step"]: row for row in records(undisturbed / "metrics.jsonl")}
    branch = {row["step"]: row for row in records(run / "metrics.jsonl")}
    assert [before[step]["lr"] for step in range(2, 25)] == [3e-3] * 23, "flat after the warmup of 2 steps"
    assert list(branch) == [25, 26, 27, 28]
    lowest = 0.1  # min_lr_factor of the job file
    expected = [3e-3 * (lowest + (1 - lowest) * (1 - k / 4)) for k in (1, 2, 3, 4)]
    # a factor and a product of the same four numbers, in another order: a few roundings
    assert [branch[s]["lr"] for s in branch] == pytest.approx(expected, rel=8 * sys.float_info.epsilon)
    assert branch[25]["loss"] == before[25]["loss"], "weights and data position are the parent's"
    assert branch[26]["grad_norm"] != before[26]["grad_norm"], "and then the smaller rate shows"
    assert branch[28]["tokens_total"] == before[28]["tokens_total"]
    assert final_checkpoint(run) == run / "checkpoint/step-28"
    assert (final_checkpoint(run) / ".metadata").is_file()
    assert json.loads((run / "lineage.json").read_text())["parent"] == str(parent)
    assert next_phase(run, Path("configs/debug_phase2.toml")).checkpoint == str(run / "checkpoint/step-28")
