"""Tests of GGUF files of every type and architecture against Transformers, and of refused files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers

from laneformer import Engine
from laneformer.cli import main
from laneformer.engine.folder import read_checkpoint
from laneformer.llama import gguf as gguf_module
from laneformer.llama.gguf import QUANTIZED, STORED, GgufFile
from laneformer.tensors import STORED_TYPES
from tests.laneformer.llama.folders import (
    EXPERTS,
    GEMMA3_ROPES,
    GPT_OSS,
    GRANITE,
    LONG,
    MINISTRAL3,
    YARN,
    engine_logits,
    plain_model,
    relative_error,
)
from tests.laneformer.llama.gguf_assets import TEXTS, byte_level, random_llama, write_gguf

# the package cannot write K-quants
WRITTEN = ("F32", "F16", "BF16", "Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "MXFP4")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "rope_theta": 5e5,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OLMO3_ROPES = {
    "full_attention": YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
TIED = {"tie_word_embeddings": True}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {**TIED, "rope_theta": 500000.0}),
    "llama3": ("llama", {"rope_scaling": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "smollm3": ("smollm3", {**TIED, "num_hidden_layers": 5, "pad_token_id": 0}),
    "qwen2": ("qwen2", TIED),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "olmo2": ("olmo2", {"num_key_value_heads": 4}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 16, "num_hidden_layers": 4, "rope_parameters": OLMO3_ROPES},
    ),
    "granite": ("granite", {**GRANITE, **TIED}),
    "phi3": (
        "phi3",
        {"pad_token_id": 0, "rope_parameters": LONG, "original_max_position_embeddings": 32},
    ),
    "gemma3": (
        "gemma3",
        {
            **TIED,
            "sliding_window": 16,
            "num_hidden_layers": 6,
            "rope_parameters": GEMMA3_ROPES,
            "query_pre_attn_scalar": 16,
        },
    ),
    "mistral3": ("mistral3", {"rope_parameters": MINISTRAL3}),
    "qwen3moe": ("qwen3moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
    "gpt-oss": ("gpt-oss", {**GPT_OSS, "head_dim": 32}),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_llama(folder: Path, kind: str = "F16", **options: Any) -> Path:
    return write_gguf(folder / "model.gguf", "llama", random_llama("llama"), kind, **options)


def read_by_transformers(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()


@torch.no_grad()
def assert_same_logits(path: Path, reference: Any) -> None:
    # float32 sums in another order differ by about 1e-6 of the largest logit; a misplaced row
    # changes all logits
    ids = torch.randint(320, (1, 40), generator=torch.Generator().manual_seed(1))
    ours, theirs = plain_model(path, threads=2, dtype="fp32")(ids), reference(ids).logits
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture(tmp_path, name):
    architecture, overrides = ARCHITECTURES[name]
    model, extra = random_llama(architecture, **overrides), {}
    if name == "llama3":
        # the file stores Llama 3's scaling as a factor of each frequency
        plain = 5e5 ** -(np.arange(0, 16, 2) / 16)
        extra["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(
            np.float32
        )
        assert extra["rope_freqs.weight"].max() == pytest.approx(8.0)
    assert_same_logits(write_gguf(tmp_path / "model.gguf", architecture, model, extra=extra), model)


@pytest.mark.parametrize("kind", WRITTEN)
def test_every_type_that_the_package_writes(tmp_path, kind):
    path = write_llama(tmp_path, kind)
    file = GgufFile(path)
    weight = random_llama("llama").state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    type_of = GGMLQuantizationType[kind]
    expected = dequantize(quantize(weight, type_of), type_of)
    stored = file["model.layers.1.mlp.up_proj.weight"]
    values = torch.from_numpy(np.array(stored.values)).view(
        getattr(torch, STORED_TYPES[stored.dtype].torch)
    )
    assert np.array_equal(values.float().numpy(), expected)
    assert file.dtype == STORED.get(kind, "int8")
    assert GgufFile(path, blocks=True).dtype == STORED.get(kind, "gguf")


def test_the_engine_generates_what_transformers_does(tmp_path, capsys):
    path = write_llama(tmp_path, "Q8_0")
    ids = list(range(5, 17))
    # no eos, so that both generate all 24 tokens
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": -1}
    expected = read_by_transformers(path).generate(torch.tensor([ids]), **options)[0, 12:]
    with Engine.from_pretrained(path, dtype="fp32") as engine:
        assert engine.generate(ids, max_new_tokens=24, ignore_eos=True) == expected.tolist()
        assert engine.eos_ids == (2,)
        text = engine.generate_text(
            engine.tokenizer.encode("<|begin|>Hi<|end|>").ids, max_new_tokens=9
        )
    main(f"generate {path} --prompt Hi --max-new-tokens 9 --dtype fp32 --chat --greedy".split())
    assert capsys.readouterr().out == text + "\n"


HELD: dict[str, tuple[str, dict[str, Any], Any]] = {
    "phi3": (*ARCHITECTURES["phi3"], "Q8_0"),  # fused rows
    "gemma3": (*ARCHITECTURES["gemma3"], "Q8_0"),
    "granite": (*ARCHITECTURES["granite"], "Q8_0"),  # rotation moves blocks
    "qwen3moe": (
        "qwen3moe",
        {
            **EXPERTS,
            "hidden_size": 256,
            "moe_intermediate_size": 512,
            "head_dim": 64,
            "norm_topk_prob": True,
        },
        "Q4_K",
    ),
    # as in llama.cpp's own files
    "gpt-oss": (*ARCHITECTURES["gpt-oss"], lambda name: "MXFP4" if "_exps" in name else "Q8_0"),
}


@pytest.mark.parametrize("name", HELD)
def test_blocks_of_every_architecture_are_held_as_they_are(tmp_path, name):
    # close to the widened file, as inputs are rounded to 8 bits; equal for any number of threads
    architecture, overrides, kind = HELD[name]
    model = random_llama(architecture, **overrides | {"num_hidden_layers": 2})
    path, ids = write_gguf(tmp_path / "m.gguf", architecture, model, kind), list(range(5, 105))
    with Engine.from_pretrained(path, cache=False, threads=1, lanes=1) as engine:
        assert engine.dtype == "gguf"
        alone = engine.logits(ids)
    assert relative_error(alone, engine_logits(path, ids, dtype="fp32", lanes=1)) < 0.07
    assert np.array_equal(engine_logits(path, ids, threads=3, lanes=1), alone)


def test_a_tokenizer_beside_the_file_goes_first(tmp_path):
    # the file gives what the folder lacks; a tokenizer with other pieces is refused
    path = write_llama(tmp_path, fields={"general.sampling.temp": 0.5})
    own = read_checkpoint(path)
    assert own.tokenizer_config["eos_token"] == "<|end|>"
    assert own.sampling_defaults == {"temperature": 0.5, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    other = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    assert own.tokenizer.to_str() != other.to_str()
    other.save(str(tmp_path / "tokenizer.json"))
    checkpoint = read_checkpoint(path)
    assert [checkpoint.tokenizer.encode(t).ids for t in TEXTS] == [
        other.encode(t).ids for t in TEXTS
    ]
    assert checkpoint.tokenizer_config == own.tokenizer_config
    assert checkpoint.sampling_defaults == own.sampling_defaults
    (tmp_path / "tokenizer_config.json").write_text(
        '{"eos_token": "<|text|>", "chat_template": "x"}'
    )
    (tmp_path / "generation_config.json").write_text('{"do_sample": true}')
    checkpoint = read_checkpoint(path)
    assert checkpoint.tokenizer_config == own.tokenizer_config | {
        "eos_token": "<|text|>",
        "chat_template": "x",
    }
    assert checkpoint.sampling_defaults == {"temperature": 1.0, "top_k": 50}
    byte_level(pre_tokenizers.ByteLevel(), texts=["another", "language"]).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(
        ValueError,
        match=r"tokenizer\.json is not the tokenizer of model\.gguf: id \d+ is .* there, but",
    ):
        read_checkpoint(path)


# --- fields that change the numbers


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"rope.scale_linear": 4.0}, "linear"),  # of files of 2023
    ({"rope.scaling.factor": 4.0}, "linear"),  # without a type it is linear
    (
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scale_linear": 2.0},
        "linear",
    ),
    ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, ""),
    ({"rope.scale_linear": 1.0, "rope.scaling.finetuned": True, "attention.causal": True}, ""),
    (
        {
            "vocab_size": 320,
            "expert_count": 0,
            "rope.scaling.attn_factor": 1.0,
            "vision.block_count": 3,
        },
        "",
    ),
    (
        {
            "attention.clamp_kqv": 0.0,
            "use_parallel_residual": False,
            "attention.key_length": 16,
            "rope.freq_base_swa": 10000.0,
        },
        "",
    ),
]


@pytest.mark.parametrize(("fields", "scaling"), FIELDS)
def test_fields_that_are_read_or_change_nothing(tmp_path, fields, scaling):
    model = random_llama("llama", **(LINEAR if scaling else {}))
    fields = {f"llama.{key}": value for key, value in fields.items()}
    assert_same_logits(
        write_gguf(tmp_path / "model.gguf", "llama", random_llama("llama"), fields=fields), model
    )


# --- what is refused by name

NEAREST = r"is not read \(gated attention among .*; the nearest that is: "


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("gemma2", {}, "architecture 'gemma2' is not read"),
    ("qwen35", {}, rf"'qwen35' {NEAREST}'qwen3'; "),
    ("qwen3next", {}, rf"'qwen3next' {NEAREST}'qwen3"),
    ("qwen35moe", {}, r"'qwen35moe' is not .*; the nearest that is: 'qwen3moe'; .*'gpt-oss'\) are"),
    ("llama", {"general.type": "adapter"}, r"is an adapter \(LoRA\), no model"),
    ("llama", {"llama.expert_count": 8}, "llama.expert_count = 8: experts are not supported"),
    (
        "llama",
        {"llama.attention.key_length": 16, "llama.rope.dimension_count": 8},
        "count = 8, but heads have 16",
    ),
    ("qwen2", {"qwen2.attention.sliding_window": 64}, "sliding_window = 64: which layers"),
    ("llama", {"llama.rope.scaling.type": "dynamic"}, "RoPE of the kind .*dynamic"),
    # fields that nobody reads
    (
        "llama",
        {"llama.attention.clamp_kqv": 8.0},
        "llama.attention.clamp_kqv = 8.0 is not supported; it may change",
    ),
    ("llama", {"llama.logit_scale": 0.5}, "llama.logit_scale = 0.5 is not supported"),
    ("llama", {"llama.attention.causal": False}, "llama.attention.causal = False is not supported"),
    ("llama", {"llama.nextn_predict_layers": 1}, "llama.nextn_predict_layers = 1 is not supported"),
    ("llama", {"llama.rope.freq_base_swa": 5e5}, r"freq_base_swa is not rope.freq_base = 10000\.0"),
    (
        "llama",
        {"llama.rope.dimension_sections": [0, 8, 8]},
        r"dimension_sections = \[0, 8, 8\] is not",
    ),
    ("llama", {"llama.rope.scaling.attn_factor": 1.2}, "attn_factor = 1.2"),
    ("llama", {"llama.attention.key_length_swa": 8}, "key_length_swa = 8, but heads have 16"),
    # what a file lacks, and values of the wrong type
    (
        "llama",
        {"llama.attention.layer_norm_rms_epsilon": None},
        "lacks llama.attention.layer_norm_rms_epsilon",
    ),
    ("llama", {"llama.attention.head_count": None}, "the file lacks llama.attention.head_count"),
    ("llama", {"llama.context_length": None}, "the file lacks llama.context_length"),
    ("llama", {"llama.block_count": "two"}, "llama.block_count = 'two' must be a number"),
    (
        "llama",
        {"llama.attention.head_count_kv": "2"},
        "num_key_value_heads = '2' must be a positive integer",
    ),
    (
        "llama",
        {"llama.attention.head_count": 0},
        "num_attention_heads = 0 must be a positive integer",
    ),
    (
        "llama",
        {"llama.attention.sliding_window": "wide"},
        "sliding_window = 'wide' must be a number",
    ),
    ("llama", {"tokenizer.ggml.token_type": [1, 1]}, "token_type has 2 entries for 320 tokens"),
    (
        "llama",
        {"general.sampling.temp": -1.0},
        "model.gguf: general.sampling says temperature = -1.0",
    ),
]


@pytest.mark.parametrize(("architecture", "fields", "message"), WRONG)
def test_what_is_not_supported(tmp_path, architecture, fields, message):
    model = random_llama("qwen2" if architecture == "qwen2" else "llama")
    path = write_gguf(tmp_path / "model.gguf", architecture, model, "F16", fields)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(path)


def test_files_that_others_load_with_defaults(tmp_path):
    # without token types, and with impossible ids and context; no request may fail from them
    wrong = {
        "tokenizer.ggml.token_type": None,
        "tokenizer.ggml.eos_token_id": 100_000,
        "tokenizer.ggml.bos_token_id": 2**32 - 1,
        "llama.context_length": 2**31,
    }
    path = write_llama(tmp_path, fields=wrong)
    with pytest.raises(
        ValueError, match=r"a context of 2147483648 tokens, .* Give a smaller one as context_tokens"
    ):
        Engine.from_pretrained(path, cache=False)
    with Engine.from_pretrained(path, cache=False, context_tokens=64) as engine:
        assert engine.eos_ids == (2,), "by its text, <|end|>"
        assert len(engine.generate([5, 6], max_new_tokens=4, ignore_eos=True)) == 4


def test_types_and_tensors_that_are_not_read(tmp_path, monkeypatch):
    # a router outside a mixture of experts; factors that no Llama 3 scaling gives
    for name, values, message in (
        (
            "blk.0.ffn_gate_inp.weight",
            np.zeros((8, 64)),
            "tensor .*, which no supported architecture",
        ),
        ("rope_freqs.weight", np.linspace(1, 7, 8), "rope_freqs.weight is no scaling of Llama 3"),
    ):
        path = write_llama(tmp_path, extra={name: values})
        with pytest.raises(ValueError, match=message):
            GgufFile(path)
    monkeypatch.setattr(
        gguf_module, "QUANTIZED", tuple(kind for kind in QUANTIZED if kind != "Q4_1")
    )
    path = write_llama(tmp_path, "Q4_1")
    with pytest.raises(
        ValueError, match=r"is Q4_1; the engine reads \['F32', .* take Q4_K_M or IQ4_XS"
    ):
        GgufFile(path)
    assert not {"Q2_K", "Q3_K", "IQ3_S"} & {*QUANTIZED, *STORED}


def test_files_that_are_no_gguf(tmp_path, monkeypatch):
    path = write_llama(tmp_path)
    # empty, only the magic, another format, cut in the fields, in the middle, and at the end
    whole, broken = path.read_bytes(), tmp_path / "broken.gguf"
    for content in (
        b"",
        b"GGUF",
        b"not a model",
        whole[:300],
        whole[: len(whole) // 2],
        whole[:-64],
    ):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a GGUF file"):
            GgufFile(broken)
    with pytest.raises(ValueError, match="nor a GGUF file"):
        read_checkpoint(tmp_path / "missing.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ValueError, match=r"needs the package gguf: pip install 'laneformer\[gguf\]'"
    ):
        GgufFile(path)


def test_a_model_in_parts(tmp_path):
    (tmp_path / "whole").mkdir()
    whole, first = (
        write_llama(tmp_path / "whole", "Q8_0"),
        write_llama(tmp_path, "Q8_0", part_tensors=8),
    )
    assert first.name == "model-00001-of-00003.gguf"
    tokens = []
    for path in (whole, whole, first):  # the second time its packed blocks are mapped
        with Engine.from_pretrained(path) as engine:
            tokens.append(engine.generate([5, 6], max_new_tokens=8))
    assert tokens[0] == tokens[1] == tokens[2]
    assert [file.name[6:11] for file in read_checkpoint(first).files] == ["00001", "00002", "00003"]
    # only the first part names a model
    second = tmp_path / "model-00002-of-00003.gguf"
    with pytest.raises(ValueError, match=r"give the first, NAME-00001-of-00003\.gguf"):
        GgufFile(second)
    second.unlink()
    with pytest.raises(
        ValueError, match=r"of which model-00002-of-00003\.gguf are missing beside it"
    ):
        GgufFile(first)


@pytest.mark.parametrize("order", [GGUFEndian.LITTLE, GGUFEndian.BIG])
def test_fields_are_those_of_the_package(order, tmp_path):
    path = tmp_path / "fields.gguf"
    writer = GGUFWriter(path, "llama", endianess=order)
    writer.add_array("words", ["", "one", "zwölf", "\u2581a" * 40])
    writer.add_array("scores", [0.5, -1e30, 3.0])
    writer.add_array("kinds", [1, 3, -6])
    writer.add_array("flags", [True, False])
    writer.add_string("after", "the arrays")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ours, theirs = gguf_module.open_file(path).fields, GGUFReader(path).fields
    assert list(ours) == list(theirs)
    for name, field in theirs.items():
        value = gguf_module.contents_of(ours[name]) if field.types else None
        assert (value, ours[name].types) == (field.contents(), field.types)
