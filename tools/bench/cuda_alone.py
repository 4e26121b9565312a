"""One GPU in the place of several: one lane on all of it, and two groups of lanes that share nothing but mail."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from laneformer import LaneformerConfig
from laneformer.config import MODULES, Join
from laneformer.engine.cuda import bench
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.folder import Tensor
from tools.bench.cuda_check import greedy
from tools.bench.cuda_rivals import Turn
from tools.bench.cuda_session import DEVICE, LIMIT_S, Report, Session

TURN_TOKENS = 128
TURNS = 5


def turn_of(decoder: CudaDecoder) -> Turn:
    return lambda tokens: bench.speeds(bench.arrivals(decoder, [5], tokens))["tokens_per_s"]


def median_speed(decoder: CudaDecoder) -> float:
    """Tokens/s of a few runs."""
    return statistics.median(turn_of(decoder)(TURN_TOKENS) for _ in range(TURNS))


def lane_alone(session: Session) -> Report:
    """One lane on all multiprocessors, as each GPU of a machine with one lane a GPU would have it."""
    session.need("persistent")
    config, rows = one_lane(session.config), []
    tensors = {name: first_lane(name, tensor) for name, tensor in session.tensors.items()}
    multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    for blocks in dict.fromkeys((multiprocessors // 32 * 32, multiprocessors)):
        decoder = CudaDecoder(config, tensors, session.dtype, (DEVICE,), blocks_per_lane=blocks, limit_s=LIMIT_S)
        speed = median_speed(decoder)
        rows.append({"blocks": blocks, "tokens_per_s": speed})
    bytes_per_token = bench.weight_bytes(decoder.geometry) + bench.cached_bytes(decoder.geometry, TURN_TOKENS / 2)
    joins = [session.config.join(i, m) for i in range(session.config.num_hidden_layers) for m in MODULES]
    return {
        "rows": rows, "lanes": session.config.num_lanes, "layers": session.config.num_hidden_layers,
        "bytes_per_token": bytes_per_token, "blocking_exchanges": joins.count(Join.PRESENT) + 1,
    }  # fmt: skip


def one_lane(config: LaneformerConfig) -> LaneformerConfig:
    """A model that is one lane of `config`: its share of everything, the whole stream, the same head dimension."""
    head_dim, lanes = config.head_dim, config.num_lanes
    lone: type[LaneformerConfig] = type("OneLane", (LaneformerConfig,), {"head_dim": property(lambda self: head_dim)})
    shares = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    return lone.from_dict({**config.to_dict(), "num_lanes": 1, **{n: getattr(config, n) // lanes for n in shares}})


def first_lane(name: str, tensor: Tensor) -> Tensor:
    whole = name.startswith("tok_embeddings") or name.endswith("norm.weight")
    return tensor if whole else Tensor(tensor.dtype, tensor.values[:1])


def two_groups(session: Session) -> Report:
    """Half of the lanes each in two launches with memories of their own, as on two GPUs, on one."""
    expected, report = greedy(session.persistent, [5]), dict[str, Any]()
    decoder = CudaDecoder(session.config, session.tensors, session.dtype, (DEVICE, DEVICE), limit_s=LIMIT_S)
    for cooperative in (True, False):  # the driver may not run two cooperative launches side by side
        for kernels in decoder.kernels:
            kernels.cooperative = cooperative
        try:
            tokens = greedy(decoder, [5])
            speed = turn_of(decoder)(TURN_TOKENS)
            return {**report, "cooperative": cooperative, "same_tokens": tokens == expected, "tokens_per_s": speed,
                    "blocks_per_lane": decoder.geometry.blocks_per_lane}  # fmt: skip
        except RuntimeError as error:
            report[f"error_{'cooperative' if cooperative else 'plain'}"] = str(error)[:500]
    return report
