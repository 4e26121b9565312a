"""Low-rank changes (LoRA) of late layers, so that a recovered model is a small file beside the dense one.

A matrix W (L, out, in) of a layer becomes W + B A, lane by lane, with A (L, rank, in) drawn and B (L, out, rank)
zero at first; the layer's norm scales are trained as they are. `write` leaves adapter.safetensors (bfloat16, and the
layout's orders) and adapter.json, which says of which model and how late; `read` and `merged` give the weights of a
plain late model, so nothing that runs it has to know of adapters.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from laneformer import LaneformerConfig
from laneformer.initialization import fill_from_generator
from laneformer.linear import LaneLinear
from records.files import file_sha256, write_atomically

from .job_config import Late
from .layout import Layout

MATRICES = ("attention.wq", "attention.wk", "attention.wv", "attention.wo",
            "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")  # fmt: skip
SCALES = ("attention_norm", "ffn_norm")
PREFIX = "adapters"  # of its parameters' names in a checkpoint; a model's own begin otherwise
ADAPTER, ABOUT = "adapter.safetensors", "adapter.json"


class Change(nn.Module):
    """A and B of one matrix."""

    def __init__(self, shape: Iterable[int], rank: int):
        super().__init__()
        lanes, rows, columns = shape
        self.a = nn.Parameter(torch.empty(lanes, rank, columns))
        self.b = nn.Parameter(torch.empty(lanes, rows, rank))


class ChangedLinear(LaneLinear):
    """A matrix and its change, which belongs to the model's `adapters`: a list hides it here."""

    change: list[Change]

    def forward(self, x: Tensor) -> Tensor:
        change = self.change[0]
        inner = torch.einsum("bsli,lri->bslr", x, change.a)
        return super().forward(x) + torch.einsum("bslr,lor->bslo", inner, change.b)


def adapt(layers: Mapping[int, nn.Module], rank: int) -> nn.ModuleDict:
    """Give every matrix of these layers a change; returns those, by `key`. The layers must call their matrices."""
    found = nn.ModuleDict()
    for i, layer in layers.items():
        for name in MATRICES:
            linear: Any = layer.get_submodule(name)
            change = Change(linear.weight.shape, rank)
            linear.__class__, linear.change = ChangedLinear, [change]
            found[key(i, name)] = change
    return found


def key(layer: int, name: str) -> str:
    return f"{layer}/{name.replace('.', '/')}"


def first_adapter(config: LaneformerConfig, late: Late, seed: int = 0) -> dict[str, Tensor]:
    """The parameters before training, by their names in a checkpoint: the dense model."""
    shapes = config.tensor_shapes()
    found: dict[str, Tensor] = {}
    for i in range(late.first_adapted, config.num_hidden_layers):
        for name in MATRICES:
            lanes, rows, columns = shapes[f"layers.{i}.{name}.weight"]
            a = torch.empty(lanes, late.lora_rank, columns)
            fill_from_generator(a, columns**-0.5, f"{seed}/{key(i, name)}")
            at = f"{PREFIX}.{key(i, name)}"
            found |= {f"{at}.a": a, f"{at}.b": torch.zeros(lanes, rows, late.lora_rank)}
    return found


def scales(config: LaneformerConfig, late: Late) -> list[str]:
    """Names of the model's own parameters that are trained with the changes."""
    layers = range(late.first_adapted, config.num_hidden_layers)
    return [f"layers.{i}.{name}.weight" for i in layers for name in SCALES]


def merged(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's float32 weights with the changes added to them, and the adapter's scales."""
    found = {name: adapter[name].float() if name in adapter else weight for name, weight in weights.items()}
    for name in adapter:
        if name.endswith(".a"):
            at = name.removeprefix(f"{PREFIX}.").removesuffix(".a").replace("/", ".")
            change = adapter[name.removesuffix("a") + "b"].float() @ adapter[name].float()
            found[f"layers.{at}.weight"] = found[f"layers.{at}.weight"] + change
    return found


def write(
    folder: Path, adapter: Mapping[str, Tensor], layout: Layout, late: Late, about: Mapping[str, Any]
) -> None:
    """about: model, model_sha256 and lanes of the dense model."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: weight.to(torch.bfloat16).contiguous() for name, weight in adapter.items()}
    kept |= {f"layout.{i}": torch.tensor(order, dtype=torch.int32) for i, order in enumerate(layout)}
    save_file(kept, folder / ADAPTER)
    (folder / ADAPTER).chmod(0o644)  # safetensors creates files with mode 600
    told = {**about, "late": {**asdict(late), "dense": ""}, "adapter_sha256": file_sha256(folder / ADAPTER)}
    write_atomically(folder / ABOUT, json.dumps(told, indent=2) + "\n")


def read(folder: Path, model_sha256: str) -> tuple[dict[str, Tensor], Layout, Late, dict[str, Any]]:
    """(changes, layout, late, about). ValueError for a damaged file, or one of another dense model."""
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    found = {"adapter_sha256": file_sha256(folder / ADAPTER), "model_sha256": model_sha256}
    for name, value in found.items():
        if about[name] != value:
            raise ValueError(
                f"{folder / ABOUT}: {name} is {about[name]}, not {value}; the model is {about['model']}"
            )
    tensors = load_file(folder / ADAPTER)
    layout = [tensors.pop(f"layout.{i}").tolist() for i in range(sum("layout." in name for name in tensors))]
    return tensors, layout, Late(**about["late"]), about
