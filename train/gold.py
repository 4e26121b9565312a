"""Bits per byte of the right answers to benchmark items, on the model while it trains: it moves before
accuracies do.

The items are those of a fixed file of tokens (`python -m evals.gold`), which go through validation's own
loop (train/validate.py). Rank 0 appends a record, kind gold, to evals.jsonl, with the nats of each item
beside it: `python -m evals.compare RUN@A RUN@B --kind gold` tells two steps apart with paired errors.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from data_mixtures.mixture import read_lock
from records.evals import NO_MODEL, About
from records.files import JsonObject, read_lines, survive_full_disk
from records.items import bits_change, gold_bits, mean_of_bits, read_items, write_items

from .metrics import RunMetrics

PASSES = 3  # forward passes that a sequence of a step costs at least
KIND = "gold"


class GoldItems:
    """The items of a job. Raises ValueError for a file of another tokenizer, or of items that are too long."""

    def __init__(self, job: Any):
        path, lock = Path(job.validation.gold_items), read_lock(Path(job.mixture.lock))
        self.head, lines = read_items(path)
        if self.head["tokenizer_sha256"] != lock["tokenizer_sha256"]:
            raise ValueError(
                f"validation.gold_items = {path} was made with another tokenizer than {job.mixture.lock}; "
                f"make it again: {how_to_make(job)}"
            )
        longest = max(len(line["ids"]) for line in lines.values())
        if longest > job.training.seq_len + 1:
            raise ValueError(
                f"validation.gold_items = {path} has items of {longest} tokens, training.seq_len is "
                f"{job.training.seq_len}; make it again with --max-length {job.training.seq_len}"
            )
        self.run, self.phase = Path(job.job.dump_folder), job.phase.name
        self.lines = list(lines.values())
        # of the training compute
        self.share = len(lines) / PASSES / job.validation.freq / job.training.global_batch_size
        content = json.dumps(
            [[line[key] for key in ("task", "item", "ids", "start")] for line in self.lines]
        )
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()

    def rows(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels int32 (items, length): a compiled model sees no new shape."""
        tokens = np.zeros((len(self.lines), length), np.int32)
        labels = np.full_like(tokens, IGNORE_INDEX)
        for row, line in enumerate(self.lines):
            ids, start = line["ids"], line["start"]
            tokens[row, : len(ids) - 1] = ids[:-1]
            labels[row, start - 1 : len(ids) - 1] = ids[start:]
        return tokens, labels

    def log(self, nats: list[float], step: int, seconds: float, metrics: RunMetrics) -> None:
        """Log the sum of each item's loss; rank 0 writes the record."""
        if not math.isfinite(sum(nats)):
            logger.warning(f"gold bits per byte  step: {step}  not a number: no record")
            return
        by_task: dict[str, list[JsonObject]] = defaultdict(list)
        for item, each in zip(self.lines, nats, strict=True):
            line = {"task": item["task"], "item": item["item"], "right": None, "nats": each}
            by_task[item["task"]].append({**line, "bytes": item["bytes"]})
        bits = {task: gold_bits(lines) for task, lines in by_task.items()}
        known = [value for value in bits.values() if value is not None]
        mean = math.fsum(known) / len(known)
        scalars = {
            "gold_bits_per_byte": mean,
            **{f"{KIND}/{task}": value for task, value in bits.items()},
        }
        metrics.survive(lambda: metrics.logger.log(scalars, step))
        if torch.distributed.get_rank() == 0:
            row = metrics.row
            tokens = row["tokens_total"] if row.get("step") == step else metrics.tokens_before
            tasks = {
                task: {"gold_bits_per_byte": bits[task], "n": len(by_task[task])}
                for task in by_task
            }
            figures = {"gold_bits_per_byte": mean, "tasks": tasks}
            with survive_full_disk(self.run):
                self.write_record(step, tokens, figures, by_task, seconds)

    def write_record(
        self,
        step: int,
        tokens: int,
        figures: JsonObject,
        by_task: dict[str, list[JsonObject]],
        seconds: float,
    ) -> None:
        out = self.run / "evals.jsonl"
        asked = {"protocol": self.head["protocol"], "limit": max(map(len, by_task.values()))}
        who = NO_MODEL | {
            "tokenizer_sha256": self.head["tokenizer_sha256"],
            "device": utils.device_type,
        }
        who |= {"data_sha256": self.sha256}
        change = self.change(out, step, by_task)
        lines = [line for of_task in by_task.values() for line in of_task]
        items = write_items(out, {"kind": KIND, "step": step, **asked, **who}, lines)
        About(out, step, tokens, self.phase).append(
            KIND,
            {**asked, **figures, "change": change, "items": items},
            **who,
            seconds=round(seconds, 3),
        )
        text = f"gold bits per byte  step: {step}  {figures['gold_bits_per_byte']:.4f}"
        if change:
            bits, error = change["bits_difference"], change["bits_standard_error"]
            text += f"  since step {change['since']}: {bits:+.4f} ± {error:.4f}"
        logger.info(f"{text}  {seconds:.1f} s")

    def change(
        self, out: Path, step: int, by_task: dict[str, list[JsonObject]]
    ) -> JsonObject | None:
        """The difference from the newest earlier step of this phase with the same items."""
        same = {"kind": KIND, "phase": self.phase, "data_sha256": self.sha256}
        earlier = [
            record
            for record in read_lines(out)
            if same.items() <= record.items() and record["step"] < step
        ]
        if not earlier:
            return None
        # of a step measured twice the last
        before = max(reversed(earlier), key=lambda record: record["step"])
        try:
            _, known = read_items(self.run / before["items"])
        except ValueError:  # somebody tidied up
            return None
        changes = [
            bits_change([(known[line["task"], line["item"]], line) for line in lines])
            for lines in by_task.values()
        ]
        return {"since": before["step"], **mean_of_bits(changes)}


def how_to_make(job: Any) -> str:
    data, out = Path(job.mixture.lock).parent, job.validation.gold_items
    return f"python -m evals.gold {data} --bundle BUNDLE --out {out}"


def gold_items(job: Any) -> GoldItems | None:
    """The items of a job; None, with a warning, where their file was not made."""
    if not job.validation.gold_items:
        return None
    if Path(job.validation.gold_items).is_file():
        items = GoldItems(job)
        if items.share > 0.01:
            logger.warning(
                f"gold bits per byte cost {items.share:.1%} of the training; raise validation.freq, or make "
                "the file again with a smaller --limit"
            )
        return items
    logger.warning(
        f"no gold bits per byte: validation.gold_items = {job.validation.gold_items} does not exist; "
        f"{how_to_make(job)}"
    )
    return None


def gold_cost(job: Any) -> dict[str, float] | None:
    """Items that each validation measures, and their share of the compute; None: there are none."""
    items = gold_items(job)
    return None if items is None else {"items": len(items.lines), "share": items.share}
