"""What more threads and sockets would give a token on the CPU: calculated, not measured.

    python -m tools.sockets --flavor 2b --threads 8 16 32 64 --sockets 2

Bytes come from the engine's own plan: tapes are laid out for so many threads, which takes no memory until they
are written. When a token is complete is tools/timeline.py's recurrence, with the slowest thread's time of a
module and the latency of the farthest thread. What bounds a read is given: a core, a socket's memory, the links
from other sockets.

Three places of the weights: "owner" is the engine's on several memory nodes (each thread's tape lies where the
thread runs, as it touches it first), "interleaved" has every S-th page on each socket, and "one socket" is what
a file in the page cache may be.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import tyro
from rich.console import Console
from rich.markdown import Markdown

from laneformer import LaneformerConfig
from laneformer.engine.cpu import _core
from laneformer.engine.cpu.decoder import MATHS, core_spec
from tools.markdown import table
from tools.timeline import awaited, split_layer, token_s

PLACES = ("owner", "interleaved", "one socket")
GROUP_MEETINGS = 6  # a layer, of threads that share a lane: four in attention, two in the MLP (cpu-engine.md)
FEW_LAYERS = 4  # one more than a plan with a layer that is neither the first nor the last
Dtype = Literal["bf16", "fp16", "fp32", "int8", "int4"]


@dataclass(frozen=True)
class Speeds:
    """What a machine reads, in bytes/s, and when a thread sees what another has written, in seconds.

    core: one thread alone. socket: its own memory, all its threads together. link: from the other sockets' memory
    into one socket. near_s, far_s: on one socket, and between two.
    """

    core: float
    socket: float
    link: float
    near_s: float
    far_s: float


@dataclass(frozen=True)
class Plan:
    """How the engine shares a model out. layer_bytes: of each thread; bytes: all that a token reads.

    lanes: first and last lane of each thread; threads with the same ones share them.
    """

    config: LaneformerConfig
    layer_bytes: list[int]
    bytes: int
    lanes: list[tuple[int, int]]

    @property
    def threads(self) -> int:
        return len(self.layer_bytes)

    def socket(self, thread: int, sockets: int) -> int:
        """Threads are pinned to CPUs in their order."""
        return thread * sockets // self.threads

    def latency(self, threads: Sequence[int], sockets: int, speeds: Speeds) -> float:
        """Until all of these see what one has written; 0 for one thread."""
        several = len({self.socket(t, sockets) for t in threads}) > 1
        return speeds.far_s if several else speeds.near_s * (len(threads) > 1)


def laid_out(config: LaneformerConfig, dtype: str, threads: int) -> tuple[list[int], int]:
    """Bytes of each thread's tape, and those that a token reads, as the engine plans them."""
    math = next(name for name, dtypes in MATHS.items() if dtype in dtypes)
    embedding = dtype if dtype in ("bf16", "fp16", "fp32") else "bf16"
    spec = {**core_spec(config, {}), "kv_dtype": "fp16", "held": []}
    decoder = _core.Decoder(
        spec, dtype, embedding, threads, "portable", math, [], float(threads), 0, 1, -1, None
    )
    return [len(decoder.part(i)) for i in range(threads)], decoder.weight_bytes


def planned(config: LaneformerConfig, dtype: str, threads: int) -> Plan:
    few = [replace(config, num_hidden_layers=n, swa_layers=()) for n in (FEW_LAYERS - 1, FEW_LAYERS)]
    less, more = (laid_out(one, dtype, threads)[0] for one in few)
    layer = [b - a for a, b in zip(less, more, strict=True)]
    lanes = [held for count, *held in shares(layer, config.num_lanes) for _ in range(count)]
    return Plan(config, layer, laid_out(config, dtype, threads)[1], [(first, last) for first, last in lanes])


def shares(layer_bytes: Sequence[int], lanes: int) -> Iterator[tuple[int, int, int]]:
    """Threads in a row whose tapes together are whole lanes: how many, their first and their last lane."""
    lane, total, held, count = sum(layer_bytes) // lanes, 0, 0, 0
    for own in layer_bytes:
        held, count = held + own, count + 1
        if held and held % lane == 0:
            yield count, total // lane, (total + held) // lane - 1
            total, held, count = total + held, 0, 0
    assert not held, f"{lanes} lanes of {lane} bytes are not shared out: {layer_bytes}"


def rates(plan: Plan, sockets: int, place: str, speeds: Speeds) -> list[float]:
    """Bytes/s of each thread while all read: its core's, or its share of what bounds them together."""
    on = [plan.socket(t, sockets) for t in range(plan.threads)]
    beside = [on.count(own) for own in on]
    if sockets == 1 or place == "owner":
        return [min(speeds.core, speeds.socket / count) for count in beside]
    if place == "interleaved":  # (S - 1) of S pages come over the links
        reach = min(speeds.socket, speeds.link * sockets / (sockets - 1))
        return [min(speeds.core, reach / count) for count in beside]
    shared = min(speeds.core, speeds.socket / plan.threads)
    return [
        min(shared, speeds.link / count) if own else shared for own, count in zip(on, beside, strict=True)
    ]


