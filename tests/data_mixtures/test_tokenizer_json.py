"""Tests of Hugging Face tokenizer.json: special ids by name, plain text, 4-byte tokens."""

from __future__ import annotations

import functools
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from data_mixtures import recipe, shards, tokenizer
from data_mixtures.stages import tokenize
from tests.data_mixtures.stages.filtered import make_recipe, run_filter
from tests.tokenizer_assets import byte_level, save

TEXT = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_text(encoding="utf-8")
LLAMA_3 = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
SOME_PARTS = "<|endoftext|> <|begin_of_text|> <s> a self 東京 😀 \0 ﬁ 123"
PARTS = [" ", "\n\n", "\r\n", *SOME_PARTS.split(" ")]


@pytest.fixture(scope="module")
def llama_3(tmp_path_factory):
    return save(byte_level([TEXT], LLAMA_3), tmp_path_factory.mktemp("llama-3"))


load_once = functools.cache(tokenizer.load)


@example(TEXT)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(PARTS), max_size=30).map("".join) | st.text(max_size=50))
def test_text_is_text_and_comes_back(llama_3, text):
    encoder = load_once(llama_3)
    texts = [text, "", text[1:]]
    tokens, lengths = encoder.encode(texts)
    assert (tokens < 600).sum() == len(tokens) - 6, (
        "two control ids a document, and none of its text"
    )
    documents = np.split(tokens, np.cumsum(lengths)[:-1])
    assert [(ids[0], ids[-1]) for ids in documents] == [(600, 601)] * 3
    assert [encoder.decode(ids) for ids in documents] == texts
    plain = Tokenizer.from_file(str(llama_3))
    plain.no_truncation()
    # the plain tokenizer finds special tokens in text, ours must not
    if not any(name in text for name in LLAMA_3):
        assert documents[0][1:-1].tolist() == plain.encode(text, add_special_tokens=False).ids


BEGIN, END, TURN = LLAMA_3
BY_CONFIG = {"bos_token": BEGIN, "eos_token": {"content": TURN}}
QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("special", "config", "given_names", "expected"),
    [
        (LLAMA_3, {}, {}, [BEGIN, END]),  # well-known names
        (LLAMA_3, BY_CONFIG, {}, [BEGIN, TURN]),
        (
            LLAMA_3,
            {"bos_token": BEGIN, "eos_token": END},
            {"eos": TURN},
            [BEGIN, TURN],
        ),  # by the recipe
        (QWEN[:1], {}, {}, QWEN[:1] * 2),  # of GPT-2
        (QWEN, {"bos_token": None, "eos_token": QWEN[0]}, {}, QWEN[:1] * 2),
        (["<begin>", "<end>"], {}, {"eos": "<end>"}, ["<end>", "<end>"]),
    ],
)
def test_what_begins_and_ends_a_document(tmp_path, special, config, given_names, expected):
    encoder = tokenizer.load(
        save(byte_level(["a b"], special, 300), tmp_path, **config), **given_names
    )
    assert [encoder.bos_id, encoder.eos_id] == [special.index(name) + 257 for name in expected]
    tokens, lengths = encoder.encode(["a b", "b"])
    one = len(set(expected)) == 1
    assert np.flatnonzero(tokens == encoder.bos_id).tolist() == [0, lengths[0]]
    assert (tokens[lengths.cumsum() - 1] == encoder.eos_id).all() != one, (
        "one separator, in front of a document"
    )


def test_unknown_names_are_refused(tmp_path):
    for number, (special, names, message) in enumerate(
        [
            (["<begin>"], {}, r"bos = None, eos = None; name them in the recipe, .* \['<begin>'\]"),
            (
                ["<s>", "</s>"],
                {"bos": "<S>", "eos": "</s>"},
                r"bos = '<S>', .* of \['<s>', '</s>'\]",
            ),
            (
                ["<s>", "</s>"],
                {"bos": "a", "eos": "</s>"},
                r"\(of added_tokens\) at their ends, bos = 'a'",
            ),
        ]
    ):
        path = save(byte_level(["a b"], special, 300), tmp_path / str(number))
        with pytest.raises(ValueError, match=message):
            tokenizer.load(path, **names)
    (tmp_path / "other.json").write_text('{"model": 1}')
    with pytest.raises(
        ValueError, match=r"other.json cannot be read as a Hugging Face tokenizer.json"
    ):
        tokenizer.load(tmp_path / "other.json")


