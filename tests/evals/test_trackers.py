"""Evaluations in the real wandb (offline) and TensorBoard, read back: the same names, steps and values."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from evals.trackers import Trackers, scalars
from records.job import Job, JobSections, Metrics
from tests.tools.dashboard import made_up_run

ROOT = Path(__file__).resolve().parents[2]
Logged = list[tuple[str, int, float]]
CONFIG = """
[evals]
every_steps = 1
commands = ["decode_speed"]
[metrics]
enable_wandb = true
enable_tensorboard = true
"""


def forward(run: Path) -> None:
    """`evals.watch` on a run without checkpoints: it has nothing to do but this."""
    env = {**os.environ, "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "evals.watch", "--run", str(run), "--once"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "got no evaluations" not in done.stderr


def write(run: Path, records: list[dict[str, Any]]) -> None:
    (run / "evals.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def wandb_records(path: Path) -> Iterator[Record]:
    """The protobuf records of a .wandb file: after 7 bytes of its own a LevelDB log, blocks of 32 KiB."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 32768 - at % 32768
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from(
            "<IHB", data, at
        )  # checksum, bytes, 1 whole 2 first 3 middle 4 last
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield Record.FromString(whole)
            whole = b""


def in_wandb(run: Path) -> Logged:
    newest = max(
        (run / "tb/evals/wandb").glob("offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime
    )
    records, logged = list(wandb_records(newest)), []
    (about,) = [r.run for r in records if r.HasField("run")]
    assert (about.display_name, about.run_group, about.job_type) == (f"{run.name}-evals", run.name, "evals")
    for record in records:
        if record.HasField("history"):
            items = [i for i in record.history.item if i.nested_key[:1] != ["samples"]]  # a table: below
            row = {"/".join([i.key, *i.nested_key]).strip("/"): json.loads(i.value_json) for i in items}
            step = row.pop("step")
            logged += [(k, step, v) for k, v in row.items() if not k.startswith("_") and k != "tokens_total"]
    return sorted(logged)


def in_tensorboard(run: Path) -> Logged:
    board = EventAccumulator(str(run / "tb/evals"), size_guidance={"scalars": 0})
    board.Reload()
    return sorted((name, e.step, e.value) for name in board.Tags()["scalars"] for e in board.Scalars(name))


def test_the_same_values_everywhere_once(tmp_path: Path) -> None:
    """Two starts, a checkpoint evaluated late in between: each tracker has every figure once, at its step."""
    run = tmp_path / "tracked"
    run.mkdir()
    (run / "config.toml").write_text(CONFIG)
    records = [r for r in made_up_run.evaluations(2000, 2, ()) if r["kind"] != "contamination"]
    write(run, records[2:])
    forward(run)
    records = [*records[2:], *records[:2]]
    write(run, records)
    forward(run)
    expected = sorted((name, r["step"], value) for r in records for name, value in scalars(r).items())
    assert len({name for name, _, _ in expected}) > 100
    assert in_wandb(run) == expected
    assert in_tensorboard(run) == [(name, step, float(np.float32(value))) for name, step, value in expected]


def test_samples_of_text_are_a_table_in_wandb(tmp_path: Path) -> None:
    run = tmp_path / "tracked"
    run.mkdir()
    (run / "config.toml").write_text(CONFIG)
    texts = [
        {"name": n, "prompt": f"{n}?", "greedy": "<b>yes</b>\nno", "sampled": "é"} for n in ("fact", "code")
    ]
    write(run, [{"kind": "samples", "step": 40, "tokens_total": 9, "samples": texts}])
    forward(run)
    (table,) = (run / "tb/evals/wandb").glob("offline-run-*/files/media/table/samples_*.table.json")
    assert json.loads(table.read_text())["columns"] == ["name", "prompt", "greedy", "sampled"]
    assert json.loads(table.read_text())["data"] == [list(text.values()) for text in texts]


def test_names_tell_what_cannot_be_compared() -> None:
    record = made_up_run.core_record(random.Random(0), 0.5, missing=("squad",))
    named = scalars(record)
    assert named["core/nanochat/limit-500/tasks/copa/accuracy"] == record["tasks"]["copa"]["accuracy"]
    assert (
        named["core/nanochat/limit-500/tasks/copa/standard_error"]
        == record["tasks"]["copa"]["standard_error"]
    )
    assert not any("core_v" in name or "squad" in name or name.endswith("/n") for name in named), (
        "no CORE, no figure"
    )
    assert set(scalars({**record, "protocol": "dclm"})).isdisjoint(named)
    whole = scalars(made_up_run.core_record(random.Random(0), 0.5))
    assert {f"core/nanochat/limit-500/core_{v}{se}" for v in ("v1", "v2") for se in ("", "_se")} <= set(whole)
    by_kind = [scalars(record) for record in made_up_run.evaluations(2000, 1, ())]
    names = {name for each in by_kind for name in each}
    assert {
        "bits_per_byte/bits_per_byte", "bits_per_byte/sources/web/bits_per_byte", "decode_speed/bf16/tokens_per_s",
        "code/humaneval_plus/greedy/chat/164/pass_at_1_plus",
        "code/mbpp_plus/sampled/chat/378/n-10/t-0.8/pass_at_k/10/plus",
        "lm_eval/0-shot/upstream/tasks/arc_easy/acc_norm", "lm_eval/limit-50/offline/ruler/2048/ruler_vt",
    } <= names  # fmt: skip
    asked = {"kind": "lm_eval", "tasks": {"arc_easy": {"acc": 0.5}}, "num_fewshot": None, "limit": None,
             "add_bos": True, "chat_template": False, "haystack": None}  # fmt: skip
    changes = {"chat_template": True, "add_bos": False, "haystack": "offline", "num_fewshot": 5, "limit": 5}
    told = [next(iter(scalars({**asked, key: value}))) for key, value in changes.items()]
    assert [*scalars(asked)] == ["lm_eval/tasks/arc_easy/acc"]
    assert told == [
        f"lm_eval/{w}/tasks/arc_easy/acc" for w in ("chat", "no-bos", "offline", "5-shot", "limit-5")
    ]
    old, new = (
        {"kind": "core", "protocol": "dclm", name: 9, "core_v1": 0.2} for name in ("max_per_task", "limit")
    )
    assert scalars(old) == scalars(new) == {"core/dclm/limit-9/core_v1": 0.2}
    assert scalars({"kind": "unheard of", "loss": 1.0}) == scalars({}) == {}


def test_a_tracker_that_fails_is_told_and_gets_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = JobSections(Job(str(tmp_path)), metrics=Metrics(enable_wandb=True, enable_tensorboard=True))
    records, said = [{"kind": "bits_per_byte", "step": 3, "bits_per_byte": 0.5}], []
    trackers = Trackers(job, said.append)
    trackers.senders["wandb"] = lambda *_: 1 / 0  # type: ignore[assignment,return-value]
    trackers.give(records)
    assert said == ["wandb got no evaluations: division by zero; a later start sends them"]
    assert trackers.given() == {"TensorBoard": 1}
    trackers.give(records)
    assert len(said) == 1
    got: list[Any] = []
    later = Trackers(job, said.append)
    later.senders["wandb"] = lambda run, folder, points, given: got.extend(points[given:])
    later.give(records)
    assert [(point.step, point.scalars) for point in got] == [(3, {"bits_per_byte/bits_per_byte": 0.5})]
    assert later.given() == {"TensorBoard": 1, "wandb": 1}
