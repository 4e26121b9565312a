"""Tests of the files beside tokenizer.json, as Transformers reads them, and of folders without a model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from laneformer.engine.folder import read_checkpoint
from laneformer.engine.text_files import read_texts
from tests.tokenizer_assets import byte_level, save

TEXTS = ("a <tool>b</tool> c", "<tool> x<tool>", "<|pad|><begin>a", "x <think> y", " a b")
PLAIN = {"bos_token": "<begin>", "eos_token": "<end>"}


def token(content: str, **properties: bool) -> dict[str, Any]:
    defaults = {
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": False,
    }
    return {"content": content, **defaults, **properties}


CASES = {
    # files beside tokenizer.json, whose added tokens are <begin> (300) and <end> (301)
    "added_tokens_decoder alone": {
        "tokenizer_config": PLAIN
        | {
            "added_tokens_decoder": {
                "300": token("<begin>", special=True),
                "302": token("<tool>"),
                "303": token("</tool>", special=True),
            }
        },
    },
    "in another order": {
        "tokenizer_config": PLAIN
        | {"added_tokens_decoder": {"303": token("</tool>"), "302": token("<tool>")}},
    },
    "other properties": {
        "tokenizer_config": PLAIN
        | {
            "added_tokens_decoder": {
                "300": token("<begin>", lstrip=True, special=True),
                "302": token("<tool>", rstrip=True, lstrip=True),
            }
        },
    },
    "names of tokens that are none yet": {
        "tokenizer_config": {
            **PLAIN,
            "pad_token": "<|pad|>",
            "additional_special_tokens": ["<tool>", "</tool>"],
        },
    },
    "added_tokens.json of older folders": {
        "tokenizer_config": PLAIN,
        "added_tokens": {"<tool>": 302, "<think>": 303},
        "special_tokens_map": {"pad_token": token("<|pad|>"), "bos_token": "<begin>"},
    },
    "added_tokens.json that nobody reads": {
        "tokenizer_config": PLAIN | {"added_tokens_decoder": {}},
        "added_tokens": {"<tool>": 302},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_beside_the_tokenizer_are_those_of_transformers(tmp_path, name):
    from transformers import PreTrainedTokenizerFast

    save(byte_level(["a b"], ["<begin>", "<end>"], 300), tmp_path)
    for file, values in CASES[name].items():
        (tmp_path / f"{file}.json").write_text(json.dumps(values))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(tmp_path), read_texts(tmp_path).tokenizer
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        for skip in (False, True):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


@pytest.mark.parametrize(
    "names", [(), ("chat_template",), ("chat_template", "tool_use"), ("tool_use", "rag")]
)
def test_templates_in_files_are_those_of_transformers(tmp_path, names):
    # they replace the one in tokenizer_config.json
    from transformers import PreTrainedTokenizerFast

    save(byte_level(["a b"], ["<begin>"], 300), tmp_path, **PLAIN, chat_template="of the config")
    (tmp_path / "additional_chat_templates").mkdir()
    for name in names:
        folder = tmp_path if name == "chat_template" else tmp_path / "additional_chat_templates"
        (folder / f"{name}.jinja").write_text(f"of {name} é", encoding="utf-8")
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template
    assert read_texts(tmp_path).tokenizer_config["chat_template"] == theirs


EMPTY = (2).to_bytes(8, "little") + b"{}"  # a safetensors file without tensors
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
ADAPTER = json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"})
LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 8,
    "max_position_embeddings": 8,
}
OTHER_FOLDERS = [
    (
        {"config.json": POINTER},
        r"config\.json is a pointer of Git LFS, not the file itself; run `git lfs pull`",
    ),
    (
        {"config.json": "{}", "model.safetensors": POINTER},
        r"model\.safetensors is a pointer of Git LFS",
    ),
    (
        {"adapter_config.json": ADAPTER},
        r"an adapter, no model .*of 'org/base'.*merge it into its model",
    ),
    (
        {"config.json": "{}", "adapter_config.json": ADAPTER, "model.safetensors": ""},
        "an adapter beside a model .*or remove it",
    ),
    *(
        ({"config.json": json.dumps(LLAMA | {name: value}), "model.safetensors": EMPTY}, message)
        for name, value, message in (
            ("rms_norm_eps", "1e-6", "rms_norm_eps = '1e-6' must be a number, without quotes"),
            ("hidden_size", "64", "hidden_size = '64' must be a number, without quotes"),
            ("rope_theta", "10000", "rope_theta = '10000' must be a number, without quotes"),
        )
    ),
]


@pytest.mark.parametrize(("files", "message"), OTHER_FOLDERS)
def test_folders_of_something_else_are_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        read_checkpoint(tmp_path)


def test_pointers_in_place_of_other_files(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(POINTER)
    for read in (lambda: read_texts(tmp_path), lambda: read_checkpoint(path)):
        with pytest.raises(ValueError, match=r"tokenizer\.json is a pointer of Git LFS"):
            read()
