"""A model folder that many tests read and none changes."""

from __future__ import annotations

import pytest

from tests.evals.core.core_assets import write_laneformer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Write a Laneformer with random weights and a context of 512."""
    path = tmp_path_factory.mktemp("models") / "hf"
    write_laneformer(path, context=512)
    return path
