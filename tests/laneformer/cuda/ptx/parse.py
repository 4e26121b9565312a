"""PTX text as NVRTC writes it: variables, and functions of statements."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

SIZES = {"pred": 1, "u8": 1, "s8": 1, "b8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4,
         "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip
VARIABLE = re.compile(
    r"\.(?P<space>global|const|shared|local|param)\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+"
    r"(?P<name>[\w$%]+)(?P<array>\[(?P<count>\d*)\])?(?:\s*=\s*(?P<value>.*))?$", re.S,
)  # fmt: skip
FUNCTION = re.compile(
    r"(?:\.visible\s+|\.weak\s+)*\.(?P<kind>entry|func)\s+(?:\((?P<returns>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*"
    r"\((?P<params>[^)]*)\)(?P<directives>[^{;]*)", re.S,
)  # fmt: skip
REGISTERS = re.compile(r"\.reg\s+\.(?P<type>\w+)\s+(?P<names>.+)$", re.S)
INSTRUCTION = re.compile(
    r"(?:@(?P<not>!?)(?P<guard>[\w$%]+)\s+)?(?P<name>[a-z][\w.:]*)\s*(?P<operands>.*)$", re.S
)


class UnknownPtx(ValueError):
    """What this reader or the table of operations does not have; it names the text and its line."""


@dataclass(frozen=True)
class Variable:
    """Bytes with a name; `count` is 0 for shared memory whose size the launch gives."""

    space: str
    name: str
    type: str
    count: int
    align: int
    values: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        return self.count * SIZES[self.type]


@dataclass(frozen=True)
class Registers:
    type: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Brace:
    text: str  # "{" or "}"


@dataclass(frozen=True)
class Instruction:
    line: int
    guard: str  # a predicate's register, or empty
    negated: bool
    name: str  # with all modifiers, such as ld.relaxed.gpu.global.v2.b64
    operands: tuple[str, ...]  # such as "%r1", "[%rd4+8]", "{%f1, %f2}", "%r3|%p2"


Statement = Variable | Registers | Label | Brace | Instruction


@dataclass
class Function:
    name: str
    kernel: bool
    returns: list[Variable]
    params: list[Variable]
    body: list[Statement] = field(default_factory=list)


@dataclass
class Module:
    target: str
    variables: dict[str, Variable]
    functions: list[Function]


def parse(text: str) -> Module:
    """UnknownPtx where a statement is none that this reader knows."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.S)
    module, at = Module("", {}, []), 0
    while rest := re.compile(r"\s*(\S)").match(text, at):
        at = rest.start(1)
        if found := FUNCTION.match(text, at):
            at = found.end()
            function = Function(
                found["name"],
                found["kind"] == "entry",
                parameters(found["returns"]),
                parameters(found["params"]),
            )
            if text[at] == ";":  # a declaration
                at += 1
                continue
            at = _read_body(text, at + 1, function)
            module.functions.append(function)
        elif found := re.compile(r"\.(version|address_size|target)\s+(\S+)").match(text, at):
            at = found.end()
            if found[1] == "target":
                module.target = found[2].rstrip(",")
        else:
            end = text.index(";", at)
            given = variable(text[at:end].replace(".extern", "").replace(".visible", "").strip())
            module.variables[given.name], at = given, end + 1
    return module


def _read_body(text: str, at: int, function: Function) -> int:
    """Statements up to the brace that closes the function; where the text goes on."""
    depth, number = 1, _LineNumbers(text)
    while depth:
        at = re.compile(r"\s*").match(text, at).end()  # type: ignore[union-attr]
        if text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if depth:
                function.body.append(Brace(text[at]))
            at += 1
        elif label := re.compile(r"([\w$]+):(?!:)").match(text, at):
            function.body.append(Label(label[1]))
            at = label.end()
        else:
            end = text.index(";", at)
            if not text.startswith(".pragma", at):  # a wish for the unrolling of loops
                function.body.append(statement(text[at:end].strip(), number.of(at)))
            at = end + 1
    return at


class _LineNumbers:
    def __init__(self, text: str):
        self.text, self.at, self.line = text, 0, 1

    def of(self, at: int) -> int:
        self.line += self.text.count("\n", self.at, at)
        self.at = at
        return self.line


def statement(text: str, line: int) -> Statement:
    if found := REGISTERS.match(text):
        return Registers(found["type"], tuple(_names(found["names"])))
    if text.startswith("."):
        return variable(text)
    if not (found := INSTRUCTION.match(text)):
        raise UnknownPtx(f"line {line}: {text!r} is no instruction")
    return Instruction(
        line, found["guard"] or "", found["not"] == "!", found["name"], tuple(split(found["operands"]))
    )


def variable(text: str) -> Variable:
    if not (found := VARIABLE.match(text.strip())):
        raise UnknownPtx(f"{text!r} is no variable")
    values = tuple(split(found["value"].strip("{}"))) if found["value"] else ()
    count = int(found["count"] or 0) if found["array"] else 1
    return Variable(
        found["space"],
        found["name"],
        found["type"],
        count,
        int(found["align"] or SIZES[found["type"]]),
        values,
    )


def parameters(text: str | None) -> list[Variable]:
    return [variable(part) for part in split(text or "")]


def split(text: str) -> Iterator[str]:
    """At commas outside of brackets."""
    for part in re.split(r",(?![^{\[(]*[}\])])", text):
        if part.strip():
            yield " ".join(part.split())


def _names(text: str) -> Iterator[str]:
    """%r<3> is %r0, %r1, %r2."""
    for part in split(text):
        if many := re.fullmatch(r"([\w$%]+)<(\d+)>", part):
            yield from (f"{many[1]}{i}" for i in range(int(many[2])))
        else:
            yield part
