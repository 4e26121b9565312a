"""The PTX that NVRTC makes of the shipped kernels, executed: every build, both ways to copy, and the graph.

What emulator.h replaces is the text of primitives.cuh; here it runs: fragments, parities, copies, words.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.bench import PROBES, expected_sum, probe_argument
from laneformer.engine.cuda.compile import source_of
from laneformer.engine.cuda.geometry import Machine
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.structures import Order
from tests.laneformer.cuda import emulator, test_head
from tests.laneformer.cuda.emulator import EmulationError
from tests.laneformer.cuda.harness import SMALL, random_model, small_config, tensors_of
from tests.laneformer.cuda.ptx.executed import (
    ARCHITECTURES,
    MISSING,
    ExecutedPasses,
    build,
    check_argument,
    ptx_of,
)
from tests.laneformer.cuda.reference import expected, read_one_by_one
from tests.laneformer.cuda.test_kernels import check, text
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES, "tests/laneformer/cuda/ptx/*.h"),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_probe_reads_every_byte_as_often_as_it_says(architecture: str, cuda_builds: Path) -> None:
    geometry = plan(small_config(), "bf16", SMALL, warps=2, chunk_bytes=1024)
    memory = DeviceMemory(geometry, tensors_of(random_model(small_config()), "bf16"), 0, "cpu")
    library = build(ptx_of(source_of("probe", geometry), architecture), cuda_builds)
    shape = {"blocks": geometry.blocks, "threads": 32 * geometry.warps, "shared_bytes": geometry.shared_bytes}
    for kernel in PROBES:
        for rounds in (1, 3):
            sums = torch.zeros(geometry.blocks * 32 * geometry.warps, dtype=torch.int32)
            argument = probe_argument(memory, sums, rounds)
            check_argument(library, kernel, argument)
            emulator.launch(library, kernel, argument, seed=rounds, **shape)
            assert int(sums.sum(dtype=torch.int64)) % 2**32 == expected_sum(memory, rounds)
    memory.tapes[-1] += 1  # planted: a reader that misses the last number would not see this
    assert int(sums.sum(dtype=torch.int64)) % 2**32 != expected_sum(memory, rounds)


def executed(builds: Path, columns: int, architecture: str, **options: Any) -> ExecutedPasses:
    return ExecutedPasses(builds, columns, architecture, **options)


@pytest.mark.job
def test_tiny_decodes(cuda_builds: Path) -> None:
    """The shipped model and its three builds: logits, keys and values against float64, in companies of 8, 3 and 1."""
    config = LaneformerConfig.from_flavor("tiny")
    machine = Machine(8, 227 * 1024, 90)
    tiny = executed(cuda_builds, 8, "sm_90a", config=config, machine=machine, fewer=(1, 4))
    assert [geometry.columns for geometry in tiny.builds] == [1, 4, 8]
    check(tiny, 11, range(1))
    assert set(tiny.launched) == {1, 4, 8}


@pytest.mark.parametrize(
    ("architecture", "columns", "dtype"), [("sm_80", 8, "bf16"), ("sm_80", 4, "int8"), ("sm_90a", 1, "fp16")]
)
def test_every_logit(architecture: str, columns: int, dtype: str, cuda_builds: Path) -> None:
    passes = executed(cuda_builds, columns, architecture, dtype=dtype)
    check(passes, 9, range(1))


@pytest.mark.job
@pytest.mark.parametrize(("architecture", "dtype"), [("sm_80", "int8"), ("sm_90a", "bf16")])
def test_the_block_of_a_head(architecture: str, dtype: str, cuda_builds: Path) -> None:
    test_head.check(executed(cuda_builds, 4, architecture, changes=test_head.HEAD, sequences=3, dtype=dtype))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_graph_decodes(architecture: str, cuda_builds: Path) -> None:
    graph = executed(cuda_builds, 1, architecture, version="graph")
    ids = text(graph, 5)
    logits, kept = read_one_by_one(graph, ids)
    right = expected(graph, ids, kept)
    assert (logits.double() - right.logits).abs().max() <= right.tolerance
    graph.forget()
    tokens, again = graph.decode(ids, 4)
    assert torch.equal(again, logits)
    last = graph.logits([(token, 5 + i, 0) for i, token in enumerate(tokens[:1])])
    assert tokens[1] == int(last.argmax())


def test_an_argument_of_another_size_is_refused(cuda_builds: Path) -> None:
    """The kernel's structure is the compiler's, the host's is Python's."""
    graph = executed(cuda_builds, 1, "sm_90a", version="graph")
    with pytest.raises(EmulationError, match=r"qkv takes \d+ bytes, the host's Order has \d+"):
        check_argument(graph.library, "qkv", Order())
