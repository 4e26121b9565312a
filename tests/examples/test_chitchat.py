"""The reader of the demo's conversations: on small ones, and on the package itself."""

from __future__ import annotations

import json
from pathlib import Path

from examples import chitchat


def turns(*texts: str | list[str]) -> list[list[dict[str, str]]]:
    """As the package stores them: a turn is what one person sends in a row."""
    return [
        [{"text": part, "sender": "ab"[i % 2]} for part in ([t] if isinstance(t, str) else t)]
        for i, t in enumerate(texts)
    ]


def contents(pairs: list[tuple[dict[str, str], dict[str, str]]]) -> list[tuple[str, str]]:
    assert all((user["role"], reply["role"]) == ("user", "assistant") for user, reply in pairs)
    return [(user["content"], reply["content"]) for user, reply in pairs]


def test_exchanges() -> None:
    assert contents(
        chitchat.exchanges(turns(["Hi ", "there"], "hello", "How are you?", ["fine", "you?"], "bye"))
    ) == [
        ("Hi there", "hello"),
        ("How are you?", "fine you?"),
    ]
    assert chitchat.exchanges(turns("Hi")) == []
    assert chitchat.exchanges(turns("Write to me", "at joe.doe@example.com")) == []


def test_an_empty_message_ends_a_stretch() -> None:
    assert contents(chitchat.exchanges(turns("a", "b", "c", " ", "e", "f"))) == [("a", "b")]


def test_split() -> None:
    pairs = chitchat.exchanges(turns("a" * 4, "b" * 4, "c" * 4, "d" * 4, "e", "f" * 20, "g", "h"))
    lengths = [[len(message["content"]) for message in one] for one in chitchat.split(pairs, 2, 16)]
    assert lengths == [[4, 4, 4, 4], [1, 1]]
    assert list(chitchat.split(pairs, 2, 3)) == [[*pairs[3]]]
    assert [len(one) for one in chitchat.split(pairs, 1, 100)] == [2, 2, 2, 2]


def test_the_package(tmp_path: Path) -> None:
    chitchat.main(tmp_path / "deep" / "chat.jsonl")
    lines = [
        json.loads(line)["messages"] for line in (tmp_path / "deep" / "chat.jsonl").read_text().splitlines()
    ]
    assert len(lines) > 20_000
    for messages in lines:
        assert [message["role"] for message in messages] == ["user", "assistant"] * (
            1 if len(messages) == 2 else 2
        )
        assert all(message["content"].strip() for message in messages)
        assert sum(len(message["content"]) for message in messages) <= 340
        assert not any("@gmail.com" in message["content"] for message in messages)
