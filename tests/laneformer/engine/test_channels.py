"""Tests that reasoning, text and calls of an answer are separated, for <think> and harmony."""

from __future__ import annotations

import itertools

import pytest

from laneformer.engine.channels import (
    CHANNEL,
    CONSTRAIN,
    ENDS,
    HARMONY,
    HERMES,
    MESSAGE,
    NEXT,
    AnswerReader,
    CallForm,
)

THOUGHT = f"{CHANNEL}analysis{MESSAGE}They greet.{NEXT}"
CALLED = f"{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}"
ARGUMENTS = '{"city": "Rome"}'
LLAMA = CallForm('{"name": "', '", "parameters": ', None, "}")


def read(pieces, **options) -> list[tuple[str, str]]:
    """Return kinds and texts, with consecutive ones of a kind as one."""
    reader = AnswerReader(**options)
    deltas = [delta for piece in pieces for delta in reader.push(piece)] + reader.finish()
    parts = []
    for kind, text in deltas:
        if parts and parts[-1][0] == kind != "call":
            parts[-1] = kind, parts[-1][1] + text
        else:
            parts.append((kind, text))
    return parts


def check_pieces(text, expected, step=1, **options):
    """Check a text in one piece, in letters, and in three pieces cut at multiples of `step`."""
    assert read([text], **options) == expected
    assert read(list(text), **options) == expected
    for a, b in itertools.combinations(range(0, len(text), step), 2):
        pieces = [text[:a], text[a:b], text[b:]]
        assert read(pieces, **options) == expected, pieces


@pytest.mark.parametrize(
    ("text", "inside", "reasoning", "content"),
    [
        ("Hello", False, "", "Hello"),
        ("", False, "", ""),
        ("<thin", False, "", "<thin"),
        ("<think>\nA b\nc\n</think>\n\nYes. ", False, "A b\nc", "Yes. "),
        ("\n<think></think>Yes", False, "", "Yes"),
        ("<think>not at its end", False, "not at its end", ""),
        ("so a < b\n</think>\nYes\n", True, "so a < b", "Yes\n"),
        ("</think>Yes <think>no</think>", True, "", "Yes <think>no</think>"),
        ("Say <think>", False, "", "Say <think>"),
    ],
)
def test_thinking(text, inside, reasoning, content):
    expected = [("reasoning", reasoning), ("text", content)]
    check_pieces(text, [part for part in expected if part[1]], inside=inside)


@pytest.mark.parametrize(
    ("text", "calls", "expected"),
    [
        (" <b> to=", None, [("text", " <b> to=")]),
        ("to", None, [("text", "to")]),
        ("", None, []),
        (f"{CHANNEL}anal", None, []),
        (
            f"{THOUGHT}{CHANNEL}final{MESSAGE}Yes. <a|",
            None,
            [("reasoning", "They greet."), ("text", "Yes. <a|")],
        ),
        (f"{CHANNEL}analysis{MESSAGE}cut <|en", None, [("reasoning", "cut <|en")]),
        (
            f"{THOUGHT}{CALLED}{ARGUMENTS}{ENDS[1]}",
            HARMONY,
            [("reasoning", "They greet."), ("call", "weather"), ("arguments", ARGUMENTS)],
        ),
        (
            f" to=functions.weather{CHANNEL}commentary json{MESSAGE}1",
            HARMONY,
            [("call", "weather"), ("arguments", "1")],
        ),
        (f"{CALLED}{ARGUMENTS}", None, [("reasoning", ARGUMENTS)]),
        (f"{CHANNEL}analysis to=python code{MESSAGE}1+1", HARMONY, [("reasoning", "1+1")]),
        (
            f"{CHANNEL}commentary{MESSAGE}I look.{NEXT}{CHANNEL}final{MESSAGE}So.",
            None,
            [("text", "I look.\n\nSo.")],
        ),
        (
            f"{CHANNEL}final{MESSAGE}a{CHANNEL}analysis{MESSAGE}b",
            None,
            [("text", "a"), ("reasoning", "b")],
        ),
        (f"{CHANNEL}final{MESSAGE}a{MESSAGE}b", None, [("text", "ab")]),
    ],
)
def test_harmony(text, calls, expected):
    check_pieces(text, expected, step=3, harmony=True, calls=calls)


CALLS = [
    {"name": "get_weather", "arguments": {"city": "Köln\n\"'}"}},
    {"name": "add", "arguments": {"a": 1, "b": {"c": 2}}},
]
HERMES_CALLS = [
    ("call", "get_weather"),
    ("arguments", '{"city": "Köln\\n\\"\'}"}'),
    ("call", "add"),
    ("arguments", '{"a": 1, "b": {"c": 2}}'),
]


@pytest.mark.parametrize(
    ("text", "form", "expected"),
    [
        ("Hm. " + HERMES.write(CALLS), HERMES, [("text", "Hm. "), *HERMES_CALLS]),
        (
            "<think>\nHm.\n</think>\n" + HERMES.write(CALLS),
            HERMES,
            [("reasoning", "Hm."), *HERMES_CALLS],
        ),
        (LLAMA.write(CALLS[:1]), LLAMA, HERMES_CALLS[:2]),
        ("So: " + LLAMA.write(CALLS[:1]), LLAMA, [("text", "So: " + LLAMA.write(CALLS[:1]))]),
        (
            'Hm.<tool_call>\n{"name": "add", "arguments": {"a": "}\\"',
            HERMES,
            [("text", "Hm."), ("call", "add"), ("arguments", '{"a": "}\\"')],
        ),
        ("Hm <tool_c", HERMES, [("text", "Hm <tool_c")]),
        ("Hm <tool_call>\n{", HERMES, [("text", "Hm ")]),
        ("", HERMES, []),
    ],
)
def test_calls(text, form, expected):
    # also those that the token limit has cut
    check_pieces(text, expected, step=7, calls=form)


@pytest.mark.parametrize(("harmony", "before"), [(False, ""), (True, f"{CHANNEL}final{MESSAGE}")])
def test_text_is_passed_on_as_it_comes(harmony, before):
    reader = AnswerReader(harmony=harmony)
    reader.push(before)
    assert reader.push("Hello") == [("text", "Hello")]
