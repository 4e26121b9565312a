"""sentencepiece models: the fast encoder gives the ids of the library for any text, or is not used."""

import functools
import io
import random
import sysconfig
from pathlib import Path

import gigatoken
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures import fast_encoder, tokenizer
from data_mixtures.recipe import TokenizerTraining

STDLIB = Path(sysconfig.get_path("stdlib"))
TEXTS = [
    (STDLIB / name).read_text(encoding="utf-8")
    for name in ("pydoc_data/topics.py", "argparse.py", "difflib.py")
]


def load(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def made_of(processor: sentencepiece.SentencePieceProcessor) -> tokenizer.SentencepieceTokenizer:
    return tokenizer.SentencepieceTokenizer(processor)


made_once = functools.cache(made_of)  # its trial of the fast encoder takes half a second


@pytest.fixture(scope="module")
def processor():
    return load(tokenizer.train(TEXTS, TokenizerTraining(2000, 10**6, 0.9999)))


def check(processor, texts: list[str], made: tokenizer.SentencepieceTokenizer | None = None) -> None:
    """Ids and lengths against one call of sentencepiece per text."""
    made = made or made_once(processor)
    tokens, lengths = made.encode(texts)
    expected = [[1, *processor.encode(text), 2] for text in texts]
    assert all(map(made.is_exact, texts))
    assert np.array_equal(made.encode(texts, fast=False)[0], tokens)
    assert np.array_equal(made.encode([text.encode() for text in texts])[0], tokens)
    assert lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    assert tokens.dtype == np.dtype("<u2")


PARTS = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\t",
    "▁",
    "\0",
    "\r\n",
    "a",
    "self",
    "ﬁ",
    "東京",
    "😀",
    "<s>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "\u00a0",
    "é",
    "12",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join) | st.text(max_size=50))
@pytest.mark.job
def test_any_text(processor, text):
    check(processor, [text, "", text[1:]])


def test_real_text_and_long_documents(processor):
    draw = random.Random(1)
    line = "".join(draw.choice("abcdef 0123456789") for _ in range(1_100_000))
    check(processor, [*TEXTS, "\n".join(TEXTS), line, "x" * 50_000, " " * 5000, "\n" * 5000])
    assert made_of(processor).fast is not None


def test_control_tokens_that_text_spells_stay_text(processor):
    """gigatoken itself, given the whole model, makes the control id of them."""
    text = "a <s> b</s> <unk> </s><s>"
    model = processor.serialized_model_proto()
    assert {1, 2} & set(gigatoken.Tokenizer.from_sentencepiece(model).encode(text).tolist())
    check(processor, [text])


def test_a_fast_encoder_that_differs_on_a_probe_is_not_used(processor, monkeypatch):
    found = fast_encoder.of_sentencepiece

    def wrong(model):
        encode = found(model)

        def other(texts):
            ids, lengths = encode(texts)
            return np.where(ids == 5, 6, ids) if "Html" in str(texts) else ids[::-1], lengths

        return other

    monkeypatch.setattr(fast_encoder, "of_sentencepiece", wrong)
    made = made_of(processor)
    assert made.fast is None
    check(processor, TEXTS[1:], made)


def test_training_on_too_little_text_says_so():
    with pytest.raises(ValueError, match="no tokenizer of 5000 pieces can be trained"):
        tokenizer.train(["a few words"], TokenizerTraining(5000, 10**6, 0.9999))


OTHER_MODELS = {
    "no dummy prefix": {"add_dummy_prefix": False},
    "newline as a symbol": {"user_defined_symbols": ["\n"]},
    "normalizing": {"normalization_rule_name": "nmt_nfkc"},
    "strips spaces": {"remove_extra_whitespaces": True},
    "without bytes": {"byte_fallback": False},
    "a piece with a space inside": {"user_defined_symbols": ["of the"]},
    "spaces as suffix": {"treat_whitespace_as_suffix": True},
    "pieces over spaces": {"split_by_whitespace": False},
    "unigram": {"model_type": "unigram"},
    "a piece of letters and signs": {"user_defined_symbols": ["<|end|>"]},
    "pieces of digits": {"split_digits": False},
}
SLOW = {
    "without bytes", "spaces as suffix", "unigram",  # what gigatoken refuses, and where it differs:
    "newline as a symbol", "normalizing", "strips spaces", "a piece with a space inside",
    "a piece of letters and signs",
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_other_models_have_a_fast_encoder_only_where_it_is_exact(name):
    options = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        **OTHER_MODELS[name],
    }
    model = io.BytesIO()
    lines = iter(TEXTS[1].split("\n"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        vocab_size=1000,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    processor = load(model.getvalue())
    assert (made_of(processor).fast is None) == (name in SLOW)
    check(processor, [TEXTS[2], " a  \n b of the<|end|>2024\t\n\n", "\n", " ", "", "▁ ▁x \n▁"])


def test_a_symbol_of_text_begins_no_document():
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[1].split("\n")), model_writer=model, vocab_size=500, model_type="bpe",
        byte_fallback=True, minloglevel=2, user_defined_symbols=["<s>"], bos_id=1, eos_id=2,
        normalization_rule_name="identity",
    )  # fmt: skip
    processor = load(model.getvalue())
    made, ids = made_of(processor), processor.encode("a <s> b")
    assert 1 in ids
    assert made.encode(["a <s> b", ""])[0].tolist() == [2, *ids, 2]
