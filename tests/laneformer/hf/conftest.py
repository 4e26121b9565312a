"""A random model, a run folder with its checkpoint, and its export, built once and read only."""

from __future__ import annotations

from pathlib import Path

import pytest

from laneformer import Laneformer
from laneformer.hf.export import Progress, export
from tests.laneformer.hf.hf_assets import random_model, write_run


@pytest.fixture(scope="session")
def model() -> Laneformer:
    return random_model()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, model: Laneformer) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo", model)


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("export") / "hf"
    progress = Progress(phase="phase2", tokens_total=123_456, loss=4.25)
    return out, export(checkpoint, out, "float32", progress=progress)
