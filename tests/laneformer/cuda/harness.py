"""Small random models for the CUDA engine's tests."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch

from laneformer import Laneformer
from laneformer.config import DRAFT_IDS, HEAD, LaneformerConfig
from laneformer.engine.cuda.geometry import Machine
from laneformer.engine.cuda.memory import TORCH_TYPES, as_torch
from laneformer.llama.variant import FamilyConfig
from laneformer.tensors import Tensor
from tests.laneformer.int8_weights import round_to_int8

SMALL = Machine(8, 48 * 1024, 90)
KERNELS = {
    "passes": ("pass",),
    "graph": ("qkv", "attention", "output", "gate_up", "down", "join_now", "head", "choose"),
}


def small_config(**changes) -> LaneformerConfig:
    """Return a configuration of two lanes and four layers, two of which have a short window."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_lanes": 2,
        "broadcast_delay": 1,
        "sliding_window": 6,
        "swa_layers": (0, 1),
        "max_position_embeddings": 32,
        "vocab_size": 96,
    }
    return (FamilyConfig if "variant" in changes else LaneformerConfig)(**{**sizes, **changes})


def random_model(config, dtype: str = "bf16", seed=0) -> Laneformer:
    """Return a float64 model whose weights 16 bits hold exactly."""
    # weights are large enough that every path matters to the logits
    generator = torch.Generator().manual_seed(seed)
    model = Laneformer(config).double().requires_grad_(False)
    for name, parameter in model.named_parameters():
        noise = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        exact = 1 + noise.float() if name.endswith("norm.weight") else noise.to(TORCH_TYPES[dtype])
        parameter.copy_(exact.double())
    return model


def tensors_of(model, dtype: str) -> dict[str, Tensor]:
    """Return the state dict as the engine reads it from a folder."""
    tensors = {}
    for name, values in model.state_dict().items():
        if name.endswith("norm.weight"):
            tensors[name] = Tensor("fp32", values.float().numpy())
        elif name == DRAFT_IDS:
            tensors[name] = Tensor("int32", values.numpy())
        else:
            bits = values.to(TORCH_TYPES[dtype]).view(torch.int16).numpy().view(np.uint16)
            tensors[name] = Tensor(dtype, bits)
    return tensors


def as_stored_in(model, dtype: str) -> Laneformer:
    """Return the model in float64 with the numbers that 8-bit weights stand for."""
    # a tied head is then another matrix
    if dtype != "int8":
        return model
    config = dataclasses.replace(model.config, tie_word_embeddings=False)
    head = model.tok_embeddings.weight.view(config.head_shape)
    stored = Laneformer(config).double().requires_grad_(False)
    weights = {HEAD: head, **model.state_dict()}
    ids = {name: weights.pop(name) for name in [DRAFT_IDS] if name in weights}
    stored.load_state_dict({**round_to_int8(weights), **ids})
    return stored


def plain_model(config, tensors: dict[str, Tensor], dtype: str) -> Laneformer:
    model = Laneformer(config).to(TORCH_TYPES[dtype])
    names = model.state_dict().keys() - {DRAFT_IDS}
    model.load_state_dict(
        {name: as_torch(tensors[name]) for name in names}, strict=len(names) == len(tensors)
    )
    return model.eval().requires_grad_(False)


def as_read(model):
    """Wrap a plain model to replace a TapeModel."""
    weights = {"embedding": model.tok_embeddings.weight, "head": lambda: model.lm_head.weight}
    return SimpleNamespace(
        config=model.config,
        layers=lambda: model.layers,
        masks=model.masks,
        norm=model.norm,
        **weights,
    )
