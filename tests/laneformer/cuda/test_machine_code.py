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

import pytest

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda import compile as compiling
from laneformer.engine.cuda.compile import FOLDER, compile_cubin
from laneformer.engine.cuda.geometry import Geometry
from laneformer.engine.cuda.memory import decode_structure
from laneformer.engine.cuda.nvrtc import compilers
from laneformer.engine.cuda.planning import plan
from tests.laneformer.cuda import sass
from tests.laneformer.cuda.cards import CARDS, REGISTERS
from tests.laneformer.cuda.harness import KERNELS
from tests.laneformer.cuda.test_compile import small
from tests.proofs import CACHE, KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.slow,
    pytest.mark.skipif(not compilers(), reason="needs the cuda extra: pip install 'laneformer[cuda]'"),
    pytest.mark.skipif(sass.tools() is None, reason="nvdisasm comes with Triton: pip install triton"),
]

MACHINES = {
    "sm_80": CARDS["A100 40 GB, 80 GB"].machine, "sm_86": CARDS["RTX 3090"].machine, "sm_89": CARDS["RTX 4090"].machine,
    "sm_90a": CARDS["H100 SXM, NVL, H200, GH200"].machine, "sm_100a": CARDS["B200"].machine,
    "sm_120a": CARDS["RTX 5090"].machine,
}  # fmt: skip
WORDS = {"lane_words", "inbox"}
# by whom else these are written while the kernel runs: a cache that is not coherent would show old values
WRITTEN = WORDS | {"kv", "graph", "logits", "tokens", "published", "report", "aborted", "cancel", "times"}


@dataclass(frozen=True)
class Limits:
    """Of the persistent kernel; the loop is the one over layers."""

    stack_bytes: int
    local: int  # loads and stores of spilled registers in the loop
    instructions: int  # in the loop, of 16 bytes


LIMITS = {
    "sm_80": Limits(stack_bytes=464, local=32, instructions=8000),
    "sm_86": Limits(stack_bytes=472, local=52, instructions=7800),
    "sm_89": Limits(stack_bytes=432, local=20, instructions=6700),
    "sm_90a": Limits(stack_bytes=408, local=8, instructions=6900),
    "sm_100a": Limits(stack_bytes=952, local=8, instructions=8500),
    "sm_120a": Limits(stack_bytes=648, local=8, instructions=8500),
}


@dataclass(frozen=True)
class Compiled:
    """One kernel of a cubin and what is known of it."""

    kernel: sass.Kernel
    resources: sass.Resources
    geometry: Geometry

    @functools.cached_property
    def pointers(self) -> sass.Pointers:
        fields = pointer_fields(decode_structure(self.geometry))
        return sass.Pointers(self.kernel, fields, self.resources.parameter_at, "inbox")

    @property
    def loop(self) -> list[sass.Instruction]:
        return [self.kernel.code[i] for i in sorted(self.kernel.layer_loop)]


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
    cubin = folder / f"{version}-{architecture}.cubin"
    cubin.write_bytes(compile_cubin(version, geometry, architecture, CACHE / "cubins"))
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
    reads_weights = name in ("decode", "qkv", "output", "gate_up", "down", "head")
    copies = [this for this in c.kernel.code if this.name in sass.COPIES]
    assert bool(copies) == reads_weights
    assert {this.name for this in copies} <= {"UBLKCP" if architecture_of(c) >= 90 else "LDGSTS"}


def architecture_of(c: Compiled) -> int:
    return {352: 80, 528: 90, 896: 100}[c.resources.parameter_at]  # where parameters begin


def the_parameter_fits(c: Compiled) -> None:
    size = ctypes.sizeof(decode_structure(c.geometry))
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


def every_gate(c: Compiled, name: str) -> None:
    the_parameter_fits(c)
    copies_are_there(c, name)
    slots_are_consumed(c)
    if c.pointers.accesses(*WORDS):
        nothing_stale_is_read(c)


# ---- the kernels as they are ----


def config(flavor: str = "2b") -> LaneformerConfig:
    return LaneformerConfig.from_flavor(flavor)


def report(c: Compiled, what: str) -> None:
    """For docs/decisions/gpu.md; pytest -s shows it."""
    local = sum(this.name in ("LDL", "STL") for this in c.loop)
    print(f"\n{what}: {c.resources}, loop {len(c.loop)} instructions, {local} local, of {len(c.kernel.code)}")


@pytest.mark.parametrize("architecture", MACHINES)
def test_the_persistent_kernel(architecture: str, tmp_path: Path) -> None:
    c = compiled("persistent", plan(config(), "bf16", MACHINES[architecture]), architecture, tmp_path)[
        "decode"
    ]
    report(c, architecture)
    every_gate(c, "decode")
    words_are_whole(c)
    registers_suffice(c)
    spills_are_few(c, LIMITS[architecture])


@pytest.mark.parametrize(
    ("flavor", "devices", "stack_bytes", "local"), [("2b", 8, 408, 8), ("300m", 1, 384, 16)]
)
def test_the_persistent_kernel_for_others(
    flavor: str, devices: int, stack_bytes: int, local: int, tmp_path: Path
) -> None:
    geometry = plan(config(flavor), "bf16", MACHINES["sm_90a"], devices=devices)
    c = compiled("persistent", geometry, "sm_90a", tmp_path)["decode"]
    report(c, f"{flavor} on {devices}")
    every_gate(c, "decode")
    words_are_whole(c)
    registers_suffice(c)
    spills_are_few(c, Limits(stack_bytes, local, 8400))


