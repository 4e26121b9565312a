"""Small models for the engine's tests, their float64 logits, and exported model folders."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models

from laneformer import Laneformer, LaneformerConfig
from laneformer.config import hf_name
from laneformer.engine import Engine, GeneratedToken, Update
from laneformer.engine.cpu.decoder import CpuDecoder
from laneformer.tensors import Tensor

EACH_COLUMN = 0.02  # of the cost of a pass
ISAS_BELOW_AMX = (
    "avx512_bf16",
    "avx512_vnni",
    "avx512",
    "avx2_vnni",
    "avx2",
    "portable",
)  # all below the matrix unit
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def small_config(**overrides) -> LaneformerConfig:
    # no size is a multiple of the engine's tiles, and the window is shorter than prompts
    values = {
        "hidden_size": 48, "intermediate_size": 88, "num_hidden_layers": 5, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_lanes": 4, "broadcast_delay": 2, "sliding_window": 7, "swa_layers": (0, 1, 3),
        "max_position_embeddings": 96, "vocab_size": 100,
    }  # fmt: skip
    return LaneformerConfig(**{**values, **overrides})


def random_model(config, seed=0, dtype: str = "fp32") -> Laneformer:
    """Return a model of random weights rounded to `dtype`."""
    # unit gain, so that every module matters to the logits
    generator = torch.Generator().manual_seed(seed)
    model = Laneformer(config).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            embeds = name.startswith("tok_embeddings")
            p.copy_(
                1 + 0.2 * noise
                if name.endswith("norm.weight")
                else noise / math.sqrt(1 if embeds else p.shape[-1])
            )
    return model.to(TORCH_DTYPES[dtype])


def small_model(seed=0, dtype="fp32", **overrides) -> Laneformer:
    return random_model(small_config(**overrides), seed, dtype)


def tensors_of(model) -> dict[str, Tensor]:
    names = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()} | {
        torch.int32: "int32"
    }
    return {
        # NumPy has no bf16, so 16-bit numbers travel as their bits
        name: Tensor(names[p.dtype], (p.view(torch.uint16) if p.itemsize == 2 else p).numpy())
        for name, p in model.state_dict().items()
    }


def engine_of(model, config: LaneformerConfig | None = None, **options) -> Engine:
    """Open an engine, by default with fp32 keys and values."""
    # most tests compare with float64 to the last few bits
    return with_fixed_cost(
        Engine(config or model.config, tensors_of(model), **{"kv_dtype": "fp32", **options})
    )


def core(engine) -> CpuDecoder:
    decoder = engine._open()
    assert isinstance(decoder, CpuDecoder)
    return decoder


def with_fixed_cost(engine) -> Engine:
    """Fix the cost that the engine assumes for each column of a pass."""
    # a measured cost varies between runs, and with it the drafts; a small one allows many drafts
    core(engine).fix_cost(EACH_COLUMN)
    return engine


def collect(batch, *tickets: int) -> dict[int, list[Update]]:
    """Return the updates of all requests until the requests of `tickets` have ended."""
    updates: dict[int, list[Update]] = {ticket: [] for ticket in tickets}
    while any(
        not updates[ticket] or updates[ticket][-1].finish_reason is None for ticket in tickets
    ):
        for update in batch.updates(10.0):
            updates.setdefault(update.ticket, []).append(update)
    return updates


def tokens_of(updates: list[Update]) -> list[GeneratedToken]:
    return [token for update in updates for token in update.tokens]


def generate_together(engine, prompts: Sequence[Sequence[int]], **options) -> list[list[int]]:
    """Generate as `Engine.generate` does, for prompts that decode side by side."""
    with engine.batch() as batch:
        tickets = [batch.join(prompt, **options) for prompt in prompts]
        updates = collect(batch, *tickets)
    return [[token.id for token in tokens_of(updates[ticket])] for ticket in tickets]


def fix_costs(monkeypatch):
    """Fix the cost of columns in all CPU engines that are opened from now on."""
    init = CpuDecoder.__init__

    def make(decoder, *arguments, **options):
        init(decoder, *arguments, **options)
        decoder.fix_cost(EACH_COLUMN)

    monkeypatch.setattr(CpuDecoder, "__init__", make)


def widen_model(model, dtype: torch.dtype) -> Laneformer:
    wide = Laneformer(model.config).to(dtype).eval()
    wide.load_state_dict(model.state_dict())
    return wide


@torch.no_grad()
def torch_logits(model, ids: list[int], dtype: torch.dtype = torch.float64) -> np.ndarray:
    return widen_model(model, dtype)(torch.tensor([ids]))[0].numpy()


def float32_error(model, ids: list[int], reference: np.ndarray) -> float:
    """Return the largest error over the logits that PyTorch makes in float32."""
    return float(np.abs(torch_logits(model, ids, torch.float32) - reference).max())


def assert_equal_widths(by_isa: dict[str, np.ndarray]):
    """Assert that instruction sets agree bit for bit, but for `portable`."""
    # vectors of any width sum in the same order; `portable` does not fuse multiply and add
    wide = [logits for isa, logits in by_isa.items() if isa != "portable"]
    for other in wide[1:]:
        np.testing.assert_array_equal(other, wide[0])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_logits(
    model, ids: list[int], config: LaneformerConfig | None = None, **options
) -> np.ndarray:
    """Return the engine's logits, compared with float64's."""
    # The weights are the same, so only float32 rounding differs. The engine sums in another order
    # than PyTorch, which changes an error's value but not its size. Planted errors are thousands of
    # times larger.
    reference = torch_logits(model, ids)
    with engine_of(model, config, **options) as engine:
        logits = engine.logits(ids)
    error, allowed = np.abs(logits - reference).max(), 4 * float32_error(model, ids, reference)
    assert error <= allowed, f"largest logit error {error:.3g}, allowed {allowed:.3g}"
    return logits


def random_ids(config, length, seed=0) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()


def write_folder(folder, model, **config_values) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "model_type": "laneformer",
        "architectures": ["LaneformerForCausalLM"],
        **model.config.to_dict(),
    }
    (folder / "config.json").write_text(json.dumps({**values, **config_values}))
    state = {hf_name(n): p.contiguous() for n, p in model.state_dict().items()}
    save_file(state, folder / "model.safetensors")
    return folder


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of three special tokens, all bytes, "a", "b" and the space."""
    # texts fall back to bytes for every other character
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", " "]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@functools.cache
def usable_isas(
    candidates: Sequence[str] = ("avx512_bf16", "avx512", "avx2", "portable"),
) -> tuple[str, ...]:
    # by default the best first, of those whose blocks of columns have the bits of single columns
    model = random_model(small_config(num_hidden_layers=1, swa_layers=()))
    usable = []
    for isa in candidates:
        try:
            engine_of(model, isa=isa).close()
        except ValueError:
            continue
        usable.append(isa)
    return tuple(usable)


def best_below_amx() -> str | None:
    """Return the best instruction set below AMX, or None if the engine uses no AMX anyway."""
    # LANEFORMER_ISA is the user's own choice
    return (
        usable_isas()[0] if usable_isas(("amx",)) and "LANEFORMER_ISA" not in os.environ else None
    )


# test_matrix_unit.py tests AMX itself; tests that name an instruction set get it.
@pytest.fixture(scope="module", autouse=True)
def exact_blocks():
    """Use the best instruction set below AMX in the modules that import this."""
    with pytest.MonkeyPatch.context() as patch:
        if isa := best_below_amx():
            patch.setenv("LANEFORMER_ISA", isa)
        yield
