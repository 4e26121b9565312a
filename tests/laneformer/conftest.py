"""What the tests of the CUDA kernels share: one folder of emulated builds, each of which costs seconds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cuda_builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for built kernels, the same in all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cuda_builds"
