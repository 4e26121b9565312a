"""Write conversations about who the model is.

    python -m train.sft.identity FACTS.toml --out identity.jsonl

Questions and answers of a TOML, combined with greetings and other ways to write them, some about two topics
in two turns: a few hundred conversations to mix with others, so that the model knows its name. The same file,
number and seed give the same lines.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from data_mixtures.recipe import check_known
from records.command import Count, check_ranges, run_command
from records.files import write_atomically
from records.job import read_sections

EXAMPLE = Path(__file__).with_suffix(".toml")
# the empty ones weigh: three questions of ten have no greeting
OPENINGS = (
    "",
    "",
    "",
    "Hi! ",
    "Hello. ",
    "Hey, ",
    "Good morning! ",
    "One question: ",
    "Tell me, ",
    "Excuse me. ",
)
# share of conversations with a second turn
TWO_TOPICS = 0.3
# attempts for each conversation that is asked for, before there are no new ones
DRAWS = 50


@dataclass
class Arguments:
    facts: tyro.conf.Positional[Path] = EXAMPLE
    """TOML with [facts] and [[topics]]; default: the example, to copy and edit."""
    out: Path = Path("identity.jsonl")
    """JSON-lines file to write, for `python -m train.sft`."""
    conversations: Count = 500
    """How many, all different."""
    seed: int = 1


def conversations(table: dict[str, Any], count: int, seed: int) -> list[list[dict[str, str]]]:
    """Draw `count` different conversations; ValueError for a wrong or small table."""
    topics = _topics(table)
    rng = random.Random(seed)
    chats: dict[str, list[dict[str, str]]] = {}
    for _ in range(count * DRAWS):
        turns: list[dict[str, str]] = []
        for topic in rng.sample(topics, 2 if len(topics) > 1 and rng.random() < TWO_TOPICS else 1):
            question = phrase(rng.choice(topic["questions"]), rng, first=not turns)
            turns += [{"role": "user", "content": question}]
            turns += [{"role": "assistant", "content": rng.choice(topic["answers"])}]
        # duplicates are drawn again, as the count is of different ones
        chats.setdefault(json.dumps(turns), turns)
        if len(chats) == count:
            return list(chats.values())
    raise ValueError(
        f"the topics give only about {len(chats)} different conversations, not {count}; add questions"
    )


def phrase(question: str, rng: random.Random, first: bool) -> str:
    """Write a question as people do."""
    opening = rng.choice(OPENINGS) if first else ""
    if opening.endswith((", ", ": ")):
        question = question[0].lower() + question[1:]
    text = opening + question
    text = text.lower() if rng.random() < 0.2 else text
    return text.rstrip("?.!") if rng.random() < 0.2 else text


def _topics(table: dict[str, Any]) -> list[dict[str, list[str]]]:
    check_known("table", table, ("facts", "topics"))
    facts, topics = table.get("facts", {}), table.get("topics", [])
    if not topics:
        raise ValueError("there is no [[topics]] with questions and answers")
    for topic in topics:
        check_known("key of [[topics]]", topic, ("questions", "answers"))
        if not topic.get("questions") or not topic.get("answers"):
            raise ValueError(f"a topic needs questions and answers, this one has {topic}")
    try:
        return [
            {key: [text.format(**facts) for text in texts] for key, texts in topic.items()}
            for topic in topics
        ]
    except KeyError as missing:
        raise ValueError(
            f"{{{missing.args[0]}}} is used, but not given under [facts]: {facts}"
        ) from None


def main() -> None:
    arguments = tyro.cli(Arguments, prog="python -m train.sft.identity", description=__doc__)
    check_ranges(Arguments, vars(arguments))
    try:
        table = read_sections(arguments.facts)
        chats = conversations(table, arguments.conversations, arguments.seed)
        write_atomically(
            arguments.out, "".join(json.dumps({"messages": turns}) + "\n" for turns in chats)
        )
    except ValueError as problem:
        raise ValueError(f"{arguments.facts}: {problem}") from None
    print(f"{arguments.out}: {len(chats)} conversations")


if __name__ == "__main__":
    run_command("train.sft.identity", main)
