"""Tests of tokenizers in GGUF files against those they were written from, id for id."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Regex, normalizers, pre_tokenizers

from laneformer.llama.gguf import GgufFile
from laneformer.llama.tokenizer import tokenizer_of
from laneformer.llama.vocabulary import Vocabulary
from tests.laneformer.hf.hf_assets import sentencepiece_model
from tests.laneformer.llama.gguf_assets import (
    TEXTS,
    byte_level,
    random_llama,
    tokenizer_fields,
    write_gguf,
)
from tests.tokenizer_assets import PATTERN as LLAMA3

QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (  # of Mistral Nemo
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (  # as in tiktoken's o200k_base
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS: dict[str, tuple[Any, Any, bool]] = {
    "llama-bpe": (pre_tokenizers.Split(Regex(LLAMA3), "isolated"), None, True),
    "qwen2": (pre_tokenizers.Split(Regex(QWEN2), "isolated"), normalizers.NFC(), False),
    "deepseek-r1-qwen": (pre_tokenizers.Split(Regex(QWEN2), "isolated"), None, False),
    "tekken": (pre_tokenizers.Split(Regex(TEKKEN), "isolated"), None, True),
    "gpt-4o": (pre_tokenizers.Split(Regex(GPT4O), "isolated"), None, False),
    "dbrx": (pre_tokenizers.Split(Regex(LLAMA3), "isolated"), None, False),
    "falcon3": (pre_tokenizers.Split(Regex(LLAMA3), "isolated"), None, True),
    "refact": (pre_tokenizers.Digits(individual_digits=True), None, False),
    "smollm": (pre_tokenizers.Digits(individual_digits=True), None, False),
    "gpt-2": (None, None, False),
}
SAME = ("dbrx", "falcon3", "refact")  # pieces of Llama 3 and SmolLM


def write_metadata(tmp_path: Path, fields: dict[str, Any], **shape: Any) -> Vocabulary:
    return GgufFile(
        write_gguf(tmp_path / "m.gguf", "llama", random_llama("llama", **shape), "F16", fields)
    ).vocabulary


@pytest.mark.parametrize("pre", KINDS)
def test_byte_level_pieces(tmp_path, pre):
    first, normalizer, whole_words = KINDS[pre]
    steps = [first] * (first is not None) + [
        WORDS if pre in ("smollm", "refact", "gpt-2") else BYTES
    ]
    original = byte_level(pre_tokenizers.Sequence(steps), normalizer, whole_words)
    tokenizer = tokenizer_of(write_metadata(tmp_path, tokenizer_fields(original, pre)))
    bos = [0] if pre in ("llama-bpe", "falcon3", "tekken") else []
    for text in TEXTS:
        ids = original.encode(text).ids
        assert tokenizer.encode(text).ids == bos + ids, text
        assert tokenizer.decode(ids) == original.decode(ids)
    assert tokenizer.encode("<|end|>", add_special_tokens=False).ids == [2]
    assert tokenizer.decode([1, 2]) == "<|text|>", "a control token is no text, an added word is"


def test_kinds_differ(tmp_path):
    # with the name of any other pre-tokenizer, some of the texts get other ids
    metadata = write_metadata(tmp_path, tokenizer_fields(byte_level(WORDS), "gpt-2")).metadata
    kinds = [{**metadata, "tokenizer.ggml.pre": pre} for pre in KINDS if pre not in SAME]
    tokenizers = [tokenizer_of(Vocabulary(kind)) for kind in kinds]
    ids = [
        [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
        for tokenizer in tokenizers
    ]
    assert all(a != b for i, a in enumerate(ids) for b in ids[:i])


@pytest.mark.parametrize("dummy_prefix", [True, False])
def test_sentencepiece_pieces(tmp_path, dummy_prefix):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(dummy_prefix))
    sp = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    # GGUF's token types; 1 is an ordinary piece
    kinds = {2: sp.is_unknown, 3: sp.is_control, 6: sp.is_byte}
    types = [next((n for n, test in kinds.items() if test(i)), 1) for i in range(len(sp))]

    fields = {
        "model": "llama",
        "tokens": [sp.id_to_piece(i) for i in range(len(sp))],
        "token_type": types,
        "pre": None,
        "scores": [sp.get_score(i) for i in range(len(sp))],
        "bos_token_id": 1,
        "add_space_prefix": dummy_prefix,
        "merges": None,
    }
    fields = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    tokenizer = tokenizer_of(write_metadata(tmp_path, fields, vocab_size=len(sp)))
    for text in TEXTS:
        if "<|" not in text:
            assert tokenizer.encode(text).ids == [1, *sp.encode(text)], text
            assert tokenizer.decode(sp.encode(text)) == sp.decode(sp.encode(text))
