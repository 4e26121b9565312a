"""Plan and fetch from a hub, by the commands: revisions, pages of files, hashes, gates, and
transfers that go wrong.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from data_mixtures.stages import stage
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.stages.fake_hub import COMMIT, FakeHub
from tests.data_mixtures.stages.hub_assets import REPO, recipe, write_mirror, write_parquet

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def hub(tmp_path: Path):
    write_mirror(tmp_path / "served")
    write_parquet(tmp_path / "served/nobody/Gated/data/part_0.parquet", 0)
    with FakeHub(tmp_path / "served") as served:
        yield served


def command(hub: FakeHub, name: str, path: Path, *more: str, token: str = "") -> subprocess.CompletedProcess:
    home = {
        "HF_HOME": str(path.parent / "home"),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    env = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": token, **home}
    line = [sys.executable, "-m", "data_mixtures", name, str(path), "--out", str(path.parent / "out"), *more]
    return subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.job
def test_plan_and_fetch_from_the_hub(hub, tmp_path):
    path = recipe(
        tmp_path, {"name": "exact"}, {"name": "gated", "repo": "nobody/Gated", "configs": '["data"]'}
    )
    done = command(hub, "plan", path, token="good")
    assert done.returncode == 0, done.stderr
    planned = stage.planned(tmp_path / "out", "exact")
    assert planned["revision"] == COMMIT
    assert [entry["path"] for entry in planned["units"]] == [
        f"4plus/part_{number:06d}.parquet" for number in range(3)
    ]
    whole = sum(p.stat().st_size for p in (tmp_path / "served/nobody/Small-Data/4plus").iterdir())
    assert sum(entry["bytes"] for entry in planned["units"]) == whole
    assert all(len(entry["sha256"]) == 64 for entry in planned["units"])
    assert not any("MIND" in line for line in hub.asked)

    hub.flaws += ["wrong byte", "500"]
    done = command(hub, "fetch", path, "--workers", "1", token="good")
    assert done.returncode == 0, done.stderr
    assert not hub.flaws
    for number in range(3):
        got = tmp_path / f"out/fetch/exact/unit-{number:05d}"
        assert sorted(p.name for p in got.iterdir()) == ["raw.parquet", "receipt.json"]
        assert (got / "raw.parquet").read_bytes() == (
            tmp_path / "served" / REPO / f"4plus/part_{number:06d}.parquet"
        ).read_bytes()
    assert stage.read_receipt(tmp_path / "out", "fetch", Unit("gated", 0))["counts"]["documents"] == 40

    asked = len(hub.asked)
    for name in ("plan", "fetch"):
        assert command(hub, name, path).returncode == 0  # what is there needs neither hub nor token
    assert len(hub.asked) == asked


def test_all_repositories_are_asked_before_anything_is_read(hub, tmp_path):
    path = recipe(
        tmp_path,
        {"name": "good"},
        {"name": "gated", "repo": "nobody/Gated", "configs": '["data"]'},
        {"name": "gone", "repo": "nobody/Gone"},
        {"name": "old", "revision": "0000000"},
    )
    done = command(hub, "plan", path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "error: 3 repositories refuse to be read; nothing was read:"
    assert (
        f"gated: nobody/Gated @ abcdef0: gated: accept its agreement at {hub.url}/datasets/nobody/Gated"
        in lines[1]
    )
    assert "(HF_TOKEN is not set)" in lines[1]
    assert "gone: nobody/Gone @ abcdef0: not found at" in lines[2]
    assert "old: nobody/Small-Data @ 0000000: has no revision '0000000'" in lines[3]
    assert len(lines) == 4
    assert not (tmp_path / "out/plan.json").exists()
    done = command(hub, "plan", path, token="bad")
    assert "gated: accept its agreement" in done.stderr
    assert "the token in HF_TOKEN is not of an account that did" in done.stderr


def test_a_mirror_is_checked_against_the_hub_s_hashes(hub, tmp_path):
    path = recipe(tmp_path, {"name": "exact"})
    assert command(hub, "plan", path).returncode == 0
    write_mirror(tmp_path / "mirror")
    victim = tmp_path / "mirror" / REPO / "4plus/part_000002.parquet"
    data = victim.read_bytes()
    victim.write_bytes(data[:1000] + b"?" + data[1001:])
    done = command(hub, "fetch", path, "--mirror", str(tmp_path / "mirror"), "--workers", "2")
    assert done.returncode == 1
    assert (
        "error: fetch exact/unit-00002: nobody/Small-Data/4plus/part_000002.parquet came with sha256"
        in done.stderr
    )
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list((tmp_path / "out/fetch").rglob("*.partial"))


def test_no_network_is_one_line_a_repository(hub, tmp_path):
    path = recipe(tmp_path, {"name": "exact"})
    hub.url = "http://127.0.0.1:9"
    done = command(hub, "plan", path)
    assert done.returncode == 1
    said, why, hint = done.stderr.splitlines()
    assert said == "error: 1 repositories are not reachable; nothing was read:"
    assert "exact: nobody/Small-Data @ abcdef0: not reachable at http://127.0.0.1:9" in why
    assert hint.endswith("python -m tools.plan JOB.toml")
