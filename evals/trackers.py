"""Evaluations in wandb and TensorBoard: the figures of evals.jsonl, at the steps of their checkpoints.

evals.jsonl is the truth; this copies from it what a tracker has not been given, and RUN/.evals-tracked.json says how
many records each has. So it does not matter who wrote a record or when, and a process that was killed loses nothing.

wandb        a run of its own in the training run's group, since two processes cannot write one run (a process that
             goes on with a run offline would replace it); `step` is its horizontal axis
TensorBoard  the run `evals` beside the job's own, in the folder metrics.save_tb_folder
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from records.files import write_atomically
from records.job import JobSections
from records.run import name_wandb_run, number, numbers_in

SENT = ".evals-tracked.json"
# of each kind the figures that a curve over checkpoints is worth drawing of; paths as they stand in the record
FIGURES = {
    "core": r"core_v\d(_se)?|tasks/[^/]+/(accuracy|standard_error|centered_v\d)|categories/.+",
    "bits_per_byte": r"bits_per_byte|loss|sources/[^/]+/(bits_per_byte|loss)",
    "code": r"pass@.+",
    "lm_eval": r"tasks/.+|ruler/.+",
    "decode_speed": r"tokens_per_s|percent_of_probe|prefill_tokens_per_s|ttft_s",
}
# records that differ in one of these are no points of one curve, so it is part of the name
SETTINGS = {
    "core": ("not_core", "protocol", "max_per_task"),
    "code": ("dataset", "protocol", "prompt", "problems"),
    "lm_eval": ("num_fewshot", "limit"),
    "decode_speed": ("device", "dtype"),
}


class Point(NamedTuple):
    """The figures of one record."""

    step: int
    time: float | None  # seconds since the epoch
    tokens: int  # 0 where it is not known
    scalars: dict[str, float]


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """{name: figure} of a record, names as in `core/nanochat/500/core_v1`; nothing for a kind that has no curve.

    The same names everywhere: letters, digits and -_./ only, as TensorBoard would rewrite others.
    """
    kind = str(record.get("kind"))
    words = [str(record[key]) for key in SETTINGS.get(kind, ()) if record.get(key) is not None]
    prefix = "/".join([kind, *words])
    found = [pair for key, value in record.items() for pair in numbers_in(key, value)]
    kept = {path: value for path, value in found if re.fullmatch(FIGURES.get(kind, ""), path)}
    return {tag(f"{prefix}/{path}"): value for path, value in kept.items()}


def tag(name: str) -> str:
    return re.sub(r"[^-./\w]+", "_", name.replace("@", "_at_").replace("+", "_plus"))


def points_of(records: Sequence[dict[str, Any]]) -> list[Point]:
    """A point a record; records of no checkpoint keep their place and have no figures."""
    points = []
    for record in records:
        step, tokens = number(record.get("step")), number(record.get("tokens_total"))
        figures = {} if step is None else scalars(record)
        points.append(Point(int(step or 0), number(record.get("time")), int(tokens or 0), figures))
    return points


def send_to_wandb(run: Path, folder: Path, points: Sequence[Point], given: int) -> None:
    """Offline all points, as `wandb sync` may put the newest folder in place of older ones; online what is new.

    wandb's own step is the number of the record: it may only grow, and a checkpoint's may be evaluated late.
    """
    import wandb

    name_wandb_run(run)
    folder.mkdir(parents=True, exist_ok=True)
    name, identity, group = (os.environ[f"WANDB_RUN_{word}"] for word in ("NAME", "ID", "GROUP"))
    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    board = wandb.init(
        entity=os.getenv("WANDB_TEAM"), project=os.environ["WANDB_PROJECT"], group=group, job_type="evals",
        name=f"{name}-evals", id=f"{identity}-evals", resume="allow", dir=folder, settings=quiet,
    )  # fmt: skip
    board.define_metric("*", step_metric="step")
    for count, point in enumerate(points):
        if point.scalars and (board.offline or count >= given):
            board.log({"step": point.step, "tokens_total": point.tokens, **point.scalars}, step=count)
    board.finish()


def send_to_tensorboard(run: Path, folder: Path, points: Sequence[Point], given: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for point in points[given:]:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in point.scalars.items()]
        writer.add_event(Event(step=point.step, wall_time=point.time, summary=Summary(value=values)))
    writer.close()


class Trackers:
    """The trackers that `[metrics]` of a run turns on; `say` is told of one that fails, which is then left alone."""

    def __init__(self, job: JobSections, say: Callable[[str], None]):
        on = job.metrics
        choices = {
            "wandb": (on.enable_wandb, send_to_wandb), "TensorBoard": (on.enable_tensorboard, send_to_tensorboard)
        }  # fmt: skip
        self.senders = {name: send for name, (wanted, send) in choices.items() if wanted}
        self.run, self.folder, self.say = job.run, job.run / on.save_tb_folder / "evals", say

    def give(self, records: Sequence[dict[str, Any]]) -> None:
        """Hand over what each tracker has not had of the records of evals.jsonl, which only grow."""
        points = points_of(records) if self.senders else []
        for name, send in list(self.senders.items()):
            given = self.given().get(name, 0)
            if given == len(points):
                continue
            try:
                send(self.run, self.folder, points, 0 if given > len(points) else given)
            except Exception as problem:  # no tracker may end the evaluations, whatever its package raises
                del self.senders[name]
                self.say(f"{name} got no evaluations: {problem}; a later start sends them")
                continue
            write_atomically(self.run / SENT, json.dumps({**self.given(), name: len(points)}))

    def given(self) -> dict[str, int]:
        """How many records each tracker has."""
        with contextlib.suppress(OSError, ValueError):
            return dict(json.loads((self.run / SENT).read_text(encoding="utf-8")))
        return {}
