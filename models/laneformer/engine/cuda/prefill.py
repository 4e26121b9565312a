"""Long prompts and scores by the plain PyTorch model, whose keys and values go to the kernels.

The weights come from the tapes (tape_model.py). The arithmetic is that of the Hugging Face model in
16 bits.

    S query positions   T key positions   L lanes   D hidden   K KV heads   d head dimension   V vocabulary
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from ...model import run_layers
from ...positions import rope_table
from .memory import TORCH_TYPES, DeviceMemory
from .tape_model import TapeModel

# positions at a time: the arithmetic takes longer than reading the weights back (18 and 10 ms for
# `2b` on an H200, both calculated), and their streams are small (100 MB each)
CHUNK_TOKENS = 2048
HEAD_TOKENS = 256  # positions whose logits are there at once


class DeviceCache:
    """Keys and values of one sequence in the kernels' memory, with the cache interface of model.py."""

    def __init__(self, memories: Sequence[DeviceMemory], length: int = 0):
        self.memories, self.length = memories, length

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, each (1, K, S, d); return all so far, (1, K, T, d)."""
        # (2, K, S, d)
        stored = torch.stack((key[0], value[0])).to(TORCH_TYPES[self.memories[0].geometry.half])
        new = stored.to(key.dtype)  # seen as later tokens will see them
        everything = torch.cat((self.read(layer_idx).to(new), new), 2) if self.length else new
        for memory, heads in zip(self.memories, stored.chunk(len(self.memories), 1), strict=True):
            self._write(memory, layer_idx, heads)
        return everything[:1], everything[1:]

    def read(self, layer: int) -> torch.Tensor:
        device = self.memories[0].device
        return torch.cat([self._read(memory, layer).to(device) for memory in self.memories], 1)

    def _places(
        self, memory: DeviceMemory, layer: int, start: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        geometry = memory.geometry
        # split and slot of the positions that the layer keeps, and the first one
        slots = geometry.kv_slots(layer)
        start = max(start, end - geometry.splits * slots)
        positions = torch.arange(start, end, device=memory.device)
        return positions % geometry.splits, positions // geometry.splits % slots, start

    def _write(self, memory: DeviceMemory, layer: int, new: torch.Tensor) -> None:
        end = self.length + new.shape[2]
        split, slot, start = self._places(memory, layer, self.length, end)
        stored = new[:, :, start - self.length :].to(memory.device).view(torch.int16)
        kv = memory.kv_layer(layer)  # (lanes, heads, splits, slots, 2, d)
        kv[:, :, split, slot] = stored.unflatten(1, kv.shape[:2]).permute(1, 2, 3, 0, 4)

    def _read(self, memory: DeviceMemory, layer: int) -> torch.Tensor:
        split, slot, start = self._places(memory, layer, 0, self.length)
        kv = memory.kv_layer(layer)
        heads = kv[:, :, split, slot].permute(3, 0, 1, 2, 4).flatten(1, 2)  # (2, K, positions, d)
        # positions that have left a window's ring read as zeros, which the masks hide
        return F.pad(heads, (0, 0, start, 0)).view(TORCH_TYPES[memory.geometry.half])


@torch.inference_mode()
def streams(model: TapeModel, ids: Sequence[int], cache: DeviceCache) -> Iterator[torch.Tensor]:
    """Yield the lanes' streams after the last layer, (1, S, L, D), for each chunk."""
    device = model.embedding.device
    for first in range(0, len(ids), CHUNK_TOKENS):
        new = torch.tensor([ids[first : first + CHUNK_TOKENS]], device=device)
        keys = torch.arange(cache.length + new.shape[1], device=device)
        queries = keys[cache.length :]
        embedding, rope = F.embedding(new, model.embedding), rope_table(model.config, queries)
        h, _ = run_layers(
            model.layers(), model.config, embedding, rope, model.masks(queries, keys), cache
        )
        cache.length += new.shape[1]
        yield h


def read_prompt(
    model: TapeModel, ids: Sequence[int], cache: DeviceCache, first_row: int
) -> Iterator[torch.Tensor]:
    """Yield float32 logits (n, V), in blocks, of the positions from `first_row` on."""
    for h in streams(model, ids, cache):
        if (rows := min(cache.length - first_row, h.shape[1])) > 0:
            yield from logits_of(model, h[:, -rows:])


@torch.inference_mode()
def logits_of(model: TapeModel, h: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield float32 logits (positions, V) of streams (1, S, L, D), some positions at a time."""
    weight = model.head()
    for part in h[0].split(HEAD_TOKENS):
        # the head's sums are in float32
        x = model.norm(part.float())
        yield torch.cat([F.linear(x[:, lane], rows.float()) for lane, rows in enumerate(weight)], 1)


def scores_of(
    logits: torch.Tensor, targets: Sequence[int], top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log p of the targets (n,), the `top` likeliest ids and their log p (both flat), on the CPU.

    Args:
        logits: (n, V).
    """
    logprobs = logits.log_softmax(-1)
    target = logprobs.gather(
        1, torch.tensor(targets, dtype=torch.int64, device=logits.device)[:, None]
    )[:, 0]
    # a stable sort puts the lowest of equally likely ids first, which topk does not promise
    likeliest = (
        logits.sort(dim=-1, descending=True, stable=True).indices[:, :top]
        if top
        else target[:, None][:, :0].long()
    )
    tops = logprobs.gather(1, likeliest).flatten()
    return target.cpu(), likeliest.flatten().int().cpu(), tops.cpu()
