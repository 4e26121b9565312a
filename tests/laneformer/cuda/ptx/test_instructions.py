"""Instructions of PTX by themselves, from text written here: against numpy, and their misuse."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulator import EmulationError
from tests.laneformer.cuda.ptx.emit import emit
from tests.laneformer.cuda.ptx.executed import build
from tests.laneformer.cuda.ptx.operations import OPERATIONS
from tests.laneformer.cuda.ptx.parse import UnknownPtx, parse

pytestmark = pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
HEAD = ".version 8.3\n.target sm_90a\n.address_size 64\n.extern .shared .align 128 .b8 shared[];\n"
KERNEL = """
.visible .entry {name}(.param .align 8 .b8 {name}_param_0[24])
{{
  .reg .pred %p<4>; .reg .b16 %h<4>; .reg .b32 %r<24>; .reg .f32 %f<12>; .reg .b64 %rd<12>;
  ld.param.u64 %rd0, [{name}_param_0];
  ld.param.u64 %rd1, [{name}_param_0+8];
  ld.param.u32 %r0, [{name}_param_0+16];
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, shared;
{body}
  ret;
}}
"""
STORE = """
  mul.wide.u32 %rd8, %r1, 4;
  add.s64 %rd8, %rd1, %rd8;
  st.global.u32 [%rd8], {};
"""
MMA = """
  mul.wide.u32 %rd2, %r1, 40; add.s64 %rd2, %rd0, %rd2;
  ld.global.v2.u32 {{%r4, %r5}}, [%rd2];
  ld.global.v2.u32 {{%r6, %r7}}, [%rd2+8];
  ld.global.v2.u32 {{%r8, %r9}}, [%rd2+16];
  ld.global.v2.f32 {{%f0, %f1}}, [%rd2+24];
  ld.global.v2.f32 {{%f2, %f3}}, [%rd2+32];
  mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32
    {{%f0, %f1, %f2, %f3}}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, {{%f0, %f1, %f2, %f3}};
  mul.wide.u32 %rd3, %r1, 16; add.s64 %rd3, %rd1, %rd3;
  st.global.v4.f32 [%rd3], {{%f0, %f1, %f2, %f3}};
"""
WARP_COPY = """
  setp.ne.s32 %p0, %r1, 0;
  @%p0 bra $made_{name};
  mbarrier.init.shared::cta.b64 [%r2], {arrivals};
$made_{name}:
  bar.warp.sync -1;
  shl.b32 %r3, %r1, 4;
  cvt.u64.u32 %rd2, %r3; add.s64 %rd2, %rd0, %rd2;
  add.s32 %r4, %r2, %r3; add.s32 %r4, %r4, 128;
  cp.async.cg.shared.global [%r4], [%rd2], 16;
  {arrive}
$wait_{name}:
  mbarrier.test_wait.parity.shared.b64 %p1, [%r2], {parity};
  @!%p1 bra $wait_{name};
  ld.shared.u32 %r5, [%r4+4];
"""
BULK = """
  setp.ne.s32 %p0, %r1, 0;
  @%p0 bra $made_{name};
  mbarrier.init.shared::cta.b64 [%r2], 1;
  {fence}
$made_{name}:
  bar.warp.sync -1;
  elect.sync _|%p1, -1;
  @!%p1 bra $sent_{name};
  createpolicy.fractional.L2::evict_first.b64 %rd3, 1.0;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r2], {bytes};
  add.s32 %r4, %r2, 128;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%r4], [%rd0], 512, [%r2], %rd3;
$sent_{name}:
  mbarrier.try_wait.parity.shared::cta.b64 %p2, [%r2], 0;
  @!%p2 bra $sent_{name};
  shl.b32 %r3, %r1, 4; add.s32 %r3, %r2, %r3;
  ld.shared.u32 %r5, [%r3+132];
