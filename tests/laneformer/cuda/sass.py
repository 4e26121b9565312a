"""Machine code of a cubin as a control-flow graph: a reader of nvdisasm's text, as far as the gates need it.

The disassemblers come in Triton's wheel. What a register holds is not known but to this extent: from which
pointer of the kernel's parameters its value was computed (`Pointers`), and whether it is still being loaded
from shared memory (`pending_loads`). Both are data flows over all paths, callees included: what may hold on
any path is said to hold.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

LINE = re.compile(r"\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+) )?([\w.]+) ?(.*?) ?;")
REGISTER = re.compile(r"\b(U?R)(\d+)\b(\.64)?")
DESCRIPTOR = re.compile(r"desc\[UR\d+\]")
CONSTANT = re.compile(r"c\[0x0\]\[(U?R\d+)?\+?-?(0x[0-9a-f]+)?\]")
LABEL = re.compile(r"`\((.+?)\)")
TARGETS = re.compile(r"BRANCH_TARGETS (\S+?)\"")
NO_RESULT = {
    "ST", "STG", "STS", "STL", "RED", "BRA", "BRX", "BSSY", "BSYNC", "BREAK", "EXIT", "CALL", "RET", "NOP", "BAR",
    "YIELD", "MEMBAR", "ERRBAR", "CGAERRBAR", "FENCE", "UBLKCP", "UBLKPF", "WARPSYNC", "CCTL", "LDGSTS", "ARRIVES",
    "LDGDEPBAR", "ISETP", "FSETP", "UISETP", "PLOP3", "UPLOP3", "R2P", "SYNCS", "ENDCOLLECTIVE", "NANOSLEEP", "DEPBAR",
    "ACQBULK", "PREEXIT", "FCHK",
}  # fmt: skip
STORES = {"ST", "STG", "RED"}
GLOBAL = STORES | {"LD", "LDG", "ATOM", "ATOMG"}
COPIES = {"UBLKCP", "LDGSTS"}  # from global to shared memory, behind the program's back


@dataclass(frozen=True)
class Instruction:
    """One line of the listing; `guard` is the predicate in front of it."""

    address: int
    guard: str
    op: str
    operands: tuple[str, ...]

    @cached_property
    def name(self) -> str:
        return self.op.split(".")[0]

    @cached_property
    def bits(self) -> int:
        """Of a memory access, for each thread."""
        return next((int(part) for part in self.op.split(".") if part in ("64", "128", "16")), 32)

    @cached_property
    def result(self) -> int | None:
        """Which operand is written: the first one that is no predicate."""
        registers = (i for i, text in enumerate(self.operands) if not re.match(r"!?U?P[\dTR]", text))
        return None if self.name in NO_RESULT else next(registers, None)

    @cached_property
    def written(self) -> tuple[str, ...]:
        found = None if self.result is None else REGISTER.match(self.operands[self.result])
        if not found:
            return ()
        parts = self.op.split(".")
        wide = 4 if "128" in parts else 2 if {"64", "WIDE"} & {*parts} or self.op == "CS2R" else 1
        return tuple(f"{found[1]}{int(found[2]) + i}" for i in range(wide))

    @cached_property
    def read(self) -> tuple[str, ...]:
        """Registers; of a vector its first one, of a 64-bit address both."""
        text = " ".join(o for i, o in enumerate(self.operands) if i != self.result)
        found = REGISTER.findall(DESCRIPTOR.sub("", text))
        return tuple(f"{kind}{int(n) + i}" for kind, n, wide in found for i in range(2 if wide else 1))

    @cached_property
    def place(self) -> str:
        """The address operand of a memory access."""
        return next((DESCRIPTOR.sub("", o) for o in self.operands if "[" in o), "")

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        return f"{self.address:#07x} {guard}{self.op} {', '.join(self.operands)}"


class Kernel:
    """The instructions of one kernel, its out-of-line functions behind it, and who can follow whom."""

    def __init__(self, listing: str):
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for line in listing.splitlines():
            if found := LINE.match(line):
                address, guard, op, operands = found.groups()
                self.code.append(Instruction(int(address, 16), guard or "", op, tuple(operands.split(", "))))
            elif line[:1] in (".", "$") and line.rstrip().endswith(":"):
                self.labels[line.rstrip()[:-1]] = len(self.code)
        self.functions = {name: at for name, at in self.labels.items() if name.startswith("$")}

    def function(self, at: int) -> str:
        """The out-of-line function that holds an instruction; "" in the kernel itself."""
        return max((start, name) for name, start in [("", 0), *self.functions.items()] if start <= at)[1]

    def successors(self, at: int, calls: bool = False) -> Iterator[int]:
        """What can come next; with `calls`, the first instruction of a callee too."""
        this = self.code[at]
        goes = this.name in ("EXIT", "RET", "BRX") or (this.op == "BRA" and this.operands[0].startswith("`"))
        targets = TARGETS.search(this.operands[-1]) if this.name == "BRX" else None
        if this.name in ("JMP", "JMX") or (this.name == "BRX" and not targets):
            raise ValueError(f"the reader does not know where this goes: {this}")
        if targets:  # of a switch
            yield from (self.labels[target] for target in targets[1].split(","))
        if this.guard or not goes:  # BRA.U, BRA.DIV, BRA.CONV: their conditions are operands
            yield at + 1
        label = LABEL.search(this.operands[-1]) if this.name in ("BRA", "WARPSYNC", "CALL") else None
        if label and (calls or label[1] not in self.functions):
            yield self.labels[label[1]]

    @cached_property
    def graph(self) -> list[list[int]]:
        end = len(self.code)
        return [[s for s in self.successors(i) if s < end] for i in range(end)]

    def loops(self, of: Iterable[int]) -> list[set[int]]:
        """Sets of instructions that can reach each other, largest first (strongly connected components)."""
        return sorted(components(self.graph, set(of)), key=len, reverse=True)

    @cached_property
    def reached(self) -> set[int]:
        """From the kernel's start: a listing also has calls that nothing comes to."""
        found, todo = {0}, [0]
        while todo:
            new = set(self.graph[todo.pop()]) - found
            found |= new
            todo += new
        return found

    @cached_property
    def layer_loop(self) -> set[int]:
        """The largest loop inside the largest loop (that over tokens); ValueError where there is none."""
        tokens = next(iter(self.loops(self.reached)), set())
        entries = {s for i in self.reached - tokens for s in self.graph[i] if s in tokens}
        inner = self.loops(tokens - entries)
        if not inner:
            raise ValueError("no loop inside a loop: the layers are not one, or the reader has lost its way")
        return inner[0]

    def innermost(self, of: set[int], name: str) -> list[set[int]]:
        """The loops in `of` that hold such an instruction, without those around them."""
        found = []
        for loop in self.loops(of):
            if any(self.code[i].name == name for i in loop):
                entries = {s for i, after in enumerate(self.graph) if i not in loop for s in after}
                found += self.innermost(loop - entries, name) or [loop]
        return found

    @cached_property
    def blocks(self) -> dict[int, range]:
        """Basic blocks by their first instruction."""
        starts = {0, *self.labels.values(), *(i + 1 for i, s in enumerate(self.graph) if s != [i + 1])}
        edges = [*sorted(s for s in starts if s < len(self.code)), len(self.code)]
        return {a: range(a, b) for a, b in pairwise(edges)}

    def flow(self, step: Callable[[int, dict[str, int]], None]) -> None:
        """Run `step(instruction, state)` along all paths until no state grows; states are maps
        to sets of bits.
        """
        states: dict[int, dict[str, int]] = {0: {}}
        waiting = {0}
        while waiting:
            start = min(waiting)
            waiting.remove(start)
            state = dict(states[start])
            after: dict[int, dict[str, int]] = {}
            for i in self.blocks[start]:
                step(i, state)
                for callee in self.successors(i, calls=True):
                    if callee not in self.blocks[start] or callee == start:
                        after[callee] = dict(state)
            for target, new in after.items():
                fresh = target not in states
                if target < len(self.code) and (merge(states.setdefault(target, {}), new) or fresh):
                    waiting.add(target)


