"""Int8 weights: the packed integers and scales, the logits they lead to, and everything else
as for other types.

What the weights stand for is defined twice, here in numpy and in tools.check.int8 in PyTorch.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from laneformer import Laneformer
from laneformer.config import MATRICES
from laneformer.engine import Engine
from laneformer.engine.cpu.decoder import RandomTensors
from laneformer.engine.cpu.kept import FOLDER
from laneformer.engine.cpu.packed import PackedWeights
from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    engine_of,
    random_ids,
    random_model,
    small_config,
    tensors_of,
    usable_isas,
    write_folder,
)
from tools.check.int8 import check
from tools.check.reference import dequantised

CONFIG = small_config()
IDS = random_ids(CONFIG, 50)
LARGEST = 127


def int8_engine(model: Laneformer, **options: object) -> Engine:
    return engine_of(model, dtype="int8", **options)


def first_matrix(engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Integers (rows, D) and scales (rows,) of the first lane's wq, wk and wv, read from
    the tape by kernels.h.
    """
    config = engine.config
    rows = (config.hidden_size + 2 * config.head_dim * config.num_key_value_heads) // config.num_lanes
    pairs = -(-config.hidden_size // 2)
    tiles = -(-rows // 32)
    tape = engine._open().part(0)[: tiles * (64 * pairs + 128)].reshape(tiles, -1)
    lines = tape[:, : 64 * pairs].view(np.int8).reshape(tiles, pairs, 16, 2, 2)  # row in group, group, parity
    integers = lines.transpose(0, 3, 2, 1, 4).reshape(tiles * 32, 2 * pairs)
    scales = np.ascontiguousarray(tape[:, 64 * pairs :]).view(np.float32).reshape(-1)
    return integers[:rows, : config.hidden_size].astype(np.float64), scales[:rows].astype(np.float64)


def first_rows(model: Laneformer) -> np.ndarray:
    layer = [model.state_dict()[f"layers.0.attention.{part}.weight"][0] for part in ("wq", "wk", "wv")]
    return torch.cat(layer).double().numpy()


def matrices_of(model: Laneformer) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if "norm" not in name and "embeddings" not in name]


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_the_tape_holds_every_weight_to_half_a_step(dtype):
    model = random_model(CONFIG, dtype=dtype)
    weights = first_rows(model)
    with int8_engine(model, threads=1) as engine:
        integers, scales = first_matrix(engine)
    steps = np.abs(weights).max(1) / LARGEST
    np.testing.assert_allclose(scales, steps, rtol=2**-24)  # one rounding to float32
    assert (np.abs(integers).max(1) == LARGEST).all()
    # the quotient, at most 127, is rounded to float32 before it is rounded to an integer
    allowed = scales * (0.5 + LARGEST * 2**-24)
    assert (np.abs(weights - integers * scales[:, None]) <= allowed[:, None]).all()
    single = weights.astype(np.float32)
    np.testing.assert_array_equal(
        integers, np.rint(single / (np.abs(single).max(1) / np.float32(LARGEST))[:, None])
    )


def test_ties_go_to_even_and_zeros_stay_zeros():
    model = random_model(CONFIG)
    wq = model.state_dict()["layers.0.attention.wq.weight"]
    wq[0, 0], wq[0, 1], wq[0, 2] = 0.0, 1e-37, 0.0
    wq[0, 2, :6] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -127.0])
    with int8_engine(model, threads=1) as engine:
        integers, scales = first_matrix(engine)
        assert np.isfinite(engine.logits(IDS)).all()
    np.testing.assert_array_equal(scales[:3], [0, 0, 1])  # 1e-37 / 127 is no normal number any more
    np.testing.assert_array_equal(integers[:2], 0)
    np.testing.assert_array_equal(integers[2, :6], [127, 0, 2, 2, 0, -127])


