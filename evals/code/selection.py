"""Which lines of an answer are the solution.

"block": of the fenced blocks that define the requested function with a real body, the last one. Otherwise "text": as
many lines as parse, if they define it; all of the answer if none do.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator

FENCE = re.compile(r"(`{3,}|~{3,})([^`~]*)$")
MAX_ENDS = 20  # tried for one block: an answer that repeats fences to its end would take O(fences^2) parses
BEGIN = re.compile(r"(async\s+def|def|class|import|from)\s|@\w|\w+\s*(:[^=]*)?=[^=]")
MAX_BEGINS, MAX_CUTS = 32, 64  # as a text of no Python would take O(lines^2) parses


def select_function(text: str, entry_point: str) -> tuple[str, str]:
    """Return (code, rule) of an answer; what a model thinks before it is left out."""
    text = text.replace("\r\n", "\n").rpartition("</think>")[2]
    # splitlines would break code at form feeds and U+2028
    lines = text.split("\n")
    # answers begin with signatures and end with corrections. Code is cut, never printed again: a
    # tree that parses may not print (numbers of thousands of digits, deep nesting)
    blocks = [code for code in iterate_blocks(lines) if has_real_body(code, entry_point)]
    if blocks:
        return blocks[-1], "block"
    begins = [number for number, line in enumerate(lines) if BEGIN.match(line)]
    for begin in begins[:MAX_BEGINS]:
        code = cut_beginning(lines[begin:])
        if has_real_body(code, entry_point):
            return code, "text"
    return text, "text"


def iterate_blocks(lines: list[str]) -> Iterator[str]:
    """Yield the code between every fence and the last later one, or the end, up to which it parses."""
    matches = [(number, FENCE.search(line)) for number, line in enumerate(lines)]
    marks = {number: mark for number, mark in matches if mark}
    for begin, opening in marks.items():
        # fences alone do not tell where a block ends: its docstring may hold some, and the last
        # may be missing
        later = [number for number in marks if number > begin and not marks[number][2].strip()]
        ends = [number for number in later if marks[number][1][0] == opening[1][0]]
        blocks = [lines[begin + 1 :]]
        for end in reversed(ends[:MAX_ENDS]):
            # text before a fence on its line is the last line of code
            blocks.append([*lines[begin + 1 : end], lines[end][: marks[end].start()]])
        for block in blocks:
            code = textwrap.dedent("\n".join(block)).strip("\n")
            if parse(code) is not None:
                yield code
                break


def parse(code: str) -> ast.Module | None:
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # all four come from texts
        return None


def has_real_body(code: str, entry_point: str) -> bool:
    """Tell whether code defines the function by more than a docstring, pass, or `...`."""
    real = False
    for node in (parse(code) or ast.Module([], [])).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == entry_point:
            real = not all(is_stub(statement) for statement in node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            real |= entry_point in [target.id for target in targets if isinstance(target, ast.Name)]
    return real


def is_stub(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        # a docstring, or `...`
        return isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Pass | ast.Raise)


def cut_beginning(lines: list[str]) -> str:
    """Return as many first lines as parse."""
    for _ in range(MAX_CUTS):
        code = "\n".join(lines)
        try:
            ast.parse(code)
            return code
        except SyntaxError as error:
            # an error tells from which line on they cannot
            lines = lines[: min(max((error.lineno or 1) - 1, 0), len(lines) - 1)]
        except (ValueError, RecursionError, MemoryError):
            break
    return ""
