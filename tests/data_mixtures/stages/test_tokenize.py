"""Tests of the tokenize stage and tokenizer training: order, counts, no effect of units."""

import json
import random

import numpy as np
import pytest
import sentencepiece
import xxhash

from data_mixtures import shards, tokenizer
from data_mixtures.recipe import TokenizerFile, TokenizerTraining
from data_mixtures.stages import blocks, stage, tokenize
from data_mixtures.stages.tokenize import DOCUMENT, INDEX, ORIGINS, TOKENS, Tokenize
from tests.data_mixtures.stages.filtered import do_all, make_recipe, run_filter
from tests.data_mixtures.stages.shuffle_assets import unique_train

SYLLABLES = ["sun", "mo", "on", "ra", "in", "ret", "urn", "de", "f", "li", "st", "ka", "ber"]
WORDS = ["</s>", "über", "東京", "12", "345\n", *(a + b for a in SYLLABLES for b in SYLLABLES)]


def notes(count: int, seed: int = 3) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choice(WORDS) for _ in range(draw.randint(20, 60))) for _ in range(count)]


TRAINING = TokenizerTraining(340, 20_000, 0.999)


def run_tokenize(out, texts) -> Tokenize:
    recipe = make_recipe(texts, TRAINING)
    run_filter(out, texts, recipe)
    tokenize.make_tokenizer(recipe, out)
    work = Tokenize(recipe, out, tuple(texts))
    do_all(work)
    return work


def test_documents_in_shuffled_order_with_their_tokens(tmp_path, monkeypatch):
    # makes each unit's output span several copies
    monkeypatch.setattr(blocks, "COPY_BYTES", 2000)
    texts = notes(300)
    # an exact copy: `shuffle` drops it, `tokenize` does not
    texts[17] = texts[3]
    work = run_tokenize(tmp_path / "out", {"a": [texts, []], "b": [notes(20, 4)]})
    folder, receipt = stage.result(work.out, "tokenize", stage.Unit("a", 0))
    documents = np.load(folder / INDEX)
    tokens = np.fromfile(folder / TOKENS, "<u2")
    assert documents.dtype == DOCUMENT
    ordered = sorted(texts, key=lambda text: place(text, seed=11))
    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(work.out / shards.TOKENIZER_MODEL)
    )
    assert tokens.tolist() == [i for text in ordered for i in (1, *processor.encode(text), 2)]
    for row, text in zip(documents, ordered, strict=True):
        key, digest = place(text, seed=11)
        assert (row["key"], row["high"], row["low"]) == (key, digest >> 64, digest % 2**64)
        assert (row["length"], row["bytes"]) == (
            len(processor.encode(text)) + 2,
            len(text.encode()),
        )
    sizes = {
        "documents": 300,
        "tokens": len(tokens),
        "bytes": sum(len(text.encode()) for text in texts),
    }
    assert receipt["counts"] == {
        **sizes,
        "slow": 0,
        "dropped": {"near_duplicate": 0, "repeated_ngrams": 0},
    }
    origins = json.loads(f"[{(folder / ORIGINS).read_text().replace('}{', '},{')}]")
    assert [origin["row"] for origin in origins] == [
        texts.index(text, 5 if i and ordered[i - 1] == text else 0)
        for i, text in enumerate(ordered)
    ]
    empty = stage.result(work.out, "tokenize", stage.Unit("a", 1))[1]
    assert empty["counts"] == receipt["counts"] | dict.fromkeys(sizes, 0)


def place(text: str, seed: int) -> tuple[int, int]:
    """Return the sort key of a text, by its definition."""
    digest = xxhash.xxh3_128_intdigest(text.encode())
    return xxhash.xxh3_64_intdigest((digest % 2**64).to_bytes(8, "little"), seed=seed), digest


def test_units_do_not_change_the_tokenizer_nor_the_sample(tmp_path):
    texts = notes(300)
    other = notes(40, 9)
    one = tmp_path / "one"
    three = tmp_path / "three"
    run_tokenize(one, {"a": [texts], "b": [other]})
    work = run_tokenize(three, {"a": [texts[200:], texts[:50], texts[50:200]], "b": [other]})
    assert (one / "tokenizer.model").read_bytes() == (three / "tokenizer.model").read_bytes()
    sample = tokenize.training_sample(work.recipe, three, TRAINING.train_bytes)
    # the sample ends with the document that reaches train_bytes
    assert 20_000 <= sum(len(text.encode()) for text in sample) < 21_000
    selected = unique_train(texts, work.recipe)
    assert sample[: len(sample) - 40] == selected[: len(sample) - 40]


def test_a_tokenizer_is_brought_along(tmp_path):
    out = tmp_path / "out"
    texts = {"a": [notes(100)]}
    run_tokenize(out, texts)
    model = out / "tokenizer.model"
    other = tmp_path / "mine.model"
    other.write_bytes(tokenizer.train(notes(100, 5), TokenizerTraining(330, 10_000, 0.999)))
    plan = make_recipe(texts, TokenizerFile(str(other)))
    tokenize.make_tokenizer(plan, out)
    assert model.read_bytes() == other.read_bytes()
    assert do_all(Tokenize(plan, out, ("a",))) == 1

    unfiltered = make_recipe(["a", "b"], TRAINING)
    with pytest.raises(ValueError, match="lacks source 'b'"):
        tokenize.make_tokenizer(unfiltered, out)
