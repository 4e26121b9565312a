"""Train low-rank changes (LoRA) of late layers: a recovered model as a small file beside the dense one.

A matrix W (L, out, in) becomes W + B A, lane by lane, with A (L, rank, in) random and
B (L, out, rank) zero at first; norm scales are trained directly. `merge` gives the weights of a
plain late model. `layout.N` is the order of the dense model's KV groups or neurons in module N,
which decides what shares a lane (examples/smollm2_late; its search is at commit 04aeaa48).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from laneformer import Laneformer, LaneformerConfig
from laneformer.config import MATRICES
from laneformer.initialization import fill_from_generator
from laneformer.lanes import LaneLinear
from records.files import file_sha256, write_json

from .job_config import Late

SCALES = ("attention_norm.weight", "ffn_norm.weight")
# of its parameters' names in a checkpoint; a model's own begin otherwise
PREFIX = "adapters."
LAYOUT, MODULES = "layout.", ("attention", "feed_forward")
ADAPTER, ABOUT = "adapter.safetensors", "adapter.json"


def names_in_late_layers(config: LaneformerConfig, late: Late, names: Iterable[str]) -> list[str]:
    layers = range(late.first_late_layer, config.num_hidden_layers)
    return [f"layers.{i}.{name}" for i in layers for name in names]


def key(matrix: str) -> str:
    """Return 3/attention/wq of layers.3.attention.wq."""
    return matrix.removeprefix("layers.").replace(".", "/")


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


def adapt(model: Laneformer, late: Late) -> nn.ModuleDict:
    """Give every matrix of the late layers a change; return the changes by `key`."""
    changes = nn.ModuleDict()
    for matrix in names_in_late_layers(model.config, late, MATRICES):
        linear: Any = model.get_submodule(matrix)
        change = Change(linear.weight.shape, late.lora_rank)
        # in place: the matrix keeps its name in checkpoints, and its weights
        linear.__class__, linear.change = ChangedLinear, [change]
        changes[key(matrix)] = change
    return changes


def first_adapter(config: LaneformerConfig, late: Late) -> dict[str, Tensor]:
    """Return the parameters before training, by their names in a checkpoint: the dense model."""
    shapes = config.tensor_shapes()
    adapter: dict[str, Tensor] = {}
    for matrix in names_in_late_layers(config, late, MATRICES):
        lanes, rows, columns = shapes[f"{matrix}.weight"]
        a = torch.empty(lanes, late.lora_rank, columns)
        # by name, as a model's own tensors: the same on any number of ranks
        fill_from_generator(a, columns**-0.5, f"0/{key(matrix)}")
        # zero: the product changes nothing at first
        b = torch.zeros(lanes, rows, late.lora_rank)
        adapter |= {f"{PREFIX}{key(matrix)}.a": a, f"{PREFIX}{key(matrix)}.b": b}
    return adapter


def merge(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 weights in the adapter's layout, with its changes and scales."""
    merged = lay_out(weights, adapter)
    for name in weights.keys() & adapter.keys():
        merged[name] = adapter[name].float()
    for at in (name.removesuffix(".a") for name in adapter if name.endswith(".a")):
        matrix = "layers." + at.removeprefix(PREFIX).replace("/", ".") + ".weight"
        merged[matrix] = merged[matrix] + adapter[f"{at}.b"].float() @ adapter[f"{at}.a"].float()
    return merged


def lay_out(weights: Mapping[str, Tensor], adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Order a cut model's weights by the adapter's layout: at delay 0 the same function."""
    ordered = dict(weights)
    for name, weight in weights.items():
        part = name.split(".")
        if not name.startswith("layers.") or part[2] not in MODULES:
            continue
        order = adapter.get(f"{LAYOUT}{2 * int(part[1]) + MODULES.index(part[2])}")
        if order is None:
            continue
        # units are columns of what writes, (L, D, in / L), and rows of what reads, (L, out / L, D)
        writes = part[3] in ("wo", "w2")
        rows = weight.movedim(2, 1) if writes else weight
        units = rows.flatten(0, 1).unflatten(0, (len(order), -1))
        rows = units[order.long()].reshape(rows.shape)
        ordered[name] = (rows.movedim(1, 2) if writes else rows).contiguous()
    return ordered


def write(folder: Path, adapter: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write an adapter.

    about: model, model_sha256 and lanes of the dense model, the late one's architecture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ADAPTER
    save_file(
        {name: weight.to(torch.bfloat16).contiguous() for name, weight in adapter.items()}, path
    )
    # safetensors creates files with mode 600
    path.chmod(0o644)
    write_json(folder / ABOUT, {**about, "adapter_sha256": file_sha256(path)})


def read(folder: Path, model_sha256: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, about); ValueError for a damaged file, or one of another dense model."""
    about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    actual = {"adapter_sha256": file_sha256(folder / ADAPTER), "model_sha256": model_sha256}
    for name, value in actual.items():
        if about[name] != value:
            raise ValueError(
                f"{folder / ABOUT}: {name} is {about[name]}, not {value}; the model is {about['model']}"
            )
    return load_file(folder / ADAPTER), about
