"""Which packed weights stay: within one budget over all models, those used last, and never without their model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from laneformer.engine import Engine
from laneformer.engine.cpu import packed_files
from laneformer.engine.cpu.cache_files import hold
from laneformer.engine.cpu.packed_files import BUDGET, FOLDER, SOURCE, list_packed
from tests.laneformer.engine.assets import small_model, write_folder


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Three folders, of which the last takes no files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.delenv(BUDGET, raising=False)
    folders = [write_folder(tmp_path / name, small_model()) for name in "abc"]
    (folders[2] / FOLDER).write_text("a file where the directory would be")
    return folders


def start(folder: Path, age_s: float = 0.0) -> Path:
    """The file that a start leaves, used so long ago."""
    with Engine.from_pretrained(folder, threads=1):
        pass
    path = next(one.path for one in list_packed() if one.source == folder)
    used_s = path.stat().st_mtime - age_s
    os.utime(path, (used_s, used_s))
    return path


def test_the_files_used_longest_ago_leave_first(models, monkeypatch):
    first, second = start(models[0], 100.0), start(models[1], 200.0)
    second.with_suffix(".checked").touch()
    os.utime(second.with_suffix(".checked"), (0, 0))
    size = first.stat().st_size
    assert [one.path for one in list_packed()] == [second, first]
    monkeypatch.setenv(BUDGET, str(2 * size + 1))
    third = start(models[2])
    assert [one.path for one in list_packed()] == [first, third]
    assert not second.with_suffix(".checked").exists()
    assert sum(one.bytes for one in list_packed()) == 2 * size


def test_a_file_that_an_engine_has_mapped_stays(models, monkeypatch):
    first, second = start(models[0], 200.0), start(models[1], 100.0)
    monkeypatch.setenv(BUDGET, str(2 * first.stat().st_size + 1))
    with Engine.from_pretrained(models[0], threads=1) as engine:
        os.utime(first.with_suffix(".checked"), (0, 0))  # whatever it says of its use
        expected = engine.logits([1, 2, 3])
        third = start(models[2])
        assert {one.path for one in list_packed()} == {first, third}
        assert (engine.logits([1, 2, 3]) == expected).all()
    assert not second.exists()
    del engine
    assert packed_files.remove(first), "the lock ended with the mapping"


def test_what_has_lost_its_model_is_removed(models):
    path = start(models[2])
    assert (path.parent / SOURCE).read_text() == str(models[2])
    shutil.rmtree(models[2])
    foreign = path.parent.parent / "0123456789abcdef" / "0.bin"  # of a version that did not say whose it is
    foreign.parent.mkdir()
    foreign.write_bytes(b"12345678901")
    named = foreign.with_name("1.bin")  # of this layout: nothing says whose
    shutil.copyfile(path, named)
    other = foreign.parent.parent / "cubins" / "0.bin"  # of another cache
    other.parent.mkdir()
    other.write_bytes(b"12345678901")
    start(models[0])
    assert not path.parent.exists()
    assert not foreign.parent.exists()
    assert other.exists()


def test_what_nobody_can_use_is_removed_of_every_model(models):
    first = start(models[0])
    old, part, mark = (first.with_name(f"0{suffix}") for suffix in (".bin", ".7.part", ".checked"))
    young = first.with_name("0.8.part")  # its writer lives
    old.write_bytes(b"12345678901")
    for path in (part, young):
        path.write_bytes(b"unfinished")
    (lost := first.with_name("1.checked")).write_text("")
    mark.write_text("")
    with young.open("rb") as writing:
        hold(writing)
        second = start(models[1])
    assert sorted(first.parent.iterdir()) == sorted([first, young])
    assert {one.path for one in list_packed()} == {first, second}
    assert not lost.exists()


def test_a_file_larger_than_the_budget_is_not_kept(models, monkeypatch):
    monkeypatch.setenv(BUDGET, "1000")
    with Engine.from_pretrained(models[0], threads=1) as engine:
        engine.logits([1])
    assert list_packed() == []
    assert not list((models[0] / FOLDER).iterdir())
    monkeypatch.setenv(BUDGET, "32 GB")
    with pytest.raises(
        ValueError, match="LANEFORMER_PACKED_BYTES = '32 GB' must be a number of bytes, such as"
    ):
        Engine.from_pretrained(models[1], threads=1)
