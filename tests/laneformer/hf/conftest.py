"""A random model, a run folder with its checkpoint, and its export, built once and read-only."""

import json

import pytest

from laneformer.hf.export import Progress, export
from tests.laneformer.hf.hf_assets import random_model, write_run


@pytest.fixture(scope="session")
def model():
    return random_model()


@pytest.fixture(scope="session")
def checkpoint(shared, model):
    return (
        shared("hf_run", lambda folder: write_run(folder / "demo", model))
        / "demo/checkpoint/step-30"
    )


@pytest.fixture(scope="session")
def export_folder(shared, checkpoint):
    """Return the folder and what `export` reported."""

    def make(folder):
        progress = Progress(phase="phase2", tokens_total=123_456, loss=4.25)
        report = export(checkpoint, folder / "hf", "float32", progress=progress)
        (folder / "report.json").write_text(json.dumps(report))

    folder = shared("exported", make)
    return folder / "hf", json.loads((folder / "report.json").read_text())
