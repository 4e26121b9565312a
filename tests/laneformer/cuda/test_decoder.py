"""Tests of the engine for GPUs without a GPU: its API with a plain PyTorch loop, and device selection."""

from __future__ import annotations

import copy
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from laneformer.engine import Cancelled, Engine, device
from laneformer.engine.bench import benchmark
from laneformer.engine.cpu.decoder import CpuDecoder
from laneformer.engine.cuda import passes as passes_module
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.cuda.prefill import scores_of
from laneformer.model import run_layers
from laneformer.positions import rope_table
from tests.laneformer.cuda.harness import random_model, small_config, tensors_of
from tests.laneformer.cuda.stand_ins import LoopPasses, cuda_of, passes_of, pretend_gpu
from tests.laneformer.engine.assets import byte_tokenizer, collect, tokens_of, write_folder
from tests.laneformer.engine.goldens import mask_of

CONFIG = small_config(vocab_size=264, max_position_embeddings=48)
MODEL = random_model(CONFIG)
TENSORS = tensors_of(MODEL, "bf16")
PROMPT = [5, 60, 7]


@pytest.fixture(autouse=True)
def two_gpus(monkeypatch):
    pretend_gpu(monkeypatch, LoopPasses, devices=2)


# The schedule is the CPU engine's, whose tests cover it.
@pytest.fixture
def engine(two_gpus):
    with Engine(CONFIG, TENSORS, device="cuda", tokenizer=byte_tokenizer()) as engine:
        cuda_of(engine).executor.schedule.fix_cost(0.02)  # the same drafts every time
        yield engine


