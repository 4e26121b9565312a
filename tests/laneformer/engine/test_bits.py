"""Tests that no bit depends on threads or blocks of columns, for a table of models and arithmetics."""

from __future__ import annotations

import numpy as np
import pytest

from tests.laneformer.engine.assets import (
    ISAS_BELOW_AMX,
    assert_equal_widths,
    engine_of,
    random_ids,
    random_model,
    small_config,
    small_model,
    usable_isas,
)

EIGHT_LANES = {
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_lanes": 8,
    "vocab_size": 104,
}
MANY_TILES = {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 640}
MANY_SHARES = {"vocab_size": 16384}  # of the head: which thread takes which differs from run to run
# the model, the engine's options, and the type of the model's weights
KINDS = {
    "bf16": ({}, {}, "bf16"),
    "fp16": ({}, {}, "fp16"),
    "fp32": ({}, {}, "fp32"),
    "rounded": ({}, {"math": "bf16"}, "bf16"),
    "int8": ({"hidden_size": 72, "num_attention_heads": 4}, {"dtype": "int8"}, "bf16"),
    "int8_rounded": ({}, {"dtype": "int8", "math": "int8"}, "bf16"),
    "int4": ({"hidden_size": 72, "num_attention_heads": 4}, {"dtype": "int4"}, "bf16"),
    "kv_int8": ({}, {"kv_dtype": "int8"}, "bf16"),
    "eight_lanes": (EIGHT_LANES, {}, "bf16"),
    "many_tiles": (MANY_TILES, {}, "bf16"),
    "replicate_head": (
        {"lm_head_type": "replicate", "use_early_comm": False, **MANY_SHARES},
        {},
        "bf16",
    ),
}
BEST_ISA_ONLY = tuple(KINDS)[8:]
LENGTHS = (
    1,
    2,
    3,
    4,
    5,
    7,
    12,
    13,
    14,
    27,
    31,
    32,
    33,
)  # of blocks of columns, alone and as a rest


def isas_of(kind) -> tuple[str, ...]:
    integer = KINDS[kind][1].get("dtype") == "int4" or KINDS[kind][1].get("math") == "int8"
    isas = usable_isas(ISAS_BELOW_AMX if integer else ("avx512_bf16", "avx512", "avx2", "portable"))
    return isas[:1] if kind in BEST_ISA_ONLY else isas


# test_goldens.py compares requests alone and in company; test_products.py covers single products.
@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_blocks_change_no_bit(kind):
    overrides, options, dtype = KINDS[kind]
    model = small_model(**overrides, seed=2, dtype=dtype)
    ids = random_ids(model.config, 50)
    by_isa = {}
    for isa in isas_of(kind):
        with engine_of(model, threads=1, isa=isa, **options) as one:
            assert (one.isa, one.threads) == (isa, 1)
            by_isa[isa] = logits = one.logits(ids)
            for length in LENGTHS:
                np.testing.assert_array_equal(
                    one.logits(ids[:length]), logits[:length], str(length)
                )
        for threads in (2, 5, 9):
            with engine_of(model, threads=threads, isa=isa, **options) as engine:
                assert engine.threads == threads
                for _ in range(2):
                    np.testing.assert_array_equal(engine.logits(ids), logits, f"{threads} threads")
    if kind != "rounded":  # bf16 products sum in an order of their own
        assert_equal_widths(by_isa)


def test_the_prefetch_distance_is_tuned_and_changes_no_bit(monkeypatch):
    config = small_config(
        hidden_size=512, intermediate_size=4096, num_hidden_layers=2, swa_layers=()
    )
    model = random_model(config, dtype="bf16")
    ids, logits = random_ids(config, 20), {}
    # tuned by the engine, none, and a megabyte ahead
    for fixed in ("", "0", "1000000"):
        monkeypatch.setenv("LANEFORMER_PREFETCH", fixed)
        with engine_of(model, threads=3) as engine:
            chosen = engine._open().prefetch_bytes
            logits[fixed] = engine.logits(ids)
        assert chosen == int(fixed) if fixed else chosen >= 0
    for fixed in ("0", "1000000"):
        np.testing.assert_array_equal(logits[fixed], logits[""])
