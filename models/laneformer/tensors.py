"""Weights as the engine takes them: arrays of one of three types, whatever kind of file they come from, and ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

# what an engine can hold matrices in
MatrixDtype = Literal["bf16", "fp16", "fp32", "int8", "int4", "gguf"]
MATRIX_DTYPES: tuple[str, ...] = get_args(MatrixDtype)
AS_IN_FILE = "gguf"  # each matrix in the blocks of its GGUF file

FIRST_MATRIX = "layers.0.attention.wv.weight"  # its type is that of dtype = "auto"


@dataclass(frozen=True)
class StoredType:
    """A weight type as others name it: safetensors, numpy (16-bit types are raw uint16) and torch."""

    safetensors: str
    element: type[np.generic]
    torch: str


STORED_TYPES = {
    "bf16": StoredType("BF16", np.uint16, "bfloat16"),
    "fp16": StoredType("F16", np.uint16, "float16"),
    "fp32": StoredType("F32", np.float32, "float32"),
    "uint8": StoredType("U8", np.uint8, "uint8"),
    "int32": StoredType("I32", np.int32, "int32"),
}


def dtype_name(dtype: Any) -> Any:
    """Our name of a type that may be given as torch's ("bfloat16", torch.bfloat16); anything else as it is."""
    name = str(dtype).removeprefix("torch.")
    return next((ours for ours, stored in STORED_TYPES.items() if stored.torch == name), dtype)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder: those that its index names, else all model*.safetensors.

    ValueError where there is none, or one is missing.
    """
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        if files := sorted(folder.glob("model*.safetensors")):
            return files
        raise ValueError(f"{folder} holds no model*.safetensors")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index with a weight_map: {error!r}") from None
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ValueError(
            f"{index} lists files that are missing: {missing}; fetch them, or the folder again"
        )
    return [folder / name for name in names]


def check_shapes(
    where: str,
    shapes: Mapping[str, Sequence[int]],
    expected: Mapping[str, Sequence[int]],
    fix: str = "",
) -> None:
    """ValueError unless `where` holds exactly these tensors; it names one that is missing, unknown or misshapen."""
    if missing := sorted(expected.keys() - shapes.keys()):
        raise ValueError(f"{where} lacks {len(missing)} tensors, such as {missing[0]}{fix}")
    if extra := sorted(shapes.keys() - expected.keys()):
        raise ValueError(
            f"{where} holds {len(extra)} tensors this architecture has not, such as {extra[0]}{fix}"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != tuple(shape):
            raise ValueError(
                f"{where}: tensor {name} has shape {tuple(shapes[name])}, the config says {tuple(shape)}{fix}"
            )


@dataclass(frozen=True)
class Tensor:
    """Values of `dtype` "bf16", "fp16" or "fp32", 16-bit types as raw uint16; "int32" for ids, "uint8" for
    parts of blocks.

    Of a file that is held as it is, dtype may be the type of its blocks in GGUF ("q4_k"), and the values its
    rows of bytes.
    """

    dtype: str
    values: np.ndarray


class TensorSource(NamedTuple):
    """A tensor that `load` reads or makes; its type and shape are known before."""

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for: a model is never in memory twice."""

    def __init__(self, sources: dict[str, TensorSource]):
        self.sources = sources

    def __getitem__(self, name: str) -> Tensor:
        return self.sources[name].load()

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)


def sources_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSource]:
    if isinstance(tensors, LazyTensors):
        return tensors.sources
    return {
        name: TensorSource(tensor.dtype, tensor.values.shape, partial(tensors.__getitem__, name))
        for name, tensor in tensors.items()
    }


def type_of(tensors: Mapping[str, Tensor], name: str) -> str:
    """What the tensor of this name comes as, without making it."""
    return tensors.sources[name].dtype if isinstance(tensors, LazyTensors) else tensors[name].dtype
