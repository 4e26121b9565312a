"""Repair: any single block of a file comes back, in place; what parity cannot restore is
named and left alone.
"""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from data_mixtures import shards
from data_mixtures.mixture import Mixture
from data_mixtures.stages import manifest, repair
from tests.data_mixtures.stages.shuffle_assets import plan_of
from tests.data_mixtures.stages.test_verify import SOURCES, change, flip, report

SHARD = "notes/shard-00003.bin"  # 322 bytes: blocks of 128, 128 and 66


def repaired(folder: Path) -> tuple[list[str], str]:
    """What is left of the damage, and what was printed."""
    console = Console(record=True, width=300, file=io.StringIO())
    left = repair.repair(report(folder), console)
    return [str(each).replace(f"{folder}/", "") for each in left], console.export_text()


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def overwrite(path: Path, first: int, last: int) -> None:
    change(path, lambda raw: raw[:first] + bytes(last - first) + raw[last:])


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: flip(d / SHARD, 0),
        lambda d: flip(d / SHARD, 321),
        lambda d: overwrite(d / SHARD, 128, 256),
        lambda d: change(d / SHARD, lambda raw: raw[:256]),
        lambda d: change(d / SHARD, lambda raw: raw[:300]),
        lambda d: change(d / SHARD, lambda raw: raw + b"more"),
        lambda d: flip(d / "notes/shard-00003.parity", 77),
        lambda d: (d / "notes/shard-00003.parity").unlink(),
        lambda d: change(d / "notes/shard-00003.parity", lambda raw: raw + b"more"),
        lambda d: flip(d / "sums/valid.bin", 9),
        lambda d: (
            flip(d / SHARD, 5),
            flip(d / "notes/shard-00001.bin", 200),
            flip(d / "sums/shard-00000.bin", 300),
        ),
    ],
)
def test_one_block_of_each_file_comes_back(data, damage):
    before, inode, lock = (
        files(data),
        (data / SHARD).stat(),
        Mixture.open(data / "phase1.lock.json").fingerprint,
    )
    damage(data)
    assert files(data) != before
    left, printed = repaired(data)
    assert not left
    assert "repaired: " in printed
    assert files(data) == before
    assert not report(data)
    assert os.path.samestat((data / SHARD).stat(), inode), "it is still the file of the stage shuffle"
    made = manifest.write(plan_of(SOURCES, windows_per_shard=20), data, SOURCES, Console(quiet=True))
    assert made in ({"notes": "reused", "sums": "reused"}, {"notes": "built", "sums": "reused"})
    assert Mixture.open(data / "phase1.lock.json").fingerprint == lock


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda d: overwrite(d / SHARD, 100, 300), "blocks 0, 1, 2 are damaged, and parity restores one"),
        (lambda d: change(d / SHARD, lambda raw: raw[:100]), "blocks 0, 1, 2 are damaged, and parity restores one"),
        (lambda d: (flip(d / SHARD, 5), flip(d / "notes/shard-00003.parity", 5)),
         "block 0 and shard-00003.parity are damaged"),
        (lambda d: (d / SHARD).unlink(), "blocks 0, 1, 2 are damaged, and parity restores one"),
    ],
)  # fmt: skip
def test_more_than_one_block_is_named_and_left(data, damage, why):
    damage(data)
    before = files(data)
    left, printed = repaired(data)
    assert left
    assert all("shard-00003" in each for each in left)
    assert f"not repaired: {data / SHARD}: {why}" in printed
    assert files(data) == before


def test_other_damage_is_left_to_others(data):
    flip(data / "sums/shard-00002.docs.zst", 1)
    (data / "phase1.lock.json").write_text("{}")
    left, _ = repaired(data)
    assert [each.split(": ")[0] for each in left] == ["sums/shard-00002.docs.zst", "phase1.lock.json"]


def test_a_kill_while_a_block_is_written_loses_nothing(data, monkeypatch):
    before = files(data)
    overwrite(data / SHARD, 128, 256)
    with monkeypatch.context() as patch:
        patch.setattr(
            repair, "_write_at", lambda path, begin, content, size: overwrite(path, 140, 200) or 1 / 0
        )
        with pytest.raises(ZeroDivisionError):
            repaired(data)
    assert repaired(data)[0] == []
    assert files(data) == before


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 700), st.integers(0, 2**32), st.data())
def test_any_block_of_any_file(tmp_path_factory, windows, seed, drawn):
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "BLOCK_BYTES", 128)
        tokens = np.random.default_rng(seed).integers(0, 2**16, windows + 1, dtype=np.uint16)
        entry = shards.write_windows(folder / "shard-00000.bin", tokens, 1)
        before = (folder / "shard-00000.bin").read_bytes()
        block = drawn.draw(st.integers(0, len(entry["xxh3_blocks"]) - 1))
        overwritten = before[128 * block : 128 * (block + 1)][::-1]
        change(
            folder / "shard-00000.bin",
            lambda raw: raw[: 128 * block] + overwritten + raw[128 * (block + 1) :],
        )
        assert repair._restore(folder, entry) == ""
        assert (folder / "shard-00000.bin").read_bytes() == before
