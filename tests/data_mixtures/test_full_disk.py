"""A disk that is full at some stage: one line, nothing half-written, and the same data when
there is room again.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.data_mixtures.conftest import files_of, prepare_folder


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


def test_a_full_disk_at_every_stage(tiny_folder, tmp_path, disk):
    out, stages = tmp_path / "disk/out", set()
    for size_kb in (64, 100, 200, 320, 450):
        disk(f"{size_kb}k")
        with pytest.raises((ValueError, OSError), match="No space left on device") as caught:
            prepare_folder(tiny_folder / "tiny.toml", out)
        stages |= set(re.findall(r"^(fetch|filter|tokenize|order|shuffle)", str(caught.value)))
        assert not list(out.rglob("*.partial"))
    disk("8m")
    prepare_folder(tiny_folder / "tiny.toml", out)
    assert len(stages) >= 2
    assert files_of(out) == files_of(tiny_folder / "out")
