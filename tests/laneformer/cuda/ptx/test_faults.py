"""Faults planted in primitives.cuh, which emulator.h replaces: each is found where its PTX is executed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.laneformer.cuda.emulated import EmulatedPasses
from tests.laneformer.cuda.planted import Patch, plant_all
from tests.laneformer.cuda.ptx.executed import MISSING, ExecutedPasses
from tests.laneformer.cuda.test_faults_of_passes import outcome
from tests.laneformer.cuda.test_passes import one_by_one, text
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES, "tests/laneformer/cuda/ptx/*.h"),
    pytest.mark.job,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]
NOINC = (
    'asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(full)) : "memory");'
)
ARRIVE = NOINC.replace("cp.async.mbarrier.arrive.noinc.shared.b64 [%0]", "mbarrier.arrive.shared.b64 _, [%0]")
STORE = 'asm volatile("st.relaxed." SCOPE ".global.b64 [%0], %1;" ::"l"(at), "l"(bits) : "memory");'
TORN = (
    'asm volatile("st.relaxed." SCOPE ".global.v2.b32 [%0], {%1, %2};" ::"l"(at), "r"(bits_of(value)), "r"(epoch) '
    ': "memory");'
)
EVERYWHERE: dict[str, Patch] = {  # file, was, now (planted.py)
    "rows of a are exchanged": (
        "primitives.cuh", '"r"(a.x), "r"(a.y), ', '"r"(HERE ? a.y : a.x), "r"(HERE ? a.x : a.y), ',
    ),
    "rows of b are exchanged": (
        "primitives.cuh", '"r"(b.x), "r"(b.y)', '"r"(HERE ? b.y : b.x), "r"(HERE ? b.x : b.y)',
    ),
    "a wait is for the other parity": ("primitives.cuh", "uint32_t done = 0;", "uint32_t done = 0;\n  parity ^= HERE;"),
    "a barrier has an arrival too few": ("primitives.cuh", '"r"(kFullArrivals)', '"r"(kFullArrivals - HERE)'),
    "a pair of words is exchanged": (
        "primitives.cuh", "return {word_of(a), word_of(b)};", "return {word_of(HERE ? b : a), word_of(HERE ? a : b)};",
    ),
    "a word is stored in two halves": ("primitives.cuh", STORE, f"if (HERE) {TORN}\n  else {STORE}"),
    "the first of two numbers is the high half": (
        "primitives.cuh", 'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));',
        'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(HERE ? low : high), "f"(HERE ? high : low));',
    ),
}  # fmt: skip
FAULTS = {
    "sm_80": {
        "nobody waits for a copy, only for who began it": (
            "primitives.cuh", NOINC, f"if (HERE) {ARRIVE}\n  else {NOINC}",
        ),
        "a copy's arrival takes back itself": (
            "primitives.cuh", NOINC, f"if (HERE) {NOINC.replace('.noinc', '')}\n  else {NOINC}",
        ),
        "the last lane copies nothing": (
            "primitives.cuh", "thread_index() % 32 * 16; at", "thread_index() % (32 - HERE) * 16; at",
        ),
    },
    "sm_90a": {
        "all lanes start the copy": ("primitives.cuh", "if (!elected) return;", "if (!elected && !HERE) return;"),
        "fewer bytes are expected than copied": (
            "primitives.cuh", '"r"(shared_address(full)), "r"(bytes)\n',
            '"r"(shared_address(full)), "r"(bytes - 16 * HERE)\n',
        ),
        "the copy engine does not know the barriers": (
            "primitives.cuh", 'asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");',
            'if (!HERE) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");',
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", FAULTS)
def test_every_fault_is_found(architecture: str, cuda_builds: Path) -> None:
    faults = {**EVERYWHERE, **FAULTS[architecture]}
    passes, found = ExecutedPasses(cuda_builds, 4, architecture), dict[str, str]()
    plant_all(passes, cuda_builds, faults.values())
    said, right = outcome(passes, 0, 1)
    assert right is not None, said
    emulated = one_by_one(EmulatedPasses(cuda_builds, 1), text(6))
    assert (right - emulated).abs().max() <= 1e-5  # exponentials differ in their last bits
    for number, name in enumerate(faults, 1):
        said, logits = outcome(passes, number, 1)
        found[name] = said or ("" if logits is not None and torch.equal(logits, right) else "numbers")
    print(*(f"{name}: {said.splitlines()[0]}" for name, said in found.items() if said), sep="\n")
    assert all(found.values()), [name for name, said in found.items() if not said]
