"""A table of shapes for the decode kernels on the emulator, which covers every rule of the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.geometry import Geometry, Machine
from laneformer.engine.cuda.planning import plan
from laneformer.llama.config import config_of_llama
from tests.laneformer.cuda.emulated import EmulatedPasses
from tests.laneformer.cuda.harness import small_config


# A shape is a change of the small model and a layout: blocks per lane, warps per block, bytes per
# chunk, chunks per ring.
@dataclass(frozen=True)
class Shape:
    config: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    blocks: int = 4
    warps: int = 2
    chunk_bytes: int = 2048
    chunks: int | None = None  # of a warp's ring; None: as many as memory holds
    devices: int = 1
    columns: int = 3

    @property
    def model(self) -> LaneformerConfig:
        return small_config(**self.config)

    def machine(self) -> Machine:
        """A GPU on which this shape fits exactly."""
        machine = Machine(self.model.num_lanes // self.devices * self.blocks, 64 * 1024, 90)
        if self.chunks is None:
            return machine
        fixed = plan(self.model, self.dtype, machine, **self.plan).fixed_shared_bytes
        return Machine(
            machine.multiprocessors, fixed + self.warps * self.chunks * (self.chunk_bytes + 8), 90
        )

    @property
    def plan(self) -> dict[str, int]:
        sizes = {
            "blocks_per_lane": self.blocks,
            "warps": self.warps,
            "chunk_bytes": self.chunk_bytes,
        }
        return {**sizes, "devices": self.devices, "columns": self.columns}

    def plan_geometry(self) -> Geometry:
        return plan(self.model, self.dtype, self.machine(), **self.plan)

    def emulate(self, builds, **options) -> EmulatedPasses:
        arguments = {"dtype": self.dtype, "machine": self.machine(), **self.plan, **options}
        return EmulatedPasses(builds, config=self.model, **arguments)


# Windows of 5 over two splits: a ring keeps one position more than the window shows.
SHAPES = {
    # one PRESENT layer, then mail of the layer before; a vocabulary that leaves a tile of the head
    # half empty
    "delay 1": Shape({"sliding_window": 5, "vocab_size": 104}),
    "delay 0": Shape(
        {
            "broadcast_delay": 0,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "vocab_size": 80,
        },
        "fp16",
        blocks=3,
        warps=1,
        chunk_bytes=512,
        chunks=2,
    ),
    # early layers are sent twice; a norm scale for each lane; most warps have no row of the stream
    "delay 2": Shape(
        {
            "broadcast_delay": 2,
            "rebroadcast_early": True,
            "replicated_rmsn_scale": False,
            "num_lanes": 4,
            "hidden_size": 128,
            "intermediate_size": 192,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_hidden_layers": 5,
            "swa_layers": (0, 2, 4),
        },
        blocks=2,
        warps=3,
        chunk_bytes=1024,
    ),
    # lanes that share nothing but the choice of a token; more KV heads than blocks
    "alone": Shape(
        {
            "broadcast_delay": 3,
            "use_early_comm": False,
            "hidden_size": 96,
            "intermediate_size": 96,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "num_hidden_layers": 3,
        },
        "fp16",
        blocks=2,
        warps=4,
        chunk_bytes=512,
    ),
    "late": Shape(
        {
            "use_early_comm": False,
            "use_mlp_comm": False,
            "num_hidden_layers": 5,
            "num_key_value_heads": 2,
            "sliding_window": 4,
            "norm_eps": 0.01,
            "rope_theta": 100.0,
            "rope_scaling": {
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        blocks=3,
        warps=2,
        chunk_bytes=1024,
        chunks=3,
    ),
    # head dimension 96; a window as long as the context
    "wide heads": Shape(
        {
            "broadcast_delay": 2,
            "use_early_comm": False,
            "use_attention_comm": False,
            "hidden_size": 192,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "sliding_window": 32,
        },
        blocks=5,
        warps=2,
    ),
    # late upper layers, and what they never send before the head
    "flushed": Shape(
        {
            "broadcast_delay": 2,
            "first_late_layer": 3,
            "flush": True,
            "num_hidden_layers": 6,
            "sliding_window": 5,
            "replicated_rmsn_scale": False,
        },
        blocks=3,
        warps=2,
        chunk_bytes=1024,
    ),
    # a base of rotation for windows and YaRN, whose scale layers without rotation have not
    "ropes": Shape(
        {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "swa_layers": (0, 2),
            "nope_layers": (3,),
            "rope_theta": 1000.0,
            "window_rope_theta": 50.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
        blocks=3,
        warps=2,
        chunk_bytes=1024,
    ),
    # every layer joins at once, on two GPUs
    "at once": Shape(
        {
            "broadcast_delay": 5,
            "num_lanes": 4,
            "hidden_size": 192,
            "intermediate_size": 192,
            "num_attention_heads": 12,
            "num_hidden_layers": 3,
        },
        blocks=2,
        warps=2,
        chunk_bytes=1024,
        devices=2,
    ),
}


# ---- of the Llama family: lanes, and what differs from SIZES ----

SIZES = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 32,
}
QWEN3 = {"model_type": "qwen3", "head_dim": 40, "num_attention_heads": 8}
LONG_ROPE = {"type": "longrope", "short_factor": [1.5] * 12, "long_factor": [4.0] * 12}
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "smollm 2": (
        1,
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
        },
    ),
    "mistral": (2, {"model_type": "mistral", "sliding_window": 5, "head_dim": 24}),
    "qwen 2": (2, {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen 3": (2, {**QWEN3, "tie_word_embeddings": True}),
    "phi 3": (
        2,
        {
            "model_type": "phi3",
            "head_dim": 40,
            "partial_rotary_factor": 0.6,
            "rope_scaling": LONG_ROPE,
            "original_max_position_embeddings": 16,
        },
    ),
    "smollm 3": (
        1,
        {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    ),
}


def family(name, **layout) -> Shape:
    lanes, values = FAMILIES[name]
    config = config_of_llama({**SIZES, **values}, lanes)
    return Shape({f.name: getattr(config, f.name) for f in fields(config)}, **layout)
