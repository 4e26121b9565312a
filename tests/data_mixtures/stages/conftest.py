"""Published data whose files have several blocks, for tests of damage."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from data_mixtures import shards
from data_mixtures.stages import sorted_runs
from tests.data_mixtures.stages.shuffle_assets import plan_of, prepared, texts_of
from tests.shared import Shared


@pytest.fixture(scope="session")
def two_sources(shared: Shared) -> Path:
    return shared("two_sources", make_two_sources) / "data"


def make_two_sources(folder: Path) -> None:
    texts = {"notes": texts_of(130), "sums": texts_of(90, seed=1)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK_BYTES", 128)
        patch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 100)
        prepared(folder / "data", plan_of(("notes", "sums"), windows_per_shard=20), texts)


@pytest.fixture
def data(two_sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of two sources of several shards, with blocks of 128 bytes: three a shard of 322 bytes."""
    monkeypatch.setattr(shards, "BLOCK_BYTES", 128)
    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 100)
    # links stay links among the copies: published shards are those of the stage shuffle
    subprocess.run(["cp", "-a", two_sources, tmp_path / "data"], check=True)
    return tmp_path / "data"
