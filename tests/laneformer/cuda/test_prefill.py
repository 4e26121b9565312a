"""Tests of prompts that PyTorch reads: the kernels continue as if they had read the prompt."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from laneformer.engine.cuda import prefill
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.structures import Column
from laneformer.engine.cuda.tape_model import TapeModel
from tests.laneformer.cuda.emulated import GREEDY, EmulatedPasses, needs_emulator
from tests.laneformer.cuda.harness import (
    SMALL,
    as_read,
    plain_model,
    random_model,
    small_config,
    tensors_of,
)
from tests.laneformer.cuda.shapes import FAMILIES, SHAPES, family

# the rings hold six
TEXT = torch.randint(96, (21,), generator=torch.Generator().manual_seed(8)).tolist()


class PlainCache:
    """A cache of all keys and values in order: per layer (2, K, T, d)."""

    def __init__(self) -> None:
        self.length, self.stored = 0, dict[int, torch.Tensor]()

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.stack((key[0], value[0]))
        self.stored[layer_idx] = torch.cat((self.stored[layer_idx], new), 2) if self.length else new
        return self.stored[layer_idx][:1], self.stored[layer_idx][1:]


# The streams equal bit for bit those of the model with a plain cache, so the distribution over
# splits and rings loses nothing.
def same_streams(model: Any, cache: Any, other: Any, other_cache: Any) -> bool:
    pairs = zip(
        prefill.streams(model, TEXT, cache), prefill.streams(other, TEXT, other_cache), strict=True
    )
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("chunk", "devices", "dtype"), [(1, 1, "fp16"), (3, 2, "bf16"), (1024, 2, "fp16")]
)
def test_the_kernels_memory_is_a_cache(monkeypatch, chunk, devices, dtype):
    # the streams of the plain model with a plain cache, chunk by chunk
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", chunk)
    config = small_config()
    geometry = plan(config, dtype, SMALL, devices=devices, blocks_per_lane=4, warps=2)
    tensors = tensors_of(random_model(config, dtype), dtype)
    memories = [DeviceMemory(geometry, tensors, i, "cpu") for i in range(devices)]
    for memory in memories:
        memory.kv.fill_(-1)  # no number
    model, same = TapeModel(memories), as_read(plain_model(config, tensors, dtype))
    cache, plain = prefill.DeviceCache(memories), PlainCache()
    assert same_streams(model, cache, same, plain)
    assert cache.length == len(TEXT)
    if chunk == 3:  # planted: positions of a chunk in each other's places give other streams
        wrong: Any = prefill.DeviceCache(memories)
        write = wrong._write
        wrong._write = lambda memory, layer, new: write(memory, layer, new.roll(1, 2))
        assert not same_streams(model, wrong, same, PlainCache())


@pytest.mark.parametrize("name", [*SHAPES, *FAMILIES])
def test_every_weight_comes_back_from_the_tapes(name):
    # bit for bit, for the memory of one layer
    shape = SHAPES[name] if name in SHAPES else family(name)
    geometry = shape.plan_geometry()
    tensors = tensors_of(random_model(shape.model, shape.dtype), shape.dtype)
    memories = [DeviceMemory(geometry, tensors, i, "cpu") for i in range(geometry.devices)]
    model, plain = TapeModel(memories), plain_model(shape.model, tensors, shape.dtype)
    places = set()
    for layer, right in zip(model.layers(), plain.layers, strict=True):
        read, expected = layer.state_dict(), right.state_dict()
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[key], expected[key]) for key in expected), layer.attention.layer
        places.add(read["feed_forward.w2.weight"].data_ptr())
    assert len(places) == 1
    tied = plain.tok_embeddings.weight.view(shape.model.head_shape)
    assert torch.equal(model.head(), tied if plain.lm_head.weight is None else plain.lm_head.weight)
    assert torch.equal(model.norm.weight, plain.norm.weight)


@needs_emulator
@pytest.mark.job
@pytest.mark.parametrize(
    ("before", "at", "ids"),
    [
        ([], 0, TEXT),  # the rings wrap three times
        (TEXT[:5], 3, [*TEXT[:3], *TEXT[10:14]]),  # another text, from within the rings
    ],
    ids=["new", "another"],
)
def test_decoding_goes_on(monkeypatch, cuda_builds, before, at, ids):
    # a prompt in chunks of three after a cached prefix gives the tokens of kernels alone
    monkeypatch.setattr(prefill, "CHUNK_TOKENS", 3)
    emulated = EmulatedPasses(cuda_builds, 3, blocks_per_lane=2)
    model = as_read(copy.deepcopy(emulated.model).float())
    for text, start in ((before, 0), (ids[:-1], at)):
        list(prefill.streams(model, text[start:], prefill.DeviceCache(emulated.memories, start)))
    tokens, _ = emulated.picks([(ids[-1], len(ids) - 1, 0)])
    last = Column(tokens[0], len(ids), 0, sampling=GREEDY)
    tokens += [row[0] for row in emulated.run([last], 3)]
    emulated.forget()
    assert tokens == emulated.decode(ids, 5)[0]
