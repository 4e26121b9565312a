"""Tests that the readable forward pass in plain loops (csrc/scalar.cpp) computes the engine's results."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.engine.cpu import _core
from laneformer.engine.cpu.spec import core_spec
from laneformer.engine.folder import rope_tables
from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    small_model,
    tensors_of,
)

LLAMA = {
    "num_lanes": 1,
    "broadcast_delay": 0,
    "swa_layers": [],
    "lm_head_type": "replicate",
    "vocab_size": 101,
}
MODELS = {
    "delay_2": {},
    "no_early_sums": {"use_early_comm": False, "broadcast_delay": 1, "lm_head_type": "replicate"},
    "tensor_parallel": {"broadcast_delay": 0, "replicated_rmsn_scale": False},
    "late_upper_layers_flushed": {"broadcast_delay": 1, "first_late_layer": 3, "flush": True},
    "llama": {**LLAMA, "nope_layers": [2]},
    "tied_in_lanes": {**LLAMA, "num_lanes": 2, "tie_word_embeddings": True},
}


def scalar_logits(model, ids) -> np.ndarray:
    tensors = {
        name: np.ascontiguousarray(t.values, np.float32) for name, t in tensors_of(model).items()
    }
    tensors["cosine"], tensors["sine"] = rope_tables(model.config)
    spec = {**core_spec(model.config, {}), "kv_dtype": "fp32"}
    return _core.scalar_logits(spec, tensors, ids).reshape(len(ids), -1)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_computes_the_same(name):
    model = small_model(**MODELS[name], seed=1)
    ids = random_ids(model.config, 24)  # three windows
    with engine_of(model, threads=2) as engine:
        np.testing.assert_allclose(scalar_logits(model, ids), engine.logits(ids), rtol=0, atol=2e-5)
