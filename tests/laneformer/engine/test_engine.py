"""The engine's arithmetic against model.py in float64: every switch, instruction set, dtype
and number of threads.

Tolerance: both sides start from the same weights, so what differs is float32 rounding. PyTorch's own
float32 forward shows how much of that this model makes; the engine sums in another order, which changes the
error's value but not its size, so four times PyTorch's largest error is allowed. A planted error is
thousands of times larger.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    engine_of,
    float32_error,
    random_ids,
    random_model,
    small_config,
    torch_logits,
    usable_isas,
)

ISAS = usable_isas()
LLAMA3_ROPE = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
SWITCHES = {
    "published": {},
    "tensor_parallel": {"broadcast_delay": 0},
    "delay_1": {"broadcast_delay": 1},
    "delay_3": {"broadcast_delay": 3},
    "delay_last_layer": {"broadcast_delay": 4},
    "delay_beyond_depth": {"broadcast_delay": 9},
    "no_early_comm": {"use_early_comm": False},
    "no_early_comm_delay_0": {"use_early_comm": False, "broadcast_delay": 0},
    "no_attention_comm": {"use_attention_comm": False},
    "no_mlp_comm": {"use_mlp_comm": False, "use_early_comm": False},
    "no_comm": {"use_mlp_comm": False, "use_attention_comm": False},
    "rebroadcast_early": {"rebroadcast_early": True, "broadcast_delay": 1},
    "flush": {"flush": True},
    "flush_beyond_half": {"flush": True, "broadcast_delay": 3, "use_early_comm": False},
    "one_early_sum_of_three": {"broadcast_delay": 3, "early_layers": 1},
    "late_upper_layers": {"first_late_layer": 3, "broadcast_delay": 1},
    "late_upper_layers_flushed": {"first_late_layer": 3, "flush": True, "lm_head_type": "replicate"},
    "flush_scale_per_lane": {"flush": True, "lm_head_type": "lane", "replicated_rmsn_scale": False},
    "scale_per_lane": {"replicated_rmsn_scale": False},
    "replicate_head": {"lm_head_type": "replicate"},
    "replicate_head_scale_per_lane": {"lm_head_type": "replicate", "replicated_rmsn_scale": False},
    "sum_before_norm": {"lm_head_type": "replicate", "pre_norm_lane_agg": True},
    "sum_before_norm_scale_per_lane": {
        "lm_head_type": "replicate", "pre_norm_lane_agg": True, "replicated_rmsn_scale": False,
    },
    "lane_head": {"lm_head_type": "lane"},
    "lane_head_scale_per_lane": {"lm_head_type": "lane", "replicated_rmsn_scale": False},
    "no_window": {"swa_layers": ()},
    "window_of_one": {"sliding_window": 1},
    "rope_scaling": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0},
    "window_theta": {"rope_theta": 4000.0, "window_rope_theta": 250.0},
    "yarn": {"rope_scaling": YARN},
    "yarn_on_full_layers": {"rope_scaling": YARN | {"layers": "full"}, "broadcast_delay": 1, "flush": True},
    "full_layers_without_rope": {"nope_layers": (2, 4), "window_rope_theta": 250.0},
    "one_lane": {"num_lanes": 1},
    "two_lanes": {"num_lanes": 2},
    "wide_heads": {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 2, "num_lanes": 2},
    "odd_intermediate": {"intermediate_size": 4 * 23},
}  # fmt: skip


def assert_close(engine_logits: np.ndarray, reference: np.ndarray, allowed: float) -> None:
    error = np.abs(engine_logits - reference).max()
    assert error <= allowed, f"largest logit error {error:.3g}, allowed {allowed:.3g}"


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_every_switch_matches_the_model(switches):
    model = random_model(small_config(max_position_embeddings=288, **switches), seed=1)
    ids = random_ids(model.config, 270)  # three blocks, 38 windows; the ring has wrapped
    reference = torch_logits(model, ids)
    with engine_of(model, threads=2) as engine:
        assert_close(engine.logits(ids), reference, 4 * float32_error(model, ids, reference))


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_and_dtype_on_every_number_of_threads(isa, dtype):
    model = random_model(small_config(), seed=2, dtype=dtype)
    ids = random_ids(model.config, 50)
    reference = torch_logits(model, ids)
    logits = []
    for threads in (1, 2, 3, 4):
        with engine_of(model, threads=threads, isa=isa) as engine:
            assert (engine.isa, engine.threads, engine.dtype) == (isa, threads, dtype)
            logits.append(engine.logits(ids))
    assert_close(logits[0], reference, 4 * float32_error(model, ids, reference))
    for other in logits[1:]:
        np.testing.assert_array_equal(other, logits[0])


@pytest.mark.parametrize("head", ["replicate", "lane"])
def test_threads_change_no_bit_of_the_shared_heads(head):
    model = random_model(small_config(lm_head_type=head, use_early_comm=False), seed=3)
    ids = random_ids(model.config, 40)
    first, *rest = (engine_of(model, threads=threads).logits(ids) for threads in (1, 2, 3))
    for other in rest:
        np.testing.assert_array_equal(other, first)


def test_wide_vectors_give_the_same_bits():
    if not {"avx2", "avx512"} <= set(ISAS):
        pytest.skip("this CPU lacks one of AVX2 and AVX-512")
    model = random_model(small_config(), seed=4, dtype="bf16")
    ids = random_ids(model.config, 50)
    avx2, avx512 = (engine_of(model, isa=isa).logits(ids) for isa in ("avx2", "avx512"))
    np.testing.assert_array_equal(avx2, avx512)


def test_repeated_and_interleaved_requests_give_the_same_bits():
    model = random_model(small_config(), seed=5)
    ids, other = random_ids(model.config, 60), random_ids(model.config, 33, seed=9)
    with engine_of(model, threads=3) as engine:
        first = engine.logits(ids)
        for _ in range(20):
            engine.generate(other, max_new_tokens=5)
            np.testing.assert_array_equal(engine.logits(ids), first)


def test_blocks_of_the_prompt_change_no_bit():
    """The same position's logits, whether its block of positions ends there or goes on."""
    model = random_model(small_config(max_position_embeddings=300), seed=6)
    ids = random_ids(model.config, 270)
    with engine_of(model) as engine:
        whole = engine.logits(ids)
        for length in (1, 2, 31, 32, 33, 127, 128, 129, 255, 256, 257):
            np.testing.assert_array_equal(engine.logits(ids[:length]), whole[:length])


