"""The reader of machine code on small made-up listings: what it sees, and what it must not overlook."""

from __future__ import annotations

import pytest

from tests.laneformer.cuda.sass import Kernel, Pointers, components, pending_loads


def kernel(*lines: str) -> Kernel:
    """Instructions, and labels ("L:"), which are addressed as nvdisasm does."""
    code = (
        f".L_x_{x}" if x.endswith(":") else f"        /*{n * 16:04x}*/   {x} ;" for n, x in enumerate(lines)
    )
    return Kernel("\n".join(x.replace("`(", "`(.L_x_") for x in code))


def names(k: Kernel, of: set[int]) -> list[str]:
    return [str(k.code[i]).split(" ", 1)[1] for i in sorted(of)]


def test_an_instruction() -> None:
    this = kernel("@!P1 LDG.E.64.STRONG.GPU R4, desc[UR6][R2.64+0x10]").code[0]
    assert (this.guard, this.name, this.bits) == ("!P1", "LDG", 64)
    assert (this.written, this.read) == (("R4", "R5"), ("R2", "R3"))
    assert kernel("LDS.128 R8, [R7+UR4]").code[0].written == ("R8", "R9", "R10", "R11")
    assert kernel("IADD3 R5, P0, R4, UR4, RZ").code[0].read == ("R4", "UR4")
    assert kernel("SHFL.BFLY PT, R4, R5, 0x10, 0x1f").code[0].written == ("R4",)
    assert kernel("ISETP.GE.AND P0, PT, R1, R2, PT").code[0].written == ()
    assert kernel("STG.E.64 desc[UR6][R2.64], R4").code[0].written == ()
    assert kernel("IMAD.WIDE R2, R0, 0x8, R6").code[0].written == ("R2", "R3")
    with pytest.raises(ValueError, match="does not know where this goes"):
        kernel("BRX R2 -0x10", "EXIT").graph  # noqa: B018
    switch = kernel('BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_1,.L_x_0"*)', "0:", "NOP", "NOP", "1:", "EXIT")
    assert switch.graph[0] == [3, 1]


def test_the_layer_loop_is_the_loop_in_the_loop_over_tokens() -> None:
    """With its out-of-line part, and without the code around it; a smaller loop in it belongs to it."""
    k = kernel(
        "S2R R0, SR_TID.X", "0:", "LDG.E R1, [R2.64]", "1:", "FADD R3, R3, R1", "2:", "@P0 BRA `(2)",
        "BRA.DIV UR4, `(8)", "7:", "@P1 BRA `(1)", "STG.E [R4.64], R3", "3:", "@P3 BRA `(3)", "@P2 BRA `(0)", "EXIT",
        "8:", "SHFL.IDX PT, R3, R3, R5, 0x1f", "BRA `(7)",
    )  # fmt: skip
    assert names(k, k.layer_loop) == [
        "FADD R3, R3, R1", "@P0 BRA `(.L_x_2)", "BRA.DIV UR4, `(.L_x_8)", "@P1 BRA `(.L_x_1)",
        "SHFL.IDX PT, R3, R3, R5, 0x1f", "BRA `(.L_x_7)",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no loop inside a loop"):
        kernel("NOP", "0:", "NOP", "@P0 BRA `(0)", "EXIT").layer_loop  # noqa: B018


def test_components() -> None:
    assert components([[1], [2], [1, 3], [4], [5], [3]], set(range(6))) in (
        [{1, 2}, {3, 4, 5}],
        [{3, 4, 5}, {1, 2}],
    )
    assert components([[1], [0]], {1}) == []
    long = [[i + 1] for i in range(20000)] + [[0]]
    assert components(long, set(range(20001))) == [set(range(20001))]


FIELDS = {"kv": (0, 8), "words": (8, 8), "inbox": (16, 32)}


def pointed(k: Kernel) -> list[list[str]]:
    """The pointers of each access of global memory, in order."""
    of = Pointers(k, FIELDS, 0x210, "inbox")
    return [sorted(of.of(i)) for i, this in enumerate(k.code) if this.name in ("LDG", "STG", "LD", "ST")]


def test_pointers_through_arithmetic() -> None:
    k = kernel(
        "ULDC.64 UR4, c[0x0][0x218]", "LEA R2, P0, R9, UR4, 0x3", "LEA.HI.X R3, R9, UR5, R10, 0x3, P0",
        "STG.E.64 desc[UR8][R2.64], R6", "LDC.64 R4, c[0x0][R11+0x220]", "IMAD.WIDE R4, R0, 0x8, R4",
        "LDG.E R4, desc[UR8][R4.64+0x8]", "LDG.E R4, desc[UR8][R4.64]", "MOV R2, c[0x0][0x210]",
        "LDG.E R1, [R2.64]", "EXIT",
    )  # fmt: skip
    assert pointed(k) == [["words"], ["inbox"], [], ["kv"]]


def test_pointers_over_the_stack_and_paths() -> None:
    """What may come on either path is there; what is overwritten is gone, unless under a condition."""
    k = kernel(
        "LDC.64 R2, c[0x0][0x218]", "STL.64 [R1+0x10], R2", "@P0 BRA `(1)", "LDC.64 R4, c[0x0][0x210]", "BRA `(2)",
        "1:", "LDL.64 R4, [R1+0x10]", "2:", "LDG.E R6, [R4.64]", "MOV R4, RZ", "LDG.E R6, [R4.64]",
        "@P1 LDL R4, [R1+0x10]", "LDG.E R6, [R4.64]", "EXIT",
    )  # fmt: skip
    assert pointed(k) == [["kv", "words"], [], ["words"]]


def test_pointers_in_a_callee_and_around_a_loop() -> None:
    text = "\n".join(
        f"        /*{n * 16:04x}*/   {x} ;" if not x.endswith(":") else x
        for n, x in enumerate(
            ["LDC.64 R4, c[0x0][0x210]", ".L_x_0:", "LDG.E R9, [R8.64]", "MOV R8, R4", "CALL.REL.NOINC `($f)",
             "@P0 BRA `(.L_x_0)", "EXIT", "$f:", "ST.E [R4.64], R9", "RET.REL.NODEC R20 `(decode)"]
        )
    )  # fmt: skip
    k = Kernel(text)
    assert pointed(k) == [["kv"], ["kv"]]
    assert [k.function(i) for i in (0, len(k.code) - 1)] == ["", "$f"]


def test_loads_that_a_copy_overtakes() -> None:
    k = kernel(
        "0:", "LDS.128 R4, [R0]", "LDS.128 R8, [R0+0x10]", "FADD R1, R5, R1", "@P1 BRA `(1)", "FADD R1, R11, R1", "1:",
        "UBLKCP.S.G [UR4], [UR6], UR8", "@P0 BRA `(0)", "EXIT",
    )  # fmt: skip
    ((copy, loads),) = pending_loads(k).items()
    assert (k.code[copy].name, names(k, loads)) == ("UBLKCP", ["LDS.128 R8, [R0+0x10]"])
    k = kernel("LDS R9, [R0]", "LDS.128 R4, [R0]", "MOV R7, RZ", "LDGSTS.E.BYPASS.128 [R0], [R2.64]", "EXIT")
    assert list(pending_loads(k).values()) == [set()]  # the register is written again: the load has come
