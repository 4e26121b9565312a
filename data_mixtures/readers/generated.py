"""Text that we write ourselves: worked problems in arithmetic and algebra, and everyday sentences in six languages.

Document i of a kind is a pure function of i (and of phrases.toml), so any process can write any part of the stream.
Every worked step is computed, never templated as a number, and the answers are exact.
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
    "Noah",
    "Olga",
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
    "bolts",
    "coins",
)
Problem = tuple[str, list[str], str]  # question, worked steps, answer


def generate(kind: str, index: int) -> str:
    """Document `index` of a generated kind ("arithmetic" or "phrases")."""
    draw = random.Random(f"{kind}/{index}")
    return _lesson(draw) if kind == "arithmetic" else _letter(draw)


def _lesson(draw: random.Random) -> str:
    parts = []
    for number in range(1, PROBLEMS_PER_DOCUMENT + 1):
        question, steps, answer = draw.choice(_PROBLEMS)(draw)
        parts.append(f"Problem {number}. {question}\nSolution. " + "\n".join(steps) + f"\nAnswer: {answer}")
    return "\n\n".join(parts) + "\n"


def _shopping(draw: random.Random) -> Problem:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    had, boxes, per_box, given = draw.randint(2, 60), draw.randint(2, 12), draw.randint(3, 24), draw.randint(1, 30)
    bought, total = boxes * per_box, had + boxes * per_box
    given = min(given, total - 1)
    question = (
        f"{name} has {had} {thing} and buys {boxes} boxes with {per_box} {thing} in each. "
        f"Then {name} gives {given} of them away. How many {thing} are left?"
    )
    steps = [
        f"The boxes hold {boxes} * {per_box} = {bought} {thing}.",
        f"Together that makes {had} + {bought} = {total}.",
        f"After giving {given} away, {total} - {given} = {total - given} remain.",
    ]
    return question, steps, str(total - given)


def _multiplication(draw: random.Random) -> Problem:
    a, b = draw.randint(12, 999), draw.randint(11, 99)
    tens, ones = b - b % 10, b % 10
    steps = [f"Split {b} into {tens} + {ones}.", f"{a} * {tens} = {a * tens}.", f"{a} * {ones} = {a * ones}."]
    steps.append(f"{a * tens} + {a * ones} = {a * b}.")
    return f"Compute {a} * {b}.", steps, str(a * b)


def _division(draw: random.Random) -> Problem:
    b, quotient = draw.randint(3, 40), draw.randint(5, 400)
    rest = draw.randrange(b)
    a = b * quotient + rest
    steps = [f"{b} * {quotient} = {b * quotient}, and {a} - {b * quotient} = {rest}, which is less than {b}."]
    return f"Divide {a} by {b} with remainder.", steps, f"{quotient} remainder {rest}"


def _linear(draw: random.Random) -> Problem:
    x, a = draw.randint(-20, 20), draw.choice([i for i in range(-9, 13) if i not in (0, 1)])
    b, letter = draw.randint(1, 60) * draw.choice((1, -1)), draw.choice("xyztn")
    c = a * x + b
    move = "Subtract" if b > 0 else "Add"
    steps = [
        f"{move} {abs(b)} on both sides: {a}{letter} = {c - b}.",
        f"Divide both sides by {a}: {letter} = {c - b} / {a} = {x}.",
    ]
    steps.append(f"Check: {a} * ({x}) {_signed(b)} = {c}.")
    return f"Solve {a}{letter} {_signed(b)} = {c} for {letter}.", steps, f"{letter} = {x}"


def _signed(value: int) -> str:
    return f"+ {value}" if value >= 0 else f"- {-value}"


def _quadratic(draw: random.Random) -> Problem:
    p, q = sorted((draw.randint(1, 12), draw.randint(1, 12)))
    question = f"Find the solutions of x^2 - {p + q}x + {p * q} = 0."
    steps = [
        f"Two numbers with sum {p + q} and product {p * q} are {p} and {q}.",
        f"So the left side is (x - {p})(x - {q}).",
    ]
    return question, steps, f"x = {p}" if p == q else f"x = {p} or x = {q}"


def _system(draw: random.Random) -> Problem:
    x, y, k = draw.randint(-9, 15), draw.randint(-9, 15), draw.randint(2, 6)
    steps = [
        f"From the first equation, y = {x + y} - x.",
        f"Insert it into the second: {k}x - ({x + y} - x) = {k * x - y}, so {k + 1}x = {k * x - y + x + y}.",
        f"Hence x = {x}, and y = {x + y} - ({x}) = {y}.",
    ]
    return f"Solve the system x + y = {x + y}, {k}x - y = {k * x - y}.", steps, f"x = {x}, y = {y}"


def _fractions(draw: random.Random) -> Problem:
    b, d = draw.randint(2, 15), draw.randint(2, 15)
    a, c = draw.randint(1, 2 * b), draw.randint(1, 2 * d)
    common = math.lcm(b, d)
    left, right = a * common // b, c * common // d
    total = Fraction(a, b) + Fraction(c, d)
    steps = [
        f"The least common denominator of {b} and {d} is {common}.",
        f"{a}/{b} = {left}/{common} and {c}/{d} = {right}/{common}.",
    ]
    steps.append(f"{left}/{common} + {right}/{common} = {left + right}/{common} = {total}.")
    return f"Add {a}/{b} + {c}/{d} and reduce.", steps, str(total)


def _percent(draw: random.Random) -> Problem:
    price, percent, name = (
        draw.randint(2, 60) * 20,
        draw.choice((5, 10, 15, 20, 25, 30, 40, 50, 75)),
        draw.choice(_NAMES),
    )
    off = price * percent // 100
    steps = [
        f"{percent}% of {price} is {price} * {percent} / 100 = {off}.",
        f"The new price is {price} - {off} = {price - off}.",
    ]
    question = f"A coat costs {price} euros. {name} gets a discount of {percent}%. What does {name} pay?"
    return question, steps, f"{price - off} euros"


def _speed(draw: random.Random) -> Problem:
    speed, minutes = draw.randint(2, 24) * 5, draw.choice((30, 45, 60, 90, 120, 150, 180))
    distance = Fraction(speed * minutes, 60)
    steps = [
        f"{minutes} minutes are {Fraction(minutes, 60)} hours.",
        f"Distance = speed * time = {speed} * {Fraction(minutes, 60)} = {distance}.",
    ]
    question = f"A train travels at {speed} km per hour for {minutes} minutes. How far does it go?"
    return question, steps, f"{distance} km"


def _euclid(draw: random.Random) -> Problem:
    factor = draw.randint(1, 30)
    a, b = factor * draw.randint(4, 60), factor * draw.randint(4, 60)
    big, small, steps = max(a, b), min(a, b), []
    while small:
        steps.append(f"{big} = {big // small} * {small} + {big % small}")
        big, small = small, big % small
    steps.append(f"The last remainder that is not 0 is {big}." if len(steps) > 1 else f"So {big} divides both.")
    return f"Find the greatest common divisor of {a} and {b} by Euclid's algorithm.", steps, str(big)


def _series(draw: random.Random) -> Problem:
    first, step, count = draw.randint(-10, 30), draw.randint(2, 12), draw.randint(5, 40)
    last = first + (count - 1) * step
    steps = [
        f"The last term is {first} + {count - 1} * {step} = {last}.",
        f"The sum is {count} * ({first} + {last}) / 2 = {count * (first + last) // 2}.",
    ]
    shown = ", ".join(str(first + i * step) for i in range(4))
    return f"Add the first {count} terms of {shown}, ...", steps, str(count * (first + last) // 2)


def _area(draw: random.Random) -> Problem:
    a, b, tile = draw.randint(3, 25), draw.randint(3, 25), draw.choice((2, 3, 4, 5))
    question = (
        f"A room is {a} m long and {b} m wide. What is the area of its floor, "
        f"and what do tiles for it cost at {tile} euros per square metre?"
    )
    steps = [
        f"The area is {a} * {b} = {a * b} square metres.",
        f"The tiles cost {a * b} * {tile} = {a * b * tile} euros.",
    ]
    return question, steps, f"{a * b} square metres, {a * b * tile} euros"


def _binary(draw: random.Random) -> Problem:
    value, steps = draw.randint(9, 1023), []
    rest = value
    while rest:
        steps.append(f"{rest} = 2 * {rest // 2} + {rest % 2}")
        rest //= 2
    steps.append("Read the remainders from the last to the first.")
    return f"Write {value} in base 2.", steps, f"{value:b}"


def _modular(draw: random.Random) -> Problem:
    base, exponent, modulus = draw.randint(2, 15), draw.randint(3, 8), draw.randint(7, 50)
    power, steps = base % modulus, [f"{base}^1 = {base % modulus} (mod {modulus})"]
    for i in range(2, exponent + 1):
        steps.append(f"{base}^{i} = {power} * {base} = {power * base} = {power * base % modulus} (mod {modulus})")
        power = power * base % modulus
    return f"What is {base}^{exponent} modulo {modulus}?", steps, str(power)


def _derivative(draw: random.Random) -> Problem:
    a, n, b, x = draw.randint(2, 9), draw.randint(2, 6), draw.randint(1, 20), draw.randint(1, 5)
    slope = a * n * x ** (n - 1) - b
    power = "x" if n == 2 else f"x^{n - 1}"
    steps = [f"By the power rule f'(x) = {a * n}{power} - {b}.", f"f'({x}) = {a * n} * {x ** (n - 1)} - {b} = {slope}."]
    return f"Let f(x) = {a}x^{n} - {b}x. Find the slope of f at x = {x}.", steps, str(slope)


def _chance(draw: random.Random) -> Problem:
    red, blue = draw.randint(2, 9), draw.randint(2, 9)
    total = red + blue
    both = Fraction(red * (red - 1), total * (total - 1))
    steps = [f"The first ball is red with probability {red}/{total}, the second then with {red - 1}/{total - 1}."]
    steps.append(f"{red}/{total} * {red - 1}/{total - 1} = {red * (red - 1)}/{total * (total - 1)} = {both}.")
    question = (
        f"A bag holds {red} red and {blue} blue balls. Two are drawn without putting back. How likely are both red?"
    )
    return question, steps, str(both)


_PROBLEMS: tuple[Callable[[random.Random], Problem], ...] = (
    _shopping, _multiplication, _division, _linear, _quadratic, _system, _fractions, _percent, _speed, _euclid, _series,
    _area, _binary, _modular, _derivative, _chance,
)  # fmt: skip


@functools.cache
def _languages() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((Path(__file__).parent / "phrases.toml").read_text(encoding="utf-8"))


def _letter(draw: random.Random) -> str:
    """Sentences of one language; a slot {word} takes a random entry of the language's list of that name."""
    languages = _languages()
    words = languages[draw.choice(sorted(languages))]
    sentences = []
    for _ in range(SENTENCES_PER_DOCUMENT):
        slots = {name: draw.choice(values) for name, values in words.items() if name != "sentences"}
        numbers = {
            "day": draw.randint(1, 28),
            "year": draw.randint(1850, 2030),
            "hour": draw.randint(7, 21),
            "few": draw.randint(2, 40),
        }
        sentences.append(draw.choice(words["sentences"]).format(**slots, **numbers))
    return " ".join(sentences) + "\n"
