"""Tests of conversations in the published template against Transformers: ids and trained tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laneformer.hf.tokenizer import write_tokenizer
from tests.laneformer.hf.hf_assets import sentencepiece_model
from tests.tokenizer_assets import encode_chat

TEXTS = st.text(
    alphabet=st.sampled_from("ab \n\t.<|>/3é🙂def_start_header_id"), min_size=1, max_size=30
).filter(
    lambda text: text.strip() and "</s>" not in text and "<s>" not in text and "<unk>" not in text
)


@pytest.fixture(scope="module", params=[True, False], ids=["dummy_prefix", "no_prefix"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    (path / "tokenizer.model").write_bytes(sentencepiece_model(request.param))
    write_tokenizer(path / "tokenizer.model", path, 512)
    return path


@pytest.fixture(scope="module")
def exported_tokenizer(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


@settings(max_examples=60)
@given(texts=st.lists(TEXTS, min_size=1, max_size=5), system=st.booleans())
def test_ids_and_mask_are_those_of_the_exported_template(folder, exported_tokenizer, texts, system):
    messages = [{"role": "system", "content": "Be kind."}] * system
    messages += [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
    ]
    theirs = exported_tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    assert encode_chat(folder, messages) == (theirs["input_ids"], theirs["assistant_masks"])
