"""configs/phase1.toml, phase2.toml and phase3.toml as shipped, on CPU ranks: only shapes, lengths and places differ
from the 2B run.

The 2B flavor's 15 layers, 8 lanes, windows and delay, compiled layers and loss, bfloat16 compute, selective
checkpointing, validation and asynchronous checkpoints all meet here and nowhere else. The short form is two
ranks of phase 1, really started. The long form is what a cluster runs: two replicas of two shards under the
supervisor, a rank that dies, and the switch to phase 2, on fewer ranks.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from records.checkpoints import check_complete
from tests.train import production
from tests.train.production import EVERY, HYBRID, STEPS, train
from tests.train.runs import metrics


@pytest.fixture(scope="module")
def first(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phase 1 under the supervisor on four ranks, one of which is killed after the first checkpoint."""
    parent = tmp_path_factory.mktemp("supervised")
    plan = parent / "faults.json"
    plan.write_text(json.dumps([{"kind": "kill", "step": EVERY + 1, "rank": 1}]))
    launcher = ["train.supervise", "--nproc-per-node", "4"]
    more = {
        **HYBRID,
        "resilience.backoff_s": 0.1,
        "validation.freq": STEPS,
    }  # compiled in the second attempt alone
    lock = prepared_data / "phase1.lock.json"
    return train(launcher, "phase1", parent / "run", lock, more, LANEFORMER_FAULTS=str(plan))


@pytest.fixture(scope="module")
def second(prepared_data: Path, first: Path) -> Path:
    """Phase 2 from the last checkpoint of phase 1."""
    more = {"checkpoint.initial_load_path": first / f"checkpoint/step-{STEPS}"}
    lock = prepared_data / "phase2.lock.json"
    return train(production.torchrun(2), "phase2", first.with_name("run2"), lock, more)


@pytest.mark.job
def test_short_form(shipped_run: Path) -> None:
    rows = metrics(shipped_run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["loss"] is not None and row["grad_norm"] > 0 for row in rows)
    assert [row["step"] for row in rows if row.get("valid_loss")] == [EVERY, STEPS]
    assert_checkpoints(shipped_run)
    production.assert_prepared_as_the_job_file_says(shipped_run)
    production.assert_nothing_else_deviates("phase1", shipped_run)


def assert_checkpoints(run: Path) -> None:
    folders = sorted((run / "checkpoint").glob("step-*"))
    assert [int(folder.name.removeprefix("step-")) for folder in folders] == [EVERY, STEPS]
    for folder in folders:
        check_complete(folder)


@pytest.mark.rotate
def test_supervised_replicas_survive_a_killed_rank(first: Path) -> None:
    attempts = [json.loads(line) for line in (first / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["step"] for attempt in attempts] == [0, EVERY]
    assert {row["step"] for row in metrics(first)} == set(range(1, STEPS + 1))
    assert {row["step"] for row in metrics(first) if row.get("valid_loss")} == {STEPS}
    assert_checkpoints(first)
    production.assert_prepared_as_the_job_file_says(
        first
    )  # of the second attempt, which did not begin at step 1
    production.assert_nothing_else_deviates("phase1", first, "resilience.backoff_s")


@pytest.mark.rotate
def test_phase_2_goes_on_from_there(first: Path, second: Path) -> None:
    lineage = json.loads((second / "lineage.json").read_text())
    assert Path(lineage["parent"]) == first / f"checkpoint/step-{STEPS}"
    rows = metrics(second)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["tokens_total"] > rows[0]["tokens"], "the tokens of phase 1 count"
    assert [row["step"] for row in rows if row.get("valid_loss")] == [EVERY, STEPS]
    assert_checkpoints(second)
    production.assert_prepared_as_the_job_file_says(second)
    production.assert_nothing_else_deviates("phase2", second)


@pytest.mark.rotate
def test_phase_3_goes_on_with_another_rope_and_its_sources_from_their_beginnings(
    prepared_data: Path, second: Path
) -> None:
    """With 80 GB the lanes are on several ranks."""
    lock = prepared_data / "phase2.lock.json"
    more = {
        "checkpoint.initial_load_path": second / f"checkpoint/step-{STEPS}",
        "mixture.begin_again": ",".join(source["name"] for source in json.loads(lock.read_text())["sources"]),
        "parallelism.tensor_parallel_degree": 2,
    }
    run = train(production.torchrun(4), "phase3", second.with_name("run3"), lock, more)
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["tokens_total"] > metrics(second)[-1]["tokens_total"]
    by_position = rows[-1]["valid_loss_by_position"]
    assert by_position.keys() == rows[-1]["valid_loss_by_source"].keys() != set()
    assert all("0" in each.keys() <= {"0", "16"} for each in by_position.values())
    assert_checkpoints(run)
    production.assert_prepared_as_the_job_file_says(run)
    production.assert_nothing_else_deviates("phase3", run, "mixture.begin_again")
