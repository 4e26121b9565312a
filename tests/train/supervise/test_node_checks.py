"""What a node needs for a job is asked of the node, without starting anything."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from train.supervise import node_checks
from train.supervise.node_checks import GIB, NodeChecks

ROOT = Path(__file__).resolve().parents[3]
Usage = namedtuple("Usage", "free")


def check_disk(config: str, run: Path, gpus: int) -> dict:
    arguments = ["--job.config_file", str(ROOT / "configs" / config), "--job.dump_folder", str(run)]
    return NodeChecks(arguments, {"gpus": gpus, "free_disk_gib": None}).disk()


@pytest.mark.parametrize("config", ["phase1.toml", "phase2.toml", "phase3.toml", "sft.toml"])
def test_a_container_without_shared_memory_is_refused_for_the_jobs_of_the_2b(config, tmp_path, monkeypatch):
    """Their saves stage the node's part of the state in /dev/shm, and end in SIGBUS in a container's 64 MB."""
    free_gib = {node_checks.SHARED_MEMORY: 1 / 16}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free_gib.get(Path(path), 1000) * GIB))
    with pytest.raises(ValueError, match=r"^/dev/shm has 0\.1 GiB free where 2\d\.\d are needed; enlarge it"):
        check_disk(config, tmp_path / "run", gpus=8)
    free_gib[node_checks.SHARED_MEMORY] = 30
    assert check_disk(config, tmp_path / "run", gpus=8)["free_gib"]["/dev/shm"] == 30


def test_two_nodes_stage_half_each(tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: Usage(14 * GIB if str(path) == "/dev/shm" else 1000 * GIB)
    )
    check_disk("phase1.toml", tmp_path / "run", gpus=4)
    with pytest.raises(ValueError, match=r"^/dev/shm has 14"):
        check_disk("phase1.toml", tmp_path / "run", gpus=8)
