"""Tests of tokenizer.json against SentencePiece, id for id."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import models

from laneformer.hf.tokenizer import (
    PROBES,
    SPACE,
    check_same_ids,
    tokenizer_from_sentencepiece,
)
from tests.laneformer.hf.hf_assets import sentencepiece_model, stdlib_sources

SPECIAL_TEXTS = ("<s>", "</s>", "<unk>")


def save_tokenizer(tmp_path, model) -> tuple[Path, SentencePieceProcessor]:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    return path, SentencePieceProcessor(model_file=str(path))


@pytest.mark.parametrize("add_dummy_prefix", [True, False])
def test_same_ids_and_text_as_sentencepiece(tmp_path, add_dummy_prefix):
    path, sp = save_tokenizer(tmp_path, sentencepiece_model(add_dummy_prefix))
    tokenizer = tokenizer_from_sentencepiece(path)
    texts = [
        text
        for text in stdlib_sources()[:30]
        if not any(special in text for special in SPECIAL_TEXTS)
    ]
    assert len(texts) > 20
    # every run of up to four of these: whitespace is where tokenizers part
    spaces = ["".join(run) for n in range(5) for run in itertools.product(" \t\na", repeat=n)]
    for text in texts + PROBES + spaces + [" " * n + "x" for n in range(70)]:
        ids = tokenizer.encode(text).ids
        assert ids == [sp.bos_id(), *sp.encode(text)], text[:80]
        if SPACE not in text:
            assert tokenizer.decode(ids) == text


def test_spaces_of_equal_score(tmp_path):
    # in Llama-2 every run of spaces has the same, lowest score; here some lengths are missing, too
    proto = pytest.importorskip(
        "sentencepiece.sentencepiece_model_pb2", reason="needs protobuf"
    ).ModelProto()
    proto.ParseFromString(sentencepiece_model())
    runs = {len(piece.piece): piece for piece in proto.pieces if set(piece.piece) == {SPACE}}
    assert len(runs) > 4
    assert set(runs) != set(range(1, max(runs) + 1))
    for length, piece in runs.items():
        piece.score = -1e9 if length > 1 else piece.score
    path, sp = save_tokenizer(tmp_path, proto.SerializeToString())
    tokenizer = tokenizer_from_sentencepiece(path)
    for text in stdlib_sources()[:20] + [" " * n + "x" for n in range(70)]:
        assert tokenizer.encode(text, add_special_tokens=False).ids == sp.encode(text)


def test_special_tokens_and_wrong_merges(tmp_path):
    # a special token's text becomes the token here, and plain characters in SentencePiece
    path, sp = save_tokenizer(tmp_path, sentencepiece_model())
    tokenizer = tokenizer_from_sentencepiece(path)
    ids = tokenizer.encode("a</s>b", add_special_tokens=False).ids
    assert ids == [*sp.encode("a"), sp.eos_id(), *sp.encode("b")]
    assert sp.eos_id() not in sp.encode("a</s>b")
    vocab = {sp.id_to_piece(i): i for i in range(len(sp))}
    tokenizer.model = models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    with pytest.raises(ValueError, match="SentencePiece gives"):
        check_same_ids(tokenizer, sp, "import os")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"model_type": "unigram", "vocab_size": 500, "input_sentence_size": 1000},
            "Only BPE models",
        ),
        ({"remove_extra_whitespaces": True}, "Only BPE models"),
        ({"normalization_rule_name": "nmt_nfkc"}, "Only BPE models"),
        ({"treat_whitespace_as_suffix": True}, "Only BPE models"),
        ({"user_defined_symbols": "<|end|>"}, "no user_defined_symbols"),
        ({"byte_fallback": False}, "has no byte pieces"),
        ({"eos_id": -1}, "has no piece that ends a document"),
    ],
)
def test_models_that_cannot_be_converted_are_refused(tmp_path, overrides, message):
    path, _ = save_tokenizer(tmp_path, sentencepiece_model(**overrides))
    with pytest.raises(ValueError, match=message):
        tokenizer_from_sentencepiece(path)
