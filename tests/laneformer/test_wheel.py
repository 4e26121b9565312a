"""Tests that the installed wheel decodes a model without torch in a fresh environment."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    random_model,
    small_config,
    write_folder,
)

ROOT = Path(__file__).resolve().parents[2]
PLAYGROUND = ROOT / "models/laneformer/serve/playground"
DECODE = """
import json, sys
import laneformer
with laneformer.Engine.from_pretrained(sys.argv[1], threads=2) as engine:
    tokens = engine.generate(json.loads(sys.argv[2]), max_new_tokens=20)
print(json.dumps({"tokens": tokens, "file": laneformer.__file__, "torch": "torch" in sys.modules}))
"""


def run(*command: object, cwd: Path) -> str:
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.mark.job
def test_the_wheel_decodes_elsewhere(tmp_path):
    build = (
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        tmp_path / "dist",
    )
    run(sys.executable, *build, ROOT, cwd=tmp_path)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("laneformer/engine/cpu/_core.") for name in names)
    sources = {name for name in names if name.endswith((".cpp", ".h"))}
    assert sources == {"laneformer/engine/sampling.h"}, "the CUDA kernels are compiled at run time"
    assert all(name.startswith("laneformer") for name in names)
    page = {f"laneformer/serve/playground/{path.name}" for path in PLAYGROUND.iterdir()}
    assert len(page) == 5
    assert page <= set(names), "the playground ships"
    assert "laneformer/engine/cuda/cards.toml" in names, "the datasheets ship"

    environment = tmp_path / "venv"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    run(
        environment / "bin/pip", "install", "--disable-pip-version-check", "-q", wheel, cwd=tmp_path
    )

    model = random_model(small_config(), dtype="bf16")
    prompt = random_ids(model.config, 25)
    folder = write_folder(tmp_path / "hf", model)
    printed = json.loads(
        run(environment / "bin/python", "-c", DECODE, folder, json.dumps(prompt), cwd=tmp_path)
    )
    with engine_of(model) as engine:
        assert printed["tokens"] == engine.generate(prompt, max_new_tokens=20)
    assert str(environment) in printed["file"]
    assert printed["torch"] is False
    assert "generate" in run(environment / "bin/laneformer", "--help", cwd=tmp_path)
    version = run(environment / "bin/laneformer", "--version", cwd=tmp_path).split()
    assert version == ["laneformer", wheel.name.split("-")[1]]