@pytest.mark.parametrize(("dtype", "math"), [*((dtype, "exact") for dtype in TORCH_DTYPES), ("bf16", "bf16")])
@pytest.mark.parametrize("isa", ISAS)
def test_any_number_of_columns_gives_the_same_bits(isa, dtype, math):
    model = random_model(small_config(), seed=12, dtype=dtype)
    ids = random_ids(model.config, 60)
    with engine_of(model, isa=isa, math=math) as engine:
        whole = engine.logits(ids)
        for length in range(1, 28):  # every block of columns, alone and as a rest
            np.testing.assert_array_equal(
                engine.logits(ids[:length]), whole[:length], err_msg=f"{length} columns"
            )


def test_the_prefetch_distance_is_tuned_and_changes_no_bit(monkeypatch):
    model = random_model(
        small_config(hidden_size=512, intermediate_size=8192, num_hidden_layers=4), dtype="bf16"
    )
    ids = random_ids(model.config, 20)
    logits = {}
    for fixed in ("", "0", "1000000"):
        monkeypatch.setenv("LANEFORMER_PREFETCH", fixed)
        with engine_of(model, threads=3) as engine:
            chosen = engine._open().prefetch_bytes
            logits[fixed] = engine.logits(ids)
        assert chosen == int(fixed) if fixed else chosen >= 0
    np.testing.assert_array_equal(logits["0"], logits[""])
    np.testing.assert_array_equal(logits["1000000"], logits[""])


@pytest.mark.parametrize("lm_head_type", ["vocab_parallel", "replicate", "lane"])
def test_logprobs(lm_head_type):
    model = random_model(small_config(lm_head_type=lm_head_type), seed=7)
    ids = random_ids(model.config, 75)
    reference = torch_logits(model, ids)
    expected = torch.log_softmax(torch.from_numpy(reference), -1)[torch.arange(74), ids[1:]].numpy()
    with engine_of(model, threads=3) as engine:
        logprobs = engine.logprobs(ids)
        assert engine.logprobs(ids[:1]).shape == (0,)
    assert logprobs.shape == (74,)
    assert logprobs.dtype == np.float32
    # log_softmax adds up to twice the logits' error; exp and the sum are good to about 1e-6 of the value
    allowed = 8 * float32_error(model, ids, reference) + 1e-6 * np.abs(expected).max()
    assert_close(logprobs, expected, allowed)


PLANTED = {
    "delay one more": {"broadcast_delay": 3},
    "delay one less": {"broadcast_delay": 1},
    "a flush that is not wanted": {"flush": True},
    "first late layer one more": {"first_late_layer": 3},
    "remote attention partials dropped": {"use_attention_comm": False},
    "early partials added twice": {"rebroadcast_early": True},
    "window one longer": {"sliding_window": 8},
    "one layer's window dropped": {"swa_layers": (0, 1)},
}


