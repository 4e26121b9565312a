"""A run on a real Slurm of three virtual nodes: two train, one is spare. One story, told once, held by many tests.

Phase 1 is submitted, and phase 2 behind it. Phase 1 is warned as before its time limit, goes back into the queue, and
is started again; then a node dies under it, and the spare takes its place; meanwhile the checkout is broken. Phase 2
starts when phase 1 has ended, with one node that fails its pre-flight. An undisturbed run of the same job, started
here without Slurm, must have ended with the same bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .launch_assets import commit, environment, launch, losses, make_checkout, records, weights_hash
from .launch_assets import SMALL as SMALL_JOB
from .slurm_cluster import SlurmCluster, missing, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"no {', '.join(missing())} here: `make slurm` installs a Slurm"),
]
STEPS = 24
STEP_TIMEOUT_S = 180
JOB = (*SMALL_JOB, "--training.steps", str(STEPS), "--checkpoint.interval", "8", "--experimental.custom_import",
       "train.paced")  # fmt: skip


@dataclass
class Story:
    """What the tests look at."""

    phase1: Path
    phase2: Path
    undisturbed: Path
    job_after_requeue: dict[str, str]
    job1: dict[str, str]
    job2: dict[str, str]
    job2_while_waiting: dict[str, str]
    snapshot: Path
    log: str


@pytest.fixture(scope="module")
def story(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("slurm")
    checkout = make_checkout(folder / "checkout")
    locks = [("--mixture.lock", str(prepared_data / f"phase{n}.lock.json")) for n in (1, 2)]
    code = folder / "code"
    phase1, phase2, undisturbed = folder / "phase1", folder / "phase2", folder / "undisturbed"
    cluster_options = ("--nodes", "2", "--gpus-per-node", "1", "--spares", "1", "--cpu", "--time", "30")
    job1 = ("configs/debug_phase1.toml", *cluster_options, *JOB, *locks[0])
    (folder / "cluster").mkdir()
    with SlurmCluster(folder / "cluster") as cluster:
        env = {**environment(), **cluster.env, "PACED_CODE": str(code)}

        def submit(*arguments: str) -> tuple[int, Path]:
            done = launch(checkout, *arguments, env=env)
            assert done.returncode == 0, done.stdout + done.stderr
            answer = json.loads(done.stdout.splitlines()[-1])
            return answer["job_id"], Path(answer["snapshot"])

        def reach(step: int) -> None:
            what = f"step {step} of phase 1; {(phase1 / 'slurm-1.log')}"
            wait_for(lambda: (phase1 / "metrics.jsonl").is_file() and step in losses(phase1), what, STEP_TIMEOUT_S)

        id1, snapshot = submit(*job1, "--run", str(phase1), "--env", "PACED_SECONDS=0.3")
        id2, _ = submit(
            "--phase-switch", str(phase1), "--config", "configs/debug_phase2.toml", "--run", str(phase2), *JOB, *locks[1],
            "--env", "PACED_BAD_NODE=n1",
        )  # fmt: skip
        waiting = cluster.job(id2)
        (checkout / "models/laneformer/model.py").write_text("raise RuntimeError('the checkout leaked into the job')\n")
        (checkout / "train/__main__.py").write_text("raise SystemExit('the checkout leaked into the job')\n")
        commit(checkout, "broken")
        reach(3)
        cluster.command("scancel", "--signal=USR1", "--batch", str(id1))
        wait_for(lambda: cluster.job(id1)["Restarts"] == "1", "the requeue", STEP_TIMEOUT_S)
        requeued = cluster.job(id1)
        reach(10)
        cluster.lose_node("n2")
        wait_for(
            lambda: cluster.job(id1)["JobState"] not in ("RUNNING", "PENDING"), "the end of phase 1", STEP_TIMEOUT_S
        )
        cluster.start_node("n2")
        wait_for(
            lambda: cluster.job(id2)["JobState"] not in ("RUNNING", "PENDING"), "the end of phase 2", STEP_TIMEOUT_S
        )
        jobs = cluster.job(id1), cluster.job(id2)
    log = (phase1 / f"slurm-{id1}.log").read_text() + (phase2 / f"slurm-{id2}.log").read_text()
    assert not cluster._processes(), "the cluster left processes behind"
    yield Story(phase1, phase2, undisturbed, requeued, *jobs, waiting, snapshot, log)


def test_story(story: Story) -> None:
    print(story)