def merge(into: dict[str, int], new: dict[str, int]) -> bool:
    """Add bits; whether any was missing."""
    grown = {name: bits | into.get(name, 0) for name, bits in new.items() if bits & ~into.get(name, 0)}
    into.update(grown)
    return bool(grown)


def components(graph: list[list[int]], nodes: set[int]) -> list[set[int]]:
    """Tarjan's strongly connected components of more than one node, without recursion."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    found, done = [], set[int]()
    for root in sorted(nodes):
        path = [] if root in index else [(root, iter(graph[root]))]
        if path:
            index[root] = low[root] = len(index)
            stack.append(root)
        while path:
            node, following = path[-1]
            for other in following:
                if other not in nodes or other in done:
                    continue
                if other in index:
                    low[node] = min(low[node], index[other])
                    continue
                index[other] = low[other] = len(index)
                stack.append(other)
                path.append((other, iter(graph[other])))
                break
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[node])
                if low[node] == index[node]:
                    part = {node}
                    while (last := stack.pop()) != node:
                        part.add(last)
                    done |= part
                    if len(part) > 1:
                        found.append(part)
    return found


class Pointers:
    """From which parameters the address of every access to global memory was computed.

    fields: {name: (offset, bytes)} of the pointers in the kernel's parameter, which begins at `base` of bank
    0; array: the one that is read with an index.
    """

    def __init__(self, kernel: Kernel, fields: dict[str, tuple[int, int]], base: int, array: str):
        self.kernel, self.names = kernel, list(fields)
        self.bytes = {
            base + at + i: 1 << n for n, (at, size) in enumerate(fields.values()) for i in range(size)
        }
        self._array = 1 << self.names.index(array)
        self._of: dict[int, int] = {}
        kernel.flow(self._step)

    def of(self, at: int) -> set[str]:
        return {name for n, name in enumerate(self.names) if self._of.get(at, 0) >> n & 1}

    def accesses(self, *names: str) -> dict[int, Instruction]:
        """Loads, stores and atomics through any of these pointers."""
        return {i: self.kernel.code[i] for i in sorted(self._of) if self.of(i) & {*names}}

    def _step(self, i: int, state: dict[str, int]) -> None:
        this = self.kernel.code[i]
        if this.name in GLOBAL:
            address = REGISTER.findall(this.place)
            bits = 0
            for kind, n, _ in address:
                bits |= state.get(f"{kind}{n}", 0)
            self._of[i] = self._of.get(i, 0) | bits
        if this.name == "STL":
            value = REGISTER.match(this.operands[1])
            for k in range(this.bits // 32):
                source = f"{value[1]}{int(value[2]) + k}" if value else ""
                put(state, slot(this.place, k), state.get(source, 0), bool(this.guard))
        for k, register in enumerate(this.written):
            put(state, register, self._value(this, k, state), bool(this.guard))

    def _value(self, this: Instruction, k: int, state: dict[str, int]) -> int:
        if this.name == "LDL":
            return state.get(slot(this.place, k), 0)
        if this.name in ("LD", "LDG", "LDS", "ATOM", "ATOMG", "ATOMS"):
            return 0
        bits = 0
        for register in this.read:
            bits |= state.get(register, 0)
        for index, offset in CONSTANT.findall(" ".join(this.operands)):
            bits |= self._array if index else self.bytes.get(int(offset, 16), 0)
        return bits


def put(state: dict[str, int], name: str, bits: int, maybe: bool) -> None:
    state[name] = bits | (state.get(name, 0) if maybe else 0)


def slot(place: str, word: int) -> str:
    """The k-th 4 bytes of a place on the stack."""
    return f"stack {offset(place) + 4 * word}"


def offset(place: str) -> int:
    """The constant part of an address in bytes."""
    found = re.search(r"\+(-?0x[0-9a-f]+)\]", place)
    return int(found[1], 16) if found else 0


def pending_loads(kernel: Kernel) -> dict[int, set[int]]:
    """{a copy to shared memory: 16-byte loads from there whose values nothing has waited for
    when the copy starts}.

    A value is there when an instruction reads it, or writes its register anew. Slots are read by
    16 bytes a lane.
    """
    loads = [i for i, this in enumerate(kernel.code) if this.name == "LDS" and this.bits == 128]
    bit = {i: 1 << n for n, i in enumerate(loads)}
    found: dict[int, int] = {}

    def step(i: int, state: dict[str, int]) -> None:
        this = kernel.code[i]
        there = 0
        for register in (*this.read, *this.written):
            there |= state.get(register, 0)
        if there:
            for register in [name for name, bits in state.items() if bits & there]:
                state[register] &= ~there
        if this.name in COPIES:
            for bits in state.values():
                found[i] = found.get(i, 0) | bits
            found.setdefault(i, 0)
        if i in bit:
            for register in this.written:
                state[register] = state.get(register, 0) | bit[i]

    kernel.flow(step)
    return {i: {load for load in loads if bits & bit[load]} for i, bits in found.items()}


# ---- what the disassemblers say ----


@dataclass(frozen=True)
class Resources:
    registers: int
    stack_bytes: int
    parameter_at: int  # in constant bank 0
    parameter_bytes: int


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


def read_kernels(cubin: Path) -> dict[str, Kernel]:
    parts = re.split(r"^\.text\.(\w+):$", run("nvdisasm", "-c", cubin), flags=re.MULTILINE)
    return {name: Kernel(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def read_resources(cubin: Path) -> dict[str, Resources]:
    used = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+)", run("cuobjdump", "-res-usage", cubin))
    text = run("cuobjdump", "-elf", cubin)
    made = {}
    for name, registers, stack in used:
        section = re.search(rf"^\.nv\.info\.{name}$(.*?)(?=^\.|\Z)", text, re.MULTILINE | re.DOTALL)
        bank = re.search(
            r"EIATTR_PARAM_CBANK\s+Format:\s+\S+\s+Value:\s+\S+ 0x([0-9a-f]+)", section[1] if section else ""
        )
        assert bank, f"no parameter of {name}"
        value = int(bank[1], 16)
        made[name] = Resources(int(registers), int(stack), value & 0xFFFF, value >> 16)
    return made