LIMITS_8 = {  # of weights of 8 bits
    ("int8", "sm_80"): Limits(stack_bytes=472, local=58, instructions=8700),
    ("int8", "sm_90a"): Limits(stack_bytes=408, local=14, instructions=7450),
    ("int8", "sm_100a"): Limits(stack_bytes=952, local=8, instructions=9750),
}


@pytest.mark.parametrize(("dtype", "architecture"), LIMITS_8)
def test_the_persistent_kernel_of_8_bits(dtype: str, architecture: str, tmp_path: Path) -> None:
    c = compiled("persistent", plan(config(), dtype, MACHINES[architecture]), architecture, tmp_path)[
        "decode"
    ]
    report(c, f"{dtype}, {architecture}")
    every_gate(c, "decode")
    words_are_whole(c)
    registers_suffice(c)
    spills_are_few(c, LIMITS_8[dtype, architecture])


@pytest.mark.parametrize("architecture", ["sm_89", "sm_90a"])
def test_the_kernels_of_the_graph(architecture: str, tmp_path: Path) -> None:
    """Two blocks on a multiprocessor, and hardly anything spilled; the one that chooses a token is alone."""
    geometry = plan(config(), "bf16", MACHINES[architecture], resident=2)
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
    file: str
    was: str
    now: str
    gate: Callable[[Compiled], None]
    message: str
    shape: dict[str, Any]


TWO_STORES = """const_cast<volatile Word*>(at)->value = value;
  const_cast<volatile Word*>(at)->epoch = epoch;
}
DEVICE void unused(Word* at, uint64_t bits) {
  asm volatile("""
LOAD_ALL = """uint4 there[Strip];
    for (int r = 0; r < Strip; ++r) there[r] = tape.peek(r, thread);
    tape.drop(Strip);
    for (int r = 0; r < Strip; ++r) sum[r] = dot(there[r], in, sum[r]);
  }"""
FAULTS = {
    "a word is stored in two halves": Fault(
        "primitives.cuh", 'asm volatile("st.relaxed." SCOPE', TWO_STORES + '"st.relaxed." SCOPE',
        words_are_whole, "without STRONG.GPU", {},
    ),
    "words are for one GPU, of two": Fault(
        "primitives.cuh", '#define SCOPE "sys"', '#define SCOPE "gpu"', words_are_whole,
        "without STRONG.SYS", {"devices": 2},
    ),
    "words are loaded as what never changes": Fault(
        "primitives.cuh", "ld.relaxed.\" SCOPE \".global.b64", "ld.global.nc.b64",
        nothing_stale_is_read, "non-coherent", {},
    ),
    "keys are loaded as what never changes": Fault(
        "decode.cuh", "take(reinterpret_cast<const uint4*>(slots + (2 * slot + value) * kHeadDim), chunks);",
        "for (int c = 0; c < kKeyChunks; ++c) chunks[c] = __ldg(reinterpret_cast<const uint4*>(slots + "
        "(2 * slot + value) * kHeadDim) + c * kKeyThreads + here(thread_index()) % kKeyThreads);",
        nothing_stale_is_read, "non-coherent", {},
    ),
    "a slot is filled while its values are under way": Fault(
        "rows.cuh",
        "for (int r = 0; r < Strip; ++r) sum[r] = dot(tape.peek(r, thread), in, sum[r]);\n"
        "    tape.drop(Strip);\n  }",
        LOAD_ALL, slots_are_consumed, "not awaited before", {},
    ),
    "the host's structure is another": Fault(
        "block.cuh", "  uint64_t limit_ns;\n  Graph", "  uint64_t limit_ns, other;\n  Graph",
        the_parameter_fits, "parameter of", {},
    ),
    "registers are too few": Fault(
        "persistent.cu", "__launch_bounds__(kThreads, 1)", "__launch_bounds__(kThreads, 20)",
        lambda c: spills_are_few(c, Limits(1000, 8, 10000)), "spilled registers", {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault, folder = FAULTS[name], tmp_path / "kernels"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    content = (folder / fault.file).read_text()
    assert content.count(fault.was) == 1, f"{fault.file} holds {content.count(fault.was)} times: {fault.was}"
    (folder / fault.file).write_text(content.replace(fault.was, fault.now))
    monkeypatch.setattr(compiling, "INCLUDES", (folder, FOLDER.parent))
    c = compiled("persistent", small(**fault.shape), "sm_90a", tmp_path)["decode"]
    with pytest.raises(AssertionError, match=fault.message):
        fault.gate(c)


def test_without_a_fault_a_small_kernel_passes(tmp_path: Path) -> None:
    for devices in (1, 2):
        c = compiled("persistent", small(devices=devices), "sm_90a", tmp_path)["decode"]
        every_gate(c, "decode")
        words_are_whole(c)
        spills_are_few(c, Limits(1000, 8, 10000))
