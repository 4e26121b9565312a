"""Tests of a run on a real Slurm of three virtual nodes, two that train and a spare.

The story happens once: phase 1 is submitted, phase 2 behind it, then the checkout is broken.
Phase 1 is warned as before its time limit, requeued and restarted; a node dies under it and the
spare takes its place. Phase 2 starts when phase 1 has ended, without a node that fails its
pre-flight. An undisturbed run must end with the same bits.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from records.files import read_lines
from tests.tools.launch.launch_assets import (
    SMALL,
    commit,
    environment,
    launch,
    make_checkout,
    stand_in_script,
)
from tests.tools.launch.slurm_cluster import SlurmCluster, missing, wait_for
from tests.train.supervised import assert_same
from tools.launch.script import Cluster

pytestmark = [
    pytest.mark.rotate,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        bool(missing()), reason=f"no {', '.join(missing())} here: `make packages` installs a Slurm"
    ),
]
# for anything to happen on a slow day
TIMEOUT_S = 900


@dataclass
class Story:
    """Run folders, scontrol's view of the jobs, and the refusal."""

    phase1: Path
    phase2: Path
    refused: str
    requeued: dict[str, str]
    waiting: dict[str, str]
    job1: dict[str, str]
    job2: dict[str, str]


class Launcher:
    """A checkout of its own, launched onto the cluster."""

    def __init__(self, folder: Path, data: Path, cluster: SlurmCluster):
        self.folder, self.data, self.cluster = folder, data, cluster
        self.checkout = make_checkout(folder / "checkout")
        self.env = {**environment(), **cluster.env, "PACED_CODE": str(folder / "code")}

    def launch(self, number: int, *arguments: str) -> subprocess.CompletedProcess:
        lock = ("--mixture.lock", str(self.data / f"phase{number}.lock.json"))
        run = ("--run", str(self.folder / f"phase{number}"))
        return launch(self.checkout, *arguments, *run, *SMALL, *lock, env=self.env)

    def submit(self, number: int, *arguments: str) -> int:
        outcome = self.launch(number, *arguments)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
        return json.loads(outcome.stdout.splitlines()[-1])["job_id"]

    def break_checkout(self) -> None:
        files = ("__main__", "supervise/__main__", "supervise/preflight")
        for name in ("models/laneformer/model.py", *(f"train/{file}.py" for file in files)):
            (self.checkout / name).write_text(
                "raise SystemExit('the checkout leaked into the job')\n"
            )
        commit(self.checkout, "broken")

    def wait_for_steps(self, number: int, attempt: int, steps: int) -> None:
        path = self.folder / f"phase{number}/metrics.jsonl"

        def count_steps() -> int:
            return sum(row["attempt"] == attempt for row in read_lines(path))

        what = f"{steps} steps of attempt {attempt} of phase {number}"
        wait_for(lambda: count_steps() >= steps, what, TIMEOUT_S)

    def wait_for_end(self, job_id: int) -> dict[str, str]:
        alive = ("PENDING", "RUNNING", "COMPLETING")
        wait_for(
            lambda: self.cluster.job(job_id)["JobState"] not in alive,
            f"the end of job {job_id}",
            TIMEOUT_S,
        )
        return self.cluster.job(job_id)


@pytest.fixture(scope="module")
def story(data_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("slurm")
    (folder / "cluster").mkdir()
    with SlurmCluster(folder / "cluster") as cluster:
        launcher = Launcher(folder, data_folder, cluster)
        nodes = ("--nodes", "2", "--gpus-per-node", "1", "--spares", "1", "--cpu")
        first = ("configs/debug_phase1.toml", *nodes)
        id1 = launcher.submit(1, *first, "--time", "30", "--env", "PACED_SECONDS=5")
        switch = ("--phase-switch", str(folder / "phase1"), "--config", "configs/debug_phase2.toml")
        id2 = launcher.submit(2, *switch)
        waiting = cluster.job(id2)
        refused = launcher.launch(1, *first).stderr
        launcher.break_checkout()
        launcher.wait_for_steps(1, attempt=1, steps=3)
        wait_for(lambda: cluster.signal(id1, "USR1"), "the signal", TIMEOUT_S)
        wait_for(lambda: cluster.job(id1)["Restarts"] == "1", "the requeue", TIMEOUT_S)
        requeued = cluster.job(id1)
        launcher.wait_for_steps(1, attempt=2, steps=3)
        cluster.lose_node("n2")
        # nothing more has to happen between steps
        (folder / "code.fast").touch()
        job1 = launcher.wait_for_end(id1)
        cluster.start_node("n2")
        cluster.make_bad("n2")
        job2 = launcher.wait_for_end(id2)
    assert not cluster.processes(), "the cluster left processes behind"
    phase1, phase2 = (folder / name for name in ("phase1", "phase2"))
    return Story(phase1, phase2, refused, requeued, waiting, job1, job2)


def supervisor(run: Path, kind: str) -> list[dict]:
    return [
        event for event in read_lines(run / "events.jsonl") if event["kind"] == f"supervisor_{kind}"
    ]


def test_both_jobs_ended_well(story):
    for job in (story.job1, story.job2):
        assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), job
    assert (
        "is RUNNING; scancel it first" in story.refused
        or "is PENDING; scancel it first" in story.refused
    )


