"""Tests that the data's tokenizer.json in the exported folder counts tokens as we do."""

from __future__ import annotations

import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from laneformer.hf.tokenizer import open_tokenizer, write_tokenizer
from tests.laneformer.hf.hf_assets import sentencepiece_model, stdlib_sources
from tests.tokenizer_assets import byte_level, encode_chat, save

TEXTS = [
    "def f(x):\n    return x\n\n\n",
    "東京 😀 é",
    "",
    "  a b\r\n\t1234567",
    *stdlib_sources()[:2],
]
NAMES = {
    "bos_token": {"content": "<begin>"},
    "eos_token": "<end>",
    "chat_template": "x",
    "added_tokens_decoder": {"600": {"content": "<begin>"}},
}


def export_tokenizer(folder, special, pattern=None, **config) -> PreTrainedTokenizerFast:
    path = save(
        byte_level(stdlib_sources()[:10], special, **(pattern or {})), folder / "given", **config
    )
    write_tokenizer(path, folder, 512)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_ids_are_those_of_the_data_behind_the_token_that_begins_a_document(tmp_path):
    tokenizer = export_tokenizer(tmp_path, ["<begin>", "<end>", "<pad>"], **NAMES)
    plain = Tokenizer.from_file(str(tmp_path / "given/tokenizer.json"))
    plain.no_truncation()
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        # 600 pieces come first, then the special tokens
        assert ids == [600, *plain.encode(text, add_special_tokens=False).ids]
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        tokenizer.model_max_length,
    ) == (
        600,
        601,
        602,
        512,
    )


def test_one_separator_is_begin_and_end(tmp_path):
    tokenizer = export_tokenizer(
        tmp_path, ["<|endoftext|>"], eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (600, 600)
    assert tokenizer.pad_token_id is None, "with the end as padding, its loss would be masked away"
    assert tokenizer("a")["input_ids"][0] == 600


def test_without_names_it_is_refused(tmp_path):
    path = save(byte_level(["a b"], ["<begin>"], 300), tmp_path)
    with pytest.raises(
        ValueError, match=r"tokenizer_config.json must name eos_token and bos_token"
    ):
        open_tokenizer(path)
    # a name that the vocabulary lacks
    save(Tokenizer.from_file(str(path)), tmp_path, bos_token="<start>", eos_token="<begin>")
    with pytest.raises(
        ValueError, match=r"tokenizer_config.json must name eos_token and bos_token"
    ):
        open_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"cannot be read as a tokenizer.json"):
        open_tokenizer(path)


def test_other_ids_of_a_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(
        # a model without a begin token, whose other ids are not the usual ones
        sentencepiece_model(pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
    )
    sp = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    write_tokenizer(tmp_path / "tokenizer.model", tmp_path, 512)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert [tokenizer(text)["input_ids"] for text in TEXTS] == [
        [1, *sp.encode(text)] for text in TEXTS
    ]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 1, 2)


@pytest.mark.parametrize(
    ("headers", "pattern"),
    [([], {}), (["<|start_header_id|>", "<|end_header_id|>"], {}), ([], {"pattern": None})],
    ids=[
        "text",
        "tokens, as in Llama 3",
        "two line breaks are one token, which a header shares with text",
    ],
)
def test_conversations_are_those_of_the_template(tmp_path, headers, pattern):
    tokenizer = export_tokenizer(tmp_path, ["<begin>", "<end>", *headers], pattern, **NAMES)
    texts = ["Hi, (you)", "1 or 2?\n\n- yes", "東 ", "\té\n\n\n1"]
    messages = [
        {"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)
    ]
    for count in (1, 2, 3, 4):
        theirs = tokenizer.apply_chat_template(
            messages[:count], return_dict=True, return_assistant_tokens_mask=True
        )
        assert encode_chat(tmp_path, messages[:count]) == (
            theirs["input_ids"],
            theirs["assistant_masks"],
        )
