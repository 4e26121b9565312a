"""Tests that the fast sentencepiece encoder gives the library's ids, or is not used."""

import functools
import io
import random
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from data_mixtures import tokenizer
from data_mixtures.recipe import TokenizerTraining

STDLIB = Path(sysconfig.get_path("stdlib"))
TEXTS = [
    (STDLIB / name).read_text(encoding="utf-8")
    for name in ("pydoc_data/topics.py", "argparse.py", "difflib.py")
]


def load(model: bytes) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=model)


def make_tokenizer(
    processor: sentencepiece.SentencePieceProcessor,
) -> tokenizer.SentencepieceTokenizer:
    return tokenizer.SentencepieceTokenizer(processor)


open_once = functools.cache(make_tokenizer)  # its trial of the fast encoder takes half a second


@pytest.fixture(scope="module")
def processor():
    return load(tokenizer.train(TEXTS, TokenizerTraining(2000, 10**6, 0.9999)))


def check(
    processor, texts: list[str], encoder: tokenizer.SentencepieceTokenizer | None = None
) -> None:
    """Compare ids and lengths with one call of sentencepiece per text."""
    encoder = encoder or open_once(processor)
    tokens, lengths = encoder.encode(texts)
    # BOS 1 and EOS 2 are the ids that `train` gives
    expected = [[1, *processor.encode(text), 2] for text in texts]
    assert all(map(encoder.is_exact, texts))
    assert np.array_equal(encoder.encode(texts, fast=False)[0], tokens)
    assert np.array_equal(encoder.encode([text.encode() for text in texts])[0], tokens)
    assert lengths.tolist() == [len(ids) for ids in expected]
    assert tokens.tolist() == [token for ids in expected for token in ids]
    assert tokens.dtype == np.dtype("<u2")


SOME_PARTS = "▁ \0 a self ﬁ 東京 😀 <s> </s> <unk> <0x0A> \u00a0 é 12"
PARTS = [" ", "  ", "\n", "\n\n", "\t", "\r\n", *SOME_PARTS.split(" ")]


@settings(max_examples=100)
@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join) | st.text(max_size=50))
@pytest.mark.job
def test_any_text(processor, text):
    check(processor, [text, "", text[1:]])


@pytest.mark.job
def test_real_text_and_long_documents(processor):
    draw = random.Random(1)
    # a line longer than what the check of a sample compares (_COMPARED_CHARS)
    line = "".join(draw.choice("abcdef 0123456789") for _ in range(1_100_000))
    check(processor, [*TEXTS, "\n".join(TEXTS), line, "x" * 50_000, " " * 5000, "\n" * 5000])
    assert make_tokenizer(processor).fast is not None


def test_training_on_too_little_text_says_so():
    with pytest.raises(ValueError, match="no tokenizer of 5000 pieces can be trained"):
        tokenizer.train(["a few words"], TokenizerTraining(5000, 10**6, 0.9999))


def train(vocab_size: int = 1000, **options) -> sentencepiece.SentencePieceProcessor:
    """Train a byte-level BPE of this project's conventions, but for the options."""
    model = io.BytesIO()
    usual = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
    usual |= {"vocab_size": vocab_size, "minloglevel": 2}
    lines = iter(TEXTS[1].split("\n"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, **{**usual, **options}
    )
    return load(model.getvalue())


# whether the fast encoder is exact for it, by what is another than usual
OTHER_MODELS = [
    (True, {"add_dummy_prefix": False}),
    (True, {"split_by_whitespace": False}),
    (True, {"split_digits": False}),
    (False, {"byte_fallback": False}),  # what gigatoken refuses
    (False, {"treat_whitespace_as_suffix": True}),
    (False, {"model_type": "unigram"}),
    (False, {"user_defined_symbols": ["\n"]}),  # and where it differs
    (False, {"normalization_rule_name": "nmt_nfkc"}),
    (False, {"remove_extra_whitespaces": True}),
    (False, {"user_defined_symbols": ["of the"]}),
    (False, {"user_defined_symbols": ["<|end|>"]}),
]


@pytest.mark.parametrize(("is_exact", "other"), OTHER_MODELS, ids=lambda value: str(value))
def test_other_models_have_a_fast_encoder_only_where_it_is_exact(is_exact, other):
    usual = {"remove_extra_whitespaces": False, "split_digits": True, "hard_vocab_limit": False}
    processor = train(**{**usual, **other})
    encoder = make_tokenizer(processor)
    assert (encoder.fast is not None) == is_exact
    check(
        processor,
        [TEXTS[2], " a  \n b of the<|end|>2024\t\n\n", "\n", " ", "", "▁ ▁x \n▁"],
        encoder,
    )


def test_a_symbol_of_text_begins_no_document():
    processor = train(500, user_defined_symbols=["<s>"], bos_id=1, eos_id=2)
    ids = processor.encode("a <s> b")
    assert 1 in ids
    assert make_tokenizer(processor).encode(["a <s> b", ""])[0].tolist() == [2, *ids, 2]