def test_warning_puts_the_job_back_into_the_queue(story):
    assert story.requeued["Requeue"] == "1"
    assert story.requeued["JobId"] == story.job1["JobId"]
    assert story.job1["Restarts"] == "1"
    first, second, *_ = supervisor(story.phase1, "start")
    assert first["step"] == 0
    assert 3 <= second["step"] < 40, (
        "the second start goes on from the checkpoint that the warning made"
    )
    assert supervisor(story.phase1, "end")[0]["code"] == 85


def test_spare_takes_the_place_of_a_lost_node(story):
    nodes = [event["nodes"] for event in supervisor(story.phase1, "start")]
    assert nodes == [["n1", "n2"], ["n1", "n2"], ["n1", "n3"]]
    assert [event["node"] for event in supervisor(story.phase1, "bad_node")] == ["n2"]


def test_it_is_the_undisturbed_run_bit_for_bit(story, run_without_faults):
    assert_same(story.phase1, run_without_faults, 40)


def test_phase_two_waits_and_leaves_out_a_bad_node(story):
    assert story.waiting["JobState"] == "PENDING"
    assert story.waiting["Dependency"].startswith(f"afterok:{story.job1['JobId']}")
    (first,) = supervisor(story.phase2, "bad_node")
    assert first["node"] == "n2"
    assert "0 GPUs where 8 are needed" in first["text"]
    assert [start["nodes"] for start in supervisor(story.phase2, "start")] == [["n1", "n3"]]
    assert list(story.phase2.glob("logs/*/network/done")), "the nodes have reached each other"
    parent = json.loads((story.phase2 / "lineage.json").read_text())["parent"]
    assert parent == str(story.phase1 / "checkpoint/step-40")
    (launched,) = read_lines(story.phase2 / "launches.jsonl")
    assert launched["parent"] == str(story.phase1)


def test_loss_of_the_first_node_puts_the_job_back_into_the_queue(tmp_path):
    # Slurm itself would let the job run on with no leader; a stand-in that waits is the supervisor
    (tmp_path / "cluster").mkdir()
    waiting = f"#!/bin/sh\necho begun >> {tmp_path}/begun\nuntil [ -f {tmp_path}/finish ]; do sleep 1; done\n"
    nodes = Cluster(nodes=2, gpus_per_node=1, spares=1, cpu=True, env=("PULSE_S=0.5",))
    script = stand_in_script(tmp_path, waiting, nodes)

    def has_begun(times: int) -> bool:
        path = tmp_path / "begun"
        return path.is_file() and len(path.read_text().splitlines()) == times

    def watches(cluster: SlurmCluster) -> bool:
        return any(process.name() == "sleep" for process in cluster.processes("n3"))

    with SlurmCluster(tmp_path / "cluster") as cluster:
        job_id = int(cluster.command("sbatch", "--parsable", str(script)))
        wait_for(lambda: has_begun(1) and watches(cluster), "the job and its watch", TIMEOUT_S)
        cluster.lose_node("n1")
        wait_for(lambda: cluster.job(job_id)["Restarts"] == "1", "the requeue", TIMEOUT_S)
        cluster.start_node("n1")
        wait_for(lambda: has_begun(2), "the second start", TIMEOUT_S)
        (tmp_path / "finish").touch()
        wait_for(lambda: cluster.job(job_id)["JobState"] == "COMPLETED", "the end", TIMEOUT_S)
    assert not cluster.processes()
