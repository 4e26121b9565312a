"""Gates on the machine code of the decode kernels: what no run on a CPU can show.

Registers, spills, the width and scope of words' accesses, loads that a copy overtakes. The figures
and their reasons: docs/decisions/gpu.md. A gate raises; each is also shown to find a planted fault.
Cubins are kept in the cache of tests/proofs.py.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from laneformer.engine.cuda import compile as compiling
from laneformer.engine.cuda.compile import FOLDER, compile_cubin
from laneformer.engine.cuda.geometry import Geometry, architecture_name
from laneformer.engine.cuda.nvrtc import compilers
from laneformer.engine.cuda.planning import plan_builds
from tests.laneformer.cuda import sass
from tests.laneformer.cuda.cards import CARDS, MODELS, REGISTERS
from tests.laneformer.cuda.harness import KERNELS
from tests.laneformer.cuda.test_compile import CUBINS, small
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.skipif(not compilers(), reason="needs the cuda extra: pip install 'laneformer[cuda]'"),
    pytest.mark.skipif(sass.tools() is None, reason="nvdisasm comes with Triton: pip install triton"),
]
TILE_LOOPS = 16  # of a layer's four matrices, with one to four tiles below each other; 4 of the head


@dataclass(frozen=True)
class Limits:
    """Of a kernel of passes. They are to go down only."""

    stack_bytes: int
    local: int  # loads and stores of spilled registers
    instructions: int  # of 16 bytes


H200 = "H100 SXM, NVL, H200, GH200"
GATES = {  # (card, model, dtype, GPUs): the build with the most columns
    ("A100 40 GB, 80 GB", "2b", "bf16", 1): Limits(568, 801, 18400),
    ("RTX 4090", "2b", "bf16", 1): Limits(488, 380, 14450),
    (H200, "2b", "bf16", 1): Limits(384, 264, 16550),
    (H200, "2b", "int8", 1): Limits(408, 290, 19800),
    (H200, "2b", "bf16", 8): Limits(440, 282, 17800),
    ("H100 PCIe", "Llama-3-8B", "bf16", 1): Limits(0, 0, 18100),
    ("B200", "2b", "bf16", 1): Limits(936, 561, 17750),
}


@dataclass(frozen=True)
class Compiled:
    """One kernel of a cubin and what is known of it."""

    code: list[sass.Instruction]
    resources: sass.Resources
    geometry: Geometry
    architecture: str

    @property
    def copies(self) -> str:
        """The instruction that copies chunks of weights."""
        return "LDGSTS" if self.architecture.startswith("sm_8") else "UBLKCP"


def compiled(version: str, geometry: Geometry, architecture: str, folder: Path) -> dict[str, Compiled]:
    """Compiled once for all tests: the cache is named by content."""
    cubin = folder / f"{version}-{architecture}.cubin"
    cubin.write_bytes(compile_cubin(version, geometry, architecture, CUBINS))
    return read(version, geometry, architecture, cubin)


def read(version: str, geometry: Geometry, architecture: str, cubin: Path) -> dict[str, Compiled]:
    kernels, resources = sass.read_kernels(cubin), sass.read_resources(cubin)
    assert kernels.keys() == resources.keys() == {*KERNELS[version]}
    return {name: Compiled(code, resources[name], geometry, architecture) for name, code in kernels.items()}


# ---- the gates ----


def require_none(sites: Iterable[object], what: str) -> None:
    found = list(map(str, sites))
    assert not found, f"{len(found)} {what}:\n" + "\n".join(found[:8])


def words_are_whole(c: Compiled) -> None:
    """A word is stored and loaded in one access of 64 bits or more, which all GPUs see.

    The compiler may load a word's epoch alone where its value is not used. Flags have 32 bits.
    """
    scope = "STRONG.SYS" if c.geometry.devices > 1 else "STRONG.GPU"
    words = [this for this in c.code if scope in this.op and this.bits >= 64]
    stores = [this for this in words if this.name in ("ST", "STG")]
    assert len(stores) >= 6, f"five exchanges and the best token; stores of words with {scope}: {len(stores)}"
    assert len(words) - len(stores) >= 6, f"loads of words with {scope}"
    narrow = (this for this in c.code if "STRONG.GPU" in this.op and this.bits < 64)
    require_none((this for this in narrow if this.name in ("ST", "STG")), "stores of part of a word")


def nothing_stale_is_read(c: Compiled) -> None:
    """No load through the non-coherent cache, which shows old values of what is written meanwhile."""
    require_none((this for this in c.code if "CONSTANT" in this.op), "non-coherent loads")


def slots_are_consumed(c: Compiled) -> None:
    """Of what a thread loads from a slot of the ring, all has come before the slot's next copy is issued."""
    pairs = sass.pending_loads(c.code)
    require_none((f"{load} before {copy}" for copy, load in pairs), "loads not awaited before a copy")


def copies_are_there(c: Compiled, name: str) -> None:
    reads_weights = name in ("pass", "qkv", "output", "gate_up", "down", "head")
    names = {this.name for this in c.code} & sass.COPIES
    assert names == ({c.copies} if reads_weights else set())


