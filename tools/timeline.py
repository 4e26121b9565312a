"""When a token is complete: the one model of decode speed behind every calculator. Nothing here is measured.

A GPU's own time is that of fluid.py. Over several GPUs one clock runs through the modules: all lanes are alike, so
one lane's clock is everybody's. A module takes its time, its outputs reach the others `link_s` after it has finished,
and a join waits for what it adds (config.Join). The recurrence is exact for that machine. A delay of d layers hides
a link as slow as d layers; beyond, every (2 d + 1)th join waits for the excess, which gives the 2 d joins after it the
time that they lack.

What reads can reach and how long stalls last is assumed, in three cases (cards.CASES): an interval, not a prediction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from laneformer.config import MODULES, Join, LaneformerConfig
from laneformer.engine.cuda.bench import weight_bytes
from laneformer.engine.cuda.geometry import WARP_THREADS, Geometry, Machine
from laneformer.engine.cuda.planning import plan_builds

from .cards import CASES, INPUTS, Card, Inputs
from .fluid import Memory, Step, token_us

GEOMETRY = (
    "multiprocessors",
    "shared_kib",
    "architecture",
    "clock_ghz",
)  # rows of a card that the kernel needs


# ---- several GPUs: a clock through the modules ----


def awaited(config: LaneformerConfig, layer: int, module: int) -> int | None:
    """How many layers ago the outputs left that a join awaits: 0 for an all-reduce, None where it awaits nothing."""
    flushes = config.flush and (layer, module) == (config.num_hidden_layers - 1, 1)
    if config.join(layer, MODULES[module]) is Join.PRESENT or (flushes and config.delivers(layer, "mlp")):
        return 0
    return config.broadcast_delay if config.adds_delayed(layer, MODULES[module]) else None


def token_s(
    config: LaneformerConfig,
    module_s: tuple[float, float],
    link_s: float,
    *,
    head_s: float = 0.0,
    modules_late: int = 0,
    ends: int = 1,
) -> float:
    """Seconds of a token.

    module_s: of attention and MLP. head_s: of the head. link_s: from the end of a module until the other lanes can
    read its outputs.
    modules_late: outputs are awaited that many modules after the join that needs them by the config (1: Ladder
    Residual). ends: further exchanges that nothing hides, such as the one that agrees on the token.
    """
    clock, count = 0.0, 2 * config.num_hidden_layers
    arrival: list[float] = []  # by running number of the module
    due = [awaited(config, *divmod(number, 2)) for number in range(count)]
    for number in range(count):
        clock += module_s[number % 2]
        arrival.append(clock + link_s)
        late = due[number - modules_late] if number >= modules_late else None
        if late is not None:
            clock = max(clock, arrival[number - modules_late - 2 * late])
    # the head reads the finished stream
    last = [arrival[n] for n in range(count - modules_late, count) if due[n] is not None]
    return max([clock, *last]) + ends * link_s + head_s


def split_layer(config: LaneformerConfig, layer_s: float) -> tuple[float, float]:
    """Seconds of attention and MLP: those of a layer, by their weights."""
    attention = 2 * config.hidden_size * (config.query_size + config.head_dim * config.num_key_value_heads)
    share = attention / config.parameter_count()["layer"]
    return share * layer_s, (1 - share) * layer_s


# ---- one GPU: the kernel of passes as fluid.py sees it, in the build of one column ----


@dataclass(frozen=True)
class Kernel:
    """The kernel of passes with one model on one kind of GPU, each of `gpus` with its part of the lanes."""

    config: LaneformerConfig
    card: Card
    case: str = "central"
    gpus: int = 1
    depth: int = 0  # cached positions
    wide: bool = False  # every exchange waits for all lanes
    filters: bool = False  # top-p
    prefetch_chunks: int = 0
    inputs: Inputs = INPUTS

    def at(self, name: str) -> float:
        return self.inputs.at(f"decode.{name}", self.case)

    @property
    def geometry(self) -> Geometry:
        """ValueError where the kernel does not fit."""
        return plan_builds(self.config, "bf16", machine_of(self.card), devices=self.gpus)[0]

    @property
    def reach(self) -> float:
        """Bytes/s that reads of one GPU can reach."""
        return self.card.bandwidth_bytes_per_s * self.at("memory_share")

    @property
    def bytes_per_token(self) -> float:
        return weight_bytes(self.geometry) + self.config.cached_bytes(self.depth, 2)

    def device_s(self) -> float:
        """Seconds of a token where links take no time."""
        geometry = self.geometry
        # a chunk is filled again when all of it is used: half a chunk of each warp is missing on average
        chunks = geometry.chunks - 0.5 + self.prefetch_chunks
        memory = Memory(
            rate=self.reach / 1e6 / geometry.blocks_per_lane,
            port=1e3 * self.at("port_bytes_per_clock") * self.card.clock_ghz,
            ring=geometry.warps * chunks * geometry.chunk_bytes,
        )
        return 1e-6 * token_us(
            self.steps(geometry), geometry.lanes_per_device, memory, self.at("stall_jitter")
        )

    def steps(self, geometry: Geometry) -> list[Step]:
        """A token, as one block sees it. Keys and values are prefetched while the first matrix is read."""
        made = []
        for layer in range(self.config.num_hidden_layers):
            held = min(self.depth, self.config.window(layer) or self.depth)
            kv = 4 * self.config.head_dim * self.config.kv_heads_per_lane * held / geometry.blocks_per_lane
            rounds_us = self.at("round_us") * (rounds_of_keys(geometry, held) - 1)
            after_attention, after_mlp = (awaited(self.config, layer, module) for module in (0, 1))
            made += [
                self.step(geometry, "qkv", self.at("attention_us") + rounds_us, None, kv),
                self.step(geometry, "output", self.at("stream_us"), after_attention),
                self.step(geometry, "gate_up", self.at("activation_us"), None),
                self.step(geometry, "down", self.at("stream_us"), after_mlp),
            ]
        tail_us = self.at("tail_us") + (self.at("filters_us") if self.filters else 0.0)
        return [*made, self.step(geometry, "head", tail_us, 0)]

    def step(
        self, geometry: Geometry, op: str, stall_us: float, layers: int | None, more_bytes: float = 0.0
    ) -> Step:
        """`layers`: how many layers ago the other lanes' outputs left that it awaits; None: it awaits none."""
        matrix, clock = geometry.matrix(op), self.card.clock_ghz
        rate = 1e3 * self.at("issue_bytes_per_clock") * self.at("issue_share") * clock
        return Step(
            bytes=2 * matrix.rows * matrix.columns / geometry.blocks_per_lane + more_bytes,
            rate=rate * matrix.balance(geometry.blocks_per_lane, geometry.warps),
            stall_us=stall_us * self.at("saturated_latency") * self.at("stall_clock_ghz") / clock,
            behind=0 if self.wide else layers and 4 * layers,  # four steps a layer
        )

    def parts_s(self) -> tuple[tuple[float, float], float]:
        """Seconds of attention and MLP of a layer, and of the head, for `token_s`: what stalls leave exposed is
        shared out over the layers.
        """
        head_s = 2 * self.config.parameter_count()["lm_head"] / (self.gpus * self.reach)
        layer_s = (self.device_s() - head_s) / self.config.num_hidden_layers
        return split_layer(self.config, layer_s), head_s


def machine_of(card: Card) -> Machine:
    """What the CUDA engine's planner has to know of a card. For one of AMD's it plans as for NVIDIA's: warps of 32."""
    return Machine(card.multiprocessors, 1024 * card.shared_kib, card.architecture)


def rounds_of_keys(geometry: Geometry, positions: int) -> int:
    """How often each warp of a block goes over keys; a warp takes one key every 4 threads (decode.cuh)."""
    threads = min(4, math.gcd(geometry.config.head_dim // 8, 32))
    keys = -(-positions // geometry.splits)
    return max(1, -(-keys // (geometry.warps * 32 // threads)))


def interval(config: LaneformerConfig, card: Card) -> dict[str, float]:
    """Tokens/s of one request on one GPU in every case. ValueError where the kernel does not take model or card."""
    if card.warp_threads != WARP_THREADS:
        raise ValueError(
            f"{card.name} has warps of {card.warp_threads} threads; the kernel is for NVIDIA's GPUs"
        )
    return {case: 1 / Kernel(config, card, case).device_s() for case in CASES}
