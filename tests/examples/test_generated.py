"""Generated text: every equation holds, and a document depends on its index alone."""

import re
from fractions import Fraction

from examples import generated

NUMBER = r"\(?-?\d+(?:/\d+)?\)?"
SIDE = rf"{NUMBER}(?: [-+*/] {NUMBER})*"
# whole equations only: not after an operator, not before one, no variable at either end
EQUATION = re.compile(rf"(?<!\S)(?<![-+*/] )(?=({SIDE}) = ({SIDE})(?![\w/^(])(?! [-+*/] ))")


def false_equations(text: str) -> list[str]:
    """Equations between numbers in a text whose two sides differ, computed exactly."""

    def value(side: str) -> Fraction:
        return eval(re.sub(r"\d+", r"Fraction(\g<0>)", side), {"Fraction": Fraction})

    return [
        f"{left} = {right}" for left, right in EQUATION.findall(text) if value(left) != value(right)
    ]


def test_generated_equations_hold():
    lessons = "\n".join(generated.arithmetic(i) for i in range(400))
    lessons = re.sub(r".*\(mod.*", "", lessons)  # congruences are not equations
    assert len(EQUATION.findall(lessons)) > 5000
    assert false_equations(lessons) == []
    assert false_equations("So 12 * 3 = 37 remain, and 2 + 2 = 4.") == [
        "12 * 3 = 37"
    ]  # the check can fail


def test_generated_text_depends_on_the_index_alone():
    for document in (generated.arithmetic, generated.phrases):
        documents = [document(i) for i in range(50)]
        assert documents == [document(i) for i in range(50)]
        assert len(set(documents)) == 50
        assert not any("{" in each for each in documents)
