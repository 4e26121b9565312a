"""Checks of the decode kernels' machine code, for properties that no run on a CPU can show."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from laneformer.engine.cuda import compile as compiling
from laneformer.engine.cuda.compile import FOLDER, compile_cubin
from laneformer.engine.cuda.geometry import architecture_name
from laneformer.engine.cuda.nvrtc import Nvrtc, compilers
from laneformer.engine.cuda.planning import plan_builds
from tests.laneformer.cuda import sass
from tests.laneformer.cuda.cards import CARDS, MODELS, REGISTERS
from tests.laneformer.cuda.harness import KERNELS
from tests.laneformer.cuda.sass import Kernel, pending_loads
from tests.laneformer.cuda.test_compile import small
from tests.proofs import CACHE, KERNEL_SOURCES

pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.skipif(
        not compilers(), reason="needs the cuda extra: pip install 'laneformer[cuda]'"
    ),
    pytest.mark.skipif(
        sass.tools() is None, reason="nvdisasm comes with Triton: pip install triton"
    ),
]
CUBINS = CACHE / "cubins"  # each is named by all that decides it
H200 = "H100 SXM, NVL, H200, GH200"
# (card, model, dtype, GPUs) of the build with the most columns: at most so many bytes of stack,
# loads and stores of spilled registers, and instructions of 16 bytes. They are to go down only
# Registers, spills, the width and scope of words' accesses, and loads that a copy overtakes:
# docs/decisions/gpu.md gives the figures and reasons. NVRTC needs neither a GPU nor a toolkit.
LIMITS = {
    ("A100 40 GB, 80 GB", "2b", "bf16", 1): (568, 801, 18400),
    (H200, "2b", "int8", 1): (408, 290, 19800),
    (H200, "2b", "bf16", 8): (440, 282, 17800),
    ("H100 PCIe", "Llama-3-8B", "bf16", 1): (0, 0, 18100),
}


def compile_kernels(version, geometry, architecture, folder) -> dict[str, Kernel]:
    cubin = folder / f"{version}-{architecture}.cubin"
    cubin.write_bytes(compile_cubin(version, geometry, architecture, CUBINS))
    kernels = sass.read_kernels(cubin)
    assert kernels.keys() == {*KERNELS[version]}
    return kernels


# ---- the gates: each raises ----


def require_none(sites: Iterable[object], what: str):
    texts = list(map(str, sites))
    assert not texts, f"{len(texts)} {what}:\n" + "\n".join(texts[:8])


def words_are_whole(code, devices):
    """Check that words are stored and loaded in one access of at least 64 bits that all GPUs see."""
    # the compiler may load only a word's epoch where its value is unused; flags have 32 bits
    scope = "STRONG.SYS" if devices > 1 else "STRONG.GPU"
    words = [this for this in code if scope in this.op and this.bits >= 64]
    stores = [this for this in words if this.name in ("ST", "STG")]
    assert len(stores) >= 6, (
        f"five exchanges and the best token; stores of words with {scope}: {len(stores)}"
    )
    assert len(words) - len(stores) >= 6, f"loads of words with {scope}"
    narrow = (this for this in code if "STRONG.GPU" in this.op and this.bits < 64)
    require_none(
        (this for this in narrow if this.name in ("ST", "STG")), "stores of part of a word"
    )


def nothing_stale_is_read(code):
    """Check that nothing is loaded through the non-coherent cache, which may return old values."""
    require_none((this for this in code if "CONSTANT" in this.op), "non-coherent loads")


def slots_are_consumed(code):
    """Check that a thread's loads from a ring slot complete before the slot's next copy is issued."""
    pairs = pending_loads(code)
    require_none(
        (f"{load} before {copy}" for copy, load in pairs), "loads not awaited before a copy"
    )


def spills_are_few(kernel, limits):
    local = sum(this.name in ("LDL", "STL") for this in kernel.code)
    figures = kernel.stack_bytes, local, len(kernel.code)
    within = all(a <= b for a, b in zip(figures, limits, strict=True))
    assert within, (
        f"stack bytes, accesses of spilled registers, instructions: {figures}; at most {limits}"
    )


# ---- the kernels as they are ----


@pytest.mark.parametrize("place", LIMITS, ids=str)
def test_the_kernel_of_passes(place, tmp_path):
    card, model, dtype, devices = place
    geometry = plan_builds(MODELS[model], dtype, CARDS[card].machine, devices=devices)[-1]
    architecture = architecture_name(CARDS[card].architecture)
    kernel = compile_kernels("passes", geometry, architecture, tmp_path)["pass"]
    # bulk copies (UBLKCP) came with sm_90
    copy = "LDGSTS" if architecture == "sm_80" else "UBLKCP"
    assert {this.name for this in kernel.code} & sass.COPIES == {copy}
    assert geometry.threads * -(-kernel.registers // 8) * 8 <= REGISTERS, (
        "given out by 8 to a thread"
    )
    slots_are_consumed(kernel.code)
    nothing_stale_is_read(kernel.code)
    words_are_whole(kernel.code, devices)
    spills_are_few(kernel, LIMITS[place])


def test_the_graph_for_the_newest_cards(tmp_path):
    for kernel in compile_kernels("graph", small(), "sm_120a", tmp_path).values():
        slots_are_consumed(kernel.code)
        nothing_stale_is_read(kernel.code)


# ---- planted faults ----

LOAD_TILES = """uint4 there[Strip];
    for (int r = 0; r < Strip; ++r) there[r] = tape.peek(r, thread);
    tape.drop(Strip);
    for (int r = 0; r < Strip; ++r) multiply_segment(sum[r], there[r], b);"""
TWO_STORES = """const_cast<volatile Word*>(at)->value = value;
  const_cast<volatile Word*>(at)->epoch = epoch;
}
DEVICE void unused(Word* at, uint64_t bits) {
  asm volatile("st.relaxed." SCOPE"""
STALE = (
    "for (int c = 0; c < kKeyChunks; ++c) chunks[c] = __ldg(reinterpret_cast<const uint4*>(slots + "
    "(2 * slot + value) * kHeadDim) + c * kKeyThreads + here(thread_index()) % kKeyThreads);"
)
Gate = Callable[[Kernel], None]
# devices of the build: (file, was, now, the gate that finds it, with this message); all of a build
# are in one source
# Of seven builds, two have planted faults that the checks must find.
FAULTS = {
    1: [
        (
            "primitives.cuh",
            'asm volatile("st.relaxed." SCOPE',
            TWO_STORES,
            lambda k: words_are_whole(k.code, 1),
            "stores of words with STRONG.GPU: 0",
        ),
        (
            "decode.cuh",
            "take(reinterpret_cast<const uint4*>(slots + (2 * slot + value) * kHeadDim), chunks);",
            STALE,
            lambda k: nothing_stale_is_read(k.code),
            "non-coherent",
        ),
        (
            "columns.cuh",
            "#pragma unroll\n    for (int r = 0; r < Strip; ++r) multiply_segment(sum[r], tape.peek(r, thread), b);\n"
            "    tape.drop(Strip);",
            LOAD_TILES,
            lambda k: slots_are_consumed(k.code),
            "not awaited before",
        ),
    ],
    2: [
        (
            "primitives.cuh",
            '#define SCOPE "sys"',
            '#define SCOPE "gpu"',
            lambda k: words_are_whole(k.code, 2),
            "stores of words with STRONG.SYS: 1",
        ),
        (
            "passes.cu",
            "__launch_bounds__(kThreads, 1)",
            "__launch_bounds__(kThreads, 20)",
            lambda k: spills_are_few(k, (1000, 8, 20000)),
            "accesses of spilled registers",
        ),
    ],
}


@pytest.mark.parametrize("devices", FAULTS)
def test_planted_faults_are_found(devices, tmp_path, monkeypatch):
    folder = tmp_path / "kernels"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    for file, was, now, *_ in FAULTS[devices]:
        content = (folder / file).read_text()
        assert content.count(was) == 1, f"{file} holds {content.count(was)} times: {was}"
        (folder / file).write_text(content.replace(was, now))
    monkeypatch.setattr(compiling, "INCLUDES", (folder, FOLDER.parent))
    geometry = small(devices=devices, columns=4)
    kernel = compile_kernels("passes", geometry, "sm_90a", tmp_path)["pass"]
    for *_, gate, message in FAULTS[devices]:
        with pytest.raises(AssertionError, match=message):
            gate(kernel)


# ---- older compilers, which `make extras` installs each in a folder of its own ----

LIBRARIES = {
    "12.9": "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
    "13.0": "nvidia/cu13/lib/libnvrtc.so.13",
}


@pytest.mark.parametrize("version", LIBRARIES)
def test_an_older_compiler(version, tmp_path):
    # users have the compiler that their torch brings, which may order instructions differently
    library = (
        Path(__file__).resolve().parents[3] / ".venv" / f"nvrtc-{version}" / LIBRARIES[version]
    )
    if not library.is_file():
        pytest.skip(f"make extras brings NVRTC {version}")
    compiler = Nvrtc(str(library))
    assert ".".join(map(str, compiler.version)) == version
    for unit, architecture in (("passes", "sm_80"), ("graph", "sm_100a")):
        cubin = tmp_path / f"{unit}.cubin"
        cubin.write_bytes(compile_cubin(unit, small(), architecture, CUBINS, compiler=compiler))
        for kernel in sass.read_kernels(cubin).values():
            slots_are_consumed(kernel.code)
            nothing_stale_is_read(kernel.code)
        if unit == "passes":
            words_are_whole(kernel.code, 1)
