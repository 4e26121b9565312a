"""Speeds and latencies on a bare machine: what the memory gives, what a word costs, what a token takes."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

from laneformer.engine.cuda.bandwidth import datasheet, shares
from laneformer.engine.cuda.structures import PASSES_PER_LAUNCH, TRACED, Column
from tools.bench.bare.model import GREEDY, Model

Figures = dict[str, Any]


def probe(model: Model) -> Figures:
    """Bytes/s of each kernel that reads the tapes, the best of some runs."""
    size = model.shape["tape_bytes"]
    trials = range(1 + model.contents.effort["trials"])
    rounds = math.ceil(model.contents.effort["probed_bytes"] / size)
    return {
        f"{name}_bytes_per_s": rounds * size / min([model.probe(name, rounds)[0] for _ in trials][1:])
        for name in ("stream", "loads")
    }


def latency(model: Model) -> Figures:
    """Microseconds from a store to the poll that sees it, and of a stream's exchange, with the memory idle
    and read by the other lanes' blocks.
    """
    found: Figures = {}
    for saturated in (False, True):
        state = "saturated" if saturated else "idle"
        for what, trips in (("store_to_poll_us", True), ("exchange_us", False)):
            rows = [
                model.exchanges(trips, saturated, model.contents.effort["rounds"])
                for _ in range(model.contents.effort["trials"])
            ]
            ns = statistics.median(row["ns"] for row in rows)
            found[f"{state}_{what}"] = ns / 1000 / (2 if trips else 1)
        found[f"{state}_bytes_per_s"] = statistics.median(row["bytes_per_s"] for row in rows)
    return found


def decode(model: Model, gpu: str, probe_bytes_per_s: float) -> Figures:
    """Tokens/s of one request after some positions, in launches of 16 passes: as the host sees them, and of
    the GPU alone, whose part of the bandwidth is given.
    """
    shape, found, effort = model.shape, Figures(), model.contents.effort
    for depth in (0, shape["context"] // 2):
        token = model.read([(7 * i) % model.vocabulary for i in range(max(depth, 1))])
        runs = [once(model, token, depth, effort["tokens"]) for _ in range(1 + effort["trials"])][1:]
        seen, alone = (statistics.median(speeds) for speeds in zip(*runs, strict=True))
        read = shape["weight_bytes"] + shape["position_bytes"] * (depth + effort["tokens"] / 2)
        part = shares(alone, read, probe_bytes_per_s, datasheet(gpu), 1, shape["layers"])
        speeds = {"tokens_per_s": seen, "kernel_tokens_per_s": alone, "bytes_per_token": read}
        found[str(depth)] = {**speeds, "runs_tokens_per_s": runs, **part}
    return {"depths": found, "passes_ms": passes_ms(model)}


def once(model: Model, token: int, depth: int, tokens: int) -> tuple[float, float]:
    """Tokens/s by the host's clock, and by the GPU's over the launches alone."""
    position, start, seconds = max(depth, 1), time.perf_counter(), 0.0
    for _ in range(tokens // PASSES_PER_LAUNCH):
        column = Column(token, position, 0, sampling=GREEDY)
        rows = model.run([column], PASSES_PER_LAUNCH - 1)
        seconds += model.driver.seconds()
        token, position = rows[-1][0], position + PASSES_PER_LAUNCH
    return tokens / (time.perf_counter() - start), tokens / seconds


def passes_ms(model: Model) -> Figures:
    """Of the GPU alone, by columns: one pass of ids of a prompt."""
    found = {}
    for build in model.shape["builds"]:
        columns = [Column(i, i, 0, sampling=GREEDY) for i in range(build["columns"])]
        times = []
        for _ in range(1 + model.contents.effort["trials"]):
            model.run(columns)
            times.append(1000 * model.driver.seconds())
        found[str(build["columns"])] = statistics.median(times[1:])
    return found


def trace(model: Model) -> Figures:
    """Where a token's time goes, by a build of the kernel that counts it: microseconds a token that the first
    warp of a block waits for each exchange and for weights, the mean and the worst of the blocks; the rest it
    computes, or waits for the other warps.
    """
    position = model.shape["context"] // 2
    token = model.read([(7 * i) % model.vocabulary for i in range(position)])
    model.trace(token, position)  # the first loads the code
    blocks, seconds = model.trace(token, position), model.driver.seconds()
    us = 1e6 * seconds / PASSES_PER_LAUNCH / max(cycles[-1] for cycles in blocks)  # a token's, of a cycle
    rows = {
        name: {"mean_us": us * statistics.fmean(values), "worst_us": us * max(values)}
        for name, values in zip(TRACED, zip(*blocks, strict=True), strict=True)
    }
    waits = [us * (cycles[-1] - sum(cycles[:-1])) for cycles in blocks]
    rows["the rest"] = {"mean_us": statistics.fmean(waits), "worst_us": max(waits)}
    return {"position": position, "tokens_per_s": PASSES_PER_LAUNCH / seconds, "of_a_token": rows}
