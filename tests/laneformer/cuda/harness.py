"""The decode kernels on the emulator: a random model in a GPU's memory layout, launches,
and a float64 reference.

The host side is the engine's own (geometry, tapes, memory, arguments), with torch tensors on the CPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from laneformer import Laneformer
from laneformer.config import HEAD, LaneformerConfig
from laneformer.engine.cuda.compile import FOLDER, INCLUDES, source_of
from laneformer.engine.cuda.geometry import Geometry, Machine
from laneformer.engine.cuda.memory import TORCH_TYPES, DeviceMemory, as_torch
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.sequence import graph_kernels
from laneformer.tensors import Tensor
from tests.laneformer.cuda import emulator
from tools.check.reference import dequantised

SMALL = Machine(8, 48 * 1024, 90)
KERNELS = {
    "persistent": ("decode",),
    "passes": ("pass",),
    "graph": ("qkv", "attention", "output", "gate_up", "down", "join_now", "head", "choose"),
}


def small_config(**changes: Any) -> LaneformerConfig:
    """Two lanes, four layers, of which two have a window that a short text leaves."""
    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_lanes": 2, "broadcast_delay": 1, "sliding_window": 6, "swa_layers": (0, 1),
        "max_position_embeddings": 32, "vocab_size": 96,
    }  # fmt: skip
    return LaneformerConfig(**{**sizes, **changes})


def random_model(config: LaneformerConfig, dtype: str = "bf16", seed: int = 0) -> Laneformer:
    """float64, with weights that 16 bits hold exactly; large enough that every path decides about the logits."""
    generator = torch.Generator().manual_seed(seed)
    model = Laneformer(config).double().requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        exact = 1 + noise.float() if name.endswith("norm.weight") else noise.to(TORCH_TYPES[dtype])
        parameter.copy_(exact.double())
    return model


def tensors_of(model: Laneformer, dtype: str) -> dict[str, Tensor]:
    """The state dict as the engine reads it from a folder."""
    tensors = {}
    for name, values in model.state_dict().items():
        if name.endswith("norm.weight"):
            tensors[name] = Tensor("fp32", values.float().numpy())
        else:
            bits = values.to(TORCH_TYPES[dtype]).view(torch.int16).numpy().view(np.uint16)
            tensors[name] = Tensor(dtype, bits)
    return tensors


def as_stored_in(model: Laneformer, dtype: str) -> Laneformer:
    """float64, with the numbers that weights of 8 bits stand for; a tied head is then another matrix."""
    if dtype != "int8":
        return model
    config = dataclasses.replace(model.config, tie_word_embeddings=False)
    head = model.tok_embeddings.weight.view(config.head_shape)
    stored = Laneformer(config).double().requires_grad_(False)
    stored.load_state_dict(dequantised({HEAD: head, **model.state_dict()}))
    return stored


def plain_model(config: LaneformerConfig, tensors: dict[str, Tensor], dtype: str) -> Laneformer:
    """The PyTorch model in 16 bits."""
    model = Laneformer(config).to(TORCH_TYPES[dtype])
    model.load_state_dict({name: as_torch(tensors[name]) for name in model.state_dict()})
    return model.eval().requires_grad_(False)


def as_read(model: Laneformer) -> Any:
    """A plain model in the place of a TapeModel."""
    weights = {"embedding": model.tok_embeddings.weight, "head": lambda: model.lm_head.weight}
    return SimpleNamespace(
        config=model.config, layers=lambda: model.layers, masks=model.masks, norm=model.norm, **weights
    )


class Emulated:
    """A model on the emulated GPU (or GPUs): `read` gives the logits after every token of a text."""

    def __init__(
        self, config: LaneformerConfig, cache: Path, *, dtype: str = "bf16", version: str = "persistent",
        machine: Machine = SMALL, seed: int = 0, races: bool = False, **shape: Any,
    ):  # fmt: skip
        self.config, self.version, self.races, self.cache = config, version, races, cache
        self.geometry: Geometry = plan(config, dtype, machine, **{"warps": 2, **shape})
        stored = random_model(config, self.geometry.half, seed)
        self.model = as_stored_in(stored, dtype)
        self.tensors = tensors_of(stored, self.geometry.half)
        self.memories = [
            DeviceMemory(self.geometry, self.tensors, i, "cpu") for i in range(self.geometry.devices)
        ]

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        """Built when it is first needed."""
        return self.build(source_of(self.version, self.geometry), self.cache)

    def build(self, source: str, cache: Path, folder: Path = FOLDER) -> ctypes.CDLL:
        """The kernels of this text, which includes those of `folder`."""
        source += "".join(f"EMULATE({kernel}, Decode)\n" for kernel in KERNELS[self.version])
        return emulator.build(source, [folder, *INCLUDES], {"TABLE": "constexpr"}, cache, self.races)

    def arguments(
        self, ids: list[int], position: int, max_tokens: int, **options: Any
    ) -> list[ctypes.Structure]:
        inboxes = [memory.inbox for memory in self.memories]
        return [m.arguments(inboxes, ids, position, max_tokens, **options) for m in self.memories]

    def launch(self, arguments: list[ctypes.Structure], seed: int = 0, **options: Any) -> list[int]:
        """Run to the end; the new tokens."""
        shape = {"threads": self.geometry.threads, "shared_bytes": self.geometry.shared_bytes, "seed": seed}
        if self.version == "persistent":
            emulator.launch(
                self.library, "decode", arguments, blocks=self.geometry.blocks, names=self.buffers(),
                plain=self.plain(), **shape, **options,
            )  # fmt: skip
        else:
            self._replay(arguments[0], shape)
        memory = self.memories[0]
        made = int(memory.published[0])
        for m in self.memories:
            m.epoch += arguments[0].prompt_count + made
        return memory.tokens[:made].tolist()

    def buffers(self) -> dict[str, tuple[int, int]]:
        """{name: (address, bytes)} of the words, for the emulator's messages."""
        words = {
            f"{name} {m.index}": getattr(m, name) for m in self.memories for name in ("lane_words", "inbox")
        }
        return {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in words.items()}

    def plain(self) -> dict[str, tuple[int, int]]:
        """The same of the keys and values, where their accesses are checked."""
        caches = {f"keys and values {m.index}": m.kv for m in self.memories if self.races}
        return {name: (tensor.data_ptr(), tensor.nbytes) for name, tensor in caches.items()}

    def forget(self) -> None:
        """Words as new; keys and values that nobody has written are no numbers."""
        for memory in self.memories:
            memory.reset_words()
            memory.kv.fill_(0x7FFF)

    def _replay(self, argument: ctypes.Structure, shape: dict[str, int]) -> None:
        memory = self.memories[0]
        state = torch.tensor([int(memory.prompt[0]), argument.position, 0], dtype=torch.int32)
        memory.graph[:3] = state.view(torch.float32)
        for _ in range(argument.prompt_count + argument.max_tokens - 1):
            for kernel, layer, module, blocks in graph_kernels(self.geometry):
                argument.layer, argument.module = layer, module
                emulator.launch(self.library, kernel, argument, blocks=blocks, **shape)

    def read(
        self, ids: list[int], max_tokens: int = 1, seed: int = 0, **options: Any
    ) -> tuple[list[int], torch.Tensor]:
        """Read `ids` from position 0 and make tokens: (new tokens, logits (len(ids) + max_tokens - 1, V))."""
        logits = torch.full((len(ids) + max_tokens - 1, self.config.vocab_size), float("nan"))
        return self.launch(self.arguments(ids, 0, max_tokens, logits=logits, **options), seed), logits


class RoundedCache:
    """model.py's cache with keys and values as the kernels keep them: in 16 bits."""

    def __init__(self, config: LaneformerConfig, dtype: str):
        self.dtype, self.length = TORCH_TYPES[dtype], 0

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key.to(self.dtype).to(key.dtype), value.to(self.dtype).to(value.dtype)


def reference(emulated: Emulated, ids: list[int]) -> torch.Tensor:
    """Logits after every token in float64, (len(ids), V), but for keys and values in 16 bits."""
    cache: Any = RoundedCache(emulated.config, emulated.geometry.half)
    return emulated.model(torch.tensor([ids]), cache)[0]