def powers_of_two(model: Laneformer) -> Laneformer:
    """Every row in whole multiples of a power of two, 127 of them somewhere: int8 holds such a model exactly."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in matrices_of(model):
            integers = torch.randint(-LARGEST, LARGEST + 1, p.shape, generator=generator)
            integers[..., 3] = -LARGEST
            p.copy_(integers * 2.0 ** -torch.randint(7, 11, (*p.shape[:-1], 1), generator=generator))
    return model


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
@pytest.mark.parametrize("isa", usable_isas())
def test_a_model_that_int8_holds_gives_the_bits_of_fp32(isa, head):
    """Sums of integers, scaled at their end by a power of two, round as the sums of the scaled weights do."""
    model = powers_of_two(random_model(small_config(lm_head_type=head)))
    with engine_of(model, isa=isa) as single, int8_engine(model, isa=isa) as small:
        np.testing.assert_array_equal(small.logits(IDS), single.logits(IDS))


@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_logits_are_those_of_the_dequantised_model(dtype, head):
    model = random_model(small_config(lm_head_type=head), seed=1, dtype=dtype)
    report = check(model.config, model.state_dict(), IDS)
    assert report["passed"] == {"relative error": True, "refuses: one scale doubled": True}, report


def test_the_gate_refuses_weights_that_were_not_rounded(monkeypatch):
    """An engine that is better than int8 is not int8 either."""
    monkeypatch.setattr("tools.check.int8.dequantised", lambda weights: weights)
    model = random_model(CONFIG, seed=1)
    assert not check(CONFIG, model.state_dict(), IDS)["passed"]["relative error"]


@pytest.mark.parametrize("isa", usable_isas())
def test_threads_blocks_and_batches_change_no_bit(isa):
    model = random_model(CONFIG, seed=2, dtype="bf16")
    prompts = [IDS[:5], IDS[7:40], IDS[3:4]]
    with int8_engine(model, threads=1, isa=isa) as one:
        logits = one.logits(IDS)
        alone = [one.generate(prompt, max_new_tokens=12, temperature=1.0, seed=3) for prompt in prompts]
        for length in (1, 2, 31, 32, 33):
            np.testing.assert_array_equal(one.logits(IDS[:length]), logits[:length])
    for threads in (2, 3, 4, 5, 9):
        with int8_engine(model, threads=threads, isa=isa) as engine:
            np.testing.assert_array_equal(engine.logits(IDS), logits, err_msg=f"{threads} threads")
            assert engine.generate_batch(prompts, max_new_tokens=12, temperature=1.0, seed=[3] * 3) == alone


def test_wide_vectors_give_the_same_bits():
    if not {"avx2", "avx512"} <= set(usable_isas()):
        pytest.skip("this CPU lacks one of AVX2 and AVX-512")
    model = random_model(small_config(hidden_size=72, num_attention_heads=4), seed=3)
    avx2, avx512 = (int8_engine(model, isa=isa).logits(IDS) for isa in ("avx2", "avx512"))
    np.testing.assert_array_equal(avx2, avx512)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_no_numbers_are_refused(bad, dtype):
    model = random_model(CONFIG, dtype=dtype)
    model.state_dict()["layers.2.feed_forward.w3.weight"][1, 7, 0] = bad
    with pytest.raises(
        ValueError, match=r"layers\.2\.feed_forward\.w3\.weight holds values that are not finite"
    ):
        int8_engine(model)


def test_one_byte_a_weight_and_one_scale_a_row():
    model = random_model(CONFIG)
    with int8_engine(model, threads=1) as engine:
        c, lanes = CONFIG, CONFIG.num_lanes
        q, kv, ff = (
            c.hidden_size // lanes,
            c.head_dim * c.num_key_value_heads // lanes,
            c.intermediate_size // lanes,
        )
        shapes = [(q + 2 * kv, c.hidden_size), (c.hidden_size, q), (2 * -(-ff // 16) * 16, c.hidden_size)]
        shapes = [
            *c.num_hidden_layers * [*shapes, (c.hidden_size, ff)],
            (c.vocab_size // lanes, c.hidden_size),
        ]
        assert engine.weight_bytes == lanes * sum(-(-r // 32) * 32 * (2 * -(-k // 2) + 4) for r, k in shapes)
    assert len(shapes) == 1 + c.num_hidden_layers * (len(MATRICES) - 3)  # qkv and w1 with w3 share tiles


def test_the_embedding_keeps_its_type():
    for dtype, size in (("bf16", 2), ("fp16", 2), ("fp32", 4)):
        with int8_engine(random_model(CONFIG, dtype=dtype), threads=2) as engine:
            assert engine._open().part(2).nbytes == size * CONFIG.vocab_size * CONFIG.hidden_size


def test_a_second_start_maps_what_the_first_packed(tmp_path, monkeypatch):
    loads, load = [], PackedWeights.load
    monkeypatch.setattr(PackedWeights, "load", lambda *args: loads.append(load(*args)) or loads[-1])
    model = random_model(CONFIG, dtype="bf16")
    folder = write_folder(tmp_path, model)
    logits = []
    for dtype in ("int8", "auto", "int8"):
        with Engine.from_pretrained(folder, dtype=dtype, kv_dtype="fp32") as engine:
            logits.append(engine.logits(IDS))
    assert loads == [False, False, True]
    assert len(list((folder / FOLDER).glob("*.bin"))) == 2
    np.testing.assert_array_equal(logits[0], logits[2])
    np.testing.assert_array_equal(logits[0], int8_engine(model).logits(IDS))
    assert (logits[0] != logits[1]).any()
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"][0, 3, 5] = 100.0
    save_file(state, folder / "model.safetensors")
    with Engine.from_pretrained(folder, dtype="int8") as engine:
        assert (engine.logits(IDS) != logits[0]).any()
    assert loads[3:] == [False]


def test_random_weights_are_the_16_bit_ones_rounded():
    with Engine.random(CONFIG, "int8", seed=5) as drawn:
        assert drawn.dtype == "int8"
        with Engine(CONFIG, RandomTensors(CONFIG, "bf16", 5), dtype="int8") as rounded:
            np.testing.assert_array_equal(drawn.logits(IDS), rounded.logits(IDS))
        with Engine.random(CONFIG, "bf16", seed=5) as half:
            assert (drawn.logits(IDS) != half.logits(IDS)).any()


def test_rounded_activations_and_int8_inputs_are_refused():
    model = random_model(CONFIG, dtype="bf16")
    with pytest.raises(ValueError, match="math = 'bf16' needs bf16 weights, these are int8"):
        int8_engine(model, math="bf16")
    with pytest.raises(
        ValueError, match=r"dtype = 'int2' is unknown; choose from \('auto', .*'int8', 'int4', 'gguf'\)"
    ):
        engine_of(model, dtype="int2")
    with int8_engine(model) as engine, pytest.raises(ValueError, match="dtype = 'int8' is unknown"):
        engine._open().set_embedding(tensors_of(model)["tok_embeddings.weight"].values, "int8")


def test_both_definitions_agree():
    rows = random_model(CONFIG, seed=6)
    meant = dequantised(rows.state_dict())["layers.0.attention.wq.weight"][0].numpy()
    with int8_engine(rows, threads=1) as engine:
        integers, scales = first_matrix(engine)
    np.testing.assert_array_equal((integers * scales[:, None])[: len(meant)], meant)
