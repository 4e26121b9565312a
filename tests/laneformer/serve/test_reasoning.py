"""What stands between <think> and </think>, in any pieces."""

from __future__ import annotations

import itertools

import pytest

from laneformer.serve.reasoning import Thinking


def split(pieces: list[str], inside: bool = False) -> tuple[str, str]:
    thinking, found = Thinking(inside), ["", ""]
    for reasoning, content in [*map(thinking.push, pieces), thinking.finish()]:
        found[0] += reasoning
        found[1] += content
    return found[0], found[1]


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("Hello", False, "", "Hello"),
        ("  Hello </think>", False, "", "  Hello </think>"),
        ("", False, "", ""),
        (" \n", False, "", " \n"),
        ("<thin", False, "", "<thin"),
        ("<think>\nA b\nc\n</think>\n\nYes. ", False, "A b\nc", "Yes. "),
        ("\n<think></think>Yes", False, "", "Yes"),
        ("<think>\n\n</think>\n\nYes", False, "", "Yes"),
        ("<think>not at its end", False, "not at its end", ""),
        ("<think>a </thin", False, "a </thin", ""),
        ("so a < b\n</think>\nYes\n", True, "so a < b", "Yes\n"),
        ("</think>Yes <think>no</think>", True, "", "Yes <think>no</think>"),
        ("Say <think>", False, "", "Say <think>"),
    ],
)
def test_reasoning_is_split_from_content(text: str, inside: bool, reasoning: str, content: str) -> None:
    assert split([text], inside) == (reasoning, content)
    assert split(list(text), inside) == (reasoning, content)
    for cuts in itertools.combinations(range(len(text)), 2):
        pieces = [text[: cuts[0]], text[cuts[0] : cuts[1]], text[cuts[1] :]]
        assert split(pieces, inside) == (reasoning, content), pieces
