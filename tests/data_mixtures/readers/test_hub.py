"""Tests of plan and fetch from a hub: revisions, pages, hashes, gates, failing transfers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_mixtures.stages import stage
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.conftest import flip
from tests.data_mixtures.stages.fake_hub import COMMIT, FakeHub
from tests.data_mixtures.stages.hub_assets import REPO, recipe, write_mirror, write_parquet

ROOT = Path(__file__).resolve().parents[3]
GATED = {"name": "gated", "repo": "nobody/Gated", "configs": '["data"]'}


@pytest.fixture
def hub(tmp_path):
    write_mirror(tmp_path / "served")
    write_parquet(tmp_path / "served/nobody/Gated/data/part_0.parquet", 0)
    with FakeHub(tmp_path / "served") as served:
        yield served


def run_command(hub: FakeHub, name: str, path: Path, *more: str, token: str = "") -> list[str]:
    """Run the command in a process of its own; return the lines of its error."""
    # huggingface_hub reads its address once
    env = {
        key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))
    }
    env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, "HF_HOME": str(path.parent / "home")}
    env |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    line = [
        sys.executable,
        "-m",
        "data_mixtures",
        name,
        str(path),
        "--out",
        str(path.parent / "out"),
    ]
    line += ["--workers", "1", *more]
    process = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (process.returncode == 0) == (not process.stderr), process.stderr
    return process.stderr.splitlines()


@pytest.mark.job
def test_plan_and_fetch_from_the_hub(hub, tmp_path):
    path = recipe(tmp_path, {"name": "exact"}, GATED)
    out = tmp_path / "out"
    assert not run_command(hub, "plan", path, token="good")
    planned = stage.find_plan(out, "exact")
    assert planned["revision"] == COMMIT
    files = [tmp_path / "served" / REPO / f"4plus/part_{number:06d}.parquet" for number in range(3)]
    assert [entry["path"] for entry in planned["units"]] == [f"4plus/{file.name}" for file in files]
    assert [entry["bytes"] for entry in planned["units"]] == [file.stat().st_size for file in files]
    assert all(len(entry["sha256"]) == 64 for entry in planned["units"])
    # 4plus_MIND begins with the requested folder's name and is another folder
    assert not any("MIND" in line for line in hub.requests)

    hub.flaws += ["wrong byte", "500"]
    assert not run_command(hub, "fetch", path, token="good")
    assert not hub.flaws
    for number, file in enumerate(files):
        folder = out / f"fetch/exact/unit-{number:05d}"
        assert {path.name for path in folder.iterdir()} == {"raw.parquet", "receipt.json"}
        assert (folder / "raw.parquet").read_bytes() == file.read_bytes()
    assert stage.read_receipt(out, "fetch", Unit("gated", 0))["counts"]["documents"] == 40
    requests = len(hub.requests)
    # a plan that is there needs neither hub nor token
    assert not run_command(hub, "plan", path)
    assert len(hub.requests) == requests


@pytest.mark.job
def test_a_mirror_is_checked_against_the_hub_s_hashes(hub, tmp_path):
    path = recipe(tmp_path, {"name": "exact"})
    assert not run_command(hub, "plan", path)
    write_mirror(tmp_path / "mirror")
    # a mirror has no hashes: those of the plan came from the hub
    flip(tmp_path / "mirror" / REPO / "4plus/part_000002.parquet", 1000)
    (line,) = run_command(hub, "fetch", path, "--mirror", str(tmp_path / "mirror"))
    assert line.startswith(
        "data_mixtures: fetch exact/unit-00002: nobody/Small-Data/4plus/part_000002.parquet came with sha256"
    )


@pytest.mark.job
def test_all_repositories_are_asked_before_anything_is_read(hub, tmp_path):
    gone = {"name": "gone", "repo": "nobody/Gone"}
    old = {"name": "old", "revision": "0000000"}
    path = recipe(tmp_path, {"name": "good"}, GATED, gone, old)
    head, *lines = run_command(hub, "plan", path)
    assert head == "data_mixtures: 3 repositories cannot be read; nothing was read:"
    agreement = f"accept its agreement at {hub.url}/datasets/nobody/Gated"
    for line, *parts in zip(
        lines,
        (
            f"gated: nobody/Gated @ abcdef0: gated: {agreement}",
            "gone: nobody/Gone @ abcdef0: not found at",
            "old: nobody/Small-Data @ 0000000: no such revision",
        ),
        ("(HF_TOKEN is not set)", "", ""),
        strict=True,
    ):
        assert all(part in line for part in parts)
    assert not (tmp_path / "out/plan.json").exists()
    _, line, *_ = run_command(hub, "plan", path, token="bad")
    assert "gated: accept its agreement" in line
    assert "the token in HF_TOKEN is not of an account that did" in line

    hub.url = "http://127.0.0.1:9"  # no network
    head, line = run_command(hub, "plan", recipe(tmp_path, {"name": "exact"}))
    assert head == "data_mixtures: 1 repositories cannot be read; nothing was read:"
    assert "exact: nobody/Small-Data @ abcdef0: not reachable at http://127.0.0.1:9" in line
    assert "python -m tools.plan JOB.toml" in line
