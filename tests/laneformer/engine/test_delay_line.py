"""Tests that the delay line between lanes delays each join as long as required; Ladder Residual."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laneformer import Laneformer
from laneformer.engine import Engine
from laneformer.engine.bench import run_timed
from laneformer.positions import rope_table
from tests.laneformer.engine.assets import (
    core,
    engine_of,
    random_ids,
    random_model,
    small_config,
    small_model,
)
from tools.roofline import token_s

LINK_S = 0.01
LAYERS = 5
# That the delay changes no token is test_goldens.py's business.
VARIANTS = {
    "tensor_parallel": {"broadcast_delay": 0},
    "ladder": {"broadcast_delay": 0},
    "delay_1": {"broadcast_delay": 1},
    "delay_2": {},
    "delay_2_no_early": {"use_early_comm": False},
    "replicated_head": {"lm_head_type": "replicate"},
    "delay_2_flushed": {"flush": True},
    "late_upper_layers": {"broadcast_delay": 1, "first_late_layer": 3, "flush": True},
}


def engine_with(variant, link_s=0.0) -> Engine:
    engine = engine_of(small_model(**VARIANTS[variant], seed=4), threads=2)
    if variant == "ladder":
        core(engine).set_ladder()
    core(engine).set_latency(link_s)
    return engine


def floor_s(variant, link_s=LINK_S) -> float:
    """Return the least seconds per token if computing takes no time."""
    config = small_config(**VARIANTS[variant])
    assert config.num_hidden_layers == LAYERS
    return token_s(config, (0.0, 0.0), link_s, modules_late=int(variant == "ladder"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_wait_that_a_join_needs_takes_its_time(variant):
    with engine_with(variant, link_s=LINK_S) as engine:
        assert min(run_timed(engine, [1, 2, 3], 3).whole.token_s) >= floor_s(variant)


@pytest.mark.rotate  # by the clock
@pytest.mark.parametrize("variant", sorted(VARIANTS.keys() - {"tensor_parallel"}))
def test_no_join_waits_that_need_not(variant):
    link_s = 0.1  # beside which even a busy machine is fast
    with engine_with(variant, link_s=link_s) as engine:
        least = min(run_timed(engine, [1, 2, 3], 4).whole.token_s)
    assert floor_s(variant, link_s) <= least < floor_s(variant, link_s) + 2 * link_s


def test_threads_of_one_lane_do_not_wait_for_the_link():
    model = small_model(num_lanes=1, broadcast_delay=0)
    with engine_of(model, threads=2) as engine:
        core(engine).set_latency(1.0)
        assert min(run_timed(engine, [1, 2, 3], 3).whole.token_s) < 1.0


def module_late_logits(model, ids) -> np.ndarray:
    """Return Ladder Residual's logits by definition, in float64."""
    # a module reads the sums of all modules but the one before it
    rows = torch.tensor([ids])
    stream = model.tok_embeddings(rows)[:, :, None].expand(-1, -1, model.config.num_lanes, -1)
    sums = []
    positions = torch.arange(len(ids))
    cos_sin, masks = rope_table(model.config, positions), model.masks(positions, positions)
    for layer, mask in zip(model.layers, masks, strict=True):
        partial = layer.attention(
            layer.attention_norm(stream + sum(sums[:-1])), cos_sin, mask, None
        )
        sums.append(partial.sum(2, keepdim=True))
        partial = layer.feed_forward(layer.ffn_norm(stream + sum(sums[:-1])))
        sums.append(partial.sum(2, keepdim=True))
    return model.lm_head(stream + sum(sums), model.norm)[0].numpy()


def test_ladder_reads_each_sum_one_module_late():
    config = small_config(broadcast_delay=0)
    model, ids = random_model(config, seed=4), random_ids(config, 40)
    reference = Laneformer(config).double().eval()
    reference.load_state_dict({name: p.double() for name, p in model.state_dict().items()})
    with torch.no_grad():
        expected = module_late_logits(reference, ids)
    with engine_of(model, threads=2) as plain, engine_with("ladder") as ladder:
        np.testing.assert_allclose(ladder.logits(ids), expected, rtol=0, atol=1e-4)
        # a thousand tolerances away, or the line above would show nothing
        assert np.abs(plain.logits(ids) - expected).max() > 0.1


def test_what_cannot_be_measured_is_refused():
    with engine_with("delay_2") as engine:
        with pytest.raises(
            ValueError,
            match=r"ladder: every join of the model must be PRESENT; set broadcast_delay",
        ):
            core(engine).set_ladder()
        for bad in (-1e-6, 2.0, float("nan")):
            with pytest.raises(ValueError, match="a link's latency is 0 to 1 s, not"):
                core(engine).set_latency(bad)
