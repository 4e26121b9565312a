"""Evaluations in wandb and TensorBoard: the figures of evals.jsonl, at the steps of their checkpoints.

Each tracker is sent the records that it lacks, which RUN/.evals-tracked.json counts: a killed process loses nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from records.evals import settings_words
from records.files import JsonObject, read_json, write_atomically
from records.job import JobSections
from records.run import name_wandb_run, number, numbers_in

SENT = ".evals-tracked.json"
# {kind: pattern of the figures that are worth a curve over checkpoints}; paths as in the record
FIGURES = {
    "core": r"core_v\d(_se)?|gold_bits_per_byte|categories/.+"
    r"|tasks/[^/]+/(accuracy|standard_error|centered_v\d|gold_bits_per_byte)",
    "bits_per_byte": r"bits_per_byte|loss|sources/[^/]+/(bits_per_byte|loss)",
    "code": r"pass@.+",
    "lm_eval": r"tasks/.+|ruler/.+",
    "decode_speed": r"tokens_per_s|percent_of_probe|prefill_tokens_per_s|ttft_s",
}


# records of checkpoints with their places in evals.jsonl
Numbered = Sequence[tuple[int, JsonObject]]


def name_figures(record: JsonObject) -> dict[str, float]:
    """Name the figures of a record by kind, settings and path: core/nanochat/limit-500/core_v1."""
    kind, figures = str(record.get("kind")), {}
    for path, value in itertools.chain(*itertools.starmap(numbers_in, record.items())):
        if re.fullmatch(FIGURES.get(kind, ""), path):
            name = "/".join([kind, *settings_words(record), path]).replace("+", "_plus")
            # TensorBoard would rewrite other characters
            figures[re.sub(r"[^-./\w]+", "_", name)] = value
    return figures


def send_to_wandb(run: Path, folder: Path, records: Numbered, already_sent: int) -> None:
    """Send records to a wandb run of their own: offline all, online the new ones."""
    import wandb

    name_wandb_run(run)
    folder.mkdir(parents=True, exist_ok=True)
    name, identity, group = (os.environ[f"WANDB_RUN_{word}"] for word in ("NAME", "ID", "GROUP"))
    quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True)
    board = wandb.init(
        entity=os.getenv("WANDB_TEAM"),
        project=os.environ["WANDB_PROJECT"],
        group=group,
        job_type="evals",
        name=f"{name}-evals",
        id=f"{identity}-evals",
        resume="allow",
        dir=folder,
        settings=quiet,
    )
    board.define_metric("*", step_metric="step")
    for count, record in records:
        figures: JsonObject = {**name_figures(record)}
        if texts := record.get("samples"):
            figures["samples"] = wandb.Table(
                list(texts[0]), [list(text.values()) for text in texts]
            )
        # `wandb sync` may replace older offline folders by the newest one; step is the index of
        # the record, as it must not decrease, and checkpoints may be evaluated out of order
        if figures and (board.offline or count >= already_sent):
            tokens = int(number(record.get("tokens_total")) or 0)
            board.log({"step": int(record["step"]), "tokens_total": tokens, **figures}, step=count)
    board.finish()


def send_to_tensorboard(run: Path, folder: Path, records: Numbered, already_sent: int) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for count, record in records:
        if count >= already_sent:
            values = [
                Summary.Value(tag=name, simple_value=value)
                for name, value in name_figures(record).items()
            ]
            step = int(record["step"])
            time = number(record.get("time"))
            writer.add_event(Event(step=step, wall_time=time, summary=Summary(value=values)))
    writer.close()


class Trackers:
    """The trackers that `[metrics]` of a run enables."""

    def __init__(self, job: JobSections, say: Callable[[str], None]):
        enabled = job.metrics
        self.senders = {"wandb": send_to_wandb} if enabled.enable_wandb else {}
        self.senders |= {"TensorBoard": send_to_tensorboard} if enabled.enable_tensorboard else {}
        self.run, self.folder, self.say = job.run, job.run / enabled.save_tb_folder / "evals", say

    def give(self, records: Sequence[JsonObject]) -> None:
        with_step = [
            (n, record)
            for n, record in enumerate(records)
            if number(record.get("step")) is not None
        ]
        for name, send in list(self.senders.items()):
            counts = self.read_counts()
            already_sent = counts.get(name, 0)
            if already_sent == len(records):
                continue
            try:
                send(
                    self.run,
                    self.folder,
                    with_step,
                    0 if already_sent > len(records) else already_sent,
                )
                write_atomically(self.run / SENT, json.dumps({**counts, name: len(records)}))
            # one that fails is reported, and left alone
            except Exception as problem:
                # whatever a tracker's package raises, evaluations continue
                del self.senders[name]
                self.say(f"{name} got no evaluations: {problem}; a later start sends them")

    def read_counts(self) -> dict[str, int]:
        """Return {tracker: number of records that it has}."""
        with contextlib.suppress(OSError, ValueError):
            return dict(read_json(self.run / SENT, {}))
        return {}
