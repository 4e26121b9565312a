"""Tests of the engine's arithmetic against model.py in float64, with every switch."""

import itertools

import numpy as np
import pytest
import torch

from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    check_logits,
    engine_of,
    random_ids,
    random_model,
    resident_bytes,
    small_config,
    small_model,
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
    "delay_3": {"broadcast_delay": 3},
    "delay_beyond_depth": {"broadcast_delay": 9},
    "no_early_comm": {"use_early_comm": False},
    "no_attention_comm": {"use_attention_comm": False},
    "no_comm": {"use_mlp_comm": False, "use_attention_comm": False},
    "rebroadcast_early": {"rebroadcast_early": True, "broadcast_delay": 1},
    "one_early_sum_of_three": {"broadcast_delay": 3, "early_layers": 1},
    "late_upper_layers_flushed": {
        "first_late_layer": 3,
        "flush": True,
        "lm_head_type": "replicate",
    },
    "flush_scale_per_lane": {"flush": True, "lm_head_type": "lane", "replicated_rmsn_scale": False},
    "replicate_head": {"lm_head_type": "replicate"},
    "sum_before_norm_scale_per_lane": {
        "lm_head_type": "replicate",
        "pre_norm_lane_agg": True,
        "replicated_rmsn_scale": False,
    },
    "lane_head_scale_per_lane": {"lm_head_type": "lane", "replicated_rmsn_scale": False},
    "window_of_one": {"sliding_window": 1},
    "rope_scaling": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0},
    "window_theta": {"rope_theta": 4000.0, "window_rope_theta": 250.0},
    "yarn_on_full_layers": {
        "rope_scaling": YARN | {"layers": "full"},
        "broadcast_delay": 1,
        "flush": True,
    },
    "full_layers_without_rope": {"nope_layers": (2, 4), "window_rope_theta": 250.0},
    "one_lane": {"num_lanes": 1},
    "wide_heads": {
        "hidden_size": 160,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_lanes": 2,
    },
    "odd_intermediate": {"intermediate_size": 4 * 23},
}


@pytest.mark.parametrize("switches", SWITCHES)
def test_every_switch_matches_the_model(switches):
    model = small_model(max_position_embeddings=288, **SWITCHES[switches], seed=1)
    check_logits(model, random_ids(model.config, 270), threads=2)  # three blocks, 38 windows


def test_random_configs():
    # twelve mixtures of the switches, each with another shape, dtype and thread count
    rng = np.random.default_rng(10)
    names = [name for name in SWITCHES if name not in ("one_lane", "wide_heads")]
    for trial, dtype in zip(range(12), itertools.cycle(TORCH_DTYPES)):
        first, second = rng.choice(names, 2, replace=False)
        values = {
            **SWITCHES[first],
            **SWITCHES[second],
            "num_hidden_layers": int(rng.integers(5, 9)),
        }
        if values.get("pre_norm_lane_agg"):
            values["lm_head_type"] = "replicate"
        model = small_model(**values, seed=trial, dtype=dtype)
        ids = random_ids(model.config, int(rng.integers(1, 90)), seed=trial)
        check_logits(model, ids, threads=int(rng.integers(1, 4)))


@pytest.mark.parametrize("isa", ISAS)
def test_gates_far_below_zero_close(isa):
    # one layer whose MLP is silu(gate) alone; e^-gate overflows a float below -88.7
    shape = {"num_hidden_layers": 1, "num_lanes": 1, "intermediate_size": 48, "swa_layers": ()}
    model = small_model(**shape, norm_eps=1e-12, seed=10)
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


def test_logits_are_handed_over_and_not_kept():
    # one buffer: no copy while it is read, and none that remains after the caller drops it
    config = small_config(vocab_size=40_000, max_position_embeddings=1000)
    size = 800 * config.vocab_size * 4

    with engine_of(random_model(config)) as engine:
        ids = random_ids(config, 800)
        engine.logits(ids[:40])
        before = resident_bytes()
        logits = engine.logits(ids)
        assert resident_bytes() - before < 1.5 * size
        del logits
        assert resident_bytes() - before < 0.5 * size
