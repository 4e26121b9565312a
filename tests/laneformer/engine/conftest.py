"""Run tests of bit equality on the best instruction set below AMX, whose blocks round differently.

test_matrix_unit.py tests AMX itself; tests that name an instruction set get it.
"""

import pytest

from tests.laneformer.engine.assets import best_below_amx


@pytest.fixture(autouse=True)
def exact_blocks(monkeypatch):
    if isa := best_below_amx():
        monkeypatch.setenv("LANEFORMER_ISA", isa)