def prediction(plan: Plan, sockets: int, place: str, speeds: Speeds) -> dict[str, float]:
    """Of one place of the weights: tokens/s, bytes/s, and seconds of a token that are no reading."""
    config, rate = plan.config, rates(plan, sockets, place, speeds)
    layer_s = max(own / each for own, each in zip(plan.layer_bytes, rate, strict=True))
    rest = plan.bytes - config.num_hidden_layers * sum(plan.layer_bytes)
    head_s = rest / sum(rate)  # threads take tiles of whoever is behind (cpu-engine.md)
    reading = config.num_hidden_layers * layer_s + head_s
    far = plan.latency(range(plan.threads), sockets, speeds)
    groups = [[t for t, held in enumerate(plan.lanes) if held == one] for one in set(plan.lanes)]
    group = max(plan.latency(members, sockets, speeds) for members in groups)
    whole = token_s(config, split_layer(config, layer_s), far, head_s=head_s)
    whole += GROUP_MEETINGS * config.num_hidden_layers * group
    return {"tokens_per_s": 1 / whole, "bytes_per_s": plan.bytes / whole, "waiting_s": whole - reading}


def waits(config: LaneformerConfig) -> int:
    """Joins of a token that wait for other lanes, and the meeting that agrees on it."""
    modules = itertools.product(range(config.num_hidden_layers), (0, 1))
    return 1 + sum(awaited(config, layer, module) is not None for layer, module in modules)


@dataclass
class Sockets:
    """Tokens/s of one request by threads, sockets and the place of the weights: calculated, not measured."""

    flavor: str = "2b"
    """A Laneformer's flavor."""
    dtype: Dtype = "bf16"
    """Type of the weights."""
    threads: tuple[int, ...] = (8, 16, 32, 64)
    """Threads of all sockets together."""
    sockets: int = 2
    """Sockets, each with a memory of its own."""
    core_gb_s: float = 25.0
    """What one thread reads alone (`laneformer bench --threads 1`: its probe)."""
    socket_gb_s: float = 300.0
    """What the threads of a socket read of its memory (the same on all its cores)."""
    link_gb_s: float = 100.0
    """What a socket reads of the others' memory."""
    near_us: float = 0.2
    """Until a thread sees what another one of its socket has written (docs/benchmarks, latency: 4 KiB)."""
    far_us: float = 1.0
    """The same between sockets."""

    def run(self) -> None:
        speeds = Speeds(
            self.core_gb_s * 1e9,
            self.socket_gb_s * 1e9,
            self.link_gb_s * 1e9,
            self.near_us / 1e6,
            self.far_us / 1e6,
        )
        if self.sockets < 1 or min(self.threads) < self.sockets or min(asdict(speeds).values()) <= 0:
            raise SystemExit("sockets: give at least one socket, a thread for each, and speeds above 0")
        config = LaneformerConfig.from_flavor(self.flavor)
        rows: list[list[str]] = []
        found: list[dict[str, Any]] = []
        for threads in self.threads:
            plan = planned(config, self.dtype, threads)
            for place in PLACES[: 1 if self.sockets == 1 else None]:
                one = prediction(plan, self.sockets, place, speeds)
                held = holdings(plan, self.sockets)
                found.append({"threads": threads, "place": place, "lanes": held, **one})
                figures = f"{one['tokens_per_s']:.1f}", f"{one['bytes_per_s'] / 1e9:.0f}"
                rows.append([str(threads), held, place, *figures, f"{1e6 * one['waiting_s']:.0f}"])
        columns = ["threads", "lanes of each socket", "weights", "tokens/s", "GB/s", "waiting, us a token"]
        what = f"`{self.flavor}` in {self.dtype}, {self.sockets} sockets, {waits(config)} waits a token"
        Console(stderr=True).print(Markdown(f"{what}: calculated\n\n{table(columns, rows)}"))
        print(json.dumps({"options": asdict(self), "waits": waits(config), "predictions": found}))


def holdings(plan: Plan, sockets: int) -> str:
    """Which lanes the threads of each socket hold."""
    found = []
    for socket in range(sockets):
        own = [t for t in range(plan.threads) if plan.socket(t, sockets) == socket]
        found.append(f"{plan.lanes[own[0]][0]}-{plan.lanes[own[-1]][1]}")
    return ", ".join(found)


if __name__ == "__main__":
    tyro.cli(Sockets, prog="python -m tools.sockets").run()
