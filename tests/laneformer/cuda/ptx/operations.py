"""What each PTX instruction computes from registers alone, as C++ (PTX ISA 8.x, "Instruction Set").

An operation is the types of its result and of its operands a, b, c, d, and an expression of these. Integers are added
and multiplied as unsigned numbers, which wrap. Functions that are not C++'s stand in ptx.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

SIGNED, UNSIGNED = ("s16", "s32", "s64"), ("u16", "u32", "u64")
BITS = ("b16", "b32", "b64")
ORDER = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@dataclass(frozen=True)
class Operation:
    result: str  # a type's name, or pred
    operands: tuple[str, ...]
    expression: str


def _unsigned(kind: str) -> str:
    return "u" + kind[1:]


def _double(kind: str) -> str:
    return kind[0] + str(2 * int(kind[1:]))


def _integers() -> Iterator[tuple[str, Operation]]:
    for kind in (*SIGNED, *UNSIGNED):
        plain, size = _unsigned(kind), int(kind[1:])
        for name, expression in (("add", "a + b"), ("sub", "a - b"), ("mul.lo", "a * b")):
            yield f"{name}.{kind}", Operation(plain, (plain, plain), expression)
        yield f"mad.lo.{kind}", Operation(plain, (plain,) * 3, "a * b + c")
        for name in ("div", "rem"):
            yield f"{name}.{kind}", Operation(kind, (kind, kind), f"{name}_of(a, b)")
        for name, sign in (("min", "<"), ("max", ">")):
            yield f"{name}.{kind}", Operation(kind, (kind, kind), f"a {sign} b ? a : b")
        yield f"shr.{kind}", Operation(kind, (kind, "u32"), f"a >> (b < {size} ? b : {size - 1})" if kind[0] == "s"
                                       else f"b < {size} ? a >> b : 0")  # fmt: skip
        yield f"neg.{kind}", Operation(plain, (plain,), "0 - a")
        if size < 64:
            wide = _double(kind)
            sum_of = f"{_unsigned(wide)}({wide}(a) * b) + c"
            yield f"mul.wide.{kind}", Operation(wide, (kind, kind), f"{wide}(a) * b")
            yield f"mul.hi.{kind}", Operation(kind, (kind, kind), f"({wide}(a) * b) >> {size}")
            yield (
                f"mad.wide.{kind}",
                Operation(_unsigned(wide), (kind, kind, wide), sum_of),
            )


def _bits() -> Iterator[tuple[str, Operation]]:
    for kind in BITS:
        plain, size = _unsigned(kind), int(kind[1:])
        for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
            yield f"{name}.{kind}", Operation(plain, (plain, plain), f"a {sign} b")
        yield f"not.{kind}", Operation(plain, (plain,), "~a")
        yield f"shl.{kind}", Operation(plain, (plain, "u32"), f"b < {size} ? a << b : 0")
        yield f"shr.{kind}", Operation(plain, (plain, "u32"), f"b < {size} ? a >> b : 0")
        yield f"bfi.{kind}", Operation(plain, (plain, plain, "u32", "u32"), "insert_bits(a, b, c, d)")
    for name, sign in (("and", "&"), ("or", "|"), ("xor", "^")):
        yield f"{name}.pred", Operation("pred", ("pred", "pred"), f"a {sign} b")
    yield "not.pred", Operation("pred", ("pred",), "!a")
    yield "prmt.b32", Operation("u32", ("u32", "u32", "u32"), "byte_perm(a, b, c)")


def _floats() -> Iterator[tuple[str, Operation]]:
    """float32, with rounding to nearest where the name does not say otherwise."""
    f, one, two = "f32", ("f32",), ("f32", "f32")
    for name, sign in (("add", "+"), ("sub", "-"), ("mul", "*")):
        yield f"{name}.rn.f32", Operation(f, two, f"a {sign} b")
        yield f"{name}.f32", Operation(f, two, f"a {sign} b")
    yield "div.rn.f32", Operation(f, two, "a / b")
    yield "sqrt.rn.f32", Operation(f, one, "sqrtf(a)")
    yield "fma.rn.f32", Operation(f, ("f32",) * 3, "fmaf(a, b, c)")
    yield "fma.rm.f32", Operation(f, ("f32",) * 3, "fma_down(a, b, c)")
    yield "neg.f32", Operation(f, one, "-a")
    yield "abs.f32", Operation(f, one, "fabsf(a)")
    yield "max.f32", Operation(f, two, "maximum(a, b)")
    yield "min.f32", Operation(f, two, "-maximum(-a, -b)")
    yield "rsqrt.approx.f32", Operation(f, one, "float(1 / sqrt(double(a)))")
    yield "rcp.rn.f32", Operation(f, one, "1 / a")
    yield "ex2.approx.ftz.f32", Operation(f, one, "flushed(float(exp2(double(flushed(a)))))")
    yield "lg2.approx.ftz.f32", Operation(f, one, "float(log2(double(flushed(a))))")


def _comparisons() -> Iterator[tuple[str, Operation]]:
    for kind in (*SIGNED, *UNSIGNED, *BITS):
        plain = _unsigned(kind) if kind[0] == "b" else kind
        for name, sign in ORDER.items():
            yield f"setp.{name}.{kind}", Operation("pred", (plain, plain), f"a {sign} b")
    two = ("f32", "f32")
    for name, sign in ORDER.items():
        unordered = "a != a || b != b"
        holds = f"a {sign} b" if name != "ne" else f"a != b && !({unordered})"
        yield f"setp.{name}.f32", Operation("pred", two, holds)
        yield f"setp.{name}u.f32", Operation("pred", two, f"a {sign} b || {unordered}")
    for kind in (*SIGNED, *UNSIGNED, *BITS, "f32"):
        plain = kind if kind == "f32" else _unsigned(kind)
        yield f"selp.{kind}", Operation(plain, (plain, plain, "pred"), "c ? a : b")


def _conversions() -> Iterator[tuple[str, Operation]]:
    for to in (*SIGNED, *UNSIGNED):
        for of in (*SIGNED, *UNSIGNED):
            yield f"cvt.{to}.{of}", Operation(to, (of,), f"{to}(a)")
    for of in ("s32", "u32", "s64", "u64"):
        yield f"cvt.rn.f32.{of}", Operation("f32", (of,), "float(a)")
    yield "cvt.sat.f32.f32", Operation("f32", ("f32",), "a > 0 ? a < 1 ? a : 1 : 0")  # no number: 0
    yield "cvt.f32.f16", Operation("f32", ("u16",), "float_of_fp16(a)")
    yield "cvt.f32.bf16", Operation("f32", ("u16",), "float_of(uint32_t(a) << 16)")
    # the first operand becomes the high half
    yield "cvt.rn.bf16x2.f32", Operation("u32", ("f32", "f32"), "bf16_of(a) << 16 | bf16_of(b)")
    yield "cvt.rn.f16x2.f32", Operation("u32", ("f32", "f32"), "fp16_of(a) << 16 | fp16_of(b)")


OPERATIONS: dict[str, Operation] = dict(
    entry for part in (_integers, _bits, _floats, _comparisons, _conversions) for entry in part()
)

# What a thread does with its warp, its barriers and the copy engine: a call, given the operands as they stand:
# {0}, {1}.. are values of the types named here ("=" a result), {line} the line of the PTX.
CALLS: dict[str, tuple[tuple[str, ...], str]] = {
    "ret": ((), "return"),
    # generic addresses, and those of global memory, are the host's
    "cvta.to.global.u64": (("=u64", "u64"), "{0} = {1}"),
    "cvta.to.shared.u64": (("=u64", "u64"), "{0} = shared_of_generic({1})"),
    "cvta.shared.u64": (("=u64", "u64"), "{0} = generic_of_shared({1})"),
    "bar.sync": (("u32",), "sync_block({0}, {line})"),
    "bar.warp.sync": (("u32",), "sync_warp({0})"),
    "shfl.sync.bfly.b32": (("=u32|pred", "u32", "u32", "u32", "u32"), "shuffle_xor({0}, {1}, {2}, {3}, {4})"),
    "elect.sync": (("=u32|pred", "u32"), "elect({0}, {1})"),
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": (
        ("=4f32", "4u32", "2u32", "4f32"), "{0} = multiply<true>({line}, {1}, {2}, {3})",
    ),
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": (
        ("=4f32", "4u32", "2u32", "4f32"), "{0} = multiply<false>({line}, {1}, {2}, {3})",
    ),
    "mbarrier.init.shared::cta.b64": (("u32", "u32"), "init_barrier({0}, {1})"),
    "mbarrier.test_wait.parity.shared.b64": (("=pred", "u32", "u32"), "{0} = wait_parity({1}, {2})"),
    "mbarrier.try_wait.parity.shared::cta.b64": (("=pred", "u32", "u32"), "{0} = wait_parity({1}, {2})"),
    "mbarrier.arrive.shared.b64": (("_", "u32"), "arrive({1})"),
    "mbarrier.arrive.expect_tx.shared::cta.b64": (("_", "u32", "u32"), "arrive_expecting({1}, {2})"),
    "fence.mbarrier_init.release.cluster": ((), "fence_barriers()"),
    "cp.async.cg.shared.global": (("u32", "u64", "u32"), "copy_async({0}, {1}, {2})"),
    "cp.async.mbarrier.arrive.noinc.shared.b64": (("u32",), "arrive_after_copies({0}, 0)"),
    "cp.async.mbarrier.arrive.shared.b64": (("u32",), "arrive_after_copies({0}, 1)"),
    "createpolicy.fractional.L2::evict_first.b64": (("=u64", "f32"), "{0} = kEvictFirst"),
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint": (
        ("u32", "u64", "u32", "u32", "u64"), "copy_bulk({0}, {1}, {2}, {3}, {4})",
    ),
    "cp.async.bulk.prefetch.L2.global": (("u64", "u32"), "prefetch_bulk({0}, {1})"),
    "prefetch.global.L2": (("u64",), "prefetch_line({0})"),
    # kernels are launched one after the other: what would overlap does not
    "griddepcontrol.wait": ((), "previous_is_done()"),
    "griddepcontrol.launch_dependents": ((), "next_may_start()"),
    "atom.cas.b32": (("=u32", "u64", "u32", "u32"), "{0} = compare_and_swap({1}, {2}, {3})"),
}  # fmt: skip
