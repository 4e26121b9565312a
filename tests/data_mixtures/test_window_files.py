"""Tests that blocks are checked once, when first touched, and that damage never passes."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from data_mixtures import shards, window_files
from data_mixtures.mixture import valid_windows
from data_mixtures.window_files import WindowFiles
from tests.data_mixtures.conftest import flip

SEQ_LEN, WINDOWS, BLOCK = 4, 23, 64  # windows of 10 bytes at a stride of 8


def write(path: Path, windows: int = WINDOWS) -> tuple[str, dict]:
    """Write tokens 0, 1, 2, ...: window i begins with i * S."""
    tokens = np.arange(windows * SEQ_LEN + 1).astype(np.uint16)
    return str(path), shards.write_windows(path, tokens, SEQ_LEN)


def read_window(files: WindowFiles, window: int, file: int = 0) -> np.ndarray:
    return files.read_windows(np.array([file]), np.array([window]))[0]


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(shards, "BLOCK_BYTES", BLOCK)
    # a chunk size that does not divide a block
    monkeypatch.setattr(window_files, "CHUNK_BYTES", 24)


@pytest.mark.parametrize("byte", [0, 63, 64, 135, 185])
def test_one_flipped_bit_fails_every_window_of_its_block_and_no_other(small_blocks, tmp_path, byte):
    path, entry = write(tmp_path / "shard-00007.bin")
    flip(Path(path), byte)
    files = WindowFiles([(path, entry)], SEQ_LEN)
    bad = byte // BLOCK
    for window in range(WINDOWS):
        # 2 bytes a token; a window may touch two blocks
        first = 2 * window * SEQ_LEN // BLOCK
        last = (2 * (window + 1) * SEQ_LEN + 1) // BLOCK
        if first <= bad <= last:
            with pytest.raises(
                ValueError, match=rf"shard-00007\.bin: block {bad} of 3 .* damaged.*verify"
            ):
                read_window(files, window)
        else:
            assert read_window(files, window)[0] == window * SEQ_LEN


def test_a_file_that_shrinks_or_goes_is_an_error_not_a_crash(small_blocks, tmp_path):
    (short, entry), gone = write(tmp_path / "short"), write(tmp_path / "gone")
    files = WindowFiles([(short, entry), gone], SEQ_LEN)
    # the second block of 64 bytes is cut; the first is whole
    os.truncate(short, 100)
    os.unlink(gone[0])
    assert read_window(files, 0)[0] == 0
    with pytest.raises(ValueError, match=r"short: block 1 of 3 .* is damaged"):
        read_window(files, 10)
    with pytest.raises(ValueError, match=r"gone: block 0 of 3 .* cannot be read: .*No such file"):
        read_window(files, 0, file=1)


def test_open_files_stay_few(tmp_path, monkeypatch):
    # a map keeps a descriptor: without a bound, 11,000 shards would need as many
    monkeypatch.setattr(window_files, "OPEN_FILES", 10)
    files = WindowFiles([write(tmp_path / f"{i}", windows=3) for i in range(200)], SEQ_LEN)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        rows = list(
            pool.map(lambda file: read_window(files, file % 3, file), [*range(200), *range(200)])
        )
    assert [row[0] for row in rows] == [file % 3 * SEQ_LEN for file in [*range(200), *range(200)]]
    assert len(os.listdir("/proc/self/fd")) - before <= 10


def test_held_out_windows_are_checked(counting_data, tmp_path):
    data = counting_data()
    shutil.copy(data / "s1/valid.bin", tmp_path / "whole")
    flip(data / "s1/valid.bin", 3)
    with pytest.raises(ValueError, match=r"s1/valid\.bin: block 0 of 1 .* is damaged"):
        valid_windows(data, "s1", max_windows=1)
    shutil.copy(tmp_path / "whole", data / "s1/valid.bin")
    assert len(valid_windows(data, "s1", max_windows=1)) == 1
