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

from evals.trackers import SETTINGS, Trackers, scalars
from records.job import Job, JobSections, Metrics
from tests.evals.not_nice import NOT_NICE
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
    env = {**os.environ, **NOT_NICE, "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "evals.watch", "--run", str(run), "--once"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
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
    named, whole = scalars(record), scalars(made_up_run.core_record(random.Random(0), 0.5))
    for figure in ("accuracy", "standard_error"):
        assert named[f"core/nanochat/limit-500/tasks/copa/{figure}"] == record["tasks"]["copa"][figure]
    told = [name for name in named if "core_v" in name or "squad" in name or name.endswith("/n")]
    assert not told, "no CORE, no figure"
    assert {f"core/nanochat/limit-500/core_{v}" for v in ("v1", "v2", "v1_se", "v2_se")} <= set(whole)
    names = {name for each in made_up_run.evaluations(2000, 1, ()) for name in scalars(each)}
    code, lm_eval = "temperature-{}/top_p-1.0/max_new_tokens-768", "add_bos-True/chat_template-False"
    assert {
        "bits_per_byte/bits_per_byte", "bits_per_byte/sources/web/bits_per_byte", "decode_speed/bf16/tokens_per_s",
        f"code/humaneval_plus/greedy/chat/problems-164/n-1/{code.format('0.0')}/pass_1_plus",
        f"code/mbpp_plus/sampled/chat/problems-378/n-10/{code.format(0.8)}/pass_k/10/plus",
        f"lm_eval/num_fewshot-0/{lm_eval}/upstream/tasks/arc_easy/acc_norm",
        "lm_eval/limit-50/add_bos-True/chat_template-True/offline/ruler/2048/ruler_vt",
    } <= names  # fmt: skip


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_setting_gives_another_name(kind: str) -> None:
    """Two records that differ in one setting, of whatever type, are never points of one curve."""
    figure = {"lm_eval": {"tasks": {"arc": 1.0}}, "code": {"pass@1_plus": 1.0}, "core": {"core_v1": 1.0},
              "bits_per_byte": {"loss": 1.0}, "decode_speed": {"ttft_s": 1.0}}[kind]  # fmt: skip
    asked = {"kind": kind, **figure}
    changes = [{}, *({key: value} for key in SETTINGS[kind] for value in ("text", True, False, 7))]
    names = [name for change in changes for name in scalars(asked | change)]
    texts = len(SETTINGS[kind]) - 1  # a text stands for itself, whatever setting it is of
    assert len(names) == len(changes) == len(set(names)) + texts
    assert scalars(asked | dict.fromkeys(SETTINGS[kind])) == scalars(asked)


def test_records_of_any_age_and_kind() -> None:
    for name in ("max_per_task", "limit"):
        record = {"kind": "core", "protocol": "dclm", name: 9, "core_v1": 0.2}
        assert scalars(record) == {"core/dclm/limit-9/core_v1": 0.2}
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
    later.senders["wandb"] = lambda run, folder, numbered, given: got.extend(numbered[given:])
    later.give(records)
    assert got == [(0, records[0])]
    assert later.given() == {"TensorBoard": 1, "wandb": 1}