def registers_suffice(c: Compiled) -> None:
    """All threads of a block fit in its registers, given out by 8 to a thread."""
    assert 32 * c.geometry.warps * -(-c.resources.registers // 8) * 8 <= REGISTERS


def spills_are_few(c: Compiled, limits: Limits) -> None:
    local = sum(this.name in sass.SPILLS for this in c.code)
    figures = c.resources.stack_bytes, local, len(c.code)
    most = limits.stack_bytes, limits.local, limits.instructions
    within = all(a <= b for a, b in zip(figures, most, strict=True))
    assert within, f"stack bytes, accesses of spilled registers, instructions: {figures}; at most {most}"


def products_spill_nothing(c: Compiled) -> None:
    """In the loops over tiles of a layer, but for a chunk's refill on old cards; the head's may."""
    allowed = int(c.copies == "LDGSTS")
    loops = sass.innermost_loops(c.code, "HMMA")
    local = [sum(this.name in sass.SPILLS for this in loop) for loop in loops]
    free = sum(count <= allowed for count in local)
    assert free >= min(TILE_LOOPS, 4 * len(loops) // 5), (
        f"accesses of spilled registers in loops over tiles: {local}"
    )


def every_gate(c: Compiled, name: str) -> None:
    copies_are_there(c, name)
    slots_are_consumed(c)
    nothing_stale_is_read(c)


# ---- the kernels as they are ----


@pytest.mark.parametrize("place", GATES, ids=str)
def test_the_builds(place: tuple[str, str, str, int], tmp_path: Path) -> None:
    name, model, dtype, devices = place
    geometry = plan_builds(MODELS[model], dtype, CARDS[name].machine, devices=devices)[-1]
    c = compiled("passes", geometry, architecture_name(CARDS[name].architecture), tmp_path)["pass"]
    every_gate(c, "pass")
    words_are_whole(c)
    registers_suffice(c)
    products_spill_nothing(c)
    spills_are_few(c, GATES[place])


# ---- planted faults ----


@dataclass(frozen=True)
class Fault:
    """A change of one place; those of one `build` are in the same source, and each gate names its own."""

    build: str
    file: str
    was: str
    now: str
    gate: Callable[[Compiled], None]
    message: str


BUILDS: dict[str, dict[str, Any]] = {
    "one": {}, "two GPUs": {"devices": 2}, "four columns": {"columns": 4},
    "four again": {"columns": 4},
}  # fmt: skip
LOAD_TILES = """uint4 there[Strip];
    for (int r = 0; r < Strip; ++r) there[r] = tape.peek(r, thread);
    tape.drop(Strip);
    for (int r = 0; r < Strip; ++r) multiply_segment(sum[r], there[r], b);"""
TWO_STORES = """const_cast<volatile Word*>(at)->value = value;
  const_cast<volatile Word*>(at)->epoch = epoch;
}
DEVICE void unused(Word* at, uint64_t bits) {
  asm volatile("""
FAULTS = {
    "a word is stored in two halves": Fault(
        "one", "primitives.cuh", 'asm volatile("st.relaxed." SCOPE', TWO_STORES + '"st.relaxed." SCOPE',
        words_are_whole, "stores of words with STRONG.GPU: 0",
    ),
    "words are for one GPU, of two": Fault(
        "two GPUs", "primitives.cuh", '#define SCOPE "sys"', '#define SCOPE "gpu"', words_are_whole,
        "stores of words with STRONG.SYS: 1",
    ),
    "keys are loaded as what never changes": Fault(
        "one", "decode.cuh", "take(reinterpret_cast<const uint4*>(slots + (2 * slot + value) * kHeadDim), chunks);",
        "for (int c = 0; c < kKeyChunks; ++c) chunks[c] = __ldg(reinterpret_cast<const uint4*>(slots + "
        "(2 * slot + value) * kHeadDim) + c * kKeyThreads + here(thread_index()) % kKeyThreads);",
        nothing_stale_is_read, "non-coherent",
    ),
    "a slot is filled while its tiles are under way": Fault(
        "four columns", "columns.cuh",
        "#pragma unroll\n    for (int r = 0; r < Strip; ++r) multiply_segment(sum[r], tape.peek(r, thread), b);\n"
        "    tape.drop(Strip);",
        LOAD_TILES, slots_are_consumed, "not awaited before",
    ),
    "registers are too few for tiles": Fault(
        "four again", "passes.cu", "__launch_bounds__(kThreads, 1)", "__launch_bounds__(kThreads, 20)",
        products_spill_nothing, "in loops over tiles",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    """The kernel of a build, from sources with all its faults."""

    @functools.cache
    def make(build: str) -> Compiled:
        top = tmp_path_factory.mktemp("faulty")
        folder = top / "kernels"
        shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        for fault in FAULTS.values():
            content = (folder / fault.file).read_text()
            if fault.build == build:
                count = content.count(fault.was)
                assert count == 1, f"{fault.file} holds {count} times: {fault.was}"
                (folder / fault.file).write_text(content.replace(fault.was, fault.now))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiling, "INCLUDES", (folder, FOLDER.parent))
            return compiled("passes", small(**BUILDS[build]), "sm_90a", top)["pass"]

    return make


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, faulty: Callable[[str], Compiled]) -> None:
    fault = FAULTS[name]
    with pytest.raises(AssertionError, match=fault.message):
        fault.gate(faulty(fault.build))


def test_without_a_fault_a_small_kernel_passes(tmp_path: Path) -> None:
    for devices in (1, 2):
        c = compiled("passes", small(devices=devices), "sm_90a", tmp_path)["pass"]
        every_gate(c, "pass")
        words_are_whole(c)
        products_spill_nothing(c)
        spills_are_few(c, Limits(1000, 8, 20000))
        with pytest.raises(AssertionError, match="accesses of spilled registers"):
            spills_are_few(c, Limits(1000, 8, 2000))
