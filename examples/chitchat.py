"""Write real conversations for the demo's SFT as JSON lines: `python -m examples.chitchat --out FILE.jsonl`.

The Chit-Chat Challenge of Brigham Young University, from PyPI's `chitchat-dataset` (MIT licence): 7,168
conversations of people who were given a question to talk about. Who writes first is the user here, the
other one the assistant.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any

import tyro

from records.files import write_atomically

SOURCE = "chitchat-dataset (BYU Chit-Chat Challenge), MIT licence"
MAX_EXCHANGES, MAX_CHARS = 2, 340
Message = dict[str, str]
Exchange = tuple[Message, Message]
_EMAIL = re.compile(r"\S@\S+\.\w")


def main(out: Path) -> None:
    """Write {"messages": [...]} lines: stretches of so few exchanges that they fit the demo's window of 256 tokens."""
    data = json.loads(files("chitchat_dataset").joinpath("dataset.json").read_text())
    stretches = [
        stretch
        for conversation in data.values()
        for stretch in split(list_exchanges(conversation["messages"]), MAX_EXCHANGES, MAX_CHARS)
    ]
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(
        out, "".join(json.dumps({"messages": stretch}) + "\n" for stretch in stretches)
    )
    print(f"{out}: {len(stretches):,} conversations from {SOURCE}", file=sys.stderr)


def list_exchanges(turns: Iterable[list[dict[str, Any]]]) -> list[Exchange]:
    """Return pairs of a user's and the assistant's message, up to an empty one."""
    # what one person sends in a row is one message, so speakers alternate
    texts = [" ".join(line["text"].strip() for line in turn).strip() for turn in turns]
    # two conversations of the set hold an e-mail address
    if any(_EMAIL.search(text) for text in texts):
        return []
    # a last message without an answer is left out
    pairs = takewhile(all, zip(texts[::2], texts[1::2], strict=False))
    return [
        ({"role": "user", "content": message}, {"role": "assistant", "content": reply})
        for message, reply in pairs
    ]


def split(pairs: Iterable[Exchange], max_exchanges: int, max_chars: int) -> Iterator[list[Message]]:
    """Yield stretches of consecutive pairs of at most `max_chars` characters; a longer pair is left out."""
    stretch: list[Message] = []
    room = max_chars
    for pair in pairs:
        size = sum(len(message["content"]) for message in pair)
        if stretch and (size > room or len(stretch) == 2 * max_exchanges):
            yield stretch
            stretch, room = [], max_chars
        if size <= room:
            stretch, room = [*stretch, *pair], room - size
    if stretch:
        yield stretch


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.chitchat")
