"""A cubin's machine code as lists of instructions, read from nvdisasm's output."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([\w.]+) ?(.*?) ?;")
REGISTER = re.compile(r"\b(U?R)(\d+)\b(\.64)?")
DESCRIPTOR = re.compile(r"desc\[UR\d+\]")
COPIES = {"UBLKCP", "LDGSTS"}  # from global to shared memory, behind the program's back


@dataclass(frozen=True)
class Instruction:
    """One line of the listing."""

    op: str
    operands: str

    @property
    def name(self) -> str:
        return self.op.split(".")[0]

    @property
    def bits(self) -> int:
        """The width of a memory access per thread."""
        return next((int(part) for part in self.op.split(".") if part in ("64", "128", "16")), 32)

    @cached_property
    def registers(self) -> set[str]:
        """The registers named: of a vector the first, of a 64-bit address both."""
        return {
            f"{kind}{int(number) + i}"
            for kind, number, wide in REGISTER.findall(DESCRIPTOR.sub("", self.operands))
            for i in range(2 if wide else 1)
        }

    def __str__(self) -> str:
        return f"{self.op} {self.operands}"


def instructions(listing: str) -> list[Instruction]:
    return [
        Instruction(*match.groups()) for match in map(LINE.match, listing.splitlines()) if match
    ]


def pending_loads(code) -> list[tuple[Instruction, Instruction]]:
    """Return pairs of a copy to shared memory and a 16-byte shared load that is pending at its start."""
    # a load is complete once an instruction names one of its registers
    pending: dict[str, Instruction] = {}
    pairs = []
    for instruction in code:
        arrived = {id(pending[register]) for register in instruction.registers & pending.keys()}
        pending = {register: load for register, load in pending.items() if id(load) not in arrived}
        if instruction.name in COPIES:
            pairs += [
                (instruction, load)
                for load in {id(load): load for load in pending.values()}.values()
            ]
        if (
            instruction.name == "LDS"
            and instruction.bits == 128
            and (first := REGISTER.match(instruction.operands))
        ):
            pending |= {f"{first[1]}{int(first[2]) + i}": instruction for i in range(4)}
    return pairs


@dataclass(frozen=True)
class Kernel:
    code: list[Instruction]
    registers: int
    stack_bytes: int


def tools() -> Path | None:
    """Return the folder of nvdisasm and cuobjdump, which come with Triton's wheel, or None."""
    try:
        import triton
    except ImportError:
        return None
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    return folder if (folder / "nvdisasm").is_file() else None


def run(tool: str, *arguments: str | Path) -> str:
    folder = tools()
    return subprocess.run(
        [folder / tool, *arguments], check=True, capture_output=True, text=True
    ).stdout


def read_kernels(cubin) -> dict[str, Kernel]:
    parts = re.split(r"^\.text\.(\w+):$", run("nvdisasm", "-c", cubin), flags=re.MULTILINE)
    listings = dict(zip(parts[1::2], parts[2::2], strict=True))
    usages = re.findall(
        r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", run("cuobjdump", "-res-usage", cubin)
    )
    return {
        name: Kernel(instructions(listings[name]), int(registers), int(stack))
        for name, registers, stack in usages
    }
