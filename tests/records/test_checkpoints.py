"""What may be deleted, what is moved aside, what counts as complete: on real, tiny DCP folders."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from records.checkpoints import (
    check_complete,
    check_contents,
    clear_branch,
    list_superseded,
    locate_checkpoint,
    newest_complete_checkpoint,
    newest_saved_step,
    read_architecture,
    run_folder,
    step_folders,
    to_trash,
    write_checksums,
)


def save(folder: Path, state: dict[str, object]) -> None:
    dcp.save(state, checkpoint_id=folder, no_dist=True)


@pytest.fixture
def folder(tmp_path):
    for step in (10, 20, 25, 30, 35):
        save(tmp_path / f"checkpoint/step-{step}", {"w": torch.arange(1000)})
    return tmp_path / "checkpoint"


def truncate(folder: Path) -> None:
    (victim,) = folder.glob("*.distcp")
    os.truncate(victim, 100)


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_only_complete_and_superseded_ones_may_go(folder):
    assert names(list_superseded(folder, 2, 0)) == ["step-25", "step-20", "step-10"]
    assert names(list_superseded(folder, 2, 10)) == ["step-25"]
    # a folder that is being written is neither counted nor deleted
    (folder / "step-40").mkdir()
    assert names(list_superseded(folder, 2, 10)) == ["step-25"]
    # a damaged checkpoint does not supersede older ones
    truncate(folder / "step-35")
    assert names(list_superseded(folder, 2, 0)) == ["step-20", "step-10"]
    for step in (10, 20, 25, 30):
        truncate(folder / f"step-{step}")
    assert list_superseded(folder, 2, 0) == []


def test_the_last_good_one_is_never_deleted(folder):
    for step in (20, 25, 30, 35):
        truncate(folder / f"step-{step}")
    assert list_superseded(folder, 1, 0) == []
    assert newest_complete_checkpoint(folder) == folder / "step-10"
    assert newest_saved_step(folder) == 35


def test_one_that_is_deleted_meanwhile_is_not_complete(folder, monkeypatch):
    # The watcher of evaluations looks while the job deletes: once a FileNotFoundError ended it.
    path = folder / "step-10"
    stat = Path.stat
    # a second file, which is gone when its turn comes
    (path / "__1_0.distcp").write_bytes(b"")

    def then_deleted(self, **options):
        status = stat(self, **options)
        if self.suffix == ".distcp" and self.parent == path:
            monkeypatch.undo()
            to_trash(path)
        return status

    monkeypatch.setattr(Path, "stat", then_deleted)
    with pytest.raises(ValueError, match="being deleted"):
        check_complete(path)


def test_a_branch_is_moved_aside_and_half_folders_are_deleted(folder):
    (folder / "step-40").mkdir()
    (folder / "step-40/__0_0.distcp").write_bytes(b"half")
    to_trash(folder / "step-10")
    removals = clear_branch(folder, folder / "step-25")
    assert list(removals) == ["step-40", "step-35", "step-30"]
    assert list(step_folders(folder)) == [25, 20]
    # left by a crash, or just made
    assert not list(folder.glob(".trash-*"))
    aside = folder.parent / "checkpoint-aside"
    assert sorted(path.name.split(".")[0] for path in aside.iterdir()) == ["step-30", "step-35"]
    assert clear_branch(folder, folder / "step-25") == {}


def test_folders_that_never_completed_are_no_run_to_protect(folder):
    for path in folder.glob("*/.metadata"):
        path.unlink()
    # every first save was cut: begin again
    assert newest_complete_checkpoint(folder) is None
    (folder / "step-10/.metadata").write_bytes(b"")
    with pytest.raises(ValueError, match="are incomplete"):
        newest_complete_checkpoint(folder)


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def test_a_flipped_bit_in_the_index_never_crashes_the_start(tmp_path):
    # Without checksums, as of old: the checkpoint is used, or the one before; with them it is never
    # used.
    weights = {f"layer.{n}": torch.arange(10.0 + n) for n in range(4)}
    folder = tmp_path / "checkpoint"
    chance = random.Random(0)
    older = folder / "step-10"
    newest = folder / "step-20"
    for path in (older, newest):
        save(path, {"model": weights, "step": 20, "text": "x" * 300})
    index = newest / ".metadata"
    good = index.read_bytes()

    def read_with_a_flipped_bit():
        index.write_bytes(good)
        flip(index, chance)
        return newest_complete_checkpoint(folder)

    used = [read_with_a_flipped_bit() for _ in range(400)]
    assert set(used) == {newest, older}
    # most flips in the index break it; some change nothing that is read
    assert used.count(older) > 40
    index.write_bytes(good)
    write_checksums(newest)
    assert {read_with_a_flipped_bit() for _ in range(50)} == {older}


def test_damage_of_the_same_size_is_found(folder, caplog):
    path = folder / "step-35"
    check_contents(path)
    # older checkpoints are accepted with a warning
    assert "cannot be checked" in caplog.text
    write_checksums(path)
    check_contents(path)
    (victim,) = path.glob("*.distcp")
    flip(victim, random.Random(1))
    # a flipped bit does not change the size
    check_complete(path)
    with pytest.raises(ValueError, match=f"{victim.name} is damaged"):
        check_contents(path)
    with pytest.raises(ValueError, match="is damaged"):
        check_contents(path, 1, 3)
    # the damaged file is another rank's share
    check_contents(path, 0, 3)
    victim.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        check_contents(path)


LINKED = {  # path of a link: what it leads to
    "checkpoint folder": {"runs/x/checkpoint": "scratch/ck"},
    "step": {"runs/x/checkpoint/step-5": "scratch/ck/step-5"},
    "step of another name": {"runs/x/checkpoint/step-5": "scratch/moved"},
    "run": {"runs/x": "scratch/run"},
    "both": {"runs/x": "scratch/run", "scratch/run/checkpoint": "scratch/ck"},
    "to a step": {"best": "runs/x/checkpoint/step-5"},
    "none": {},
}


@pytest.mark.parametrize("links", LINKED.values(), ids=LINKED)
def test_a_checkpoint_belongs_to_its_run_whatever_is_a_link(tmp_path, links, monkeypatch):
    for path, target in links.items():
        if path != "best":
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).symlink_to(tmp_path / target)
    checkpoint = tmp_path / "runs/x/checkpoint/step-5"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (tmp_path / "runs/x/model.json").write_text('{"a": 1}')
    path_to_it = tmp_path / "best" if "best" in links else checkpoint
    monkeypatch.chdir(tmp_path)
    for path in (path_to_it, path_to_it.relative_to(tmp_path)):
        assert locate_checkpoint(path) == checkpoint
        assert run_folder(path) == tmp_path / "runs/x"
        assert read_architecture(path) == {"a": 1}
