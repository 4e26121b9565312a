"""Machine code of a cubin, as lists of instructions, read from nvdisasm's text.

The disassembler comes in Triton's wheel. What the gates ask is asked of the listing in its order
(`pending_loads`, `innermost_loops`), not of all its paths.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+) )?([\w.]+) ?(.*?) ?;")
REGISTER = re.compile(r"\b(U?R)(\d+)\b(\.64)?")
DESCRIPTOR = re.compile(r"desc\[UR\d+\]")
LABEL = re.compile(r"`\((.+?)\)")
COPIES = {"UBLKCP", "LDGSTS"}  # from global to shared memory, behind the program's back
SPILLS = {"LDL", "STL"}


@dataclass(frozen=True)
class Instruction:
    """One line of the listing, with the labels in front of it."""

    op: str
    operands: tuple[str, ...]
    labels: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        return self.op.split(".")[0]

    @cached_property
    def bits(self) -> int:
        """Of a memory access, for each thread."""
        return next((int(part) for part in self.op.split(".") if part in ("64", "128", "16")), 32)

    @cached_property
    def registers(self) -> set[str]:
        """Those that are named; of a vector its first one, of a 64-bit address both."""
        text = DESCRIPTOR.sub("", " ".join(self.operands))
        return {
            f"{kind}{int(number) + i}"
            for kind, number, wide in REGISTER.findall(text)
            for i in range(2 if wide else 1)
        }

    @property
    def target(self) -> str:
        """The label that a branch goes to."""
        label = LABEL.search(self.operands[-1]) if self.name == "BRA" else None
        return label[1] if label else ""

    def __str__(self) -> str:
        return f"{self.op} {', '.join(self.operands)}"


def instructions(listing: str) -> list[Instruction]:
    code, labels = list[Instruction](), list[str]()
    for line in listing.splitlines():
        if found := LINE.match(line):
            *_, op, operands = found.groups()
            code.append(Instruction(op, tuple(operands.split(", ")), tuple(labels)))
            labels = []
        elif line[:1] in (".", "$") and line.rstrip().endswith(":"):
            labels.append(line.rstrip()[:-1])
    return code


def innermost_loops(code: list[Instruction], name: str) -> list[list[Instruction]]:
    """The shortest parts from a branch's target to the branch that hold such an instruction."""
    at = {label: i for i, this in enumerate(code) for label in this.labels}
    jumps = [(at[this.target], i) for i, this in enumerate(code) if this.target in at]
    loops = [
        (start, end)
        for start, end in jumps
        if start <= end and any(this.name == name for this in code[start : end + 1])
    ]

    def holds_another(start: int, end: int) -> bool:
        return any((a, b) != (start, end) and start <= a and b <= end for a, b in loops)

    return [code[start : end + 1] for start, end in loops if not holds_another(start, end)]


def pending_loads(code: list[Instruction]) -> list[tuple[Instruction, Instruction]]:
    """(a copy to shared memory, a 16-byte load from there that nothing has waited for when it starts).

    A value is there when an instruction names one of its registers.
    """
    pending: dict[str, Instruction] = {}
    found = []
    for this in code:
        come = {id(load) for register in this.registers if (load := pending.get(register))}
        pending = {register: load for register, load in pending.items() if id(load) not in come}
        if this.name in COPIES:
            found += [(this, load) for load in {id(load): load for load in pending.values()}.values()]
        if this.name == "LDS" and this.bits == 128 and (first := REGISTER.match(this.operands[0])):
            pending |= {f"{first[1]}{int(first[2]) + i}": this for i in range(4)}
    return found


# ---- what the disassemblers say ----


@dataclass(frozen=True)
class Resources:
    registers: int
    stack_bytes: int


def tools() -> Path | None:
    """The folder of nvdisasm and cuobjdump; None where Triton is not installed."""
    try:
        import triton
    except ImportError:
        return None
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return folder if (folder / "nvdisasm").is_file() else None


def run(tool: str, *arguments: str | Path) -> str:
    folder = tools()
    assert folder is not None
    return subprocess.run([folder / tool, *arguments], check=True, capture_output=True, text=True).stdout


def read_kernels(cubin: Path) -> dict[str, list[Instruction]]:
    parts = re.split(r"^\.text\.(\w+):$", run("nvdisasm", "-c", cubin), flags=re.MULTILINE)
    return {name: instructions(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def read_resources(cubin: Path) -> dict[str, Resources]:
    used = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", run("cuobjdump", "-res-usage", cubin))
    return {name: Resources(int(registers), int(stack)) for name, registers, stack in used}
