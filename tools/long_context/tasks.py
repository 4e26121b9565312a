"""Documents that ask for what stands far before, made by code: a document is a function of its seed and length.

    가            a fact: one sign that says a name (α) and its value (Б)
    규            a link, one sign as well: a name (α) and the name whose value it has (β)
    ?αБ           a question, which the sign after the name answers

A fact is one token, so that to find it takes attention at a distance and nothing else. Of lines of several tokens
(`a = K`) models of this size learn in the tokens that they get here only that some value follows, not whose.

Facts stand at random places among RULER's noise sentences; a chain's keep their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

KINDS = ("recall", "keys", "hops")
# of two scripts, which SentencePiece never joins to one piece
NAMES, VALUES = "αβγδεζηθικ", "БГДЖЗИЙЛПФЦЧШЩЭЮ"
FACTS = {"recall": 2, "keys": len(NAMES)}
CHAINS, HOPS = 5, 2
TOLD_WITHIN = 0.9  # of a document stand the facts; questions that are scored come behind
ASKED_SHARE = 0.5  # of a training document are questions, but for "hops"
AT_ONCE = 0.5  # of the questions of "hops" follow their sign
NOISE = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
WHAT = VALUES + NAMES
FIRST_SIGN, SIGN_STEP = 0xAC00, 28  # Hangul syllables without a final consonant


def sign(name: str, what: str) -> str:
    """Of a fact or a link."""
    return chr(FIRST_SIGN + SIGN_STEP * (len(WHAT) * NAMES.index(name) + WHAT.index(what)))


@dataclass(frozen=True)
class Question:
    name: str
    value: str
    hops: int  # signs that lead to the value

    @property
    def line(self) -> str:
        return f"?{self.name}{self.value}"


@dataclass(frozen=True)
class Document:
    """lines before the questions; nothing of a question stands in them."""

    lines: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def text(self) -> str:
        """In one line: a name is the same token wherever it stands."""
        return " ".join(self.lines)


def facts(kind: str, draw: random.Random, told: bool) -> tuple[list[list[str]], list[list[Question]]]:
    """Chains of signs that belong together, in their order, and what can be asked of each chain."""
    names, values = (draw.sample(letters, len(letters)) for letters in (NAMES, VALUES))
    length, number = (HOPS, CHAINS) if kind == "hops" else (1, FACTS[kind])
    if told and kind != "hops":
        number = draw.randint(min(FACTS.values()), max(FACTS.values()))
    chains, asked = [], []
    for i in range(number):
        own, value = names[i * length : (i + 1) * length], values[i]
        chains.append([sign(name, before) for name, before in zip(own, [value, *own], strict=False)])
        asked.append([Question(name, value, hops) for hops, name in enumerate(own, 1)])
    return chains, asked


def document(kind: str, seed: int, tokens: int, count: Callable[[str], int], told: bool) -> Document:
    """At most so many tokens, as `count` counts them, with its questions.

    told: for training: every name may be asked, again and again, as soon as it can be answered; in "hops" once,
    as a second time the first answer tells it. Otherwise questions are scored: one of each chain, as an answer
    would tell the chain's others, and they stand at the end.
    """
    draw = random.Random(f"{kind} {seed}")
    chains, asked = facts(kind, draw, told)
    placed: list[tuple[float, str]] = []
    begins: dict[str, float] = {}
    for chain, own in zip(chains, asked, strict=True):
        places = sorted(draw.uniform(0, TOLD_WITHIN) for _ in chain)
        placed += zip(places, chain, strict=True)
        begins |= zip((question.name for question in own), places, strict=True)
    left = tokens - sum(count(line) for _, line in placed)
    cost, questions = count(asked[0][0].line), [draw.choice(own) for own in asked]
    if told:
        every = [question for own in asked for question in own]
        if kind != "hops":
            every = draw.choices(every, k=int(left * ASKED_SHARE) // cost)
        draw.shuffle(every)
        for question in every[: left // cost]:
            begin = begins[question.name]
            at_once = kind == "hops" and draw.random() < AT_ONCE
            placed.append((begin + 1e-9 if at_once else draw.uniform(begin, 1), question.line))
            left -= cost
    else:
        draw.shuffle(questions)
        left -= cost * len(questions)
    while (cost := count(line := draw.choice(NOISE))) <= left:
        placed.append((draw.random(), line))
        left -= cost
    return Document(tuple(line for _, line in sorted(placed)), () if told else tuple(questions))
