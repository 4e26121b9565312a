"""gpt-oss's experts, which are one tensor of a layer, under the names of other mixtures of experts.

Gate and up projection are one matrix whose even rows are gates and whose odd rows are ups. In 16 bits a
matrix is stored transposed, (E, in, out). As MXFP4 (OCP Microscaling Formats) it is `_blocks`
(E, out, in / 32, 16), bytes of two inputs each, and `_scales` (E, out, in / 32), and comes as rows of the
blocks of GGUF files.

E experts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..tensors import Tensor

INPUTS = 32  # of a block
ROWS = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2), "down_proj": slice(None)}
RENAMED = {".self_attn.sinks": ".self_attn.sinks.weight", ".mlp.router.": ".mlp.gate."}
FUSED = ".mlp.experts."


class InterleavedExperts(Mapping[str, Tensor]):
    """`experts.gate_up_proj` and `experts.down_proj` as `experts.gate_proj.weight`, (E, rows, inputs), and so
    on; others as they are. A tensor is made when it is asked for.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors
        self.sources: dict[str, tuple[str, slice]] = {}
        for name in tensors:
            stem, _, part = name.partition(FUSED)
            if not part:
                self.sources[new_name(name)] = name, slice(None)
            elif not part.endswith("_scales"):
                kind = "bias" if part.endswith("_bias") else "weight"
                whole = part.removesuffix("_bias").removesuffix("_blocks")
                for own in ("gate_proj", "up_proj") if whole == "gate_up_proj" else (whole,):
                    self.sources[f"{stem}{FUSED}{own}.{kind}"] = name, ROWS.get(own, slice(None))
        self.shapes = {name: self._shape(name) for name in self}

    def __getitem__(self, name: str) -> Tensor:
        source, rows = self.sources[name]
        stored = self.tensors[source]
        if source.endswith("_blocks"):
            scales = self._scales(source).values
            return Tensor("mxfp4", as_gguf(stored.values[:, rows], scales[:, rows]))
        if FUSED not in source:
            return stored
        values = stored.values if name.endswith(".bias") else stored.values.swapaxes(1, 2)
        return Tensor(stored.dtype, values[:, rows])

    def __iter__(self) -> Iterator[str]:
        return iter(self.sources)

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def has_blocks(self) -> bool:
        return any(source.endswith("_blocks") for source, _ in self.sources.values())

    def type_of(self, name: str) -> str:
        """What the tensor of this name comes as, without making it."""
        source, _ = self.sources[name]
        return "mxfp4" if source.endswith("_blocks") else self.tensors[source].dtype

    def _shape(self, name: str) -> tuple[int, ...]:
        source, rows = self.sources[name]
        shape = self.tensors[source].values.shape
        if FUSED not in source:
            return shape
        if source.endswith("_blocks"):
            scales = self._scales(source).values.shape
            if len(shape) != 4 or (*scales, INPUTS // 2) != shape:
                raise ValueError(
                    f"{source} of shape {shape} needs scales of shape {shape[:-1]}, not {scales}, and "
                    f"{INPUTS // 2} bytes a block"
                )
            shape = *shape[:2], INPUTS * shape[2]
        elif len(shape) == 3:
            shape = shape[0], shape[2], shape[1]
        elif len(shape) != 2:
            raise ValueError(f"{source} has shape {shape}; experts' matrices have 3 dimensions, biases 2")
        return shape[0], len(range(shape[1])[rows]), *shape[2:]

    def _scales(self, blocks: str) -> Tensor:
        name = blocks.removesuffix("_blocks") + "_scales"
        if name not in self.tensors:
            raise ValueError(f"the checkpoint holds {blocks}, but not {name}")
        return self.tensors[name]


def new_name(name: str) -> str:
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def as_gguf(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks (..., G, 16), whose byte i has inputs 2i and 2i + 1, with their exponents (..., G), as rows of
    ggml's blocks, (..., 17 G): an exponent, then bytes of the inputs i and i + 16.
    """
    rows = np.empty((*blocks.shape[:-1], 17), np.uint8)
    first, second = blocks[..., :8], blocks[..., 8:]
    rows[..., 0] = scales
    rows[..., 1::2] = first & 15 | second << 4
    rows[..., 2::2] = first >> 4 | second & 0xF0
    return rows.reshape(*blocks.shape[:-2], -1)
