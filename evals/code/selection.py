"""Which part of an answer is the solution, before EvalPlus's sanitize, which keeps the
longest text that parses.

The rule "block": among the fenced blocks that parse and define the requested function at top level with a
real body, the last one, as answers begin with signatures and end with corrections. Otherwise the rule "text":
all of the answer.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

FENCE = re.compile(r"(`{3,}|~{3,})([^`~]*)$")
MAX_ENDS = 20  # tried for one block: an answer that repeats fences to its end would take O(fences^2) parses
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def target_function(text: str, entry_point: str) -> tuple[str, str]:
    """(code, rule) of an answer: the block that defines `entry_point`, or all of the text;
    thinking is left out.
    """
    text = text.replace("\r\n", "\n").rpartition("</think>")[2]
    chosen = [code for code in fenced_blocks(text) if has_real_body(code, entry_point)]
    return (chosen[-1], "block") if chosen else (text, "text")


def fenced_blocks(text: str) -> Iterator[str]:
    """The code between every fence and the last later one, or the end, up to which it parses.

    Where a block ends cannot be told from its fences alone: its docstring may hold fences, and the
    last may be missing. Text may precede a fence on its line: prose at the beginning, the last line of
    code at the end.
    """
    lines = text.split("\n")  # splitlines would break code at form feeds and U+2028
    marks = {number: mark for number, line in enumerate(lines) if (mark := FENCE.search(line))}
    for begin, opening in marks.items():
        ends = [
            n
            for n, mark in marks.items()
            if n > begin and mark[1][0] == opening[1][0] and not mark[2].strip()
        ]
        blocks = [[*lines[begin + 1 : n], lines[n][: marks[n].start()]] for n in ends[:MAX_ENDS]]
        blocks.append(lines[begin + 1 :])
        codes = [textwrap.dedent("\n".join(block)).strip("\n") for block in blocks]
        yield from [code for code in codes if parsed(code) is not None][-1:]


def parsed(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # all four come from texts
        return None


def has_real_body(code: str, entry_point: str) -> bool:
    """Whether code defines the function at top level, finally by more than a docstring, pass, or `...`."""
    real = False
    for node in (parsed(code) or ast.Module([], [])).body:
        if isinstance(node, NAMED[:2]) and node.name == entry_point:
            real = not all(is_stub(statement) for statement in node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            real |= entry_point in [target.id for target in targets if isinstance(target, ast.Name)]
    return real


def is_stub(node: ast.stmt) -> bool:
    if isinstance(node, ast.Raise):
        return "NotImplementedError" in ast.dump(node)
    return isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def lost_names(selected: str, sanitized: str, entry_point: str) -> set[str]:
    """What the sanitized code needs and lost: EvalPlus drops decorated definitions
    and functions without `return`.
    """
    before, after = (parsed(code) or ast.Module([], []) for code in (selected, sanitized))
    defined, kept = ({node.name for node in tree.body if isinstance(node, NAMED)} for tree in (before, after))
    used = {node.id for node in ast.walk(after) if isinstance(node, ast.Name)} | {entry_point}
    return (defined - kept) & used
