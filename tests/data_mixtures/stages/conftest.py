"""Published data whose files have several blocks, for tests of damage."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from data_mixtures import shards
from data_mixtures.stages import sorted_runs
from tests.data_mixtures.stages.shuffle_assets import TWO_SOURCES, TWO_TEXTS, prepare_texts


def make_two_sources(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK_BYTES", 128)
        patch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 100)
        prepare_texts(folder / "data", TWO_SOURCES, TWO_TEXTS)


@pytest.fixture
def data(shared, tmp_path, monkeypatch):
    """Copy two sources of several shards: 322 bytes each, in blocks of 128."""
    prepared = shared("two_sources", make_two_sources) / "data"
    monkeypatch.setattr(shards, "BLOCK_BYTES", 128)
    monkeypatch.setattr(sorted_runs, "DOCUMENTS_PER_RANGE", 100)
    # links stay links among the copies: published shards are those of the stage shuffle
    subprocess.run(["cp", "-a", prepared, tmp_path / "data"], check=True)
    return tmp_path / "data"
