"""GGUF files of every type and architecture against Transformers, and what they must not hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM

from laneformer import Engine, Laneformer
from laneformer.cli import main
from laneformer.config import LaneformerConfig
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
    relative_error,
)
from tests.laneformer.llama.gguf_assets import TEXTS, byte_level, random_llama, tokenizer_metadata, write_gguf

WRITTEN = (
    "F32",
    "F16",
    "BF16",
    "Q8_0",
    "Q5_0",
    "Q5_1",
    "Q4_0",
    "Q4_1",
    "MXFP4",
)  # the package cannot write K-quants
SMOLLM = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "XDG_CACHE_HOME", str(tmp_path / "cache")
    )  # where packed weights of a GGUF file are kept


@pytest.fixture(scope="module")
def metadata() -> Any:
    return tokenizer_metadata(byte_level(SMOLLM), "smollm")


def laneformer(path: Path) -> Laneformer:
    """The plain PyTorch model of a file, in float32."""
    checkpoint = read_checkpoint(path, threads=2, dtype="fp32")
    weights = {
        name: torch.from_numpy(np.array(tensor.values))
        .view(getattr(torch, STORED_TYPES[tensor.dtype].torch))
        .float()
        for name, tensor in checkpoint.tensors.items()
    }
    with torch.device("meta"):
        model = Laneformer(checkpoint.config).eval()
    model.load_state_dict(weights, assign=True)
    return model


@torch.no_grad()
def assert_same_logits(path: Path, reference: Any, tolerance: float = 1e-5) -> None:
    """Float32 of both sides sums in other orders: about 1e-6 of the largest logit. A misplaced
    row changes it all.
    """
    ids = torch.randint(320, (1, 40), generator=torch.Generator().manual_seed(1))
    ours, theirs = laneformer(path)(ids), reference(ids).logits
    assert float((ours - theirs).abs().max()) <= tolerance * float(theirs.abs().max())


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "rope_theta": 500000.0}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 5e5,
                                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}),
        ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True, "pad_token_id": 0}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 32}),
        ("llama", {"rope_parameters": YARN}),
        ("olmo2", {"num_key_value_heads": 4}),
        ("olmo3", {"sliding_window": 16, "num_hidden_layers": 4, "rope_parameters": {
            "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
        ("granite", {**GRANITE, "tie_word_embeddings": True}),
        ("phi3", {"pad_token_id": 0, "rope_parameters": LONG, "original_max_position_embeddings": 32}),
        ("gemma3", {"sliding_window": 16, "num_hidden_layers": 6, "rope_parameters": GEMMA3_ROPES,
                    "query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
        ("mistral3", {"rope_parameters": MINISTRAL3}),
        ("qwen3moe", {**EXPERTS, "norm_topk_prob": True, "head_dim": 32}),
        ("gpt-oss", {**GPT_OSS, "head_dim": 32}),
    ],
    ids=["llama", "tied", "llama3", "smollm3", "qwen2", "qwen3", "yarn", "olmo2", "olmo3", "granite", "phi3", "gemma3",
         "mistral3", "qwen3moe", "gpt-oss"],
)  # fmt: skip
def test_every_architecture(
    tmp_path: Path, metadata: Any, architecture: str, overrides: dict[str, Any]
) -> None:
    model = random_llama(architecture, **overrides)
    extra = {}
    if "rope_scaling" in overrides:
        plain = 5e5 ** -(np.arange(0, 16, 2) / 16)
        extra["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
        assert extra["rope_freqs.weight"].max() == pytest.approx(8.0)
    path = write_gguf(tmp_path / "model.gguf", architecture, model, "F32", metadata, extra)
    assert_same_logits(path, model)


@pytest.mark.parametrize("kind", WRITTEN)
def test_every_type_that_the_package_writes(tmp_path: Path, metadata: Any, kind: str) -> None:
    model = random_llama("llama")
    path = write_gguf(tmp_path / "model.gguf", "llama", model, kind, metadata)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    assert_same_logits(path, theirs)
    file = GgufFile(path)
    weight = model.state_dict()["model.layers.1.mlp.up_proj.weight"].numpy()
    type_of = GGMLQuantizationType[kind]
    expected = dequantize(quantize(weight, type_of), type_of)
    stored = file["model.layers.1.mlp.up_proj.weight"]
    values = torch.from_numpy(np.array(stored.values)).view(getattr(torch, STORED_TYPES[stored.dtype].torch))
    assert np.array_equal(values.float().numpy(), expected)
    assert file.dtype == STORED.get(kind, "int8")
    assert GgufFile(path, blocks=True).dtype == STORED.get(kind, "gguf")


def test_k_quants_are_widened_as_ggml_defines_them() -> None:
    """A block of 256 weights, one by one, from the layout in ggml's headers."""
    rng = np.random.default_rng(0)

    def six_bits(scales: np.ndarray, j: int) -> tuple[int, int]:
        if j < 4:
            return int(scales[j] & 63), int(scales[j + 4] & 63)
        low = int(scales[j + 4])
        return low & 15 | int(scales[j - 4]) >> 6 << 4, low >> 4 | int(scales[j]) >> 6 << 4

    for kind, high_bits in (("Q4_K", 0), ("Q5_K", 32)):
        block = rng.integers(0, 256, 144 + high_bits, np.uint8)
        d, dmin = block[:4].view(np.float16)[:] = np.array([0.37, 0.11], np.float16)
        scales, high, low = block[4:16], block[16 : 16 + high_bits], block[16 + high_bits :]
        expected = np.empty(256)
        for i in range(256):
            group, at = i // 32, i % 32
            nibble = int(low[group // 2 * 32 + at]) >> 4 * (group % 2) & 15
            nibble += 16 * (int(high[at]) >> group & 1) if high_bits else 0
            scale, least = six_bits(scales, group)
            expected[i] = float(d) * scale * nibble - float(dmin) * least
        found = dequantize(block[None], GGMLQuantizationType[kind])[0]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    block = rng.integers(0, 256, 210, np.uint8)
    block[208:].view(np.float16)[:] = 0.23
    low, high, scale_bytes = block[:128], block[128:192], block[192:208].view(np.int8)
    expected = np.empty(256)
    for i in range(256):
        half, quarter, at = i // 128, i % 128 // 32, i % 32
        nibble = int(low[half * 64 + quarter % 2 * 32 + at]) >> 4 * (quarter // 2) & 15
        bits = int(high[half * 32 + at]) >> 2 * quarter & 3
        expected[i] = float(np.float16(0.23)) * int(scale_bytes[i // 16]) * ((nibble | bits << 4) - 32)
    found = dequantize(block[None], GGMLQuantizationType.Q6_K)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_embeddings_of_quantised_files_are_held_in_16_bits_where_they_stay(
    tmp_path: Path, metadata: Any
) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", random_llama("llama"), "Q8_0", metadata)
    types = {
        dtype: GgufFile(path, dtype)["model.embed_tokens.weight"].dtype for dtype in ("int8", "fp16", "fp32")
    }
    assert types == {"int8": "fp16", "fp16": "fp16", "fp32": "fp32"}
    assert GgufFile(path, "int8")["model.layers.0.mlp.up_proj.weight"].dtype == "fp32", (
        "rounded once, by the engine"
    )


def test_the_engine_generates_what_transformers_does(
    tmp_path: Path, metadata: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", random_llama("llama"), "Q8_0", metadata)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32).eval()
    ids = list(range(5, 17))
    expected = theirs.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=-1)[
        0, 12:
    ]
    with Engine.from_pretrained(path, dtype="fp32") as engine:
        assert engine.generate(ids, max_new_tokens=24, ignore_eos=True) == expected.tolist()
        assert engine.eos_ids == (2,)
        text = engine.generate_text(engine.tokenizer.encode("<|begin|>Hi<|end|>").ids, max_new_tokens=9)
    command = [
        "generate",
        str(path),
        "--prompt",
        "Hi",
        "--max-new-tokens",
        "9",
        "--dtype",
        "fp32",
        "--chat",
        "--greedy",
    ]
    main(command)
    assert capsys.readouterr().out == text + "\n"
    with Engine.from_pretrained(path) as engine:
        assert engine.dtype == "gguf"


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("phi3", {"pad_token_id": 0, "rope_parameters": LONG, "original_max_position_embeddings": 32}),
     ("gemma3", {"sliding_window": 16, "rope_parameters": GEMMA3_ROPES, "query_pre_attn_scalar": 16,
                 "tie_word_embeddings": True}),
     ("granite", GRANITE), ("olmo2", {"num_key_value_heads": 4})],
)  # fmt: skip
def test_blocks_of_every_new_architecture_are_held_as_they_are(
    tmp_path: Path, metadata: Any, architecture: str, overrides: dict[str, Any]
) -> None:
    """Close to what the widened file gives, as inputs are rounded to 8 bits; fused rows and rotation move blocks."""
    path = write_gguf(
        tmp_path / "m.gguf", architecture, random_llama(architecture, **overrides), "Q8_0", metadata
    )
    ids = list(range(5, 105))
    with Engine.from_pretrained(path, dtype="fp32", cache=False) as engine:
        wide = engine.logits(ids)
    with Engine.from_pretrained(path, cache=False) as engine:
        assert engine.dtype == "gguf"
        assert relative_error(engine.logits(ids), wide) < 0.05


def test_a_tokenizer_beside_the_file_goes_first(tmp_path: Path, metadata: Any) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", random_llama("llama"), "F16", metadata)
    other = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))
    assert read_checkpoint(path).tokenizer.to_str() != other.to_str()
    assert read_checkpoint(path).tokenizer_config["eos_token"] == "<|end|>"
    other.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|text|>"}')
    checkpoint = read_checkpoint(path)
    assert [checkpoint.tokenizer.encode(text).ids for text in TEXTS] == [
        other.encode(text).ids for text in TEXTS
    ]
    assert checkpoint.tokenizer_config == {"eos_token": "<|text|>"}


def test_a_scaling_that_is_not_llama_3_s_is_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.linspace(1, 7, 8).astype(np.float32)}
    path = write_gguf(tmp_path / "model.gguf", "llama", random_llama("llama"), "F32", extra=factors)
    with pytest.raises(ValueError, match=r"rope_freqs.weight is no scaling of Llama 3"):
        GgufFile(path)


