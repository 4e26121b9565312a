"""Tests of the instruction set `amx`, whose blocks of four columns or more round differently."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.laneformer.engine.assets import (
    engine_of,
    float32_error,
    random_ids,
    small_model,
    torch_logits,
    usable_isas,
)
from tests.laneformer.engine.test_native import build
from tests.proofs import CORE_SOURCES

ROOT = Path(__file__).resolve().parents[3]
BELOW = os.environ.get("BELOW_AMX", "avx512_bf16")  # whose product few columns take
LONG = {"max_position_embeddings": 192}
needs_unit = pytest.mark.skipif(
    not usable_isas(("amx",)), reason="no matrix unit: see the last test"
)


def long_model(seed, dtype="bf16", **overrides):
    return small_model(**LONG, **overrides, seed=seed, dtype=dtype)


@needs_unit
def test_it_is_chosen_first_and_others_by_name(monkeypatch):
    monkeypatch.delenv("LANEFORMER_ISA", raising=False)
    model = small_model(dtype="bf16")
    with engine_of(model) as first, engine_of(model, isa=BELOW) as second:
        assert (first.isa, second.isa) == ("amx", BELOW)
    monkeypatch.setenv("LANEFORMER_ISA", "portable")
    with engine_of(model) as engine:
        assert engine.isa == "portable"


@needs_unit
@pytest.mark.parametrize(
    "overrides", [{}, {"lm_head_type": "replicate"}, {"intermediate_size": 4 * 23}]
)
def test_exact_prompts_are_as_near_to_float64_as_float32(overrides):
    model = long_model(1, **overrides)
    ids = random_ids(model.config, 150)  # a block of 128 columns and one of 22
    reference = torch_logits(model, ids)
    with engine_of(model, isa="amx") as engine, engine_of(model, isa=BELOW) as below:
        logits, others = engine.logits(ids), below.logits(ids)
    assert np.abs(logits - reference).max() <= 4 * float32_error(model, ids, reference)
    assert np.abs(logits - reference).max() <= 3 * np.abs(others - reference).max()
    assert np.abs(logits - others).max() > 0, "the same bits: the unit has not been used"


@needs_unit
@pytest.mark.parametrize("math", ["exact", "bf16"])
def test_few_columns_have_the_bits_of_the_level_below(math):
    # one token or two drafts make no block of four columns, so the unit has no part in them
    model = long_model(3)
    with (
        engine_of(model, isa="amx", math=math) as engine,
        engine_of(model, isa=BELOW, math=math) as below,
    ):
        for speculate in (0, 2):
            new, old = (
                e.generate_detailed([1, 2, 3], max_new_tokens=60, logprobs=2, speculate=speculate)
                for e in (engine, below)
            )
            assert new.tokens == old.tokens


@needs_unit
@pytest.mark.parametrize("dtype", ["fp16", "fp32", "int8"])
def test_other_weights_have_the_bits_of_the_level_below(dtype):
    # the unit multiplies bf16 weights alone
    model = long_model(4, dtype="fp32" if dtype == "int8" else dtype)
    ids = random_ids(model.config, 100)
    with (
        engine_of(model, dtype=dtype, isa="amx") as engine,
        engine_of(model, dtype=dtype, isa=BELOW) as below,
    ):
        np.testing.assert_array_equal(engine.logits(ids), below.logits(ids))


@needs_unit
@pytest.mark.parametrize("math", ["exact", "bf16"])
def test_threads_change_no_bit(math):
    # test_products.py: nor does a column's place in a block
    model = long_model(5)
    ids = random_ids(model.config, 180)
    with engine_of(model, isa="amx", math=math, threads=1) as engine:
        whole = engine.logprobs(ids)
    for threads in (2, 5):
        with engine_of(model, isa="amx", math=math, threads=threads) as engine:
            np.testing.assert_array_equal(engine.logprobs(ids), whole)


# Where the CPU has no matrix unit, this test runs the others on emulated tiles. Speed is not
# tested.
@pytest.mark.proof(*CORE_SOURCES)
@pytest.mark.timeout(2400)
@pytest.mark.skipif("BELOW_AMX" in os.environ, reason="this is the emulation")
def test_all_of_it_on_emulated_tiles():
    core = build(
        "", "tiles-module", LANEFORMER_EMULATED_TILES="ON", Python_EXECUTABLE=sys.executable
    ).parent
    (module,) = core.glob("_core*.so")
    runner = "tests.laneformer.engine.on_emulated_tiles"
    command = [sys.executable, "-m", runner, module, "-rs", "-m", "not proof"]
    environment = {**os.environ, "BELOW_AMX": "portable"}
    files = [__file__, str(Path(__file__).with_name("test_products.py"))]
    process = subprocess.run(
        [*command, *files], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-2000:]
    assert "skipped" not in process.stdout, process.stdout
