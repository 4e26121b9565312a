"""Tests of identity conversations: fixed by table, number and seed; all different."""

from __future__ import annotations

import json
import tomllib

import pytest

from train.sft.identity import EXAMPLE, conversations

TABLE = tomllib.loads(EXAMPLE.read_text())


def test_they_are_different_and_a_function_of_the_seed():
    chats = conversations(TABLE, 500, seed=1)
    assert chats == conversations(TABLE, 500, seed=1) != conversations(TABLE, 500, seed=2)
    assert len({json.dumps(chat) for chat in chats}) == 500
    assert {len(chat) for chat in chats} == {2, 4}


def test_facts_are_put_in_everywhere():
    changed = {**TABLE, "facts": {"name": "Ada", "maker": "Acme", "kind": "a test"}}
    text = json.dumps(conversations(changed, 300, seed=1))
    assert "Ada" in text
    assert "Acme" in text
    assert "Laneformer" not in text
    assert "{" not in text.replace('{"role"', "")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"facts": {}}, r"\{name\} is used, but not given under \[facts\]"),
        ({"topics": []}, r"there is no \[\[topics\]\]"),
        ({"topics": [{"questions": ["x"], "answers": []}]}, "needs questions and answers"),
        ({"topics": [{"question": ["x"]}]}, "did you mean 'questions'"),
        ({"topics": [{"questions": ["Who?"], "answers": ["Me."]}]}, "add questions"),
    ],
)
def test_a_wrong_table_is_named(changes, says):
    with pytest.raises(ValueError, match=says):
        conversations({**TABLE, **changes}, 300, seed=1)