@torch.inference_mode()
def greedy(prompt, count) -> list[int]:
    loop, ids = LoopPasses(CONFIG, TENSORS, "bf16"), list(prompt)
    for _ in range(count):
        ids.append(int(loop.logits_after(ids)[-1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def expected_tokens():
    return greedy(PROMPT, 12)


# ---- requests ----


def test_every_way_to_generate_gives_the_same_tokens(engine, expected_tokens):
    assert engine.generate(PROMPT, max_new_tokens=12) == expected_tokens
    assert list(engine.stream(PROMPT, max_new_tokens=12)) == expected_tokens
    detailed = engine.generate_detailed(PROMPT, max_new_tokens=12, speculate=0)
    assert (detailed.ids, detailed.finish_reason, detailed.statistics.passes) == (
        expected_tokens,
        "length",
        1 + 11,
    )
    assert [
        token.id for token in engine.stream_detailed(PROMPT, max_new_tokens=12)
    ] == expected_tokens
    assert engine.generate(PROMPT, max_new_tokens=12, speculate=5) == expected_tokens
    # more stop ids than the kernels take: the schedule draws
    others = [i for i in range(264) if i not in expected_tokens]
    assert engine.generate(PROMPT, max_new_tokens=12, stop_ids=others) == expected_tokens


def test_a_request_draws_from_what_its_masks_allow(engine, expected_tokens):
    # beside a request without masks, which draws as alone
    with engine.batch() as batch:
        masked, plain = (
            batch.join(PROMPT, masked=True, max_new_tokens=2),
            batch.join(PROMPT, max_new_tokens=12),
        )
        for index, ids in enumerate(([40, 41], [9])):
            batch.allow(masked, index, mask_of(ids, 264))
        updates = collect(batch, masked, plain)
    first, second = (token.id for token in tokens_of(updates[masked]))
    assert first in (40, 41)
    assert second == 9
    assert [token.id for token in tokens_of(updates[plain])] == expected_tokens


def test_a_join_ends_the_passes_ahead(engine, monkeypatch):
    columns, tickets, one_pass = [], [], LoopPasses._pass
    with engine.batch() as batch:

        def joining(passes, inputs, logits):
            columns.append(len(inputs))
            if len(columns) == 6:  # one of those that follow unasked
                tickets.append(batch.join(PROMPT[::-1], max_new_tokens=3, speculate=0))
            return one_pass(passes, inputs, logits)

        # the join comes from within a pass, while passes ahead are under way
        monkeypatch.setattr(LoopPasses, "_pass", joining)
        tickets.append(batch.join(PROMPT, max_new_tokens=30, speculate=0))
        ends = 0
        while ends < 2:
            ends += sum(update.finish_reason is not None for update in batch.updates(5.0))
    assert columns[:6] == [3, 1, 1, 1, 1, 1]
    assert max(columns[6:8]) > 1


def test_a_prompt_without_memory_ends_alone(engine, expected_tokens, monkeypatch):
    # the others go on, and no request reuses what it wrote

    def full(*_):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    monkeypatch.setattr(passes_module, "COLUMN_TOKENS", 1)  # of five columns
    with Engine(CONFIG, TENSORS, device="cuda") as engine, engine.batch() as batch:
        with monkeypatch.context() as patch:
            patch.setattr(LoopPasses, "read", full)
            tickets = batch.join(PROMPT, max_new_tokens=12), batch.join(PROMPT * 6)
            updates = collect(batch, *tickets)
        assert [token.id for token in tokens_of(updates[tickets[0]])] == expected_tokens
        last = updates[tickets[1]][-1]
        assert last.error == "the GPU has no memory for this request: tried to allocate 3 GiB"
        again = batch.join(PROMPT * 6, max_new_tokens=2)
        assert [token.id for token in tokens_of(collect(batch, again)[again])] == greedy(
            PROMPT * 6, 2
        )


def test_a_closed_engine_says_so(engine):
    stream = engine.stream(PROMPT, max_new_tokens=40)
    next(stream)
    executor = cuda_of(engine).executor
    engine.close()
    engine.close()
    # the executor's thread gives its memory back by itself, within 5 s
    for _ in range(100):
        time.sleep(0.05 * (executor.passes is not None))
    assert executor.passes is None, "its memory is given back"
    with pytest.raises(Cancelled):
        list(stream)
    with pytest.raises(ValueError, match="closed"):
        engine.generate(PROMPT)


# ---- scores ----


def reference_logits(model, ids) -> np.ndarray:
    # layers in bf16 as in the engine, the head in float64
    positions = torch.arange(len(ids))
    embedding, masks = model.tok_embeddings(torch.tensor([ids])), model.masks(positions, positions)
    h, _ = run_layers(
        model.layers, model.config, embedding, rope_table(model.config, positions), masks
    )
    norm, head = (copy.deepcopy(module).double() for module in (model.norm, model.lm_head))
    return head(h.double(), norm)[0].detach().numpy()


def test_scores_are_those_of_the_model(engine, monkeypatch):
    ids = [(11 * i + 3) % 264 for i in range(49)]
    logits = reference_logits(passes_of(engine).model, ids[:48])
    logprobs = torch.from_numpy(logits).log_softmax(-1).numpy()
    # fp32 sums of 64 products: 64 roundings of 2^-24 of at most the sum of magnitudes, here below
    # 200
    bound = 64 * 2**-24 * 200
    np.testing.assert_allclose(engine.logits(ids[:48]), logits, rtol=0, atol=bound)
    np.testing.assert_allclose(
        engine.logprobs(ids), logprobs[np.arange(48), ids[1:]], rtol=0, atol=2 * bound
    )
    scores = engine.logprobs(ids, top=3, start=20)
    np.testing.assert_array_equal(scores.logprobs, engine.logprobs(ids)[19:])
    np.testing.assert_array_equal(
        scores.top_ids, (-logprobs[19:]).argsort(-1, kind="stable")[:, :3]
    )
    np.testing.assert_allclose(
        scores.top_logprobs, -np.sort(-logprobs[19:])[:, :3], rtol=0, atol=2 * bound
    )
    assert engine.logprobs(ids, start=49).shape == (0,)
    with pytest.raises(ValueError, match="50 tokens"):
        engine.logprobs([1] * 50)
    monkeypatch.setattr("laneformer.engine.cuda.prefill.HEAD_TOKENS", 9)
    blocks = engine.logprobs(ids, top=3, start=20)
    # sums of other widths
    np.testing.assert_allclose(blocks.logprobs, scores.logprobs, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(blocks.top_ids, scores.top_ids)


def test_equally_likely_ids_come_lowest_first():
    target, ids, logprobs = scores_of(torch.tensor([[1.0, 3.0, 3.0, 3.0]]), [2], 3)
    assert ids.tolist() == [1, 2, 3]
    assert (logprobs == target).all()


# ---- options ----


def test_options_of_the_cpu_are_refused_by_name():
    others = {
        "threads": 2,
        "isa": "avx2",
        "math": "bf16",
        "pin": True,
        "kv_dtype": "fp32",
        "dtype": "int4",
    }
    for option, value in [*others.items(), ("dtype", "fp32")]:
        with pytest.raises(ValueError, match=f"{option} = .*use device = 'cpu'"):
            Engine(CONFIG, TENSORS, device="cuda", **{option: value})
    with pytest.raises(
        ValueError, match="version = 'persistant' is unknown; choose from 'passes' and 'graph'"
    ):
        CudaDecoder(CONFIG, TENSORS, version="persistant")


def test_a_models_own_head_drafts_nothing_here():
    config = small_config(vocab_size=264, num_nextn_predict_layers=1, draft_vocab_size=40)
    model = random_model(config)
    with Engine(config, tensors_of(model, "bf16"), device="cuda") as engine:
        assert engine.draft_head is None
        assert passes_of(engine).config.num_nextn_predict_layers == 0
        assert len(engine.generate(PROMPT, max_new_tokens=4)) == 4


# ---- which engine ----


def test_the_device_chooses_the_engine(tmp_path, expected_tokens):
    # a checkpoint in fp32, which the GPU engine rounds to bf16
    folder = write_folder(tmp_path / "hf", copy.deepcopy(MODEL).float(), eos_token_id=3)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    with Engine.from_pretrained(folder, device="cuda:0,cuda:1", context_tokens=40) as engine:
        assert isinstance(engine._open(), CudaDecoder)
        assert (engine.dtype, engine.isa, engine.eos_ids) == (
            "bf16",
            "cuda",
            (3,),
        )  # the checkpoint is fp32
        assert passes_of(engine).devices == ("cuda:0", "cuda:1")
        assert engine.config.max_position_embeddings == 40
        assert engine.generate(PROMPT, max_new_tokens=12, ignore_eos=True) == expected_tokens
    with Engine(CONFIG, TENSORS, device="cuda", dtype="int8") as engine:
        assert (engine.dtype, engine.kv_dtype) == ("int8", "bf16")
    with Engine.from_pretrained(folder) as engine:
        assert isinstance(engine._open(), CpuDecoder), (
            "unproven kernels are for those who name them"
        )
    with pytest.raises(ValueError, match="threads = 2"):
        Engine.random(CONFIG, device="cuda", threads=2)


def test_devices_that_are_not_there():
    for name in ("cuda:0,cuda:0", "cuda:2", "cuda:0,cuda:7"):
        with pytest.raises(ValueError, match=f"device = '{name}': name each GPU once, of the 2"):
            Engine.random("tiny", device=name)
    for name in ("tpu", "cuda:", "cuda0", "cuda:0,cpu", "", None):
        with pytest.raises(ValueError, match="choose 'auto', 'cpu', 'cuda'"):
            Engine.random("tiny", device=name)


LACKS = {  # what is patched, and in which module
    "no NVIDIA driver": (device, "driver_version", lambda: None),
    "torch is not installed: pip install": (
        device,
        "is_installed",
        lambda module: module != "torch",
    ),
    "cuda.bindings is not installed: pip": (
        device,
        "is_installed",
        lambda module: module != "cuda.bindings",
    ),
    "built without CUDA": (torch.version, "cuda", None),
    "driver for CUDA 13.0, this one is for CUDA 12.4: .* CUDA 12": (
        device,
        "driver_version",
        lambda: 12040,
    ),
    "torch finds no GPU": (torch.cuda, "is_available", lambda: False),
}


@pytest.mark.parametrize("message", LACKS)
def test_what_is_missing_is_said(message, monkeypatch):
    monkeypatch.undo()  # two_gpus
    monkeypatch.setattr(device, "driver_version", lambda: 13000)
    monkeypatch.setattr(device, "is_installed", lambda module: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(*LACKS[message])
    with pytest.raises(ValueError, match=f"device = 'cuda': .*{message}.*or use device = 'cpu'"):
        Engine.random("tiny", device="cuda")
    assert device.cuda_devices("auto") == ()


def test_auto_without_a_gpu_does_not_import_torch():
    # torch takes seconds to import, and the CPU engine needs none; this process has it already
    code = (
        "import sys; from laneformer.engine import Engine, device; device.DRIVER = 'libnothing.so';"
        "Engine.random('tiny').generate([1], max_new_tokens=2); print('torch' in sys.modules)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert process.stdout == "False\n", process.stderr


def test_bench_measures_the_decoder(engine, monkeypatch):
    monkeypatch.setattr("laneformer.engine.cuda.bench.benchmark", lambda *arguments: arguments)
    assert benchmark(engine, 30, print) == (cuda_of(engine).executor, 30, print)
