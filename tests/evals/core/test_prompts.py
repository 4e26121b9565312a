"""Tests of prompts: examples drawn by each protocol, tokens of task types, too long prompts."""

import re
from dataclasses import replace

import pytest

from evals.core.prompts import (
    Item,
    Protocol,
    Unscorable,
    crop_prompt,
    draw_dclm_examples,
    draw_nanochat_examples,
    items,
    locate_answers,
    order_rows,
    space_evenly,
)
from evals.core.tasks import Row
from evals.scorer import Prompt
from tests.evals.core.core_assets import CHOICE_ROWS, ROWS, SCHEMA_ROWS, TEXT_ROWS, task

LONG = 1 << 20


class Letters:
    """A tokenizer whose ids are code points, so spans can be read as text. BOS is 1, EOS is 2."""

    bos_id: int | None = 1
    eos_id: int | None = 2

    def encode(self, text, special_tokens=False):
        return [1] * special_tokens + [ord(c) for c in text] + [2] * special_tokens

    def encode_each(self, texts):
        return [self.encode(text) for text in texts]


class Words(Letters):
    """A tokenizer like GPT-2's: a space belongs to the word after it, no text is wrapped."""

    def __init__(self):
        self.words: list[str] = ["<bos>", "<eos>", "<0>"]

    def encode(self, text, special_tokens=False):
        words = re.findall(" ?[^ ]+", text)
        self.words += dict.fromkeys(words)
        return [self.words.index(word) for word in words]

    def text(self, ids):
        return "".join(self.words[i] for i in ids)


def ask(
    label: str, rows: list[Row], protocol: Protocol, most: int | None = None, **changed: int
) -> list[Item]:
    return list(items(replace(task(label), **changed), rows, protocol, Letters(), LONG, most))


def read(prompt: Prompt) -> tuple[str, str]:
    """Return context (without BOS) and answer as text."""
    text = "".join(chr(i) for i in prompt.ids if i > 2)
    cut = sum(i > 2 for i in prompt.ids[: prompt.start])
    return text[:cut], text[cut:]


# --- which rows, which examples


def test_nanochat_choices_are_fixed():
    assert order_rows(10, None) == [0, 3, 7, 2, 1, 6, 4, 5, 8, 9]
    assert order_rows(10, 3) == [0, 3, 7]
    assert [draw_nanochat_examples(i, 12, 3) for i in range(4)] == [
        [8, 2, 1],
        [7, 9, 8],
        [9, 8, 10],
        [2, 7, 5],
    ]
    assert draw_nanochat_examples(5, 500, 10) == [39, 143, 234, 458, 13, 25, 53, 245, 247, 352]


def test_dclm_choices_are_fixed():
    chosen = [[3, 4, 5], [0, 4, 5], [0, 1, 5], [1, 4, 5], [0, 1, 5], [0, 3, 4]]
    assert [list(examples) for examples in draw_dclm_examples(6, 3)] == chosen
    last = [386, 302, 881, 1683, 565, 1526, 1813, 539, 221, 1855]
    assert [list(examples) for examples in draw_dclm_examples(2117, 10)][2116] == last
    for count, shots in [(32, 10), (230, 3), (11, 10), (300, 0)]:
        for index, examples in enumerate(draw_dclm_examples(count, shots)):
            assert index not in examples
            assert len(examples) == shots


def test_too_few_examples():
    with pytest.raises(Unscorable, match="needs 10 other rows as examples, but only 6 rows"):
        ask("bigbench_operators", TEXT_ROWS, "nanochat")
    # dclm shows as many as there are
    assert all(len(chosen) == 5 for chosen in draw_dclm_examples(6, 10))


def test_a_subset_of_dclm_has_the_prompts_of_the_whole():
    whole = ask("jeopardy", TEXT_ROWS, "dclm")
    assert [item.group for item in whole] == ["odd"] * 3 + ["even"] * 3
    part = ask("jeopardy", TEXT_ROWS, "dclm", most=3)
    assert [item.group for item in part] == ["odd", "even", "even"]
    assert all(item in whole for item in part)
    assert space_evenly(10, 4) == {0, 2, 5, 7}
    assert space_evenly(3, 9) == space_evenly(3, None) == {0, 1, 2}


# --- texts and spans


