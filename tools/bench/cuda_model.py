"""How fast the persistent CUDA kernel should be: a model of its rings and stalls, not a
measurement; needs no GPU.

    python -m tools.bench cuda-model --out docs/benchmarks/DATE-cuda-model.md

A fluid model. Each block (one a multiprocessor) consumes weights out of its rings at the rate C of its
arithmetic, and the memory fills them at F, its share of the bandwidth. While an exchange holds a block up,
its rings fill; when they are full, the memory stands idle. Afterwards they drain at C - F until they are
empty, and the block runs at F. Blocks of a lane are alike, and lanes wait for each other where their joins do
(config.Join): one whose rings are full leaves its share to the others. Every input stands in cuda_model.toml
with its source, to be replaced by measurements.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tomli

from laneformer.config import MODULES, Join, LaneformerConfig
from laneformer.engine.cuda.bench import datasheet, shares, weight_bytes
from laneformer.engine.cuda.geometry import Geometry, Machine
from laneformer.engine.cuda.planning import plan
from tools.bench import harness
from tools.bench.harness import Result
from tools.markdown import table

INPUTS = Path(__file__).with_suffix(".toml")
KERNELS, CASES = ("first", "today"), ("central", "pessimistic")
STALLS = ("attention_us", "round_us", "stream_us", "activation_us", "tail_us")
FLAVORS = ("2b", "300m")
SHARES = (0.92, 0.90, 0.88, 0.85, 0.80)
DEPTHS = (0, 1024, 2048, 4096)
TOKENS = 8
FILE_START = """# A model of the CUDA engine's speed

