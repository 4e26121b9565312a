"""Block checks that the processes of a node share: each block once, and for this attempt only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from data_mixtures import node_marks, shards
from data_mixtures.node_marks import NodeMarks
from data_mixtures.window_files import WindowFiles

ROOT = Path(__file__).resolve().parents[2]
SEQ_LEN, WINDOWS, BLOCK = 4, 200, 64
PROCESS = f"""
import json, sys, time
from pathlib import Path
import numpy as np
from data_mixtures import node_marks, shards, window_files
shards.BLOCK_BYTES = {BLOCK}
node_marks.FOLDER = Path(sys.argv[1])
files = json.loads(sys.argv[2])
read, digest = [], window_files._digest
window_files._digest = lambda *place: (time.sleep(0.002), read.append(place), digest(*place))[2]
reader = window_files.WindowFiles(files, {SEQ_LEN}, shared=True)
for _ in sys.stdin:
    row = np.empty({SEQ_LEN} + 1, dtype=np.int64)
    for window in np.random.default_rng(1).permutation({WINDOWS} * len(files)).tolist():
        reader.read(window // {WINDOWS}, window % {WINDOWS}, row)
        assert row[0] == window % {WINDOWS} * {SEQ_LEN}
    print(json.dumps(read), flush=True)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shards, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(node_marks, "FOLDER", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def files(shared: Path, tmp_path: Path) -> list:
    tokens = np.arange(WINDOWS * SEQ_LEN + 1).astype(np.uint16)
    return [(str(tmp_path / name), shards.write_windows(tmp_path / name, tokens, SEQ_LEN)) for name in "ab"]


def start(shared: Path, files: list, restarts: int = 0) -> subprocess.Popen:
    environment = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    return subprocess.Popen(
        [sys.executable, "-c", PROCESS, str(shared), json.dumps(files)],
        cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def blocks_read(processes: list[subprocess.Popen]) -> list[list]:
    """What each process reads for checks while all of them read every window, in the same
    order: they often meet.
    """
    for process in processes:
        print(file=process.stdin, flush=True)
    return [json.loads(next(iter(process.stdout or ()))) for process in processes]


def test_two_processes_read_each_block_once_and_another_attempt_reads_it_again(
    shared: Path, files: list
) -> None:
    every = sorted([path, begin, min(begin + BLOCK, entry["bytes"])] for path, entry in files
                   for begin in range(0, entry["bytes"], BLOCK))  # fmt: skip
    first, second, restarted = start(shared, files), start(shared, files), start(shared, files, restarts=1)
    one, two, three = blocks_read([first, second, restarted])
    assert sorted(one + two) == every
    assert sorted(three) == every
    assert len(list(shared.iterdir())) == 2
    for process in (first, second):
        process.kill()
        process.wait()
    again = start(shared, files)
    assert sorted(blocks_read([again])[0]) == every, "what killed processes left behind counts for nothing"
    for process in (again, restarted):
        process.communicate()
    assert not list(shared.iterdir()), "nothing is left"


def test_a_mark_is_seen_by_all_of_this_attempt_and_damage_is_never_marked(shared: Path, files: list) -> None:
    path, row = files[1][0], np.empty(SEQ_LEN + 1, dtype=np.int64)
    content = bytearray(Path(path).read_bytes())
    content[BLOCK + 1] ^= 8
    Path(path).write_bytes(content)
    one, other = (WindowFiles(files, SEQ_LEN, shared=True) for _ in range(2))
    one.read(1, 0, row)
    assert list(other._checked[1])[:2] == [1, 0]
    for reader in (one, other):
        with pytest.raises(ValueError, match="block 1 of"):
            reader.read(1, 9, row)
    assert not any(WindowFiles(files, SEQ_LEN)._checked[1]), "only who asks for it shares"
    del one, other, reader
    assert not list(shared.iterdir())


@pytest.mark.parametrize("broken", ["missing", "full", "other user's"])
def test_without_shared_memory_each_process_checks_for_itself(shared: Path, monkeypatch, broken: str) -> None:
    if broken == "missing":
        shared.rmdir()
    elif broken == "full":
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(full))
    else:
        monkeypatch.setattr(node_marks, "_attempt", lambda: "1")
        (shared / f"{node_marks.PREFIX}x-1").symlink_to("/etc/hostname")
    marks = NodeMarks(5, "x")
    assert marks.bytes == bytearray(5)
    with marks.claimed(3):
        marks.bytes[3] = 1
    assert NodeMarks(5, "x").bytes == bytearray(5)
