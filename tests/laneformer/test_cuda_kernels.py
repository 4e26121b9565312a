"""The decode kernels on the emulator: every logit of every position, in any order of threads, cut in any way.

test_cuda_order.py shows that the checks here and in the emulator find planted faults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.engine.cuda.geometry import Machine, plan
from laneformer.engine.cuda.memory import DeviceMemory

from . import cuda_emulator
from .cuda_harness import Emulated, small_config
from .cuda_reference import expected, read_one_by_one
from .cuda_shapes import SHAPES, Shape, drawn

pytestmark = pytest.mark.skipif(bool(cuda_emulator.MISSING), reason=cuda_emulator.MISSING)


def text(emulated: Emulated, count: int) -> list[int]:
    return torch.randint(emulated.config.vocab_size, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def check(emulated: Emulated, count: int, seeds: range) -> None:
    """A text of `count` tokens against the reference, and in one launch in several orders of the threads."""
    ids = text(emulated, count)
    emulated.forget()
    logits, kept = read_one_by_one(emulated, ids)
    right = expected(emulated, ids, kept)
    assert float((logits.double() - right.logits).abs().max()) <= right.tolerance
    for layer, numbers in enumerate(kept):
        both = torch.cat(numbers)
        assert ((right.least[layer] <= both) & (both <= right.most[layer])).all(), f"keys or values of layer {layer}"
    for seed in seeds:  # the emulator checks the order of the words
        emulated.forget()
        _, at_once = emulated.read(ids, seed=seed)
        assert torch.equal(at_once, logits), f"seed {seed}"


@pytest.mark.parametrize("name", SHAPES)
def test_every_logit(name: str, cuda_builds: Path) -> None:
    check(SHAPES[name].emulated(cuda_builds), 11, range(3))
