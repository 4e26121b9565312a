"""The reader of machine code on small made-up listings: what it sees, and what it must not overlook."""

from __future__ import annotations

from tests.laneformer.cuda.sass import Instruction, innermost_loops, instructions, pending_loads


def listing(*lines: str) -> list[Instruction]:
    """Instructions, and labels ("L:"), as nvdisasm writes them."""
    text = [f".L_x_{line}" if line.endswith(":") else f"        /*0010*/   {line} ;" for line in lines]
    return instructions("\n".join(line.replace("`(", "`(.L_x_") for line in text))


def test_an_instruction() -> None:
    (load,) = listing("@!P1 LDG.E.64.STRONG.GPU R4, desc[UR6][R2.64+0x10]")
    assert (load.name, load.bits, load.registers) == ("LDG", 64, {"R4", "R2", "R3"})
    (sum_of_two,) = listing("IADD3 R5, P0, R4, UR4, RZ")
    assert (sum_of_two.bits, sum_of_two.registers) == (32, {"R5", "R4", "UR4"})


def test_the_innermost_loops_around_an_instruction() -> None:
    code = listing(
        "0:", "NOP", "1:", "HMMA R4, R8", "STL [R1], R4", "@P0 BRA `(1)", "2:", "FADD R1, R1, R2", "@P1 BRA `(2)",
        "@P2 BRA `(0)", "@P3 BRA `(3)", "HMMA R4, R8", "3:", "EXIT",
    )  # fmt: skip
    (loop,) = innermost_loops(code, "HMMA")
    assert [this.name for this in loop] == ["HMMA", "STL", "BRA"]


def test_loads_that_a_copy_overtakes() -> None:
    code = listing(
        "LDS.128 R4, [R0]", "LDS.128 R8, [R0+0x10]", "FADD R1, R5, R1", "UBLKCP.S.G [UR4], [UR6], UR8", "EXIT"
    )
    assert [(copy.name, str(load)) for copy, load in pending_loads(code)] == [
        ("UBLKCP", "LDS.128 R8, [R0+0x10]")
    ]
    code = listing("LDS R9, [R0]", "LDS.128 R4, [R0]", "MOV R7, RZ", "LDGSTS.E.BYPASS.128 [R0], [R2.64]")
    assert pending_loads(code) == []  # its register is written again: the load has come