@pytest.mark.parametrize("wrong", PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_error_is_seen(wrong):
    model = random_model(small_config(), seed=8)
    ids = random_ids(model.config, 40)
    reference = torch_logits(model, ids)
    with (
        engine_of(model, small_config(**wrong)) as engine,
        pytest.raises(AssertionError, match="largest logit error"),
    ):
        assert_close(engine.logits(ids), reference, 4 * float32_error(model, ids, reference))


def test_a_single_dropped_partial_is_seen():
    """One lane's output of one layer removed: what a lost message would do."""
    model, broken = (random_model(small_config(), seed=9) for _ in range(2))
    with torch.no_grad():
        broken.layers[1].feed_forward.w2.weight[2].zero_()
    ids = random_ids(model.config, 40)
    reference = torch_logits(model, ids)
    with engine_of(broken) as engine, pytest.raises(AssertionError, match="largest logit error"):
        assert_close(engine.logits(ids), reference, 4 * float32_error(model, ids, reference))


def test_random_configs():
    """Twelve mixtures of the switches, each with another shape, dtype and thread count."""
    rng = np.random.default_rng(10)
    names = [name for name in SWITCHES if name not in ("one_lane", "two_lanes", "wide_heads")]
    for trial, dtype in zip(range(12), itertools.cycle(TORCH_DTYPES)):
        first, second = rng.choice(names, 2, replace=False)
        values = {**SWITCHES[first], **SWITCHES[second], "num_hidden_layers": int(rng.integers(5, 9))}
        if values.get("pre_norm_lane_agg"):
            values["lm_head_type"] = "replicate"
        model = random_model(small_config(**values), seed=trial, dtype=dtype)
        ids = random_ids(model.config, int(rng.integers(1, 90)), seed=trial)
        reference = torch_logits(model, ids)
        with engine_of(model, threads=int(rng.integers(1, 4))) as engine:
            assert_close(engine.logits(ids), reference, 4 * float32_error(model, ids, reference))


@pytest.mark.parametrize("isa", ISAS)
def test_gates_far_below_zero_close(isa):
    """One layer whose MLP is silu(gate) alone; e^-gate does not fit a float below -88.7."""
    config = small_config(
        num_hidden_layers=1, num_lanes=1, intermediate_size=48, swa_layers=(), norm_eps=1e-12
    )
    model = random_model(config, seed=10)
    gates = -np.linspace(80, 300, 48, dtype=np.float32)
    gates[:8] = [-88.6, -88.7, -88.73, -89, -90, 0, 30, 300]
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.fill_("norm" in name or name.startswith("tok_embeddings"))
        mlp = model.layers[0].feed_forward
        mlp.w1.weight[..., 0] = torch.from_numpy(gates)
        mlp.w3.weight[..., 0] = 1
        mlp.w2.weight.copy_(torch.eye(48))
    with engine_of(model, isa=isa) as engine:
        out = engine._partials([0], [0])[0, 0, 1, 0]
    wide = gates.astype(np.float64)
    np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)), rtol=1e-6, atol=1e-35)


@pytest.mark.parametrize("isa", ISAS)
def test_saturated_gates_match_the_model(isa):
    model = random_model(small_config(), seed=11)
    with torch.no_grad():
        for layer in model.layers:
            layer.feed_forward.w1.weight.mul_(40)
    ids = random_ids(model.config, 40)
    reference = torch_logits(model, ids)
    with engine_of(model, isa=isa) as engine:
        assert_close(engine.logits(ids), reference, 4 * float32_error(model, ids, reference))


def test_bf16_math_rounds_activations_and_no_more():
    """An option, not the default: its error is that of bf16 inputs, 2^-9 relative each,
    and clearly not float32's.
    """
    model = random_model(small_config(), seed=11, dtype="bf16")
    ids = random_ids(model.config, 50)
    reference = torch_logits(model, ids)
    own = float32_error(model, ids, reference)
    native = np.abs(model(torch.tensor([ids]))[0].float().detach().numpy() - reference).max()
    for isa in ISAS:
        with engine_of(model, isa=isa, math="bf16") as engine:
            error = np.abs(engine.logits(ids) - reference).max()
        assert 10 * own < error, "activations were not rounded"
        assert error < native, "worse than PyTorch's bf16 forward, which rounds every result as well"


def test_logits_are_handed_over_and_not_kept():
    """One buffer: not a copy beside it while it is read, nor one that stays after the caller has dropped his."""
    config = small_config(vocab_size=40_000, max_position_embeddings=1000)
    size = 800 * config.vocab_size * 4

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    with engine_of(random_model(config)) as engine:
        ids = random_ids(config, 800)
        engine.logits(ids[:40])
        before = resident()
        logits = engine.logits(ids)
        assert resident() - before < 1.5 * size
        del logits
        assert resident() - before < 0.5 * size
