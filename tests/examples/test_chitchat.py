"""The reader of the demo's conversations: on small ones, and on the package itself."""

from __future__ import annotations

from examples import chitchat
from records.files import read_lines

Pairs = list[tuple[dict[str, str], dict[str, str]]]


def exchanges(*turns: list[str]) -> Pairs:
    """Of turns as the package stores them: what one person sends in a row."""
    messages = [
        [{"text": text, "sender": "ab"[i % 2]} for text in texts] for i, texts in enumerate(turns)
    ]
    return chitchat.list_exchanges(messages)


def contents(pairs: Pairs) -> list[tuple[str, str]]:
    assert all((user["role"], reply["role"]) == ("user", "assistant") for user, reply in pairs)
    return [(user["content"], reply["content"]) for user, reply in pairs]


def test_exchanges():
    pairs = exchanges(["Hi ", "there"], ["hello"], ["How are you?"], ["fine", "you?"], ["bye"])
    assert contents(pairs) == [("Hi there", "hello"), ("How are you?", "fine you?")]
    assert exchanges(["Hi"]) == exchanges(["Write to me"], ["at joe.doe@example.com"]) == []
    assert contents(exchanges(["a"], ["b"], ["c"], [" "], ["e"], ["f"])) == [("a", "b")], (
        "an empty message"
    )


def test_split():
    pairs = exchanges(
        *(
            [letter * length]
            for letter, length in zip("abcdefgh", [4, 4, 4, 4, 1, 20, 1, 1], strict=True)
        )
    )
    lengths = [[len(message["content"]) for message in one] for one in chitchat.split(pairs, 2, 16)]
    assert lengths == [[4, 4, 4, 4], [1, 1]]
    assert list(chitchat.split(pairs, 2, 3)) == [[*pairs[3]]]
    assert [len(one) for one in chitchat.split(pairs, 1, 100)] == [2, 2, 2, 2]


def test_the_package(tmp_path):
    chitchat.main(tmp_path / "deep" / "chat.jsonl")
    conversations = [line["messages"] for line in read_lines(tmp_path / "deep" / "chat.jsonl")]
    assert len(conversations) > 20_000
    for messages in conversations:
        turns = ["user", "assistant"] * (1 if len(messages) == 2 else 2)
        assert [message["role"] for message in messages] == turns
        texts = [message["content"] for message in messages]
        assert all(text.strip() for text in texts)
        assert sum(map(len, texts)) <= 340
        assert not any("@gmail.com" in text for text in texts)
