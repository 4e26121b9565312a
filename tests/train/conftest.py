"""The run as it should be, made once for all tests that compare with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.supervised import INTERVAL, STEPS, undisturbed


@pytest.fixture(scope="session")
def reference(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of STEPS undisturbed steps on two ranks."""
    return undisturbed(tmp_path_factory.mktemp("reference"), prepared_data / "phase1.lock.json", STEPS, INTERVAL)
