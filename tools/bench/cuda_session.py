"""The model that the steps of `tools.bench cuda` measure, its decoders, and the kernels of all steps.

Kernels are compiled before anything is measured. Compiled code is kept on disk (compile.py), so a step
finds it whatever became of the process that made it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda.bench import read_bandwidth
from laneformer.engine.cuda.compile import VERSIONS, compile_cubin, source_of
from laneformer.engine.cuda.geometry import Geometry
from laneformer.engine.cuda.launch import architecture_of, describe
from laneformer.engine.cuda.passes import PassDecoder
from laneformer.engine.cuda.planning import plan_builds
from laneformer.engine.device import driver_version
from laneformer.tensors import Tensor
from tools.bench.bundle import Bundle
from tools.bench.compiling import in_order
from tools.bench.harness import Result
from tools.check.reference import TORCH_DTYPES, Weights, planted_faults, random_weights, tensors_of

LIMIT_S = 3.0  # a wait inside a kernel takes microseconds
SMALLER_RUNS = 10  # that must be bit-identical, of a smaller model
CUTS: dict[str, Result] = {  # of the kernel of passes, each compared with the one that decodes
    "wide_exchanges": {"wide_exchanges": True, "columns": 1}, "prefetched": {"prefetch_chunks": 4},
}  # fmt: skip
Units = list[tuple[str, Geometry]]
RESERVE_S = 3.0  # to answer within the limit
SMOKE_SHAPE: Result = {"blocks_per_lane": 4, "warps": 4}
FAULTS_FLAVOR = {"2b": "300m"}  # each planted fault needs a model of its own, so a smaller one


@dataclass(eq=False)
class Session:
    """One model with random weights on the GPU; everything is made when a step first needs it.

    `without`: versions that are known to fail.
    """

    device = "cuda:0"
    flavor: str
    dtype: str
    runs: int = 100
    without: Sequence[str] = ()
    deadline: float = float("inf")

    def __post_init__(self) -> None:
        self.config = LaneformerConfig.from_flavor(self.flavor)

    def time_left(self) -> float:
        return self.deadline - time.monotonic()

    @functools.cached_property
    def weights(self) -> Weights:
        """bf16 or fp16 matrices."""
        return random_weights(self.config, dtype=TORCH_DTYPES[self.dtype], device=self.device)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.weights)

    @property
    def version(self) -> str:
        """The better one of those that work."""
        return "graph" if "passes" in self.without else "passes"

    def make(
        self, version: str | None = None, config: LaneformerConfig | None = None,
        tensors: dict[str, Tensor] | None = None, limit_s: float = LIMIT_S, dtype: str | None = None, **shape: Any,
    ) -> PassDecoder:  # fmt: skip
        """The better version of this model, unless told otherwise; RuntimeError for a version that
        is known to fail.
        """
        version, tensors = version or self.version, tensors or self.tensors
        if version in self.without:
            raise RuntimeError(f"the {version} version failed at its first tokens")
        dtype = dtype or next(iter(tensors.values())).dtype
        return PassDecoder(
            config or self.config, tensors, dtype, (self.device,), limit_s, 0, version=version, **shape
        )

    def smaller(self, flavor: str) -> Session:
        """The same for another model, which goes with the step."""
        return Session(flavor, self.dtype, min(self.runs, SMALLER_RUNS), self.without, self.deadline)

    @functools.cache  # noqa: B019  (a session lives as long as its process)
    def decoder(self, version: str | None = None) -> PassDecoder:
        """One per version, kept; without a name the better one."""
        return self.decoder(self.version) if version is None else self.make(version)

    @functools.cached_property
    def bandwidth(self) -> dict[str, float]:
        return read_bandwidth(self.decoder().memories[0])


def make_room(session: Session, count: int) -> None:
    """Give the decoders' memory back where the GPU has not so many bytes free; a step that needs them makes them again.

    RuntimeError where even that is too little.
    """
    if torch.cuda.mem_get_info(session.device)[0] < count:
        Session.decoder.cache_clear()
        torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(session.device)[0]
    if free < count:
        raise RuntimeError(f"the GPU has {free / 1e9:.1f} GB free, and this needs {count / 1e9:.1f}")


# --- the kernels of all steps
# ---------------------------------------------------------------------------------------------------


def units(session: Session) -> Units:
    """(version, geometry) of all kernels that the steps launch, the first ones first."""
    own, machine = session.config, describe(torch.device(session.device))

    def of(version: str, config: LaneformerConfig, dtype: str = session.dtype, **shape: Any) -> Units:
        return [(version, g) for g in plan_builds(config, dtype, machine, version == "graph", **shape)]

    tiny, small = (session.smaller(flavor).config for flavor in ("tiny", "300m"))
    faulty = session.smaller(FAULTS_FLAVOR.get(session.flavor, session.flavor)).config
    faults = planted_faults(faulty, defaultdict(lambda: torch.zeros(2, 1)))  # only the shapes count here
    wanted = [
        *(of(version, config) for config in (tiny, small, own) for version in VERSIONS),
        *(of(version, smoke_config(tiny), **SMOKE_SHAPE) for version in VERSIONS),
        [("probe", of(session.version, own)[-1][1])],
        of_bundle(session),
        *(of("passes", own, **cut) for cut in CUTS.values()),
        *(of(session.version, wrong) for _, _, wrong, _ in faults),
        *(of(session.version, own, dtype) for dtype in ("fp16", "int8")),
        *(of("passes", one_lane(own), blocks_per_lane=n) for n in alone_blocks(session.device)),
    ]
    return list(itertools.chain(*wanted))


def of_bundle(session: Session) -> Units:
    """Of the step that runs a bundle of this model on this GPU."""
    bundle = Bundle(Path(os.devnull), {session.flavor: session.config})
    return list(bundle.units(describe(torch.device(session.device)), session.config).values())


def prepare(session: Session) -> Result:
    """Compile everything, the first ones first; what is late is left to the step that needs it."""
    architecture, driver = architecture_of(torch.device(session.device)), driver_version()
    different = {source_of(*unit): unit for unit in units(session)}
    jobs = {
        f"{unit[0]} {number}": functools.partial(compile_cubin, *unit, architecture, driver=driver)
        for number, unit in enumerate(different.values(), 1)
    }
    return in_order(jobs, session.time_left() - RESERVE_S)


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
