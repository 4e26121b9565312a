"""Tests of evaluations read back from real wandb (offline) and TensorBoard."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.trackers import Trackers, name_figures
from records.files import JsonObject
from records.job import Job, JobSections, Metrics

TEXTS = [
    {"name": n, "prompt": f"{n}?", "greedy": "<b>yes</b>\nno", "sampled": "é"}
    for n in ("fact", "code")
]
CORE = {
    "protocol": "nanochat",
    "limit": 500,
    "core_v2": 0.2,
    "core_v2_se": 0.01,
    "tasks": {"copa": {"accuracy": 0.6, "standard_error": 0.02, "n": 100}},
}
CODE = {
    "dataset": "humaneval+",
    "protocol": "greedy",
    "prompt": "chat",
    "problems": 164,
    "n": 1,
    "temperature": 0.8,
    "top_p": 1.0,
    "max_new_tokens": 768,
    "pass@1_plus": 0.3,
    "pass@k": {"10": {"plus": 0.4}},
}
LM_EVAL = {
    "num_fewshot": 0,
    "add_bos": True,
    "chat_template": False,
    "haystack": "upstream",
    "tasks": {"arc_easy": {"acc_norm": 0.5}},
    "ruler": {"2048": {"ruler_vt": 0.7}},
}
RECORDS = {
    "core": CORE,
    "bits_per_byte": {"bits_per_byte": 0.9, "sources": {"web": {"bits_per_byte": 1.1}}},
    "code": CODE,
    "lm_eval": LM_EVAL,
    "decode_speed": {"dtype": "bf16", "tokens_per_s": 51.5},
    "samples": {"samples": TEXTS},
}


def job_of(run: Path) -> JobSections:
    return JobSections(Job(str(run)), metrics=Metrics(enable_wandb=True, enable_tensorboard=True))


def spy_on_wandb(monkeypatch) -> list[tuple[Any, list[JsonObject]]]:
    import wandb

    started: list[tuple[Any, list[JsonObject]]] = []
    start = wandb.init

    def init(**options):
        run = start(**options)
        rows = list[JsonObject]()
        log = run.log

        def keep(row, step):
            rows.append(row)
            log(row, step=step)

        run.log = keep
        started.append((run, rows))
        return run

    monkeypatch.setattr(wandb, "init", init)
    return started


def read_tensorboard(run: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run / "tb/evals"), size_guidance={"scalars": 0})
    board.Reload()
    return sorted(
        (name, e.step, e.value) for name in board.Tags()["scalars"] for e in board.Scalars(name)
    )


@pytest.mark.job
def test_the_same_values_everywhere_once(tmp_path, monkeypatch):
    # two starts, a checkpoint evaluated late in between: every figure once, at its step
    run = tmp_path / "tracked"
    log = []
    started = spy_on_wandb(monkeypatch)
    monkeypatch.setenv("WANDB_MODE", "offline")
    early, late = (
        [
            {"kind": kind, "step": step, "tokens_total": 9, "time": 1.0, **r}
            for kind, r in RECORDS.items()
        ]
        for step in (20, 10)
    )
    for records in (early, early + late):
        Trackers(job_of(run), log.append).give(records)
    assert not log
    expected = sorted(
        (name, r["step"], value) for r in early + late for name, value in name_figures(r).items()
    )
    assert len(expected) == 2 * 11
    # an offline run is written whole each time, so the last one holds all
    board, rows = started[-1]
    assert (board.name, board.group, board.job_type) == (f"{run.name}-evals", run.name, "evals")
    others = {"step", "tokens_total", "samples"}
    assert sorted((k, row["step"], row[k]) for row in rows for k in row.keys() - others) == expected
    assert read_tensorboard(run) == [
        (name, step, float(np.float32(value))) for name, step, value in expected
    ]
    tables = (run / "tb/evals/wandb").glob("offline-run-*/files/media/table/samples_*.table.json")
    for path in tables:
        table = json.loads(path.read_text())
        assert table["columns"] == ["name", "prompt", "greedy", "sampled"]
        assert table["data"] == [list(text.values()) for text in TEXTS]


def test_names_tell_what_cannot_be_compared():
    names = {
        name for kind, record in RECORDS.items() for name in name_figures({"kind": kind, **record})
    }
    code = "code/humaneval_plus/greedy/chat/problems-164/n-1/temperature-0.8/top_p-1.0/max_new_tokens-768"
    lm_eval = "lm_eval/num_fewshot-0/add_bos-True/chat_template-False/upstream"
    core = "core/nanochat/limit-500"
    assert names == {
        f"{core}/core_v2",
        f"{core}/core_v2_se",
        f"{core}/tasks/copa/accuracy",
        f"{core}/tasks/copa/standard_error",
        "bits_per_byte/bits_per_byte",
        "bits_per_byte/sources/web/bits_per_byte",
        "decode_speed/bf16/tokens_per_s",
        f"{code}/pass_1_plus",
        f"{code}/pass_k/10/plus",
        f"{lm_eval}/tasks/arc_easy/acc_norm",
        f"{lm_eval}/ruler/2048/ruler_vt",
    }
    no_core = name_figures({"kind": "core", **CORE, "core_v2": None, "core_v2_se": None})
    # no CORE, no figure
    assert not [name for name in no_core if "core_v" in name]


def test_records_of_any_age_and_kind():
    for name in ("max_per_task", "limit"):
        record = {"kind": "core", "protocol": "dclm", name: 9, "core_v1": 0.2}
        assert name_figures(record) == {"core/dclm/limit-9/core_v1": 0.2}
    assert name_figures({"kind": "unheard of", "loss": 1.0}) == name_figures({}) == {}


def test_a_tracker_that_fails_is_reported_and_gets_it_later(tmp_path):
    records = [{"kind": "bits_per_byte", "step": 3, "bits_per_byte": 0.5}]
    log = []
    received = []
    trackers = Trackers(job_of(tmp_path), log.append)
    trackers.senders["wandb"] = lambda *_: 1 / 0
    for _ in range(2):
        trackers.give(records)
        assert log == ["wandb got no evaluations: division by zero; a later start sends them"]
        assert trackers.read_counts() == {"TensorBoard": 1}
    later = Trackers(job_of(tmp_path), log.append)
    later.senders["wandb"] = lambda run, folder, numbered, already_sent: received.extend(
        numbered[already_sent:]
    )
    later.give(records)
    assert received == [(0, records[0])]
    assert later.read_counts() == {"TensorBoard": 1, "wandb": 1}
