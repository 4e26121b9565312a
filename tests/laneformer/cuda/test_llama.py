"""Models of the Llama family on the CUDA engine: every logit on the emulator, and folders end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laneformer.engine import Engine
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.tape_model import TapeModel
from laneformer.llama.config import config_of_llama, lanes_for_gpus
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import emulated_engine
from tests.laneformer.cuda.harness import SMALL, plain_model, random_model, tensors_of
from tests.laneformer.cuda.shapes import Shape
from tests.laneformer.cuda.stand_ins import passes_of
from tests.laneformer.cuda.test_kernels import check
from tests.laneformer.llama.folders import LLAMA3, Case, logits_of, reference, relative_error, write_folder
from tests.proofs import CORE_SOURCES, KERNEL_SOURCES

pytestmark = pytest.mark.proof(*KERNEL_SOURCES, *CORE_SOURCES)

needs_emulator = pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING)
SIZES: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 32,
}  # fmt: skip
# lanes, and what differs from SIZES
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama 2": (4, {"num_key_value_heads": 4}),
    "llama 3": (2, {"rope_scaling": LLAMA3}),
    "smollm 2": (
        1,
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "mistral": (2, {"model_type": "mistral", "sliding_window": 5, "head_dim": 24}),
    "qwen 2": (2, {"model_type": "qwen2", "tie_word_embeddings": True}),
    "qwen 3": (
        2,
        {"model_type": "qwen3", "head_dim": 40, "num_attention_heads": 8, "tie_word_embeddings": True},
    ),
    "qwen 3 by YaRN": (
        2,
        {
            "model_type": "qwen3",
            "head_dim": 40,
            "num_attention_heads": 8,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
    "phi 3": (
        2,
        {
            "model_type": "phi3",
            "head_dim": 40,
            "partial_rotary_factor": 0.6,
            "rope_scaling": {"type": "longrope", "short_factor": [1.5] * 12, "long_factor": [4.0] * 12},
            "original_max_position_embeddings": 16,
        },
    ),
    "smollm 3": (1, {"model_type": "smollm3", "num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}),
}


def shape(name: str, **plan: Any) -> Shape:
    lanes, values = FAMILIES[name]
    return Shape({**vars(config_of_llama({**SIZES, **values}, lanes))}, **{"blocks": 4, "warps": 2, **plan})


@needs_emulator
@pytest.mark.job
@pytest.mark.parametrize("name", FAMILIES)
def test_every_logit(name: str, cuda_builds: Path) -> None:
    check(shape(name).emulated(cuda_builds), 9, range(1))


@needs_emulator
@pytest.mark.job
def test_the_graph_gives_the_same_bits(cuda_builds: Path) -> None:
    made = []
    for version in ("passes", "graph"):
        made.append(shape("qwen 3").emulated(cuda_builds, version=version).decode([5, 60, 7, 11], 4))
    assert made[0][0] == made[1][0]
    assert torch.equal(made[0][1], made[1][1])


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_have_the_same_weights(name: str) -> None:
    wanted = shape(name)
    tensors = tensors_of(random_model(wanted.model), "bf16")
    memory = DeviceMemory(plan(wanted.model, "bf16", SMALL, warps=2), tensors, 0, "cpu")
    model, plain = TapeModel([memory]), plain_model(wanted.model, tensors, "bf16")
    for layer, right in zip(model.layers(), plain.layers, strict=True):
        read, expected = layer.state_dict(), right.state_dict()
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[key], expected[key]) for key in expected)
    head = plain.tok_embeddings.weight.view(wanted.model.head_shape) if plain.lm_head.weight is None else None
    assert torch.equal(model.head(), plain.lm_head.weight if head is None else head)


@needs_emulator
@pytest.mark.job
@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3"])
def test_a_folder_end_to_end(
    kind: str, tmp_path: Path, cuda_builds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written and judged by Transformers; prompts through PyTorch on the tapes, tokens by the kernels."""
    values = {"vocab_size": 136, "max_position_embeddings": 48, "tie_word_embeddings": True, "head_dim": 16}
    folder = write_folder(Case(kind, values, torch.bfloat16), tmp_path / "hf")
    emulated_engine(monkeypatch, cuda_builds)
    ids = [(7 * i + 3) % 136 for i in range(20)]
    judge = reference(folder)
    with Engine.from_pretrained(folder, device="cuda") as engine:
        assert (engine.dtype, engine.config.num_lanes, passes_of(engine).geometry.devices) == ("bf16", 2, 1)
        exact = logits_of(judge, ids)
        assert relative_error(engine.logits(ids), exact) < 0.1  # 16 bits throughout
        for prompt in (ids[:4], ids):  # read by the kernel, by PyTorch
            made = engine.generate(prompt, max_new_tokens=6, ignore_eos=True)
            spread = logits_of(judge, prompt + made)[len(prompt) - 1 : -1]
            behind = spread.max(1) - spread[np.arange(6), made]
            assert (behind < 0.1 * np.ptp(spread)).all(), "another token only where two are nearly as likely"


def test_lanes_are_shared_evenly_by_gpus() -> None:
    def lanes(heads: int, kv_heads: int, rows: int, vocabulary: int, gpus: int = 1) -> int:
        names = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        return lanes_for_gpus(dict(zip(names, (heads, kv_heads, rows, vocabulary), strict=True)), gpus)

    assert lanes(32, 8, 14336, 128256) == 8  # Llama 3 8B
    assert lanes(9, 3, 1536, 49152) == 3  # SmolLM2 135M
    assert lanes(14, 2, 4864, 151936) == 2  # Qwen 2 0.5B
    assert lanes(32, 8, 14336, 32001) == 1
    assert lanes(32, 8, 14336, 128256, gpus=8) == 8
    assert lanes(9, 3, 1536, 49152, gpus=2) == 2  # which the config then refuses by name


def test_a_vocabulary_that_lanes_cannot_share_is_refused() -> None:
    config = config_of_llama({**SIZES, "vocab_size": 131}, 2)
    with pytest.raises(
        ValueError, match=r"lm_head_type = 'replicate'.*lanes that divide its vocabulary of 131"
    ):
        plan(config, "bf16", SMALL, warps=2)