TEXTS = [
    # the rows of nanochat in its order; the options of a choice begin where they part
    (
        "nanochat",
        "copa",
        CHOICE_ROWS,
        {},
        1,
        [
            ("The tree looked at the moon, because ", option)
            for option in ("the tree was old.", "it was moon", "no.")
        ],
    ),
    (
        "nanochat",
        "winograd",
        SCHEMA_ROWS,
        {},
        1,
        [
            ("The tree hit the car and the tree", " fell down."),
            ("The tree hit the car and the car", " fell down."),
        ],
    ),
    (
        "nanochat",
        "squad",
        TEXT_ROWS,
        {"shots": 2},
        0,
        [("7 and 7 make 14\n\n1 and 2 make 3\n\n2 and 2 make", " 4")],
    ),
    (
        "dclm",
        "copa",
        CHOICE_ROWS[1:],
        {},
        1,
        [
            ("The tree looked at the moon, because", option)
            for option in ("the tree was old.", "it was moon", "no.")
        ],
    ),
    (
        "dclm",
        "winograd",
        SCHEMA_ROWS[1:],
        {},
        1,
        [
            ("The tree hit the car and the tree", "fell down."),
            ("The tree hit the car and the car", "fell down."),
        ],
    ),
    (
        "dclm",
        "jeopardy",
        TEXT_ROWS[::2],
        {"shots": 2},
        0,
        [
            ("3 and 4 make\nAnswer: 7\n5 and 6 make\nAnswer: 11\n1 and 2 make\nAnswer:", "3"),
        ],
    ),
]


def test_texts_of_each_protocol_and_type():
    for protocol, label, rows, changed, gold, texts in TEXTS:
        item = ask(label, rows, protocol, **changed)[0]
        assert [read(p) for p in item.prompts] == texts, (protocol, label)
        assert item.gold == gold
        for (
            prompt
        ) in item.prompts:  # one BOS, the tokenizer's own or added; and no EOS before the question
            assert prompt.ids[0] == 1 < 2 < min(prompt.ids[1:])


def test_a_tokenizer_with_spaces_before_words():
    words = Words()
    item = next(items(task("copa"), CHOICE_ROWS, "dclm", words, LONG))
    answers = [words.text(p.ids[p.start :]) for p in item.prompts]
    assert answers == [" the cat was old.", " it was dog", " no."]
    assert [words.text(p.ids[: p.start]) for p in item.prompts] == [CHOICE_ROWS[0]["query"]] * 3


def test_answer_spans_by_hand():
    for kind, prompts, starts in (
        ("multiple_choice", [[1, 5, 6, 7], [1, 5, 8]], [2, 2]),
        ("multiple_choice", [[1, 5, 6], [1, 5]], [2, 2]),  # one is the other's start
        ("schema", [[1, 5, 6, 7, 9], [1, 8, 7, 9]], [3, 2]),
    ):
        assert locate_answers(prompts, kind) == [*map(Prompt, prompts, starts)]
    # the second: the answer's first letters joined the token before them
    for context in ([1, 4], [1, 4, 3]):
        assert locate_answers([context, [1, 4, 5, 6]], "language_modeling") == [
            Prompt([1, 4, 5, 6], 2)
        ]


# --- too long


@pytest.mark.parametrize("label", ["copa", "winograd", "coqa"])
@pytest.mark.parametrize("protocol", ["nanochat", "dclm"])
def test_a_prompt_too_long_loses_its_beginning(protocol, label):
    rows = ROWS[task(label).type]
    whole = ask(label, rows, protocol)
    # room for the longest answer and four ids before it
    limit = max(len(p.ids) - p.start for item in whole for p in item.prompts) + 4
    short = list(items(task(label), rows, protocol, Letters(), limit))
    assert any(len(p.ids) > limit for item in whole for p in item.prompts)
    for before, after in zip(whole, short, strict=True):
        assert after.gold == before.gold
        for long, cut in zip(before.prompts, after.prompts, strict=True):
            assert cut.ids == long.ids[-limit:]
            # the answer is whole
            assert cut.ids[cut.start :] == long.ids[long.start :]
    with pytest.raises(Unscorable, match="tokens does not fit into"):
        list(items(task(label), rows, protocol, Letters(), limit - 4))


def test_an_answer_needs_one_token_before_it():
    assert crop_prompt(Prompt([1, 2, 3, 4], 2), 3) == Prompt([2, 3, 4], 1)
    with pytest.raises(Unscorable, match="an answer of 3 tokens does not fit into 3"):
        crop_prompt(Prompt([1, 2, 3, 4], 1), 3)
