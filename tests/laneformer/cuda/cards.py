"""GPUs in use, a driver's limits on each, and models that run on them."""

from __future__ import annotations

from dataclasses import dataclass

from laneformer.config import FLAVORS, LaneformerConfig
from laneformer.engine.cuda.geometry import Machine
from laneformer.llama.config import config_of_llama, lanes_for_gpus

# of a multiprocessor: KiB of shared memory, KiB that one block may use, threads; the registers are
# 65,536 on all
# From "Technical specifications per compute capability" in the CUDA C++ programming guide.
LIMITS = {
    80: (164, 163, 2048), 86: (100, 99, 1536), 89: (100, 99, 1536), 90: (228, 227, 2048), 100: (228, 227, 2048),
    120: (100, 99, 1536),
}  # fmt: skip
REGISTERS = 65_536


@dataclass(frozen=True)
class Card:
    multiprocessors: int
    architecture: int

    @property
    def shared_total(self) -> int:
        return 1024 * LIMITS[self.architecture][0]

    @property
    def shared_block(self) -> int:
        return 1024 * LIMITS[self.architecture][1]

    @property
    def threads(self) -> int:
        return LIMITS[self.architecture][2]

    @property
    def machine(self) -> Machine:
        return Machine(self.multiprocessors, self.shared_block, self.architecture)


# Multiprocessors come from NVIDIA's data sheets and white papers.
CARDS = {
    "A100 40 GB, 80 GB": Card(108, 80),
    "A10": Card(72, 86),
    "RTX 3090": Card(82, 86),
    "L4": Card(58, 89),
    "L40S": Card(142, 89),
    "RTX 4090": Card(128, 89),
    "H100 SXM, NVL, H200, GH200": Card(132, 90),
    "H100 PCIe": Card(114, 90),
    "H100 MIG 2g": Card(32, 90),
    "B200": Card(148, 100),
    "RTX 5090": Card(170, 120),
}


def llama(**values) -> LaneformerConfig:
    """Return a configuration from the values of its config.json."""
    return config_of_llama(values, lanes_for_gpus(values, 1))


MODELS = {
    **{flavor: LaneformerConfig.from_flavor(flavor) for flavor in FLAVORS},
    "Qwen3-0.6B": llama(
        model_type="qwen3", hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=40960,
        tie_word_embeddings=True,
    ),
    "Llama-3-8B": llama(
        model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    ),
    "Qwen2.5-7B": llama(
        model_type="qwen2", hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768,
    ),
}  # fmt: skip
