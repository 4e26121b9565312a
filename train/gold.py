"""Bits per byte of the right answers to benchmark items, on the model while it trains: it moves before
accuracies do.

The items are those of a file (`python -m evals.gold`), the first of each task: as many as cost at most
SHARE of the steps between two validations. One prompt a row of training.seq_len, so a compiled model
sees no new shape. Rank 0 appends a record, kind gold, to evals.jsonl, with the answers to the items
beside it: `python -m evals.compare RUN@A RUN@B --kind gold` tells two steps, or runs of one subset,
apart with paired errors.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from data_mixtures.mixture import read_lock
from records.evals import NO_MODEL, About
from records.files import JsonObject, read_lines, survive_full_disk
from records.items import bits_change, gold_bits, mean_of_bits, read_items, write_items

from .metrics import RunMetrics, sequence_losses
from .supervise.heartbeat import enter

SHARE = 0.01  # of the training compute
LEAST = 2  # items of a task: the spread of one is unknown
PASSES = 3  # forward passes that a sequence of a step costs at least
KIND = "gold"


class GoldItems:
    """The items that a job measures, and what they cost it; of no ranks, so the same whatever their number.

    Raises ValueError for a file of another tokenizer, or with items that are too long.
    """

    def __init__(self, job: Any):
        path, lock = Path(job.validation.gold_items), read_lock(Path(job.mixture.lock))
        self.head, lines = read_items(path)
        if self.head["tokenizer_sha256"] != lock["tokenizer_sha256"]:
            raise ValueError(f"validation.gold_items = {path} was made with another tokenizer than {job.mixture.lock}; "
                             f"make it again: {how_to_make(job)}")  # fmt: skip
        longest = max(len(line["ids"]) for line in lines.values())
        if longest > job.training.seq_len + 1:
            raise ValueError(
                f"validation.gold_items = {path} has items of {longest} tokens, training.seq_len is "
                f"{job.training.seq_len}; make it again with --max-length {job.training.seq_len}"
            )
        tasks = dict.fromkeys(line["task"] for line in lines.values())
        sequences = job.validation.freq * job.training.global_batch_size
        self.per_task = max(LEAST, int(SHARE * PASSES * sequences / len(tasks)))
        self.lines = [line for line in lines.values() if line["item"] < self.per_task]
        self.share = len(self.lines) / PASSES / sequences
        content = json.dumps([[line[key] for key in ("task", "item", "ids", "start")] for line in self.lines])
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()

    def rows(self, length: int) -> np.ndarray:
        """int32 (2, items, length): tokens, and labels with IGNORE_INDEX but for the answers."""
        rows = np.zeros((2, len(self.lines), length), np.int32)
        rows[1] = IGNORE_INDEX
        for (tokens, labels), line in zip(rows.swapaxes(0, 1), self.lines, strict=True):
            ids, start = line["ids"], line["start"]
            tokens[: len(ids) - 1] = ids[:-1]
            labels[start - 1 : len(ids) - 1] = ids[start:]
        return rows


def how_to_make(job: Any) -> str:
    data, out = Path(job.mixture.lock).parent, job.validation.gold_items
    return f"python -m evals.gold {data} --bundle BUNDLE --out {out}"


def gold_items(job: Any) -> GoldItems | None:
    """The items of a job; None, with a warning, where their file was not made."""
    if not job.validation.gold_items:
        return None
    if not Path(job.validation.gold_items).is_file():
        logger.warning(
            f"no gold bits per byte: validation.gold_items = {job.validation.gold_items} does not exist; "
            f"{how_to_make(job)}"
        )
        return None
    return GoldItems(job)


def gold_cost(job: Any) -> dict[str, float] | None:
    """Items that each validation measures, of a task at most, and their share of the compute; None:
    there are none.
    """
    found = gold_items(job)
    if found is None:
        return None
    return {"items": len(found.lines), "per_task": found.per_task, "share": found.share}


class GoldBits:
    """The measurement; constructed, and called at the same steps, on every rank."""

    def __init__(
        self,
        items: GoldItems,
        job: Any,
        deal: Callable[[np.ndarray, np.ndarray, int], tuple[torch.Tensor, torch.Tensor]],
        mesh: Any,
        context: Callable[[], AbstractContextManager[None]],
        metrics: RunMetrics,
    ):
        """deal: (rows, number of each, number of padding) -> this rank's micro-batches of both."""
        self.items, self.mesh, self.context, self.metrics = items, mesh, context, metrics
        self.run, self.phase = Path(job.job.dump_folder), job.phase.name
        numbers = np.arange(len(items.lines))
        (self.tokens, self.numbers), (self.labels, _) = (
            deal(part, numbers, len(numbers)) for part in items.rows(job.training.seq_len)
        )
        if items.share > SHARE:
            logger.warning(f"gold bits per byte of two items a task cost {items.share:.1%} of the training; raise "
                           "validation.freq, or choose fewer tasks (evals.gold --tasks)")  # fmt: skip

    @torch.no_grad()
    def measure(self, model: nn.Module, step: int) -> None:
        """Measure a model in eval mode; rank 0 writes the record. The time counts in no throughput."""
        started = time.perf_counter()
        enter(f"the gold bits per byte after step {step}")
        device, count = utils.device_type, len(self.items.lines)
        nats = torch.zeros(count + 1, dtype=torch.float64, device=device)
        for tokens, labels, numbers in zip(self.tokens, self.labels, self.numbers, strict=True):
            inputs, wanted = (each.to(device, torch.int64) for each in (tokens, labels))
            with self.context():
                losses = sequence_losses(model(inputs, wanted))
            nats.index_add_(0, numbers.to(device), losses)
        if self.mesh is not None:
            torch.distributed.all_reduce(nats, group=self.mesh.get_group())
        seconds = time.perf_counter() - started
        self.metrics.time_last_log += seconds
        lines = [
            {"task": line["task"], "item": line["item"], "right": None, "nats": each, "bytes": line["bytes"]}
            for line, each in zip(self.items.lines, nats[:-1].tolist(), strict=True)
        ]
        if not math.isfinite(sum(line["nats"] for line in lines)):
            logger.warning(f"gold bits per byte  step: {step}  not a number: no record")
            return
        figures = self.figures(lines)
        scalars = {f"{KIND}/{task}": of["gold_bits_per_byte"] for task, of in figures["tasks"].items()}
        self.metrics.survive(
            lambda: self.metrics.logger.log(
                {"gold_bits_per_byte": figures["gold_bits_per_byte"], **scalars}, step
            )
        )
        if torch.distributed.get_rank() == 0:
            with survive_full_disk(self.run):
                self.write(step, figures, lines, seconds)

    def figures(self, lines: list[JsonObject]) -> JsonObject:
        by_task: dict[str, list[JsonObject]] = {}
        for line in lines:
            by_task.setdefault(line["task"], []).append(line)
        tasks = {task: {"gold_bits_per_byte": gold_bits(of), "n": len(of)} for task, of in by_task.items()}
        known = [of["gold_bits_per_byte"] for of in tasks.values() if of["gold_bits_per_byte"] is not None]
        mean = math.fsum(known) / len(known)
        head = {"limit": self.items.per_task, "protocol": self.items.head["protocol"]}
        return {**head, "gold_bits_per_byte": mean, "tasks": tasks}

    def write(self, step: int, figures: JsonObject, lines: list[JsonObject], seconds: float) -> None:
        """The record of a step, with the change since the one before it, and a line in the log."""
        out, row = self.run / "evals.jsonl", self.metrics.row
        change = self.change(out, step, lines)
        who = NO_MODEL | {
            "tokenizer_sha256": self.items.head["tokenizer_sha256"],
            "device": utils.device_type,
        }
        head = {"kind": KIND, "step": step, **{key: figures[key] for key in ("protocol", "limit")}}
        asked = {"data_sha256": self.items.sha256}
        figures = {**figures, "change": change, "items": write_items(out, {**head, **who, **asked}, lines)}
        tokens = row["tokens_total"] if row.get("step") == step else self.metrics.tokens_before
        About(out, step, tokens, self.phase).append(KIND, figures, **who, **asked, seconds=round(seconds, 3))
        since = f"  since step {change['since']}: {change['bits_difference']:+.4f} ± " \
                f"{change['bits_standard_error']:.4f}" if change else ""  # fmt: skip
        mean = figures["gold_bits_per_byte"]
        logger.info(f"gold bits per byte  step: {step}  {mean:.4f}{since}  {seconds:.1f} s")

    def change(self, out: Path, step: int, lines: list[JsonObject]) -> JsonObject | None:
        """The difference from the newest earlier step of this phase that has the same items, with paired
        errors.
        """
        earlier = [
            record
            for record in read_lines(out)
            if record.get("kind") == KIND and record["phase"] == self.phase and record["step"] < step
            and record["data_sha256"] == self.items.sha256
        ]  # fmt: skip
        if not earlier:
            return None
        before = max(
            reversed(earlier), key=lambda record: record["step"]
        )  # of a step measured twice the last
        try:
            _, known = read_items(self.run / before["items"])
        except ValueError:  # somebody tidied up
            return None
        pairs: dict[str, list[tuple[JsonObject, JsonObject]]] = {}
        for line in lines:
            pairs.setdefault(line["task"], []).append((known[line["task"], line["item"]], line))
        return {"since": before["step"], **mean_of_bits(bits_change(of) for of in pairs.values())}
