"""A random model, a run folder with its checkpoint, and its export, built once and read only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laneformer import Laneformer
from laneformer.hf.export import Progress, export
from tests.laneformer.hf.hf_assets import random_model, write_run
from tests.shared import Shared


@pytest.fixture(scope="session")
def model() -> Laneformer:
    return random_model()


@pytest.fixture(scope="session")
def checkpoint(shared: Shared, model: Laneformer) -> Path:
    return shared("hf_run", lambda folder: write_run(folder / "demo", model)) / "demo/checkpoint/step-30"


@pytest.fixture(scope="session")
def exported(shared: Shared, checkpoint: Path) -> tuple[Path, dict]:
    """The folder and what `export` reported."""

    def make(folder: Path) -> None:
        progress = Progress(phase="phase2", tokens_total=123_456, loss=4.25)
        report = export(checkpoint, folder / "hf", "float32", progress=progress)
        (folder / "report.json").write_text(json.dumps(report))

    folder = shared("exported", make)
    return folder / "hf", json.loads((folder / "report.json").read_text())
