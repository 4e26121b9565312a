"""Generate text: worked problems in arithmetic and algebra, and everyday sentences in six languages.

Document i of a kind is a pure function of i (and of phrases.toml). Every worked step is computed, never
templated as a number, and the answers are exact.
"""

from __future__ import annotations

import functools
import math
import random
import tomllib
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

PROBLEMS_PER_DOCUMENT = 6
SENTENCES_PER_DOCUMENT = 12
_NAMES = (
    "Ada",
    "Ben",
    "Chloe",
    "Diego",
    "Emma",
    "Farid",
    "Grace",
    "Hana",
    "Ivan",
    "Jun",
    "Kofi",
    "Lena",
    "Mina",
)
_THINGS = (
    "apples",
    "books",
    "marbles",
    "stickers",
    "pencils",
    "eggs",
    "bricks",
    "tickets",
    "cards",
    "seeds",
    "coins",
)
# question, worked steps, answer
Problem = tuple[str, list[str], str]


def arithmetic(index: int) -> str:
    """Return document `index` of worked problems."""
    draw = random.Random(f"arithmetic/{index}")
    parts = []
    for number in range(1, PROBLEMS_PER_DOCUMENT + 1):
        question, steps, answer = draw.choice(_PROBLEMS)(draw)
        parts.append(
            f"Problem {number}. {question}\nSolution. " + "\n".join(steps) + f"\nAnswer: {answer}"
        )
    return "\n\n".join(parts) + "\n"


def phrases(index: int) -> str:
    """Return document `index` of sentences of one language."""
    draw = random.Random(f"phrases/{index}")
    languages = _languages()
    words = languages[draw.choice(sorted(languages))]
    ranges = {"day": (1, 28), "year": (1850, 2030), "hour": (7, 21), "few": (2, 40)}
    sentences = []
    for _ in range(SENTENCES_PER_DOCUMENT):
        # a slot {word} takes a random entry of the list of that name
        slots = {name: draw.choice(values) for name, values in words.items() if name != "sentences"}
        numbers = {name: draw.randint(*limits) for name, limits in ranges.items()}
        sentences.append(draw.choice(words["sentences"]).format(**slots, **numbers))
    return " ".join(sentences) + "\n"


@functools.cache
def _languages() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((Path(__file__).parent / "phrases.toml").read_text(encoding="utf-8"))


def _shopping(draw: random.Random) -> Problem:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    had, boxes, per_box, gift = (
        draw.randint(2, 60),
        draw.randint(2, 12),
        draw.randint(3, 24),
        draw.randint(1, 30),
    )
    bought, total = boxes * per_box, had + boxes * per_box
    # something is left
    gift = min(gift, total - 1)
    question = (
        f"{name} has {had} {thing} and buys {boxes} boxes with {per_box} {thing} in each. "
        f"Then {name} gives {gift} of them away. How many {thing} are left?"
    )
    steps = [
        f"The boxes hold {boxes} * {per_box} = {bought} {thing}.",
        f"Together that makes {had} + {bought} = {total}.",
        f"After giving {gift} away, {total} - {gift} = {total - gift} remain.",
    ]
    return question, steps, str(total - gift)


def _linear(draw: random.Random) -> Problem:
    x, a = draw.randint(-20, 20), draw.choice([i for i in range(-9, 13) if i not in (0, 1)])
    b, letter = draw.randint(1, 60) * draw.choice((1, -1)), draw.choice("xyztn")
    c = a * x + b
    move = "Subtract" if b > 0 else "Add"
    signed = f"+ {b}" if b > 0 else f"- {-b}"
    steps = [
        f"{move} {abs(b)} on both sides: {a}{letter} = {c - b}.",
        f"Divide both sides by {a}: {letter} = {c - b} / {a} = {x}.",
        f"Check: {a} * ({x}) {signed} = {c}.",
    ]
    return f"Solve {a}{letter} {signed} = {c} for {letter}.", steps, f"{letter} = {x}"


def _fractions(draw: random.Random) -> Problem:
    b, d = draw.randint(2, 15), draw.randint(2, 15)
    a, c = draw.randint(1, 2 * b), draw.randint(1, 2 * d)
    common = math.lcm(b, d)
    left, right = a * common // b, c * common // d
    total = Fraction(a, b) + Fraction(c, d)
    steps = [
        f"The least common denominator of {b} and {d} is {common}.",
        f"{a}/{b} = {left}/{common} and {c}/{d} = {right}/{common}.",
        f"{left}/{common} + {right}/{common} = {left + right}/{common} = {total}.",
    ]
    return f"Add {a}/{b} + {c}/{d} and reduce.", steps, str(total)


_PROBLEMS: tuple[Callable[[random.Random], Problem], ...] = (_shopping, _linear, _fractions)
