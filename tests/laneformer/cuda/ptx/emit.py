"""PTX as C++: a function for each of its functions, a variable for each register, a goto for each branch.

What it writes is compiled over ptx.h and runs on the emulated machine. An instruction that is in no table is an
UnknownPtx with its name and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.laneformer.cuda.ptx.operations import CALLS, OPERATIONS, Operation
from tests.laneformer.cuda.ptx.parse import (
    SIZES,
    Brace,
    Function,
    Instruction,
    Label,
    Module,
    Registers,
    Statement,
    UnknownPtx,
    Variable,
)

REGISTERS = {
    "pred": "pred",
    "f32": "f32",
    "b16": "u16",
    "f16": "u16",
    "b32": "u32",
    "b64": "u64",
    "u64": "u64",
}
VALUES = {
    "u8": "u8",
    "b8": "u8",
    "b16": "u16",
    "b32": "u32",
    "b64": "u64",
    "f16": "u16",
}  # else as they are called
SPECIAL = {"%tid.x": "thread_x()", "%ctaid.x": "block_x()", "%globaltimer": "global_timer()"}
ACCESS = re.compile(
    r"(?P<way>ld|st)(?P<strong>\.(?:relaxed|release)\.(?:gpu|sys))?(?:\.(?P<space>global|shared|const|param))?"
    r"(?:\.v(?P<count>[24]))?\.(?P<type>\w+)$"
)  # fmt: skip
ADDRESS = re.compile(r"\[([\w$%]+)(?:\+(-?\d+))?\]$")


def emit(module: Module) -> str:
    """The translation unit, with EMULATE for each kernel."""
    parts = ['#include "ptx.h"', "namespace ptx {"]
    used = set(re.findall(r"[\w$]+", " ".join(_operands(module))))
    parts += [_constant(v) for v in module.variables.values() if v.name in used and v.space != "shared"]
    parts += [f"{_head(function)};" for function in module.functions if not function.kernel]
    for function in module.functions:
        parts.append(_Body(module, function).text())
    parts.append("}  // namespace ptx")
    for function in module.functions:
        if function.kernel:
            parts.append(
                f'extern "C" int bytes_of_{function.name}() {{ return sizeof(ptx::{function.name}_arguments); }}\n'
                f"using ptx::{function.name};\nEMULATE({function.name}, ptx::{function.name}_arguments)"
            )
    return "\n".join(parts) + "\n"


def _operands(module: Module) -> Iterator[str]:
    for function in module.functions:
        for statement in function.body:
            if isinstance(statement, Instruction):
                yield from statement.operands


def _constant(variable: Variable) -> str:
    kind = VALUES.get(variable.type, variable.type)
    values = ", ".join(_number(value, variable.type) for value in variable.values)
    declared = f"{kind} {variable.name}[{variable.count}] = {{{values}}};"
    alias = f"static auto& {_name(variable.name)} = {variable.name};"
    if variable.space == "global":  # tests set it, by the name that it has in the text
        return f'extern "C" {{ alignas(8) {declared} }} {alias}'
    return f"alignas(8) static {declared} {alias}"


def _head(function: Function) -> str:
    if function.kernel:
        return f"static void {function.name}(const {function.name}_arguments& arguments)"
    given = [f"char* {_name(v.name)}" for v in (*function.returns, *function.params)]
    return f"static void {_name(function.name)}({', '.join(given)})"


def _name(ptx: str) -> str:
    return "v_" + re.sub(r"\W", "_", ptx.lstrip("%"))


def _number(text: str, kind: str) -> str:
    """An immediate as a C++ value of a type."""
    if found := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", text):
        return f"as<{VALUES.get(kind, kind)}>(float_of(0x{found[1]}u))"
    if kind == "f32":
        return f"{float(text)}f"
    return f"{VALUES.get(kind, kind)}({int(text.rstrip('U'), 0)}{'ull' if int(text.rstrip('U'), 0) >= 0 else 'll'})"


class _Body:
    """One function on its way to C++."""

    def __init__(self, module: Module, function: Function):
        self.module, self.function = module, function
        self.scopes: list[dict[str, str]] = [{}]  # C++ types of registers
        self.bytes = {
            v.name: v.bytes for v in (*function.params, *function.returns)
        }  # of what is a .param here

    def text(self) -> str:
        function, lines = self.function, list[str]()
        if function.kernel:
            (argument,) = function.params  # the kernels have one
            lines.append(
                f"struct {function.name}_arguments {{ alignas({argument.align}) char bytes[{argument.bytes}]; }};"
            )
        lines.append(f"{_head(function)} {{")
        if function.kernel:
            lines.append(f"const char* {_name(function.params[0].name)} = arguments.bytes;")
        lines += [self._statement(statement) for statement in function.body]
        return "\n".join([*lines, "}"])

    def _statement(self, statement: Statement) -> str:
        if isinstance(statement, Registers):
            kind = REGISTERS[statement.type]
            self.scopes[-1] |= dict.fromkeys(statement.names, kind)
            return f"{kind} {', '.join(map(_name, statement.names))};"
        if isinstance(statement, Variable):
            if statement.space != "param":
                raise UnknownPtx(f"{statement.name}: variables in .{statement.space} of a function")
            self.bytes[statement.name] = statement.bytes
            return f"alignas(16) char {_name(statement.name)}[{statement.bytes}];"
        if isinstance(statement, Label):
            return f"{_name(statement.name)}:;"
        if isinstance(statement, Brace):
            self.scopes.append({}) if statement.text == "{" else self.scopes.pop()
            return statement.text
        text = self._instruction(statement)
        if statement.guard:
            text = f"if ({'!' * statement.negated}{_name(statement.guard)}) {{ {text} }}"
        return text

    def _instruction(self, i: Instruction) -> str:
        try:
            if operation := OPERATIONS.get(i.name):
                return self._operation(operation, *i.operands)
            if i.name in CALLS:
                return self._call(i)
            if found := ACCESS.match(i.name):
                return self._access(i, found)
            base, _, kind = i.name.partition(".")
            if base == "mov" and kind in SIZES:
                return self._move(kind, *i.operands)
            if base == "bra":
                return f"goto {_name(i.operands[0])};"
            if base == "call" and len(i.operands) == 3:
                given = [part.strip(" ()") for part in f"{i.operands[0]},{i.operands[2]}".split(",")]
                return f"{_name(i.operands[1])}({', '.join(map(_name, given))});"
        except (ValueError, KeyError) as error:
            raise UnknownPtx(f"line {i.line}: {i.name} {', '.join(i.operands)}: {error!r}") from None
        raise UnknownPtx(f"line {i.line}: {i.name} {', '.join(i.operands)} is in no table of operations.py")

    def _operation(self, operation: Operation, to: str, *given: str) -> str:
        pairs = zip("abcd"[: len(given)], operation.operands, given, strict=True)
        values = " ".join(f"const {kind} {name} = {self._value(text, kind)};" for name, kind, text in pairs)
        return f"{{ {values} put({self._register(to)}, {operation.result}({operation.expression})); }}"

    def _type(self, register: str) -> str | None:
        return next((scope[register] for scope in reversed(self.scopes) if register in scope), None)

    def _register(self, text: str) -> str:
        if self._type(text) is None:
            raise UnknownPtx(f"{text} is no register")
        return _name(text)

    def _value(self, text: str, kind: str) -> str:
        """An operand as a C++ value of a type."""
        kind = VALUES.get(kind, kind)
        if (own := self._type(text)) is not None:
            return _name(text) if own == kind else f"as<{kind}>({_name(text)})"
        if text in SPECIAL:
            return f"{kind}({SPECIAL[text]})"
        if text in self.bytes:
            return f"reinterpret_cast<u64>({_name(text)})"
        if text in self.module.variables:
            shared = self.module.variables[text].space == "shared"
            if shared and self.module.variables[text].count:
                raise UnknownPtx(f"{text}: shared memory of a size that the launch does not give")
            return f"{kind}(kSharedAt)" if shared else f"reinterpret_cast<u64>({_name(text)})"
        return _number(text, kind)

    def _move(self, kind: str, to: str, given: str) -> str:
        if to.startswith("{"):
            parts = ", ".join(map(self._register, _parts(to)))
            return f"unpack({self._value(given, kind)}, {parts});"
        if given.startswith("{"):
            value = f"pack<{VALUES[kind]}>({', '.join(map(self._register, _parts(given)))})"
        else:
            value = self._value(given, kind)
        return f"put({self._register(to)}, {value});"

    def _access(self, i: Instruction, found: re.Match[str]) -> str:
        way, space, count = found["way"], found["space"], int(found["count"] or 1)
        vector, target = i.operands if way == "ld" else reversed(i.operands)
        kind = VALUES.get(found["type"], found["type"])
        parts = _parts(vector) if vector.startswith("{") else [vector]
        values = ", ".join(self._value(part, kind) if way == "st" else self._register(part) for part in parts)
        if not (address := ADDRESS.match(target)) or len(parts) != count:
            raise UnknownPtx(f"address {target}, {len(parts)} values")
        name, offset = address[1], int(address[2] or 0)
        if space == "param" and self._type(name) is None:
            if not 0 <= offset <= self.bytes[name] - count * SIZES[found["type"]]:
                raise UnknownPtx(f"outside of the {self.bytes[name]} bytes of {name}")
            if way == "st":
                return f"write<{kind}, {count}>({_name(name)} + {offset}, {{{values}}});"
            return f"several({values}) = read<{kind}, {count}>({_name(name)} + {offset});"
        shared = space == "shared"
        at = f"{self._value(name, 'u32' if shared else 'u64')} + ({offset})"
        function = ("load" if way == "ld" else "store") + ("_shared" if shared else "")
        if found["strong"]:
            function += "_relaxed"
        if way == "st":
            return f"{function}<{kind}, {count}>({at}, {i.line}, {{{values}}});"
        return f"several({values}) = {function}<{kind}, {count}>({at}, {i.line});"

    def _call(self, i: Instruction) -> str:
        kinds, template = CALLS[i.name]
        values, sink = list[str](), ""
        for kind, text in zip(kinds, i.operands, strict=True):
            if kind == "_":
                values.append(text)
            elif kind == "=u32|pred":
                both = text.split("|") if "|" in text else [text, "_"]
                sink = "u32 any_word; pred any_bit; "
                values.append(", ".join(
                    other if name == "_" else self._register(name)
                    for name, other in zip(both, ("any_word", "any_bit"), strict=True)
                ))  # fmt: skip
            elif kind.startswith("="):
                parts = ", ".join(map(self._register, _parts(text)))
                values.append(f"several({parts})" if kind[1].isdigit() else parts)
            elif kind[0].isdigit():
                parts = ", ".join(self._value(part, kind[1:]) for part in _parts(text))
                values.append(f"std::array<{kind[1:]}, {kind[0]}>{{{parts}}}")
            else:
                values.append(self._value(text.strip("[]"), kind))
        return f"{{ {sink}{template.format(*values, line=i.line)}; }}"


def _parts(vector: str) -> list[str]:
    return [part.strip() for part in vector.strip("{}").split(",")]
