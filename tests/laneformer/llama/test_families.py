"""Tests of every supported family against Transformers: logits, greedy tokens, threads and memory."""

from __future__ import annotations

import dataclasses
import json
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from laneformer import Engine
from laneformer.engine.folder import read_checkpoint
from tests.laneformer.llama.folders import (
    ALLOWED,
    CASES,
    IDS,
    WINDOW,
    engine_logits,
    logits_of,
    plain_model,
    reference,
    relative_error,
    write_folder,
    write_with_vision,
)

if TYPE_CHECKING:
    pass

TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


@pytest.fixture(scope="module", params=CASES)
def folder(request, tmp_path_factory):
    return write_folder(CASES[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def truth(folder):
    return reference(folder)


@pytest.fixture
def tied_folder(tmp_path):
    return write_folder(CASES["llama-tied"], tmp_path / "tied")


def test_engine(folder, truth):
    # prompts longer than the window, for the lanes that each number of threads gets
    from tools.check.reference import hf_greedy

    expected, prompt = logits_of(truth), IDS[: 3 * WINDOW]
    tokens, _ = hf_greedy(truth, prompt, 24)
    options = {"cache": False, "kv_dtype": "fp32"}
    with Engine.from_pretrained(folder, threads=1, **options) as engine:
        alone = engine.logits(IDS)
        assert engine.dtype == TYPES[json.loads((folder / "config.json").read_text())["dtype"]]
    assert relative_error(alone, expected) < ALLOWED
    for threads in (3, 4):
        with Engine.from_pretrained(folder, threads=threads, **options) as engine:
            assert relative_error(engine.logits(IDS), expected) < ALLOWED
            assert engine.generate(prompt, max_new_tokens=24, ignore_eos=True) == tokens
    logits = engine_logits(folder, threads=5, lanes=1, kv_dtype="fp32")
    assert np.array_equal(logits, alone), "the number of threads changed bits"


def test_pytorch(folder, truth):
    # model.py with the translated tensors, on one lane and on as many as there are KV heads
    for lanes in {
        1,
        read_checkpoint(folder, threads=truth.config.num_key_value_heads).config.num_lanes,
    }:
        assert (
            relative_error(logits_of(plain_model(folder, lanes=lanes)), logits_of(truth)) < ALLOWED
        )


@pytest.mark.parametrize(
    ("kind", "text"), [("Gemma3", "gemma3"), ("Mistral3", "mistral"), ("Mistral3", "ministral3")]
)
def test_the_text_model_beside_a_vision_tower(kind, text, tmp_path):
    folder, alone = write_with_vision(
        kind, dataclasses.replace(CASES[text], dtype=torch.float32), tmp_path
    )
    logits = engine_logits(folder, threads=2, kv_dtype="fp32")
    assert relative_error(logits, logits_of(alone)) < ALLOWED


def test_the_context_chooses_the_factors_of_longrope(tmp_path):
    # Transformers uses the short factors for a text of 32 tokens, the trained length
    folder = write_folder(CASES["phi4-mini"], tmp_path)
    expected = logits_of(reference(folder), IDS[:32])
    short = engine_logits(folder, IDS[:32], context_tokens=32, kv_dtype="fp32")
    assert relative_error(short, expected) < ALLOWED
    assert relative_error(engine_logits(folder, IDS[:32], kv_dtype="fp32"), expected) > 0.01


def test_gpus_refuse_what_they_have_not(tmp_path, monkeypatch):
    monkeypatch.setattr("laneformer.engine.loading.cuda_devices", lambda device: ("cuda:0",))
    for name in ("olmo2", "granite", "qwen3-moe", "gpt-oss", "gemma3", "ministral3"):
        folder = write_folder(CASES[name], tmp_path / name)
        with pytest.raises(
            ValueError, match=r"the CUDA engine does not support .*; use device = 'cpu'"
        ):
            Engine.from_pretrained(folder, device="cuda", lanes=1)


@pytest.mark.parametrize("isa", ["avx2", "avx512"])
def test_every_instruction_set_has_the_same_gates(isa, tmp_path):
    # products of quantised weights are integers, so they match the machine's own bit for bit
    folder = write_folder(CASES["gemma3"], tmp_path)
    for dtype in ("fp32", "int4"):
        expected = engine_logits(folder, dtype=dtype)
        try:
            logits = engine_logits(folder, dtype=dtype, isa=isa)
        except ValueError as error:
            pytest.skip(str(error))
        assert np.array_equal(logits, expected)


@pytest.mark.parametrize(
    ("dtype", "threads", "lanes"),
    [("bf16", 1, 1), ("fp16", 2, 2), ("fp32", 3, 1), ("int8", 2, 2), ("int4", 3, 1)],
)
def test_tied_embeddings_are_stored_once(tied_folder, dtype, threads, lanes):
    # the tapes are as large as the parameters, also in the packed cache
    with Engine.from_pretrained(tied_folder, dtype=dtype, threads=threads, lanes=lanes) as engine:
        decoder, first = engine._open(), engine.logits(IDS)
        assert decoder.parts == threads
        rows = sum(len(decoder.part(i)) for i in range(threads))
        element = {"fp32": 4, "int8": 1, "int4": 1}.get(dtype, 2)
        assert (
            rows < 1.5 * element * engine.config.parameter_count()["total"]
        )  # tiles of 32 rows are padded
    assert [path.suffix for path in (tied_folder / ".packed").iterdir()].count(".bin") == 1
    with Engine.from_pretrained(tied_folder, dtype=dtype, threads=threads, lanes=lanes) as engine:
        assert np.array_equal(engine.logits(IDS), first)


def test_an_embedding_row_of_the_packed_head_is_exact(tied_folder):
    # a tied model has the bits of the same model with a separate head, wherever a row lies
    weights = load_file(tied_folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tied_folder / "model.safetensors")
    config = json.loads((tied_folder / "config.json").read_text())
    for lanes, threads in ((1, 1), (1, 3), (2, 2), (2, 5)):
        logits = []
        for tie in (True, False):
            (tied_folder / "config.json").write_text(
                json.dumps(config | {"tie_word_embeddings": tie})
            )
            logits.append(
                engine_logits(tied_folder, list(range(131)), lanes=lanes, threads=threads)
            )
        assert np.array_equal(*logits)


def test_one_translated_tensor_at_a_time(tmp_path):
    case = dataclasses.replace(CASES["llama"], values={"num_hidden_layers": 8, "vocab_size": 128})
    tensors = read_checkpoint(write_folder(case, tmp_path), 2).tensors
    largest = max(tensors[name].values.nbytes for name in tensors)
    tracemalloc.start()
    total = sum(np.ascontiguousarray(tensors[name].values).nbytes for name in tensors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total > 20 * largest
    # a tensor, its translation, and a little more
    assert peak < 3 * largest
