"""Tests of GGUF vocabularies by llama.cpp's rules: end and begin tokens, and invalid ids and lists."""

from __future__ import annotations

from typing import Any

import pytest

from laneformer.llama.tokenizer import tokenizer_of
from laneformer.llama.vocabulary import Vocabulary
from laneformer.prompts import PromptEncoder

GPT2 = {"model": "gpt2", "pre": "gpt-2", "merges": []}
SPM = {"model": "llama"}
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "a"]
PHI3 = ["<unk>", "<s>", "</s>", "a", "<|endoftext|>", "<|assistant|>", "<|end|>"]
HARMONY = ["a", "<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>"]


def vocabulary(pieces: list[str], kind: dict[str, Any] = GPT2, /, **values: Any) -> Vocabulary:
    """Return a vocabulary; by default every `token_type` is ordinary."""
    defaults = {"tokens": pieces, "token_type": [1] * len(pieces), "scores": [0.0] * len(pieces)}
    values = {**defaults, **kind, **values}
    metadata = {
        f"tokenizer.ggml.{name}": value for name, value in values.items() if value is not None
    }
    if "chat_template" in values:
        metadata["tokenizer.chat_template"] = values["chat_template"]
    return Vocabulary(metadata)


ENDS: list[tuple[Vocabulary, list[int]]] = [
    (vocabulary(GEMMA, SPM, eos_token_id=1), [1, 5]),  # as published: the file names <eos> alone
    (vocabulary(GEMMA, SPM, eos_token_id=1, token_type=[3, 3, 3, 2, 4, 4, 1]), [1, 5]),
    (vocabulary(PHI3, SPM, eos_token_id=4), [4, 6]),
    (vocabulary(PHI3, SPM, eos_token_id=4, token_type=[2, 3, 4, 1, 3, 3, 3]), [4, 6]),
    (
        vocabulary(HARMONY, eos_token_id=3),
        [3, 4, 5],
    ),  # <|end|> ends a message, and other ones follow
    (vocabulary(HARMONY, eos_token_id=3, eot_token_id=2), [3, 4, 5]),
    (
        vocabulary(["a", "<EOT>", "<|im_end|>", "[EOS]", "<|fim_pad|>"], eos_token_id=2),
        [1, 2, 3, 4],
    ),
    (vocabulary(["a", "b", "c", "d"], eos_token_ids=[1, 3]), [1, 3]),
    (vocabulary(["a", "b", "c", "d"], eos_token_id=0, eot_token_id=1, eom_token_id=2), [0, 1, 2]),
    (vocabulary(["a", "b", "c", "d"], fim_sep_token_id=3), [3]),
    # ids that do not exist: SentencePiece's defaults, of other vocabularies none
    (vocabulary(["<unk>", "<s>", "</s>", "a"], SPM, eos_token_id=100_000), [2]),
    (vocabulary(["<unk>", "<s>", "</s>", "a"], SPM), [2]),
    (vocabulary(["a", "b"], eos_token_id=2**32 - 1, eos_token_ids=[1, 9]), [1]),
    (vocabulary([*PHI3[:6], "<|end|>"], SPM, eos_token_id=4, token_type=None), [4, 6]),
]


@pytest.mark.parametrize(("vocab", "ids"), ENDS)
def test_where_generation_ends(vocab, ids):
    assert vocab.eos_ids() == ids
    tokenizer, pieces = tokenizer_of(vocab), vocab.pieces
    special = {
        token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
    }
    special_ids = {vocab.special_id(name) for name in ("eos", "eot", "eom", "fim_sep")}
    others = set(ids) - special_ids - set(vocab.values.get("eos_token_ids", ()))
    assert {pieces[i] for i in others} <= special, "no text of a user spells an end"


TURN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
LETTERS = ["<unk>", "<s>", "</s>", "[", "]", "a", "\u2581", "\u2581[", "<|begin|>"]
CONTROL = [2, 3, 3, 1, 1, 1, 1, 1, 3]
BEGINS: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    # kind of vocabulary, other fields; what begins a conversation
    (SPM, {}, ["<s>"]),
    (SPM, {"bos_token_id": 8}, ["<|begin|>"]),
    (SPM, {"bos_token_id": 2**32 - 1}, ["<s>"]),  # the default
    (SPM, {"add_bos_token": False}, []),
    (SPM, {"token_type": None}, ["<s>"]),
    (GPT2 | {"pre": "llama-bpe"}, {"bos_token_id": 1}, ["<s>"]),
    (GPT2 | {"pre": "tekken"}, {"bos_token_id": 1}, ["<s>"]),
    (GPT2 | {"pre": "tekken"}, {"bos_token_id": 1, "add_bos_token": False}, []),
    (GPT2 | {"pre": "llama-bpe"}, {"bos_token_id": 99}, []),
    (GPT2, {"bos_token_id": 1}, []),
    (GPT2, {"bos_token_id": 1, "add_bos_token": True}, ["<s>"]),
]


@pytest.mark.parametrize(("kind", "fields", "begin"), BEGINS)
def test_one_token_begins_a_conversation_whether_its_template_writes_it_or_not(kind, fields, begin):
    # where the tokenizer begins no text, a template's own token stays
    for template in (TURN, "{{ bos_token }}" + TURN):
        fields = {"token_type": CONTROL, **fields, "chat_template": template}
        vocab = vocabulary(LETTERS, kind, **fields)
        encoder = PromptEncoder(tokenizer_of(vocab), vocab.tokenizer_config())
        rendered = encoder.render([{"role": "user", "content": "a"}])
        pieces = [LETTERS[i] for i in encoder.encode(rendered)]
        written = (
            [vocab.tokenizer_config().get("bos_token", "")]
            if template != TURN and not begin
            else []
        )
        assert "".join(pieces).replace("\u2581", "") == "".join([*begin, *written]) + "[a]"
        assert [LETTERS[i] for i in encoder.encode_text("a")][: len(begin)] == begin


WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"tokens": None, "token_type": None, "scores": None},
        "the file lacks tokenizer.ggml.tokens. Put the mod",
    ),
    ({"token_type": [1]}, "tokenizer.ggml.token_type has 1 entries for 9 tokens"),
    ({"scores": [0.0]}, "tokenizer.ggml.scores has 1 entries for 9 tokens"),
    (
        {"model": "gpt2", "pre": "deepseek-coder"},
        r"'deepseek-coder' is unknown; known are \['llama-bpe'",
    ),
    ({"model": "gpt2", "merges": []}, "tokenizer.ggml.pre = None is unknown"),
    (
        {"model": "bert"},
        "tokenizer.ggml.model = 'bert' is not supported; 'gpt2' and 'llama' are. Put the",
    ),
    (
        {"model": "gpt2", "pre": "smollm"},
        "the file lacks tokenizer.ggml.merges. Put the model's tokenizer",
    ),
    (
        {"scores": None},
        "the file lacks tokenizer.ggml.scores. Put the model's tokenizer.json beside the file",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_is_missing_or_unknown_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_of(vocabulary(LETTERS, SPM, **changes))
    with pytest.raises(ValueError, match="tokens has 9 entries, but the embedding 8 rows"):
        Vocabulary(vocabulary(LETTERS, SPM).metadata, 8)
