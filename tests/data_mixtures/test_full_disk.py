"""A disk that is full at some stage: one line, nothing half-written, and the same data when
there is room again.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from data_mixtures import prepare
from data_mixtures.stages.run import Options
from tests.data_mixtures.test_prepare import files_of


@pytest.fixture
def disk(tmp_path: Path):
    """Set the size of a small file system of its own, mounted at tmp_path/disk."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount here")
    if done.returncode:
        pytest.skip(f"file systems cannot be mounted here: {done.stderr.strip()}")
    yield lambda size: subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.mark.parametrize(("workers", "sizes_kb"), [(1, (64, 100, 150, 200, 320, 450)), (2, (200,))])
def test_a_full_disk_at_every_stage(recipe_path, tmp_path, disk, workers, sizes_kb):
    prepare.prepare(recipe_path, tmp_path / "whole", Options(), Console(quiet=True))
    out, stages = tmp_path / "disk/out", set()
    for size_kb in sizes_kb:
        disk(f"{size_kb}k")
        with pytest.raises((ValueError, OSError), match="No space left on device") as caught:
            prepare.prepare(recipe_path, out, Options(workers), Console(quiet=True))
        stages |= set(re.findall(r"^(fetch|filter|tokenize|order|shuffle)", str(caught.value)))
        assert not list(out.rglob("*.partial"))
    disk("8m")
    prepare.prepare(recipe_path, out, Options(workers), Console(quiet=True))
    assert len(stages) >= min(2, len(sizes_kb))
    assert files_of(out) == files_of(tmp_path / "whole")
