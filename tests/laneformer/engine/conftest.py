"""What holds bit for bit is tested on the best instruction set below the matrix unit,
whose blocks round otherwise.

test_matrix_unit.py has what holds on that one; tests that name an instruction set get it.
"""

import pytest

from tests.laneformer.engine.assets import best_below_amx


@pytest.fixture(autouse=True)
def exact_blocks(monkeypatch):
    if isa := best_below_amx():
        monkeypatch.setenv("LANEFORMER_ISA", isa)
