"""Run tests of bit equality on the best instruction set below AMX, whose blocks round differently."""

import pytest

from tests.laneformer.engine.assets import best_below_amx


# test_matrix_unit.py tests AMX itself; tests that name an instruction set get it.
@pytest.fixture(autouse=True)
def exact_blocks(monkeypatch):
    if isa := best_below_amx():
        monkeypatch.setenv("LANEFORMER_ISA", isa)