"""
NOINC, FENCE = "cp.async.mbarrier.arrive.noinc.shared.b64 [%r2];", "fence.mbarrier_init.release.cluster;"
COPIES = {  # name: body; each thread's result is the second number of its 16 bytes
    "async": (WARP_COPY, {"arrivals": 32, "arrive": NOINC, "parity": 0}),
    "async_other_parity": (WARP_COPY, {"arrivals": 32, "arrive": NOINC, "parity": 1}),
    "async_too_few": (WARP_COPY, {"arrivals": 31, "arrive": NOINC, "parity": 0}),
    "async_with_inc": (WARP_COPY, {"arrivals": 32, "arrive": NOINC.replace(".noinc", ""), "parity": 0}),
    "async_unawaited": (WARP_COPY, {"arrivals": 32, "arrive": "mbarrier.arrive.shared.b64 _, [%r2];", "parity": 0}),
    "bulk": (BULK, {"fence": FENCE, "bytes": 512}),
    "bulk_without_fence": (BULK, {"fence": "", "bytes": 512}),
    "bulk_of_fewer_bytes": (BULK, {"fence": FENCE, "bytes": 496}),
}  # fmt: skip
MISUSES = {
    "outside": ("add.s32 %r3, %r2, 4096; ld.shared.u32 %r4, [%r3];", r"line \d+: 4 bytes at 0x1400, outside of the"),
    "unaligned": ("ld.global.v2.u32 {%r3, %r4}, [%rd0+4];", r"8 bytes at 0x[0-9a-f]+, which is no multiple of that"),
    "null": ("mov.u64 %rd2, 0; st.u32 [%rd2], %r1;", "which is no memory"),
    "other_line": ("setp.lt.s32 %p0, %r1, 16; @%p0 bra $other; bar.sync 0; bra $end;\n"
                   "$other: bar.sync 0;\n$end:\n", r"diverged: line \d+, lanes [0-9a-f]+ wait at line \d+"),
    "half_a_warp": ("bar.warp.sync 65535;", "members 0000ffff; only whole warps"),
}  # fmt: skip


class Arguments(ctypes.Structure):
    _fields_ = [("given", ctypes.c_void_p), ("out", ctypes.c_void_p), ("count", ctypes.c_int)]


def of_table() -> dict[str, str]:
    """One thread an operand: what C++ would leave undefined, or rounds otherwise."""
    load = "mul.wide.u32 %rd2, %r1, 8; add.s64 %rd2, %rd0, %rd2; ld.global.v2.u32 {%r3, %r4}, [%rd2];\n"
    floats = "mov.b32 %f0, %r3; mov.b32 %f1, %r4;\n"
    return {
        "shl": load + "shl.b32 %r5, %r3, %r4;" + STORE.format("%r5"),
        "sar": load + "shr.s32 %r5, %r3, %r4;" + STORE.format("%r5"),
        "high": load + "mul.hi.s32 %r5, %r3, %r4;" + STORE.format("%r5"),
        "prmt": load + "prmt.b32 %r5, %r3, 0x4b000000, %r4;" + STORE.format("%r5"),
        "down": load + floats + "fma.rm.f32 %f2, %f0, %f1, 0f4B400001; mov.b32 %r5, %f2;" + STORE.format("%r5"),
        "bf16": load + floats + "cvt.rn.bf16x2.f32 %r5, %f0, %f1;" + STORE.format("%r5"),
        "f16": load + floats + "cvt.rn.f16x2.f32 %r5, %f0, %f1;" + STORE.format("%r5"),
        "unordered": load + floats + "setp.geu.f32 %p0, %f0, %f1; selp.u32 %r5, 1, 0, %p0;" + STORE.format("%r5"),
        "halves": load + "mov.b32 {%h0, %h1}, %r3; mov.b32 %r5, {%h1, %h0};" + STORE.format("%r5"),
        "shuffled": load + "shfl.sync.bfly.b32 %r5|%p0, %r3, 5, 31, -1;" + STORE.format("%r5"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def library(cuda_builds: Path) -> ctypes.CDLL:
    bodies = {**of_table(), **{f"mma_{kind}": MMA.format(type=kind) for kind in ("bf16", "f16")}}
    bodies |= {
        name: body.format(name=name, **given) + STORE.format("%r5") for name, (body, given) in COPIES.items()
    }
    bodies |= {name: body for name, (body, _) in MISUSES.items()}
    return build(
        HEAD + "".join(KERNEL.format(name=name, body=body) for name, body in bodies.items()), cuda_builds
    )


def run(library: ctypes.CDLL, kernel: str, given: np.ndarray, count: int = 32, seed: int = 0) -> np.ndarray:
    space, out = np.zeros(given.nbytes + 128, np.uint8), np.zeros(count, np.uint32)
    aligned = space[-space.ctypes.data % 16 :][: given.nbytes]
    aligned[:] = np.ascontiguousarray(given).view(np.uint8).reshape(-1)
    argument = Arguments(aligned.ctypes.data, out.ctypes.data, count)
    emulator.launch(library, kernel, argument, blocks=1, threads=32, shared_bytes=1024, seed=seed)
    return out


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_a_product_of_tiles_is_numpys(library: ctypes.CDLL, kind: str) -> None:
    """Registers dealt out as the PTX ISA has them (mma.m16n8k16, 16-bit)."""
    generator = torch.Generator().manual_seed(3)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((16, 16), (16, 8)))
    c = torch.randn(16, 8, generator=generator)
    given = np.zeros((32, 10), np.uint32)
    bits = {
        "a": a.view(torch.int16).numpy().view(np.uint16),
        "b": b.view(torch.int16).numpy().view(np.uint16),
    }
    for lane in range(32):
        group, member = lane // 4, lane % 4
        for i in range(8):  # a0 .. a7: row group, + 8 for a2, a3, a6, a7; column + 8 from a4 on
            row, column = group + 8 * (i % 4 >= 2), 2 * member + i % 2 + 8 * (i >= 4)
            given[lane, i // 2] |= np.uint32(bits["a"][row, column]) << np.uint32(16 * (i % 2))
        for i in range(4):  # b0 .. b3: row + 8 from b2 on
            row = 2 * member + i % 2 + 8 * (i >= 2)
            given[lane, 4 + i // 2] |= np.uint32(bits["b"][row, group]) << np.uint32(16 * (i % 2))
        given[lane, 6:].view(np.float32)[:] = [c[group + 8 * (i >= 2), 2 * member + i % 2] for i in range(4)]
    out = run(library, f"mma_{kind}", given, 128).view(np.float32).reshape(32, 4)
    exact = a.double().numpy() @ b.double().numpy() + c.double().numpy()
    terms = np.abs(a.double().numpy()) @ np.abs(b.double().numpy()) + np.abs(c.double().numpy())
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4 + 8 * (i >= 2), 2 * (lane % 4) + i % 2
            assert abs(out[lane, i] - exact[row, column]) <= 17 * 2.0**-24 * terms[row, column]


def pairs(seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).integers(0, 2**32, (32, 2), dtype=np.uint32)
    drawn[:, 1] %= 80  # as amounts to shift by: more than a register has
    return drawn


def test_integers(library: ctypes.CDLL) -> None:
    given = pairs()
    value, amount = given[:, 0].astype(np.int64), given[:, 1].astype(np.int64)
    signed = given[:, 0].view(np.int32).astype(np.int64)
    shifted = np.where(amount < 32, value << np.minimum(amount, 31), 0) & 0xFFFFFFFF
    np.testing.assert_array_equal(run(library, "shl", given), shifted)
    np.testing.assert_array_equal(run(library, "sar", given), (signed >> np.minimum(amount, 31)) & 0xFFFFFFFF)
    np.testing.assert_array_equal(run(library, "high", given), (signed * amount >> 32) & 0xFFFFFFFF)
    np.testing.assert_array_equal(run(library, "halves", given), (value >> 16 | value << 16) & 0xFFFFFFFF)
    np.testing.assert_array_equal(run(library, "shuffled", given), given[np.arange(32) ^ 5, 0])
    given[:, 1] = 0x7540 | np.arange(32) % 4
    picked = 0x4B000000 | value >> 8 * (np.arange(32) % 4) & 0xFF
    np.testing.assert_array_equal(run(library, "prmt", given), picked)


def test_floats(library: ctypes.CDLL) -> None:
    x = np.random.default_rng(1).normal(0, 300, (32, 2)).astype(np.float32)
    x[0], x[1] = (np.nan, 1), (-0.0, 0.0)
    down = run(library, "down", x).view(np.float32)
    for (a, b), made in zip(x[1:], down[1:], strict=True):  # at 2^23 and above: whole numbers
        assert made == np.floor(float(a) * float(b) + 12582913.0) or made < 2**23
    tensors = torch.from_numpy(x[1:])
    for name, dtype in (("bf16", torch.bfloat16), ("f16", torch.float16)):
        halves = tensors.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
        np.testing.assert_array_equal(run(library, name, x)[1:], halves[:, 0] << 16 | halves[:, 1])
    np.testing.assert_array_equal(run(library, "unordered", x)[1:], (x[1:, 0] >= x[1:, 1]).astype(np.uint32))
    assert run(library, "unordered", x)[0] == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("async", ""), ("bulk", ""),
        ("async_other_parity", "numbers|deadlock|nobody has waited"),
        ("async_too_few", "more arrivals|numbers|nobody has waited|in the midst"),
        ("async_with_inc", "deadlock"), ("async_unawaited", "has ended, and nobody can wait for its cp.async"),
        ("bulk_without_fence", "no fence has made known"), ("bulk_of_fewer_bytes", "deadlock"),
    ],
)  # fmt: skip
def test_copies(library: ctypes.CDLL, name: str, said: str) -> None:
    given = np.arange(128, dtype=np.uint32)
    for seed in range(10):
        try:
            found = (
                ""
                if np.array_equal(run(library, name, given, seed=seed), 4 * np.arange(32) + 1)
                else "numbers"
            )
        except EmulationError as error:
            found = str(error)
        assert bool(found) == bool(said), f"{name}, seed {seed}: {found}"
        assert re.search(said, found), f"{name}, seed {seed}: {found}"


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_with_its_line(library: ctypes.CDLL, name: str) -> None:
    with pytest.raises(EmulationError, match=MISUSES[name][1]):
        run(library, name, np.zeros(64, np.uint32))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("  bar.arrive 0, 64;", r"line \d+: bar.arrive 0, 64 is in no table"),
        ("  add.s32 %r99, %r1, 1;", "%r99 is no register"),
        ("  ld.param.u64 %rd2, [odd_param_0+20];", "outside of the 24 bytes of odd_param_0"),
        ("  .local .b8 depot[8];", "variables in .local of a function"),
    ],
)
def test_what_is_unknown_is_named(body: str, message: str) -> None:
    with pytest.raises(UnknownPtx, match=message):
        emit(parse(HEAD + KERNEL.format(name="odd", body=body)))


def test_the_table_has_only_types_that_are_there() -> None:
    kinds: set[Any] = {
        kind for operation in OPERATIONS.values() for kind in (operation.result, *operation.operands)
    }
    assert kinds <= {"pred", "f32", *(f"{sign}{size}" for sign in "su" for size in (16, 32, 64))}
