"""Reasoning and answer told apart, in any pieces: <think> and harmony."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from laneformer.engine.channels import (
    CALL,
    CHANNEL,
    CONSTRAIN,
    ENDS,
    MESSAGE,
    NEXT,
    Harmony,
    Thinking,
)

Reader = Callable[[], Thinking | Harmony]
THOUGHT = f"{CHANNEL}analysis{MESSAGE}They greet.{NEXT}"
CALLED = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
ARGUMENTS = '{"city": "Rome"}'


def read(make: Reader, pieces: list[str]) -> tuple[str, str]:
    """Reasoning and content of all pieces."""
    reader = make()
    parts = [*map(reader.push, pieces), reader.finish()]
    return "".join(reasoning for reasoning, _ in parts), "".join(content for _, content in parts)


def check_pieces(make: Reader, text: str, *expected: str, step: int = 1) -> None:
    """In one piece, in letters, and in three pieces that end at any multiple of `step`."""
    assert read(make, [text]) == expected
    assert read(make, list(text)) == expected
    for a, b in itertools.combinations(range(0, len(text), step), 2):
        pieces = [text[:a], text[a:b], text[b:]]
        assert read(make, pieces) == expected, pieces


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
def test_thinking(text: str, inside: bool, reasoning: str, content: str) -> None:
    check_pieces(lambda: Thinking(inside), text, reasoning, content)


@pytest.mark.parametrize(
    ("text", "calls", "reasoning", "content"),
    [
        ("Hello", False, "", "Hello"),
        (" <b> to=", False, "", " <b> to="),
        ("to", False, "", "to"),
        ("", False, "", ""),
        (f"{CHANNEL}anal", False, "", ""),
        (f"{THOUGHT}{CHANNEL}final{MESSAGE}Yes. <a|", False, "They greet.", "Yes. <a|"),
        (f"{CHANNEL}analysis{MESSAGE}cut <|en", False, "cut <|en", ""),
        (f"{CHANNEL}final{MESSAGE}Yes{ENDS[2]}", False, "", "Yes"),
        (f"{THOUGHT}{CALLED}{ARGUMENTS}{ENDS[1]}", True, "They greet.", ARGUMENTS.join(["weather".join(CALL), ""])),
        (f" to=functions.weather{CHANNEL}commentary json{MESSAGE}1", True, "", "weather".join(CALL) + "1"),
        (f"{CALLED}{ARGUMENTS}", False, ARGUMENTS, ""),
        (f"{CHANNEL}analysis to=python code{MESSAGE}1+1", True, "1+1", ""),
        (f"{CHANNEL}commentary{MESSAGE}I look.{NEXT}{CHANNEL}final{MESSAGE}So.", False, "", "I look.\n\nSo."),
        (f"{CHANNEL}final{MESSAGE}a{CHANNEL}analysis{MESSAGE}b", False, "b", "a"),
        (f"{CHANNEL}final{MESSAGE}a{MESSAGE}b", False, "", "ab"),
    ],
)  # fmt: skip
def test_harmony(text: str, calls: bool, reasoning: str, content: str) -> None:
    check_pieces(lambda: Harmony(calls), text, reasoning, content, step=3)