def test_text_that_becomes_a_control_id_is_refused(tmp_path):
    # a Unigram with </s> among its pieces finds it in text, whatever the added tokens say
    pieces = [
        ("<unk>", 0.0),
        ("</s>", 0.0),
        ("<", -3.0),
        ("/", -3.0),
        ("s", -3.0),
        (">", -3.0),
        ("a", -1.0),
    ]
    unigram = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    unigram.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    encoder = tokenizer.load(save(unigram, tmp_path), eos="</s>")
    assert encoder.encode(["a", "a/a"])[0].tolist() == [1, 6, 1, 6, 3, 6]
    with pytest.raises(ValueError, match="makes control tokens of ordinary text, such as 'a</s>a'"):
        encoder.encode(["a", "a</s>a", "s"])


def test_a_large_vocabulary_takes_4_bytes(tmp_path):
    # the last of 70,000 ids is a word that the text is full of; shards of 4 bytes: test_shuffle
    large = byte_level([TEXT], LLAMA_3, unused=70_000 - 604)
    large.add_tokens([AddedToken("argument", normalized=False)])
    encoder = tokenizer.load(save(large, tmp_path))
    tokens, _ = encoder.encode([TEXT])
    assert (encoder.vocab_size, encoder.dtype, tokens.max()) == (70_000, np.dtype("<u4"), 69_999)
    assert encoder.decode(tokens) == TEXT
    facts = dict(
        zip(shards.TOKENIZER_FACTS[1:], (70_000, 4, encoder.bos_id, encoder.eos_id), strict=True)
    )
    assert facts.items() <= tokenizer.facts(tmp_path / "tokenizer.json").items()


def test_a_unit_whose_sample_differs_is_encoded_by_the_library(tmp_path, monkeypatch):
    # a planted encoder is wrong for one document of 300: the sample sees it
    words = "some words that are long enough to be kept by the filter"
    texts = {"a": [[f"{words}, {n} of them or so" for n in range(300)]]}
    plan = make_recipe(texts, recipe.TokenizerTraining(300, 20_000, 0.999))
    run_filter(tmp_path, texts, plan)
    tokenize.make_tokenizer(plan, tmp_path)
    monkeypatch.setattr(tokenize, "_COMPARED_BYTES", 100)
    monkeypatch.setattr(tokenize, "COMPARED_OF", 50)
    work = tokenize.Tokenize(plan, tmp_path, ("a",))
    compared = []
    exact = tokenizer.Tokenizer.is_exact
    monkeypatch.setattr(
        tokenizer.Tokenizer,
        "is_exact",
        lambda encoder, text: compared.append(text) or exact(encoder, text),
    )
    assert work_in(work, tmp_path / "right")["slow"] == 0
    assert 2 <= len(compared) < 30, "the first ones, and one of 50"
    encoder = tokenize._load_tokenizer(
        shards.tokenizer_path(tmp_path), tuple(tokenize._hashes(tmp_path))
    )
    right = encoder.fast
    # the planted encoder is wrong for one text that the sample holds
    end = compared[-1][-20:]
    monkeypatch.setattr(
        encoder,
        "fast",
        lambda texts: right([bytes_of(text).replace(end.encode(), b"x") for text in texts]),
    )
    # one difference, and the whole unit goes through the library
    assert work_in(work, tmp_path / "wrong")["slow"] == 300
    for name in tokenize.SLICED:
        assert (tmp_path / "right" / name).read_bytes() == (tmp_path / "wrong" / name).read_bytes()


def bytes_of(text: str | bytes) -> bytes:
    return text if isinstance(text, bytes) else text.encode()


def work_in(work: tokenize.Tokenize, folder: Path) -> dict:
    folder.mkdir()
    return work.make(tokenize.Unit("a", 0), folder)


def test_a_tokenizer_json_is_brought_along_with_its_names(tmp_path):
    out = tmp_path / "out"
    texts = {"a": [[TEXT[:3000]]]}
    path = save(
        byte_level([TEXT], LLAMA_3),
        tmp_path / "given",
        bos_token=LLAMA_3[0],
        eos_token=LLAMA_3[1],
        more=1,
    )
    plan = make_recipe(texts, recipe.TokenizerFile(str(path), eos="<|eot_id|>"))
    run_filter(out, texts, plan)
    tokenize.make_tokenizer(plan, out)
    assert (out / "tokenizer.json").read_bytes() == path.read_bytes()
    config = {"bos_token": LLAMA_3[0], "eos_token": "<|eot_id|>", "more": 1}
    assert json.loads((out / "tokenizer_config.json").read_text()) == config
    # a trained model beside a left-over tokenizer.json would never be read
    trained = make_recipe(texts, recipe.TokenizerTraining(300, 20_000, 0.999))
    with pytest.raises(ValueError, match=r"out/tokenizer.json is not this recipe's, and"):
        tokenize.make_tokenizer(trained, out)
