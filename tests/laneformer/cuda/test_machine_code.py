"""Gates on the machine code of the decode kernels, for cards of every generation: what no run on
a CPU can show.

The figures and their reasons: docs/decisions/gpu.md. A gate is a function that raises; each is
also shown to find a fault that is planted in the kernels' source. Cubins are kept in the cache of tests/proofs.py.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from laneformer.config import DRAFT_IDS, LaneformerConfig
from laneformer.engine.cuda import compile as compiling
from laneformer.engine.cuda.compile import FOLDER, compile_cubin
from laneformer.engine.cuda.geometry import Geometry, architecture_name
from laneformer.engine.cuda.head import plan_block
from laneformer.engine.cuda.nvrtc import compilers
from laneformer.engine.cuda.planning import plan_builds
from laneformer.engine.cuda.structures import decode_structure
from laneformer.tensors import Tensor
from tests.laneformer.cuda import sass
from tests.laneformer.cuda.cards import CARDS, MODELS, REGISTERS
from tests.laneformer.cuda.harness import KERNELS
from tests.laneformer.cuda.test_compile import CUBINS, small
from tests.proofs import KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.job,
    pytest.mark.skipif(not compilers(), reason="needs the cuda extra: pip install 'laneformer[cuda]'"),
    pytest.mark.skipif(sass.tools() is None, reason="nvdisasm comes with Triton: pip install triton"),
]

WORDS = {"lane_words", "inbox"}
# by whom else these are written while the kernel runs: a cache that is not coherent would show old values
WRITTEN = WORDS | {"kv", "graph", "logits", "picks", "report", "aborted", "cancel"}


@dataclass(frozen=True)
class Limits:
    """Of the kernel of passes, all builds together; the loop is the one over layers. They are to go down only."""

    stack_bytes: int
    local: int  # loads and stores of spilled registers in the loop
    instructions: int  # in the loop, of 16 bytes


H200 = "H100 SXM, NVL, H200, GH200"
GATES = {  # every card once, and a shape of the Llama family on each generation that several cards share
    ("A100 40 GB, 80 GB", "2b", "bf16"): Limits(stack_bytes=584, local=330, instructions=10300),
    ("RTX 3090", "2b", "bf16"): Limits(stack_bytes=512, local=58, instructions=7350),
    ("RTX 4090", "2b", "bf16"): Limits(stack_bytes=504, local=62, instructions=7200),
    (H200, "2b", "bf16"): Limits(stack_bytes=392, local=24, instructions=8800),
    ("B200", "2b", "bf16"): Limits(stack_bytes=984, local=4, instructions=10000),
    ("RTX 5090", "2b", "bf16"): Limits(stack_bytes=856, local=6, instructions=8250),
    ("A10", "Qwen3-0.6B", "bf16"): Limits(stack_bytes=344, local=86, instructions=10550),
    ("L4", "Qwen2.5-7B", "bf16"): Limits(stack_bytes=16, local=0, instructions=6350),
    ("L40S", "Llama-3-8B", "bf16"): Limits(stack_bytes=296, local=134, instructions=7900),
    ("H100 PCIe", "Llama-3-8B", "bf16"): Limits(stack_bytes=0, local=0, instructions=10200),
    ("H100 MIG 2g", "Qwen3-0.6B", "bf16"): Limits(stack_bytes=272, local=12, instructions=8300),
    (H200, "300m", "bf16"): Limits(stack_bytes=392, local=28, instructions=8050),
    ("A100 40 GB, 80 GB", "2b", "int8"): Limits(stack_bytes=584, local=356, instructions=13400),
    (H200, "2b", "int8"): Limits(stack_bytes=472, local=44, instructions=11300),
    ("B200", "2b", "int8"): Limits(stack_bytes=976, local=6, instructions=12000),
}  # fmt: skip
EIGHT_GPUS = Limits(stack_bytes=456, local=22, instructions=10100)


HEAD_GATES = {  # of the block of a head that drafts, for 2b
    ("A100 40 GB, 80 GB", "bf16"): Limits(stack_bytes=176, local=266, instructions=13100),
    (H200, "bf16"): Limits(stack_bytes=88, local=66, instructions=11300),
    (H200, "int8"): Limits(stack_bytes=120, local=95, instructions=14350),
}


@dataclass(frozen=True)
class Compiled:
    """One kernel of a cubin and what is known of it."""

    kernel: sass.Kernel
    resources: sass.Resources
    geometry: Geometry

    @property
    def argument(self) -> type[ctypes.Structure]:
        return decode_structure(self.geometry.devices, drafts=self.geometry.model is not None)

    @functools.cached_property
    def pointers(self) -> sass.Pointers:
        fields = pointer_fields(self.argument)
        return sass.Pointers(self.kernel, fields, self.resources.parameter_at, "inbox")

    @property
    def loop_at(self) -> set[int]:
        """Over layers; the block of a head is one layer, so over passes."""
        kernel = self.kernel
        return kernel.layer_loop if self.geometry.model is None else kernel.loops(kernel.reached)[0]

    @property
    def loop(self) -> list[sass.Instruction]:
        return [self.kernel.code[i] for i in sorted(self.loop_at)]


def pointer_fields(structure: type[ctypes.Structure], at: int = 0) -> dict[str, tuple[int, int]]:
    """{name: (offset, bytes)} of the pointers, and of arrays of them, in a C structure and those inside it."""
    found: dict[str, tuple[int, int]] = {}
    for name, kind, *_ in structure._fields_:
        field = getattr(structure, name)
        if issubclass(kind, ctypes.Structure):
            found |= pointer_fields(kind, at + field.offset)
        elif kind is ctypes.c_void_p or getattr(kind, "_type_", None) is ctypes.c_void_p:
            found[name] = (at + field.offset, field.size)
    return found


def compiled(version: str, geometry: Geometry, architecture: str, folder: Path) -> dict[str, Compiled]:
    """Compiled once for all tests: the cache is named by content."""
    cubin = folder / f"{version}-{architecture}.cubin"
    cubin.write_bytes(compile_cubin(version, geometry, architecture, CUBINS))
    return read(version, geometry, cubin)


def read(version: str, geometry: Geometry, cubin: Path) -> dict[str, Compiled]:
    kernels, resources = sass.read_kernels(cubin), sass.read_resources(cubin)
    assert kernels.keys() == resources.keys() == {*KERNELS[version]}
    return {name: Compiled(kernel, resources[name], geometry) for name, kernel in kernels.items()}


# ---- the gates ----


def none(sites: Iterable[sass.Instruction], what: str) -> None:
    found = list(map(str, sites))
    assert not found, f"{len(found)} {what}:\n" + "\n".join(found[:8])


def words_are_whole(c: Compiled) -> None:
    """A word is stored and loaded in one access of 64 bits (a pair in 128), and past the caches
    that are not coherent.

    The compiler may load a word's epoch alone where its value is not used, and a value alone where the
    sampler looks again at scores that are there.
    """
    scope = "STRONG.SYS" if c.geometry.devices > 1 else "STRONG.GPU"
    found = {i: this for i, this in c.pointers.accesses(*WORDS).items() if c.pointers.of(i) <= WORDS}
    stores = [this for this in found.values() if this.name in sass.STORES]
    assert len(stores) >= 6, "five exchanges and the best token"
    assert len(found) - len(stores) >= 6
    none((this for this in found.values() if scope not in this.op), f"accesses of words without {scope}")
    narrow = {i: this for i, this in found.items() if this.bits < 64}
    none((this for this in narrow.values() if this.name in sass.STORES), "stores of part of a word")
    values = [i for i, this in narrow.items() if sass.offset(this.place) % 8 == 0]
    none((found[i] for i in values if "draw" not in c.kernel.function(i)), "loads of part of a word")


def nothing_stale_is_read(c: Compiled) -> None:
    """No load through the non-coherent cache of what is written while the kernel runs."""
    data = c.pointers.accesses(*WRITTEN)
    assert any(this.name == "LDG" for this in data.values())
    none((this for this in data.values() if "CONSTANT" in this.op), "non-coherent loads of what changes")


def slots_are_consumed(c: Compiled) -> None:
    """Of what a thread loads from a slot of the ring, all has come before the slot's next copy is issued."""
    pending = sass.pending_loads(c.kernel)
    for copy, loads in pending.items():
        none((c.kernel.code[i] for i in sorted(loads)), f"loads not awaited before {c.kernel.code[copy]}")


