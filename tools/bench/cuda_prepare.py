"""What `tools.bench cuda` compiles before it measures: the kernels of all its steps, at once.

Compiled code is kept on disk (compile.py), so a step finds it whatever became of the process that made it.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda.compile import VERSIONS, compile_cubin, source_of
from laneformer.engine.cuda.geometry import Geometry
from laneformer.engine.cuda.launch import architecture_name, describe
from laneformer.engine.cuda.passes import plan_columns
from laneformer.engine.cuda.sequence import geometry_for
from laneformer.engine.device import driver_version
from tools.bench.cuda_session import Session
from tools.check.reference import planted_faults

CUTS: dict[str, dict[str, Any]] = {  # of the persistent version, each compared with the one that decodes
    "wide_exchanges": {"wide_exchanges": True}, "interleaved": {"interleaved": True},
    "prefetched": {"prefetch_chunks": 4}, "both": {"interleaved": True, "prefetch_chunks": 4},
}  # fmt: skip
RESERVE_S = 3.0  # to answer within the limit
SMOKE_SHAPE: dict[str, Any] = {"blocks_per_lane": 4, "warps": 4}
FAULTS_FLAVOR = {"2b": "300m"}  # each planted fault needs a model of its own, so a smaller one


def units(session: Session) -> Iterator[tuple[str, Geometry]]:
    """(version, geometry) of all kernels that the steps launch, the first ones first."""

    def of(
        version: str, config: LaneformerConfig, dtype: str = session.dtype, **shape: Any
    ) -> tuple[str, Geometry]:
        return version, geometry_for(config, dtype, [torch.device(device)], version, **shape)

    own, device = session.config, session.device
    nothing: defaultdict[str, torch.Tensor] = defaultdict(
        lambda: torch.zeros(2, 1)
    )  # only the shapes count here
    for config in (*(session.smaller(flavor).config for flavor in ("tiny", "300m")), own):
        yield from (of(version, config) for version in VERSIONS)
    yield from (
        of(version, smoke_config(session.smaller("tiny").config), **SMOKE_SHAPE) for version in VERSIONS
    )
    yield "probe", of(session.version, own)[1]
    yield from (of("persistent", own, **cut) for cut in CUTS.values())
    yield "passes", plan_columns(own, session.dtype, describe(torch.device(device)))
    faulty = session.smaller(FAULTS_FLAVOR.get(session.flavor, session.flavor)).config
    yield from (of(session.version, wrong) for _, _, wrong, _ in planted_faults(faulty, nothing))
    yield from (of(session.version, own, dtype) for dtype in ("fp16", "int8", "fp8"))
    yield from (of("persistent", one_lane(own), blocks_per_lane=blocks) for blocks in alone_blocks(device))


def prepare(session: Session) -> dict[str, Any]:
    """Compile everything at once, a process each; what is late is left to the step that needs it."""
    options = architecture_name(torch.device(session.device)), None, driver_version()
    different = {source_of(*unit): unit for unit in units(session)}
    start, fork, running = time.monotonic(), multiprocessing.get_context("fork"), {}
    for number, unit in enumerate(
        different.values(), 1
    ):  # a process each: one that crashes takes no other with it
        process = running[f"{unit[0]} {number}"] = fork.Process(
            target=compile_cubin, args=(*unit, *options), daemon=True
        )
        process.start()
    for process in running.values():
        process.join(max(0.0, session.time_left() - RESERVE_S))
    late = [name for name, process in running.items() if process.is_alive()]
    failed = [name for name, process in running.items() if process.exitcode]
    for process in running.values():
        process.kill()
    return {
        "units": len(running), "late": ", ".join(late) or "none", "failed": ", ".join(failed) or "none",
        "compile_s": round(time.monotonic() - start, 1),
    }  # fmt: skip


def smoke_config(config: LaneformerConfig) -> LaneformerConfig:
    return dataclasses.replace(config, num_hidden_layers=4, swa_layers=(0, 1))


def alone_blocks(device: str) -> list[int]:
    """Blocks of one lane alone: a number that divides rows evenly, and as many as there are multiprocessors."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return list(dict.fromkeys((max(1, multiprocessors // 32) * min(32, multiprocessors), multiprocessors)))


def one_lane(config: LaneformerConfig) -> LaneformerConfig:
    """A model that is one lane of `config`: its share of everything, the whole stream,
    the same head dimension.
    """
    names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    shares = {name: getattr(config, name) // config.num_lanes for name in names}
    return LaneformerConfig.from_dict(
        {**config.to_dict(), "head_dim": config.head_dim, "num_lanes": 1, **shares}
    )