@pytest.mark.parametrize(
    ("architecture", "key", "value", "says"),
    [
        ("gemma2", "", 0, "architecture 'gemma2' is not read"),
        (
            "qwen35",
            "",
            0,
            r"'qwen35' is not read \(gated attention among .*; the nearest that is: 'qwen3'; ",
        ),
        (
            "qwen3next",
            "",
            0,
            r"'qwen3next' is not read \(gated attention among .*; the nearest that is: 'qwen3",
        ),
        ("qwen35moe", "", 0, r"'qwen35moe' is not .*; the nearest that is: 'qwen3moe'; .*'gpt-oss'\) are"),
        ("llama", "llama.expert_count", 8, "llama.expert_count = 8: experts are not supported"),
        ("llama", "llama.rope.dimension_count", 8, "llama.rope.dimension_count = 8, but heads have 16"),
        ("qwen2", "qwen2.attention.sliding_window", 64, "sliding_window = 64: which layers"),
        ("llama", "llama.rope.scaling.type", "dynamic", "RoPE of the kind .*dynamic"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, architecture: str, key: str, value: Any, says: str
) -> None:
    model = random_llama("qwen2" if architecture == "qwen2" else "llama")

    def metadata(writer: GGUFWriter) -> None:
        writer.add_key_length(16)
        if isinstance(value, str):
            writer.add_string(key, value)
        elif key.endswith("dimension_count"):
            writer.kv_data[0][key].value = value
        elif key:
            writer.add_uint32(key, value)

    path = write_gguf(tmp_path / "model.gguf", architecture, model, "F16", metadata)
    with pytest.raises(ValueError, match=says):
        read_checkpoint(path)


def test_types_and_tensors_that_are_not_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_llama("llama")
    monkeypatch.setattr(gguf_module, "QUANTIZED", tuple(kind for kind in QUANTIZED if kind != "Q4_1"))
    path = write_gguf(tmp_path / "model.gguf", "llama", model, "Q4_1")
    with pytest.raises(ValueError, match=r"is Q4_1; the engine reads \['F32', .* take Q4_K_M or IQ4_XS"):
        GgufFile(path)
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((8, 64), np.float32)}
    path = write_gguf(tmp_path / "model.gguf", "llama", model, "F16", extra=extra)
    with pytest.raises(
        ValueError, match=r"the tensor blk.0.ffn_gate_inp.weight, which no supported architecture has"
    ):
        GgufFile(path)


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ3_S"])
def test_smaller_types_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    def add_tensor(writer: GGUFWriter) -> None:
        _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        blocks = np.zeros((8, size), np.uint8)
        writer.add_tensor("blk.9.ffn_up.weight", blocks, raw_dtype=GGMLQuantizationType[kind])

    path = write_gguf(tmp_path / "model.gguf", "llama", random_llama("llama"), "F16", add_tensor)
    with pytest.raises(ValueError, match=f"blk.9.ffn_up.weight is {kind}; the engine reads"):
        read_checkpoint(path)


def test_files_that_are_no_gguf(tmp_path: Path, metadata: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_gguf(tmp_path / "model.gguf", "llama", random_llama("llama"), "F16", metadata).read_bytes()
    broken = tmp_path / "broken.gguf"
    for content in (b"", b"GGUF", b"not a model", whole[:300], whole[: len(whole) // 2], whole[:-64]):
        broken.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as a GGUF file"):
            GgufFile(broken)
    with pytest.raises(ValueError, match="nor a GGUF file"):
        read_checkpoint(tmp_path / "missing.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match=r"needs the package gguf: pip install 'laneformer\[gguf\]'"):
        GgufFile(tmp_path / "model.gguf")


def test_lanes_of_a_file_are_free(tmp_path: Path, metadata: Any) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", random_llama("llama"), "F16", metadata)
    config: LaneformerConfig = read_checkpoint(path, lanes=1).config
    assert (config.num_lanes, read_checkpoint(path, threads=2).config.num_lanes) == (1, 2)


def test_a_model_in_parts(tmp_path: Path, metadata: Any) -> None:
    model = random_llama("llama")
    whole = write_gguf(tmp_path / "whole.gguf", "llama", model, "Q8_0", metadata)
    first = write_gguf(tmp_path / "model.gguf", "llama", model, "Q8_0", metadata, part_tensors=8)
    assert first.name == "model-00001-of-00003.gguf"
    with Engine.from_pretrained(whole) as one, Engine.from_pretrained(first) as other:
        assert one.generate([5, 6], max_new_tokens=8) == other.generate([5, 6], max_new_tokens=8)
    assert [file.name[6:11] for file in read_checkpoint(first).files] == ["00001", "00002", "00003"]
    second = tmp_path / "model-00002-of-00003.gguf"
    with pytest.raises(ValueError, match=r"give the first, NAME-00001-of-00003\.gguf"):
        GgufFile(second)
    second.unlink()
    with pytest.raises(ValueError, match=r"of which model-00002-of-00003\.gguf are missing beside it"):
        GgufFile(first)


@pytest.mark.parametrize("order", [GGUFEndian.LITTLE, GGUFEndian.BIG])
def test_fields_are_those_of_the_package_and_a_cut_file_is_refused(order: GGUFEndian, tmp_path: Path) -> None:
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
        assert (ours[name].contents(), ours[name].types) == (field.contents(), field.types)
    whole = path.read_bytes()
    for size in (whole.index(b"zw"), whole.index(b"scores") + 30):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cannot be read as a GGUF file"):
            gguf_module.open_file(path)