**Nothing here was measured: every figure is the output of a model** (tools/bench/cuda_model.py), whose inputs are the
last table of each section. "% of datasheet": bytes of weights, keys and values a second over the vendor's bandwidth. c:
exposed microseconds a layer, (time per token - bytes / reachable bandwidth) / layers. `first` is the kernel as first
written, `today` what its changes since are assumed to have made of the stalls. A c of 0 says that the rings hide all
stalls that were assumed, and no more: what is missing from the inputs (slow DRAM pages, a cold instruction cache, polls
in the stream's way, weights that stay in an L2) is missing from c."""

# ---- the machine ----


@dataclass(frozen=True)
class Step:
    """Bytes that a block consumes at no more than `rate` (bytes/us), and how long an exchange
    then holds it up.

    behind: the exchange waits until all lanes have done this step but so many before it; None:
    for no other lane.
    """

    bytes: float
    rate: float
    stall_us: float
    behind: int | None


@dataclass
class Lane:
    """One block of a lane: bytes in its rings, bytes left of its step, then us left of a stall, steps done."""

    ring: float
    left: float
    stall_us: float = 0.0
    waiting: bool = False
    done: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes/us: of all lanes' blocks together, one of each lane; into one block. And bytes
    of a block's rings.
    """

    rate: float
    port: float
    ring: float


def token_us(steps: Sequence[Step], lanes: int, memory: Memory, jitter: float, tokens: int = TOKENS) -> float:
    """Microseconds of a token, after a first one."""
    draw, clock = random.Random(0), 0.0
    ends: list[float] = []
    state = [Lane(memory.ring, steps[0].bytes) for _ in range(lanes)]
    while len(ends) < tokens + 2:
        while any(go_on(lane, state, steps, jitter, draw) for lane in state):
            if not state[0].waiting and state[0].done == len(steps) * (len(ends) + 1):
                ends.append(clock)
        rates = [steps[lane.done % len(steps)].rate if working(lane) else 0.0 for lane in state]
        wanted = [
            memory.port if lane.ring < memory.ring else rate for lane, rate in zip(state, rates, strict=True)
        ]
        filled = shared_out(wanted, memory.rate)
        used = [min(r, f) if lane.ring <= 0 else r for lane, r, f in zip(state, rates, filled, strict=True)]
        step_us = min(
            us for each in zip(state, used, filled, strict=True) for us in next_events(*each, memory.ring)
        )
        clock += step_us
        for lane, use, fill in zip(state, used, filled, strict=True):
            lane.left -= use * step_us
            lane.stall_us -= step_us
            lane.ring = snapped(lane.ring + (fill - use) * step_us, memory.ring)
    return (ends[-1] - ends[1]) / tokens


def working(lane: Lane) -> bool:
    return not lane.waiting and lane.stall_us <= 0


def go_on(
    lane: Lane, state: Sequence[Lane], steps: Sequence[Step], jitter: float, draw: random.Random
) -> bool:
    """From the end of a step into its stall, when no lane is awaited; true if something has changed."""
    if working(lane) and lane.left <= 1e-3:
        lane.waiting, lane.done = True, lane.done + 1
    ended = steps[(lane.done - 1) % len(steps)]
    if not lane.waiting or any(
        other.done < lane.done - ended.behind for other in state if ended.behind is not None
    ):
        return False
    lane.waiting, lane.left = False, steps[lane.done % len(steps)].bytes
    lane.stall_us = ended.stall_us * (1 + jitter * (2 * draw.random() - 1))
    return True


def shared_out(demands: Sequence[float], rate: float) -> list[float]:
    """Equal shares of the rate; what a lane does not want, the others get."""
    given, left = [0.0] * len(demands), rate
    for count, i in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        given[i] = min(demands[i], left / (len(demands) - count))
        left -= given[i]
    return given


def next_events(lane: Lane, used: float, filled: float, ring: float) -> Iterator[float]:
    """Microseconds until its step or stall ends, its rings are full or empty; at least a
    thousandth of a nanosecond.
    """
    if used > 0:
        yield max(lane.left / used, 1e-6)
    if lane.stall_us > 0:
        yield max(lane.stall_us, 1e-6)
    if filled > used and lane.ring < ring:
        yield max((ring - lane.ring) / (filled - used), 1e-6)
    if filled < used and lane.ring > 0:
        yield max(lane.ring / (used - filled), 1e-6)


def snapped(level: float, ring: float) -> float:
    """Full and empty are exact, so that rounding makes no events."""
    return ring if level > ring - 0.01 else level if level > 0.01 else 0.0


# ---- the inputs, and the kernel in its terms ----


@cache
def tables() -> dict[str, Any]:
    return tomli.loads(INPUTS.read_text(encoding="utf-8"))


def values_of(kernel: str, case: str) -> dict[str, float]:
    """{name: value} of a kernel's inputs and of those of all kernels."""
    rows = {**tables()["all"], **tables()[kernel]}
    return {name: row.get("value", row.get(case)) for name, row in rows.items()}


def geometry_of(flavor: str, card: str) -> Geometry:
    """ValueError where the kernel does not fit."""
    row = tables()["cards"][card]
    machine = Machine(row["multiprocessors"], row["shared_kib"] * 1024, row["architecture"])
    return plan(LaneformerConfig.from_flavor(flavor), "bf16", machine)


def rounds_of_keys(geometry: Geometry, positions: int) -> int:
    """How often each warp of a block goes over keys; a warp takes one key every 4 threads (decode.cuh)."""
    threads = min(4, math.gcd(geometry.config.head_dim // 8, 32))
    keys = -(-positions // geometry.splits)
    return max(1, -(-keys // (geometry.warps * 32 // threads)))


def steps_of(
    geometry: Geometry, inputs: dict[str, float], clock_ghz: float, depth: int, wide: bool
) -> list[Step]:
    """A token, as one block sees it. Keys and values are prefetched while the first matrix is read."""
    config, slower = geometry.config, inputs["stall_clock_ghz"] / clock_ghz
    rate = 1e3 * inputs["issue_bytes_per_clock"] * inputs["issue_share"] * clock_ghz

    def step(op: str, stall: str, behind: int | None, more_bytes: float = 0.0, more_us: float = 0.0) -> Step:
        matrix = geometry.matrix(op)
        even = matrix.rows / geometry.warps_per_lane  # the busiest warp's rows, and so its block's time
        size = 2 * matrix.rows * matrix.columns / geometry.blocks_per_lane + more_bytes
        return Step(
            size,
            rate * even / geometry.max_rows(op),
            slower * (inputs[stall] + more_us),
            0 if wide else behind,
        )

    def awaited(layer: int, module: str) -> int | None:
        if config.join(layer, module) is Join.PRESENT:
            return 0
        return 4 * config.broadcast_delay if config.adds_delayed(layer, module) else None

    made = []
    for layer in range(config.num_hidden_layers):
        held = min(depth, config.window(layer) or depth)
        kv_bytes = 4 * config.head_dim * config.kv_heads_per_lane * held / geometry.blocks_per_lane
        rounds_us = inputs["round_us"] * (rounds_of_keys(geometry, held) - 1)
        joins = [awaited(layer, module) for module in MODULES]
        made += [
            step("qkv", "attention_us", None, kv_bytes, rounds_us), step("output", "stream_us", joins[0]),
            step("gate_up", "activation_us", None), step("down", "stream_us", joins[1]),
        ]  # fmt: skip
    return [*made, step("head", "tail_us", 0)]


def modelled(
    kernel: str, case: str, flavor: str = "2b", card: str = "H200", *, depth: int = 0, wide: bool = False,
    filters: bool = False, prefetch_chunks: int = 0, **replaced: float,
) -> Result:  # fmt: skip
    """Tokens/s and what follows from it; `replaced` inputs instead of the file's."""
    geometry, inputs = geometry_of(flavor, card), {**values_of(kernel, case), **replaced}
    stated, row = datasheet(card), tables()["cards"][card]
    assert stated is not None, f"bench.DATASHEET has no {card}"
    inputs["tail_us"] += inputs["filters_us"] if filters else 0
    reach = stated * inputs["memory_share"]
    # a chunk is filled again when all of it is used: half a chunk of each warp is missing on average
    ring = geometry.warps * (geometry.chunks - 0.5 + prefetch_chunks) * geometry.chunk_bytes
    memory = Memory(
        reach / 1e6 / geometry.blocks_per_lane, 1e3 * inputs["port_bytes_per_clock"] * row["clock_ghz"], ring
    )
    steps = steps_of(geometry, inputs, row["clock_ghz"], depth, wide)
    tokens_per_s = 1e6 / token_us(steps, geometry.lanes_per_device, memory, inputs["stall_jitter"])
    size = weight_bytes(geometry) + geometry.config.cached_bytes(depth, 2)
    part = shares(tokens_per_s, size, reach, stated, 1, geometry.config.num_hidden_layers)
    return {
        "tokens_per_s": tokens_per_s,
        **{name: round(value or 0.0, 6) + 0.0 for name, value in part.items()},
    }


# ---- the report ----


@dataclass(kw_only=True)
class Options(harness.Options):
    """Model the speed of the CUDA engine's persistent kernel from its stalls and rings; nothing is measured."""


def main(arguments: list[str] | None = None) -> None:
    harness.run("cuda-model", Options, measure, section, FILE_START, arguments)


def measure(options: Options, console: Any) -> Result:
    """{"model": true, "tables": {title: rows}, "inputs": {name: row}}."""
    every = [(kernel, case) for kernel in KERNELS for case in CASES]
    variants: dict[str, dict[str, Any]] = {
        "nothing": {}, "every exchange waits for all lanes": {"wide": True}, "top-p": {"filters": True},
        "prefetch_chunks = 4": {"prefetch_chunks": 4}, "no jitter": {"stall_jitter": 0.0},
        **{f"{name} = 0": {name: 0.0} for name in STALLS},
    }  # fmt: skip
    return {
        "model": True,
        "tables": {
            "2b on an H200, by the share of the bandwidth that reads can reach": [
                {"share": s, **row(*each, memory_share=s)} for s in SHARES for each in every
            ],
            "2b on an H200, by depth of the context": [{"depth": d, **row(*e, depth=d)} for d in DEPTHS for e in every],
            "2b on an H200, one thing changed": [
                {"changed": name, **row(*each, **change)}
                for name, change in variants.items() for each in (every[0], every[-1])
            ],
            "Cards": [
                {"card": card, "model": flavor, **row("today", case, flavor, card)}
                for flavor in FLAVORS for card in tables()["cards"] for case in CASES
            ],
        },
        "inputs": {f"{group}.{name}": row for group, rows in tables().items() for name, row in rows.items()},
    }  # fmt: skip


def row(kernel: str, case: str, *arguments: str, **options: Any) -> Result:
    return {"kernel": kernel, "inputs": case, **modelled(kernel, case, *arguments, **options)}


COLUMNS = {
    "tokens_per_s": "tokens/s, modelled", "percent_of_datasheet": "% of datasheet",
    "exposed_us_per_layer": "c, us/layer",
}  # fmt: skip


def section(options: Options, result: Result) -> tuple[str, str]:
    parts = ["**The output of a model, not a measurement.**"]
    for title, rows in result["tables"].items():
        columns = {name: COLUMNS.get(name, name) for name in rows[0] if name != "percent_of_probe"}
        parts += [
            f"### {title}",
            table(list(columns.values()), [[*map(r.get, columns)] for r in rows]),
        ]
    about = ("kind", "source")
    lines = [
        (name, *map(r.get, about), "yes" if r["measured"] else "no",
         ", ".join(f"{k} {v}" for k, v in r.items() if k not in (*about, "measured")))
        for name, r in result["inputs"].items()
    ]  # fmt: skip
    parts += ["### Inputs", table(["input", *about, "measured", "value"], lines)]
    return "a model of the persistent kernel", "\n\n".join(parts)
