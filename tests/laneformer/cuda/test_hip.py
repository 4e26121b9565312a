"""The kernels for AMD GPUs: compiled for gfx942, and on the emulator with warps of 64 threads. No
GPU has run them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.config import FLAVORS, LaneformerConfig
from laneformer.engine.cuda.compile import FOLDER, source_of
from laneformer.engine.cuda.geometry import MI300X, Machine
from laneformer.engine.cuda.launch import describe
from laneformer.engine.cuda.planning import plan
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import KERNELS, Emulated
from tests.laneformer.cuda.hip import CLANG, instructions, loops, machine_code, noted, of_kernel
from tests.laneformer.cuda.shapes import SHAPES
from tests.laneformer.cuda.test_kernels import check, text
from tests.proofs import KERNEL_SOURCES

pytestmark = pytest.mark.proof(*KERNEL_SOURCES)
compiled = pytest.mark.skipif(
    CLANG is None, reason="no clang-22, which compiles for gfx942: apt-get install clang-22"
)
emulated = pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
BIG = LaneformerConfig.from_flavor("2b")
TOYS = """
#define GRAPH 0
#define WEIGHTS_BF16 1
#define WARP_THREADS 64
constexpr int kChunkBytes = 1024;
#include "primitives.cuh"
extern "C" __global__ void store(Word* at) { store_word(at, 1.0f, 2); }
extern "C" __global__ void load(const Word* at, WordPair* out) { *out = load_words(at); }
extern "C" __global__ void stop(int* at, int* data) { *data = 1, publish_flag(at, load_flag(at + 1)); }
extern "C" __global__ void copy(const char* from, uint4* out) {
  for (int i = 0; i < 3; ++i) copy_chunk(dynamic_shared() + i * 1024, from + i * 1024, 1024, nullptr);
  wait_full<2>(nullptr, 0);
  out[thread_index()] = reinterpret_cast<const uint4*>(dynamic_shared())[thread_index()];
}
"""


def amd(name: str, builds: Path, **options: Any) -> Emulated:
    """A shape of shapes.py on a GPU of two chiplets, whose lanes alternate."""
    shape = SHAPES[name]
    blocks = shape.model.num_lanes * shape.blocks
    machine = Machine(blocks, MI300X.shared_bytes, MI300X.architecture, MI300X.warp_threads, chiplets=2)
    sizes = {"blocks_per_lane": shape.blocks, "warps": shape.warps}
    return Emulated(shape.model, builds, dtype=shape.dtype, machine=machine, **{**sizes, **options})


# ---- the plan ----


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_flavor_fits_an_mi300x(flavor: str) -> None:
    config = LaneformerConfig.from_flavor(flavor)
    geometry = plan(config, "bf16", MI300X)
    assert geometry.blocks_per_lane == MI300X.multiprocessors // config.num_lanes
    assert geometry.shared_bytes <= 64 * 1024
    assert geometry.threads <= 1024
    assert geometry.chunks >= 4
    assert geometry.alternate


def test_a_lane_of_eight_is_a_chiplet() -> None:
    geometry = plan(BIG, "bf16", MI300X)
    assert geometry.lanes_per_device == MI300X.chiplets
    assert geometry.blocks_per_lane == 38


def test_passes_of_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="mma_columns = 2 is for GPUs with warps of 32 threads"):
        plan(BIG, "bf16", MI300X, mma_columns=2)


def test_a_pytorch_for_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match=r"AMD .* cannot be launched yet; use device \"cpu\""):
        describe(torch.device("cuda"))


# ---- machine code ----


def test_both_files_offer_the_same_primitives() -> None:
    def offered(name: str) -> set[str]:
        return set(
            re.findall(r"^DEVICE [\w: ]+?[*&]? ?(\w+\([^)]*\))", (FOLDER / name).read_text(), re.MULTILINE)
        )

    def names(functions: set[str]) -> set[str]:
        return {function.split("(")[0] for function in functions}

    missing = names(offered("primitives.cuh")) - names(offered("primitives_hip.cuh"))
    eight_bits = {
        "byte_perm",
        "low_fp16",
        "high_fp16",
        "fp16_of_fp8",
    }  # `plan` refuses these weights, and columns
    assert missing == {"multiply_tile", *eight_bits}


@compiled
@pytest.mark.parametrize(("devices", "scope"), [(1, "sc1"), (2, "sc0 sc1")])
def test_words_are_whole_and_reach_beyond_the_compute_unit(devices: int, scope: str) -> None:
    """In the scope of the device (sc1), or of the system."""
    code = machine_code(f"#define DEVICES {devices}\n{TOYS}")
    stores = instructions(of_kernel(code, "store"), "global_store")
    assert [re.sub(r"[vs]\[?[\d:]+\]?,? ?", "", store) for store in stores] == [
        f"global_store_dwordx2 {scope}"
    ]
    loads = instructions(of_kernel(code, "load"), "global_load_dwordx2")
    assert [re.search(r"(sc0 )?sc1$", load)[0] for load in loads] == [scope, scope]  # type: ignore[index]


@compiled
def test_a_flag_follows_what_was_written_before_it() -> None:
    code = of_kernel(machine_code(f"#define DEVICES 1\n{TOYS}"), "stop")
    order = [line.split()[0] for line in instructions(code, "global_store|buffer_wbl2|vmcnt")]
    assert order[-3:] == ["buffer_wbl2", "s_waitcnt", "global_store_dword"]
    assert order[0] == "global_store_dword"


@compiled
def test_a_chunk_is_awaited_and_not_those_behind_it() -> None:
    code = of_kernel(machine_code(f"#define DEVICES 1\n{TOYS}"), "copy")
    events = [
        re.sub(r"\s.*\s(?=vmcnt)|\s+v\[.*", " ", line)
        for line in instructions(code, "lds_dword|vmcnt|ds_read")
    ]
    assert [event.split()[0] for event in events[:14]] == 12 * ["global_load_lds_dword"] + [
        "s_waitcnt",
        "ds_read_b128",
    ]
    assert "vmcnt(8)" in events[12]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("version", ["persistent", "graph"])
def test_the_2b_model_compiles_for_an_mi300x(version: str) -> None:
    """One block of 8 wavefronts a compute unit: 256 registers a thread."""
    code = machine_code(source_of(version, plan(BIG, "bf16", MI300X)))
    assert noted(code, "wavefront_size") == [64] * len(KERNELS[version])
    assert max(noted(code, "vgpr_count")) <= 256
    assert max(noted(code, "group_segment_fixed_size")) == 0  # all of it is the launch's
    assert not instructions(code, "flat_|s_swappc")  # pointers of a known kind, and no calls
    assert all(
        re.search(r"s_mov_b32 m0, s", line) for line in instructions(code, r"\bm0\b")
    )  # the copies' alone


@compiled
@pytest.mark.slow
def test_the_layer_loop_on_an_mi300x() -> None:
    geometry = plan(BIG, "bf16", MI300X)
    code = machine_code(source_of("persistent", geometry))
    layer = max(loops(code, 2), key=lambda loop: len(instructions(loop, "load_lds")))
    assert len(instructions(layer, "scratch_")) <= 100  # 85: the heads of a softmax and spilled registers
    per_chunk = geometry.chunk_bytes // 256
    waits = instructions(layer, rf"s_waitcnt vmcnt\({(geometry.chunks - 1) * per_chunk}\)")
    assert len(waits) >= 4  # matrices
    words = instructions(layer, r"global_(load|store)_dwordx2.*\bsc1$")
    assert len(words) > 50
    assert not instructions(layer, r"global_store_dwordx2(?!.*\bsc1$)")  # nothing else is 8 bytes


# ---- the emulator ----


@emulated
@pytest.mark.slow
@pytest.mark.parametrize("name", ["delay 0", "late"])
def test_every_logit_with_warps_of_64(name: str, cuda_builds: Path) -> None:
    check(amd(name, cuda_builds), 11, range(3))


@emulated
@pytest.mark.slow
def test_all_threads_of_64_have_keys(cuda_builds: Path) -> None:
    """16 keys at once for a warp, of which 20 positions fill more than one."""
    check(amd("wide heads", cuda_builds, blocks_per_lane=1, warps=1), 20, range(2))


@emulated
@pytest.mark.slow
def test_the_graph_gives_the_same_bits_with_warps_of_64(cuda_builds: Path) -> None:
    made = []
    for version in ("persistent", "graph"):
        model = amd("delay 0", cuda_builds, version=version)
        model.forget()
        made.append(model.read(text(model, 6), 4))
    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1], made[1][1])
