"""gpt-oss: MXFP4 folders and files, sinks, the clamped gate, columns that share a pass, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

from laneformer import Engine
from laneformer.engine.folder import read_checkpoint
from laneformer.llama.config import lanes_for
from tests.laneformer.llama.folders import CASES, GPT_OSS, logits_of, reference, relative_error, write_folder
from tests.laneformer.llama.gguf_assets import byte_level, random_llama, tokenizer_metadata, write_gguf
from tests.laneformer.llama.test_experts import changed, plain

IDS = np.random.default_rng(0).integers(0, 128, 100).tolist()
ALLOWED = 1e-5  # see test_families.py
MXFP4 = GGMLQuantizationType.MXFP4
ROUNDED = 0.06  # of the logits' spread: inputs are rounded to int8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(CASES["gpt-oss"], tmp_path_factory.mktemp("gpt_oss"))


@pytest.fixture(scope="module")
def blocks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder with experts in MXFP4, as OpenAI's, and with the same numbers in bf16, as Transformers writes it."""
    paths = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("bf16")
    stored = load_file(folder / "model.safetensors")
    wide = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        rows = np.ascontiguousarray(stored.pop(name).float().swapaxes(1, 2).numpy())
        held = quantize(rows, MXFP4).reshape(*rows.shape[:2], -1, 17)
        meant = dequantize(held.reshape(*rows.shape[:2], -1), MXFP4)
        nibbles = np.concatenate((held[..., 1:] & 15, held[..., 1:] >> 4), -1)
        stored[f"{name}_blocks"] = torch.from_numpy(nibbles[..., 0::2] | nibbles[..., 1::2] << 4)
        stored[f"{name}_scales"] = torch.from_numpy(np.ascontiguousarray(held[..., 0]))
        wide[name] = torch.from_numpy(meant).swapaxes(1, 2).contiguous().bfloat16()
        assert np.array_equal(wide[name].float().swapaxes(1, 2).numpy(), meant)
    config = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    for path, tensors, more in zip(paths, (stored, wide), ({"quantization_config": said}, {}), strict=True):
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps({**config, **more}))
    return paths


def test_blocks_of_a_folder_are_what_transformers_reads(blocks: tuple[Path, Path]) -> None:
    """Widened, the logits of Transformers, and the bits of a folder of the same numbers."""
    expected = logits_of(reference(blocks[1]), IDS)
    found = []
    for path in blocks:
        with Engine.from_pretrained(path, dtype="fp32", threads=2, cache=False) as engine:
            found.append(engine.logits(IDS))
    assert relative_error(found[0], expected) < ALLOWED
    assert np.array_equal(*found)


def test_blocks_of_a_folder_are_served_as_they_are(blocks: tuple[Path, Path]) -> None:
    with Engine.from_pretrained(blocks[1], dtype="fp32", cache=False) as engine:
        exact = engine.logits(IDS)
    found = []
    for options in ({"threads": 1}, {"threads": 3}, {"threads": 2, "isa": "portable"}):
        with Engine.from_pretrained(blocks[0], lanes=1, cache=False, **options) as engine:
            assert (engine.dtype, engine.math) == ("gguf", "int8")
            found.append(engine.logits(IDS))
    assert np.array_equal(found[0], found[1])
    assert all(np.abs(other - exact).mean() / exact.std() < ROUNDED for other in found)


@pytest.mark.parametrize("held", [False, True], ids=["bf16", "mxfp4"])
@pytest.mark.parametrize(("threads", "lanes"), [(1, 1), (3, 1), (2, 2)])
def test_a_column_is_what_it_is_alone(
    folder: Path, blocks: tuple[Path, Path], held: bool, threads: int, lanes: int
) -> None:
    """In passes of any number of columns, in batches, as drafts: the bits of a pass of its own."""
    path = blocks[0] if held else folder
    with Engine.from_pretrained(path, threads=threads, lanes=lanes, cache=False) as engine:
        every = engine.logits(IDS)
        for count in (1, 5, 64):
            assert np.array_equal(engine.logits(IDS[:count]), every[:count])
        prompts = [IDS[:1], IDS[3:20], IDS[40:90]]
        alone = [engine.generate(p, max_new_tokens=20, reuse_prefix=False, speculate=0) for p in prompts]
        assert engine.generate_batch(prompts, max_new_tokens=20) == alone
        assert engine.generate(prompts[1], max_new_tokens=20, speculate=7) == alone[1]


