"""Tests of Llama-family models on the CUDA engine: logits on the emulator, and folders end to end."""

import numpy as np
import pytest
import torch

from laneformer.engine import Engine
from tests.laneformer.cuda.emulated import EmulatedPasses, needs_emulator
from tests.laneformer.cuda.shapes import FAMILIES, family
from tests.laneformer.cuda.stand_ins import passes_of, pretend_gpu
from tests.laneformer.cuda.test_kernels import check
from tests.laneformer.llama.folders import Case, logits_of, reference, relative_error, write_folder
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = [pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES), needs_emulator]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_logit(name, cuda_builds):
    check(family(name).emulate(cuda_builds), 9, range(1))


def test_a_folder_end_to_end(tmp_path, cuda_builds, monkeypatch):
    # Transformers writes and judges it; PyTorch reads prompts on the tapes, the kernels decode
    values = {
        "vocab_size": 136,
        "max_position_embeddings": 48,
        "tie_word_embeddings": True,
        "head_dim": 16,
    }
    folder = write_folder(Case("Qwen3", values, torch.bfloat16), tmp_path / "hf")

    def make(config, tensors, dtype, *_, **__):
        return EmulatedPasses(cuda_builds, 3, config=config, tensors=tensors, dtype=dtype)

    pretend_gpu(monkeypatch, make)
    ids = [(7 * i + 3) % 136 for i in range(20)]
    judge = reference(folder)
    with Engine.from_pretrained(folder, device="cuda") as engine:
        assert (engine.dtype, engine.config.num_lanes, passes_of(engine).geometry.devices) == (
            "bf16",
            2,
            1,
        )
        exact = logits_of(judge, ids)
        assert relative_error(engine.logits(ids), exact) < 0.1  # 16 bits throughout
        for prompt in (ids[:4], ids):  # read by the kernel, by PyTorch
            tokens = engine.generate(prompt, max_new_tokens=6, ignore_eos=True)
            spread = logits_of(judge, prompt + tokens)[len(prompt) - 1 : -1]
            behind = spread.max(1) - spread[np.arange(6), tokens]
            assert (behind < 0.1 * np.ptp(spread)).all(), (
                "another token only where two are nearly as likely"
            )
