"""Documents that ask for what stands far before, made by code: a document is a function of its seed and length.

    a = K .       a fact: name, value
    b = a .       the same value by one more hop
    ? b K .       a question, which the token after the name answers

Facts stand in random order of places among lines of filler text; a chain's lines keep their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase, ascii_uppercase

KINDS = ("recall", "keys", "hops")
FACTS = {"recall": 2, "keys": 10}
CHAINS, HOPS = 5, 4
TOLD_WITHIN = 0.9  # of a document stand the facts; questions that are scored come behind
CHANCE = 1 / len(ascii_uppercase)


@dataclass(frozen=True)
class Question:
    name: str
    value: str
    hops: int  # lines that lead to the value

    @property
    def line(self) -> str:
        return f"? {self.name} {self.value} ."


@dataclass(frozen=True)
class Document:
    """lines before the questions; nothing of a question stands in them."""

    kind: str
    lines: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def text(self) -> str:
        """In one line: a name is the same token wherever it stands."""
        return " ".join(self.lines)


def facts(kind: str, draw: random.Random) -> tuple[list[list[str]], list[Question]]:
    """Chains of lines that belong together, in their order, and what can be asked."""
    names, values = (draw.sample(letters, len(letters)) for letters in (ascii_lowercase, ascii_uppercase))
    length = HOPS if kind == "hops" else 1
    chains, asked = [], []
    for number in range(CHAINS if kind == "hops" else FACTS[kind]):
        own, value = names[number * length : (number + 1) * length], values[number]
        chains.append([f"{name} = {before} ." for name, before in zip(own, [value, *own], strict=False)])
        asked += [Question(name, value, hops) for hops, name in enumerate(own, 1)]
    return chains, asked


def document(
    kind: str, seed: int, tokens: int, filler: Sequence[str], count: Callable[[str], int], told: bool
) -> Document:
    """At most so many tokens, as `count` counts them, with its questions.

    told: for training: every name may be asked as soon as it can be answered. Otherwise questions are scored: one of
    each chain, as an answer would tell the chain's other ones, and they stand at the end.
    """
    draw = random.Random(f"{kind} {seed}")
    chains, asked = facts(kind, draw)
    by_chain = [asked[i : i + len(chains[0])] for i in range(0, len(asked), len(chains[0]))]
    questions = 2 * asked if told else [draw.choice(each) for each in by_chain]
    draw.shuffle(questions)
    lines = [(sorted(draw.uniform(0, TOLD_WITHIN) for _ in chain), chain) for chain in chains]
    placed = [pair for places, chain in lines for pair in zip(places, chain, strict=True)]
    left = tokens - sum(count(line) for _, line in placed)
    if told:
        said = {line.split()[0]: place for place, line in placed}
        for question in questions[: max(0, left) // count(questions[0].line)]:
            placed.append((draw.uniform(said[question.name], 1), question.line))
            left -= count(question.line)
    else:
        left -= sum(count(question.line) for question in questions)
    while (cost := count(line := draw.choice(filler))) <= left:
        placed.append((draw.random(), line))
        left -= cost
    return Document(kind, tuple(line for _, line in sorted(placed)), () if told else tuple(questions))