@pytest.mark.parametrize(("part", "factor"), [("gate_up_proj_bias", 60.0), ("sinks", 20.0), ("sinks", -20.0)])
def test_large_biases_and_sinks(folder: Path, tmp_path: Path, part: str, factor: float) -> None:
    """Gates and ups beyond 7, sinks that take all of a softmax and nothing of it."""

    def grow(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.endswith(part):
                weights[name] = weights[name].abs() * factor if part == "sinks" else weights[name] * factor

    path = changed(folder, tmp_path, grow)
    expected, before = logits_of(reference(path), IDS), logits_of(reference(folder), IDS)
    assert relative_error(before, expected) > 0.01
    assert relative_error(logits_of(plain(path, 2), IDS), expected) < ALLOWED
    with Engine.from_pretrained(path, cache=False, kv_dtype="fp32", threads=3, lanes=2) as engine:
        assert relative_error(engine.logits(IDS), expected) < ALLOWED


@pytest.mark.parametrize(
    "part", ["sinks", "o_proj.bias", "router.bias", "gate_up_proj_bias", "down_proj_bias", "q_proj.bias"]
)
def test_every_bias_is_seen(folder: Path, tmp_path: Path, part: str) -> None:
    """What the comparison with Transformers would find if one were left out."""

    def drop(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if name.endswith(part):
                weights[name].fill_(-100.0) if part == "sinks" else weights[name].zero_()

    with Engine.from_pretrained(folder, cache=False, kv_dtype="fp32", threads=1) as engine:
        whole = engine.logits(IDS)
    with Engine.from_pretrained(changed(folder, tmp_path, drop), cache=False, kv_dtype="fp32") as engine:
        assert relative_error(engine.logits(IDS), whole) > 0.01


def test_a_file_s_blocks_are_served_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts in MXFP4 and the rest in Q8_0, as llama.cpp's own files are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = random_llama("gpt-oss", **{**GPT_OSS, "head_dim": 32})
    metadata = tokenizer_metadata(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt-2")
    path = write_gguf(
        tmp_path / "m.gguf", "gpt-oss", model, lambda name: "MXFP4" if "_exps" in name else "Q8_0", metadata
    )
    with Engine.from_pretrained(path, dtype="fp32", cache=False) as engine:
        exact = engine.logits(IDS)
    found = []
    for threads in (1, 3):
        with Engine.from_pretrained(path, threads=threads, lanes=1, cache=False) as engine:
            assert engine.dtype == "gguf"
            found.append(engine.logits(IDS))
    assert np.array_equal(*found)
    assert np.abs(found[0] - exact).mean() / exact.std() < ROUNDED


def test_lanes_cut_no_blocks(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    large = {"intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
    assert [lanes_for({**values, **large}, threads) for threads in (1, 2, 3, 4, 8)] == [1, 2, 1, 2, 2]
    assert lanes_for({**values, **large, "intermediate_size": 40}, 8) == 8


def without_scales(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.mlp.experts.down_proj_scales"]


def cut_scales(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.mlp.experts.down_proj_scales"
    weights[name] = weights[name][..., :-1].contiguous()


@pytest.mark.parametrize(
    ("change", "says"),
    [({"swiglu_limit": 5.0}, r"swiglu_limit = 5.0 .*only 7.0"), ({"swiglu_alpha": 1.0}, r"swiglu_alpha = 1.0 .*1.702"),
     ({"attention_bias": False}, r"attention_bias = False .*only True"),
     ({"quantization_config": {"quant_method": "fp8"}}, r"quant_method 'fp8'; supported is 'mxfp4'"),
     (without_scales, r"layers.1.mlp.experts.down_proj_blocks, but not .*down_proj_scales"),
     (cut_scales, r"down_proj_blocks of shape .* needs scales of shape")],
    ids=["limit", "alpha", "bias", "quantization", "scales", "shape"],
)  # fmt: skip
def test_what_is_not_supported_is_named(
    blocks: tuple[Path, Path], tmp_path: Path, change: dict[str, Any] | Callable[..., None], says: str
) -> None:
    path = changed(blocks[0], tmp_path, change if callable(change) else lambda weights: None)
    if not callable(change):
        values = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(values | change))
    with pytest.raises(ValueError, match=says):
        read_checkpoint(path)
