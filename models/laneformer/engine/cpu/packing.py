"""From a config and named tensors to the decoder's packed tapes: plain numbers, one tensor at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...config import Join, LaneformerConfig
from ..folder import MATRICES, Tensor, expected_shapes
from ..rope import rope_tables
from . import _core
from .packed import LAYOUT_VERSION, PackedWeights

JOIN_CODES = {Join.PRESENT: 0, Join.NO_REDUCE: 1, Join.PAST: 2}
HEAD_CODES = {"vocab_parallel": 0, "replicate": 1, "lane": 2}


def core_spec(config: LaneformerConfig) -> dict[str, Any]:
    """The config as plain numbers: joins, windows and late arrivals per layer are decided here, by config.py alone."""
    layers, delay = range(config.num_hidden_layers), config.broadcast_delay

    def arrives(layer: int, module: str) -> bool:
        return config.join(layer, module) is Join.PAST and config.broadcasts(layer - delay, module)

    return {
        **config.to_dict(),
        "head": HEAD_CODES[config.lm_head_type],
        "broadcast_delay": min(delay, config.num_hidden_layers),
        "window": [config.window(i) or 0 for i in layers],
        "join": [[JOIN_CODES[config.join(i, m)] for i in layers] for m in ("attention", "mlp")],
        "adds_delayed": [[int(arrives(i, m)) for i in layers] for m in ("attention", "mlp")],
    }


def load_tensors(
    decoder: _core.Decoder,
    config: LaneformerConfig,
    tensors: Mapping[str, Tensor],
    dtype: str,
    packed: PackedWeights | None = None,
) -> None:
    """Hand every tensor to the packer, one at a time; ValueError names the first one with a non-finite value.

    With `packed` the matrices and the embedding come from that cache, or are written to it once they are packed.
    """

    def send(name: str, setter: Any, *where: Any) -> None:
        tensor = tensors[name]
        if not setter(*where, np.ascontiguousarray(tensor.values), tensor.dtype):
            raise ValueError(f"tensor {name} holds values that are not finite (NaN, or too large for the dtype)")

    decoder.set_rope(*rope_tables(config))
    for i in range(config.num_hidden_layers):
        send(f"layers.{i}.attention_norm.weight", decoder.set_norm, 2 * i)
        send(f"layers.{i}.ffn_norm.weight", decoder.set_norm, 2 * i + 1)
    send("norm.weight", decoder.set_norm, 2 * config.num_hidden_layers)
    plan = {"layout": LAYOUT_VERSION, "dtype": dtype, "threads": decoder.threads, "config": config.to_dict()}
    if packed is not None and packed.load(decoder, plan):
        return
    send("tok_embeddings.weight", decoder.set_embedding)
    for i in range(config.num_hidden_layers):
        for matrix in MATRICES:
            send(f"layers.{i}.{matrix}.weight", decoder.set_matrix, matrix.split(".")[1], i)
    send("lm_head.weight", decoder.set_matrix, "lm_head", 0)
    if packed is not None:
        packed.save(decoder, plan)


class RandomTensors(Mapping[str, Tensor]):
    """Tensors made when they are asked for, so that only one exists at a time."""

    def __init__(self, config: LaneformerConfig, dtype: str, seed: int):
        self.dtype, self.seed, self.shapes = dtype, seed, expected_shapes(config)
        self.deviation = config.initializer_range

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return Tensor("fp32", np.ones(self.shapes[name], np.float32))
        values = np.empty(self.shapes[name], np.float32 if self.dtype == "fp32" else np.uint16)
        key = (self.seed << 32 ^ zlib.crc32(name.encode())) % 2**64
        _core.random_values(values, self.dtype, key, self.deviation)
        return Tensor(self.dtype, values)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)
