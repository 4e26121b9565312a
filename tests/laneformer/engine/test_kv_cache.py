"""Tests of cached keys and values in 16 and 8 bits, and of attention in blocks and chunks."""

import itertools

import numpy as np
import pytest
import torch

import laneformer.model
from laneformer.engine.decoder import KV_BYTES
from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    assert_equal_widths,
    check_logits,
    engine_of,
    random_ids,
    small_model,
    torch_logits,
    usable_isas,
)

# Contexts exceed two chunks of 256 positions, so chunks are merged, cut by windows, and
# distributed.
LENGTH = 600
LONG = {
    "max_position_embeddings": 640,
    "num_hidden_layers": 2,
    "broadcast_delay": 1,
    "swa_layers": (0,),
}
SHAPES = {
    "window of a chunk and more": {"sliding_window": 300},
    "window within a chunk": {"sliding_window": 40},
    "one head each": {"num_key_value_heads": 8, "num_lanes": 2, "swa_layers": ()},
    "eight heads share one": {"num_key_value_heads": 1, "num_lanes": 1, "sliding_window": 257},
    "three heads share one": {"num_attention_heads": 6, "num_key_value_heads": 2, "num_lanes": 2},
    "two dimensions": {"hidden_size": 16, "sliding_window": 300},
    "eighty dimensions": {
        "hidden_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_lanes": 2,
    },
}


def long_model(dtype="bf16", **overrides):
    return small_model(**{**LONG, **overrides}, seed=3, dtype=dtype)


KV_OF_SHAPES = [
    *zip(SHAPES, itertools.cycle(KV_BYTES)),
    *(("window of a chunk and more", kv) for kv in [*KV_BYTES][1:]),
]


@pytest.mark.parametrize(("shape", "kv_dtype"), KV_OF_SHAPES)
def test_blocks_and_chunks_give_the_bits_of_single_tokens(shape, kv_dtype):
    # one position per pass, passes of 128, and 16 threads on the lanes
    model = long_model(**SHAPES[shape])
    with engine_of(model, threads=2, kv_dtype=kv_dtype) as engine:
        generated = engine.generate_detailed(
            random_ids(model.config, 2), max_new_tokens=LENGTH - 2, logprobs=0
        )
        ids = [*random_ids(model.config, 2), *generated.ids]
        scored = engine.logprobs(ids, start=2, reuse_prefix=False)
    np.testing.assert_array_equal(scored, np.float32([token.logprob for token in generated.tokens]))
    with engine_of(model, threads=16, kv_dtype=kv_dtype) as engine:
        np.testing.assert_array_equal(engine.logprobs(ids, start=2), scored)
        # from a cached prefix on: few columns, so that chunks of positions are shared out
        assert engine.generate(ids[:-4], max_new_tokens=4) == ids[-4:]


@pytest.mark.parametrize("shape", SHAPES)
def test_long_contexts_are_right(shape):
    model = long_model("fp32", **SHAPES[shape])
    ids = random_ids(model.config, LENGTH)
    assert_equal_widths(
        {isa: check_logits(model, ids, threads=2, isa=isa) for isa in usable_isas()}
    )


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp16", "int8"])
def test_keys_and_values_are_rounded_and_nothing_else(kv_dtype, monkeypatch):
    # float32 errors move a few values across a rounding edge of the float64 model's
    model = long_model(sliding_window=300)
    ids = random_ids(model.config, LENGTH)
    exact = torch_logits(model, ids)
    attend = torch.nn.functional.scaled_dot_product_attention

    def narrow(x):
        if kv_dtype != "int8":
            return x.to(TORCH_DTYPES[kv_dtype]).to(x.dtype)
        scale = x.abs().amax(-1, keepdim=True) / 127
        return (x / scale).round() * scale

    def attend_rounded(query, key, value, **options):
        return attend(query, narrow(key), narrow(value), **options)

    monkeypatch.setattr(laneformer.model.F, "scaled_dot_product_attention", attend_rounded)
    expected, by_isa = torch_logits(model, ids), {}
    rounding = np.sqrt(np.mean((expected - exact) ** 2))
    for isa in usable_isas():
        with engine_of(model, threads=2, isa=isa, kv_dtype=kv_dtype) as engine:
            by_isa[isa] = logits = engine.logits(ids)
        assert np.sqrt(np.mean((logits - expected) ** 2)) < rounding / 10
        assert np.sqrt(np.mean((logits - exact) ** 2)) > rounding / 2
    assert_equal_widths(by_isa)


def test_auto_is_16_bits_where_weights_are():
    for dtype, expected in (("fp32", "fp32"), ("bf16", "fp16"), ("fp16", "fp16")):
        with engine_of(small_model(dtype=dtype), kv_dtype="auto") as engine:
            assert engine.kv_dtype == expected


def test_values_beyond_fp16_end_the_request():
    model = small_model(dtype="bf16")
    with torch.no_grad():
        model.get_parameter("layers.3.attention.wv.weight").mul_(1e6)
    ids = random_ids(model.config, 20)
    with engine_of(model, kv_dtype="fp16") as engine:
        # the second request must not reuse what the first has left
        for _ in range(2):
            with pytest.raises(
                OverflowError, match="beyond fp16's 65,504; use kv_dtype = 'bf16' or 'fp32'"
            ):
                engine.generate(ids, max_new_tokens=4)
        with pytest.raises(OverflowError, match="beyond fp16"):
            list(engine.stream(ids, max_new_tokens=4))
    # both reach further
    for kv_dtype in ("bf16", "int8"):
        with engine_of(model, kv_dtype=kv_dtype) as engine:
            assert len(engine.generate(ids, max_new_tokens=4)) == 4