def copies_are_there(c: Compiled, name: str) -> None:
    reads_weights = name in ("pass", "qkv", "output", "gate_up", "down", "head")
    copies = [this for this in c.kernel.code if this.name in sass.COPIES]
    assert bool(copies) == reads_weights
    assert {this.name for this in copies} <= {"UBLKCP" if architecture_of(c) >= 90 else "LDGSTS"}


def architecture_of(c: Compiled) -> int:
    return {352: 80, 528: 90, 896: 100}[c.resources.parameter_at]  # where parameters begin


def the_parameter_fits(c: Compiled) -> None:
    size = ctypes.sizeof(c.argument)
    assert c.resources.parameter_bytes == size, (
        f"a parameter of {c.resources.parameter_bytes} bytes, the host's is {size}"
    )


def registers_suffice(c: Compiled, blocks: int = 1) -> None:
    """All threads of a multiprocessor's blocks fit in its registers, given out by 8 to a thread."""
    assert blocks * 32 * c.geometry.warps * -(-c.resources.registers // 8) * 8 <= REGISTERS


def spills_are_few(c: Compiled, limits: Limits) -> None:
    assert c.resources.stack_bytes <= limits.stack_bytes
    local = [this for this in c.loop if this.name in ("LDL", "STL")]
    if len(local) > limits.local:
        none(
            local,
            f"accesses of spilled registers in the loop over layers, at most {limits.local} are allowed",
        )
    assert len(c.loop) <= limits.instructions


def products_spill_nothing(c: Compiled) -> None:
    """Of a layer's matrix products, nothing in the loops over tiles but what a chunk's refill asks for on old cards."""
    loops = c.kernel.innermost(c.loop_at, "HMMA")
    assert len(loops) >= 4, "a matrix each, and a number of tiles below each other"
    for loop in loops:
        local = [c.kernel.code[i] for i in sorted(loop) if c.kernel.code[i].name in ("LDL", "STL")]
        if len(local) > (architecture_of(c) < 90):
            none(local, "accesses of spilled registers in a loop over tiles")


def every_gate(c: Compiled, name: str) -> None:
    the_parameter_fits(c)
    copies_are_there(c, name)
    slots_are_consumed(c)
    if c.pointers.accesses(*WORDS):
        nothing_stale_is_read(c)


# ---- the kernels as they are ----


def report(c: Compiled, what: str) -> None:
    """For docs/decisions/gpu.md; pytest -s shows it."""
    local = sum(this.name in ("LDL", "STL") for this in c.loop)
    print(f"\n{what}: {c.resources}, loop {len(c.loop)} instructions, {local} local, of {len(c.kernel.code)}")


@pytest.mark.parametrize("place", GATES, ids=" on ".join)
def test_the_builds(place: tuple[str, str, str], tmp_path: Path) -> None:
    name, model, dtype = place
    for geometry in plan_builds(MODELS[model], dtype, CARDS[name].machine):
        c = compiled("passes", geometry, architecture_name(CARDS[name].architecture), tmp_path)["pass"]
        report(c, f"{model} in {dtype} on {name}, {geometry.columns} columns")
        every_gate(c, "pass")
        words_are_whole(c)
        registers_suffice(c)
        products_spill_nothing(c)
        spills_are_few(c, GATES[place])


@pytest.mark.parametrize("place", HEAD_GATES, ids=" on ".join)
def test_the_builds_of_a_heads_block(place: tuple[str, str], tmp_path: Path) -> None:
    """Of one layer, so the loop is that over passes; the model's kernels are those of models without a head."""
    (name, dtype), machine = place, CARDS[place[0]].machine
    config = LaneformerConfig.from_flavor("2b", num_nextn_predict_layers=1, draft_vocab_size=8192)
    ids = {DRAFT_IDS: Tensor("int32", np.arange(8192, dtype=np.int32))}
    builds = plan_builds(config, dtype, machine)
    for geometry in plan_block(builds, ids, machine)[0]:
        c = compiled("passes", geometry, architecture_name(CARDS[name].architecture), tmp_path)["pass"]
        report(c, f"the block of 2b's head in {dtype} on {name}, {geometry.columns} columns")
        every_gate(c, "pass")
        words_are_whole(c)
        registers_suffice(c)
        if architecture_of(c) >= 90:  # before, a loop over tiles has four accesses
            products_spill_nothing(c)
        spills_are_few(c, HEAD_GATES[place])


def test_the_builds_on_several_gpus(tmp_path: Path) -> None:
    for geometry in plan_builds(MODELS["2b"], "bf16", CARDS[H200].machine, devices=8):
        c = compiled("passes", geometry, "sm_90a", tmp_path)["pass"]
        every_gate(c, "pass")
        words_are_whole(c)
        spills_are_few(c, EIGHT_GPUS)


def test_every_card_has_a_gate() -> None:
    assert {card for card, _, _ in GATES} == set(CARDS)


@pytest.mark.parametrize(("card", "architecture"), [("RTX 4090", "sm_89"), (H200, "sm_90a")])
def test_the_kernels_of_the_graph(card: str, architecture: str, tmp_path: Path) -> None:
    """Two blocks on a multiprocessor, and hardly anything spilled; the one that chooses a token is alone."""
    (geometry,) = plan_builds(MODELS["2b"], "bf16", CARDS[card].machine, graph=True)
    for name, c in compiled("graph", geometry, architecture, tmp_path).items():
        every_gate(c, name)
        registers_suffice(c, 1 if name == "choose" else 2)
        if name != "choose":
            local = sum(this.name in ("LDL", "STL") for this in c.kernel.code)
            assert local <= (200 if name == "attention" else 8), (
                name
            )  # the attention of 64 registers does spill


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
    "one": {}, "another": {}, "two GPUs": {"devices": 2}, "four columns": {"columns": 4},
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
        words_are_whole, "without STRONG.GPU",
    ),
    "words are for one GPU, of two": Fault(
        "two GPUs", "primitives.cuh", '#define SCOPE "sys"', '#define SCOPE "gpu"', words_are_whole,
        "without STRONG.SYS",
    ),
    "words are loaded as what never changes": Fault(
        "another", "primitives.cuh", "ld.relaxed.\" SCOPE \".global.b64", "ld.global.nc.b64",
        nothing_stale_is_read, "non-coherent",
    ),
    "keys are loaded as what never changes": Fault(
        "one", "decode.cuh", "take(reinterpret_cast<const uint4*>(slots + (2 * slot + value) * kHeadDim), chunks);",
        "for (int c = 0; c < kKeyChunks; ++c) chunks[c] = __ldg(reinterpret_cast<const uint4*>(slots + "
        "(2 * slot + value) * kHeadDim) + c * kKeyThreads + here(thread_index()) % kKeyThreads);",
        nothing_stale_is_read, "non-coherent",
    ),
    "the host's structure is another": Fault(
        "one", "block.cuh", "  uint64_t limit_ns;\n  int device", "  uint64_t limit_ns, other;\n  int device",
        the_parameter_fits, "parameter of",
    ),
    "a slot is filled while its tiles are under way": Fault(
        "four columns", "columns.cuh",
        "#pragma unroll\n    for (int r = 0; r < Strip; ++r) multiply_segment(sum[r], tape.peek(r, thread), b);\n"
        "    tape.drop(Strip);",
        LOAD_TILES, slots_are_consumed, "not awaited before",
    ),
    "registers are too few for tiles": Fault(
        "four again", "passes.cu", "__launch_bounds__(kThreads, 1)", "__launch_bounds__(kThreads, 20)",
        products_spill_nothing, "spilled registers in a loop over tiles",
    ),
    "registers are too few": Fault(
        "another", "passes.cu", "__launch_bounds__(kThreads, 1)", "__launch_bounds__(kThreads, 20)",
        lambda c: spills_are_few(c, Limits(1000, 8, 10000)), "spilled registers",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    """The kernel of a build, from sources with all its faults."""

    @functools.cache
    def of(build: str) -> Compiled:
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
            geometry = small(**BUILDS[build])
            return compiled("passes", geometry, "sm_90a", top)["pass"]

    return of


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
        spills_are_few(c, Limits(1000, 8, 10000))
