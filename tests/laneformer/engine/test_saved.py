"""Tests of prefixes saved in `cache_dir`: a restart gives the same bits and uses no damaged file."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laneformer.engine.cpu import saved
from laneformer.engine.cpu.saved import SavedPrefixes
from tests.laneformer.engine.assets import (
    core,
    engine_of,
    random_ids,
    random_model,
    small_model,
)
from tests.laneformer.engine.test_kv_pool import LONG, answer, check_reuse
from tests.laneformer.engine.test_running import run_python


def prefixes(engine) -> SavedPrefixes:
    saved_prefixes = core(engine).prefixes
    return saved_prefixes


def files(directory) -> list[Path]:
    return sorted(directory.glob("*.kv"))


def until(condition: Callable[[], Any]):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s, "it has not come"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def model():
    return small_model(**{**LONG, "sliding_window": 150}, seed=1)


@pytest.fixture(scope="module")
def talk(model):
    return random_ids(model.config, 400)


@pytest.fixture
def saves(model, talk, tmp_path):
    with engine_of(model, threads=1, cache_dir=tmp_path / "kept") as engine:
        answer(engine, talk)
    assert len(files(tmp_path / "kept")) == 1
    return tmp_path / "kept"


@pytest.mark.parametrize(
    ("threads", "kv_dtype"), [(1, "fp32"), (3, "fp16"), (1, "bf16"), (3, "int8")]
)
def test_a_restart_goes_on_with_the_same_bits(model, talk, tmp_path, threads, kv_dtype):
    options = {"threads": threads, "kv_dtype": kv_dtype}
    with engine_of(model, **options, cache_dir=tmp_path) as engine:
        first = answer(engine, talk)
    longer = talk + first[0] + random_ids(model.config, 20, seed=2)
    # the last 30 ids differ, so only 370 positions can be reused
    edited = [*talk[:-30], *random_ids(model.config, 40, seed=3)]
    with engine_of(model, **options) as fresh:
        for prompt, start in ((talk, 399), (longer, 400), (edited, 370)):
            with engine_of(model, **options, cache_dir=tmp_path) as engine:
                assert check_reuse(engine, fresh, prompt) == start
                assert prefixes(engine).counts["hits"] == 1


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


DAMAGE = {
    "first keys": lambda path: flip(path, 5),
    "a start in the header": lambda path: flip(path, path.read_bytes().index(b'"starts": [') + 11),
    "length": lambda path: flip(path, -8),
    "the header cut": lambda path: os.truncate(path, path.stat().st_size - 41),
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("nothing of this kind " * 10),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_removed_and_never_used(model, talk, saves, caplog, damage):
    (path,) = files(saves)
    DAMAGE[damage](path)
    with engine_of(model) as fresh, engine_of(model, threads=1, cache_dir=saves) as engine:
        assert answer(engine, talk) == answer(fresh, talk)
        assert prefixes(engine).counts["files"] == 0
        assert not path.exists()
    (warning,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert str(path) in warning
    assert "is removed" in warning


def test_a_file_of_another_model_under_an_own_name_is_refused(model, talk, saves, caplog):
    other, (path,) = random_model(model.config, seed=2), files(saves)
    with engine_of(other, threads=1, cache_dir=saves) as engine:
        expected = answer(engine, talk)
    assert not caplog.records
    # a foreign file under the name that this model's own file has
    own_path = next(file for file in files(saves) if file != path)
    shutil.copy(path, own_path)
    with engine_of(other, threads=1, cache_dir=saves) as engine:
        assert answer(engine, talk) == expected
    assert "of another model" in caplog.text
    assert path.exists()


def test_what_decides_the_bits_is_part_of_the_key(model, talk, saves):
    norm = random_model(model.config, seed=1)
    # the last norm changes no key or value, yet makes another model
    norm.state_dict()["norm.weight"].mul_(1.5)
    for other, options in (
        (model, {"kv_dtype": "fp16"}),
        (model, {"dtype": "int8"}),
        (model, {"isa": "portable"}),
        (model, {"threads": 2}),
        (norm, {}),
    ):
        with engine_of(other, **{"threads": 1, **options}, cache_dir=saves) as engine:
            assert answer(engine, talk)[2] == 0, options


KILLED = """
    import signal
    from laneformer.engine.cpu import saved
    pieces = []
    def kill_at_the_seventh(self, what, took_s):
        pieces.append(took_s)
        if len(pieces) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
    saved.SavedPrefixes._give_way = kill_at_the_seventh
    with Engine.random(config, cache_dir=sys.argv[1]) as engine:
        engine.generate([i % 500 for i in range(400)], max_new_tokens=3)
"""


def test_a_writer_that_is_killed_leaves_nothing_that_counts(model, talk, tmp_path):
    assert run_python(KILLED, str(tmp_path)).returncode == -signal.SIGKILL
    (part,) = tmp_path.iterdir()
    assert part.suffix == ".part"
    with engine_of(model) as fresh, engine_of(model, cache_dir=tmp_path) as engine:
        assert not list(tmp_path.iterdir())
        assert answer(engine, talk) == answer(fresh, talk)


def test_the_file_used_longest_ago_goes_first(model, tmp_path):
    talks = [random_ids(model.config, 400, seed=i) for i in range(4)]
    with engine_of(model, cache_dir=tmp_path) as engine:
        answer(engine, talks[0])
    # room for three of four files
    limit = int(3.5 * files(tmp_path)[0].stat().st_size)
    for number in (1, 2, 0, 3):  # the third time, 0 is loaded
        with engine_of(model, cache_dir=tmp_path, cache_dir_bytes=limit) as engine:
            assert answer(engine, talks[number])[2] == (399 if number == 0 else 0)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    reused = []
    for number in (0, 2, 3, 1):
        with engine_of(model, cache_dir=tmp_path, cache_dir_bytes=limit) as engine:
            reused.append(answer(engine, talks[number])[2])
    assert reused == [399, 399, 399, 0]


def test_a_prefix_beyond_the_limit_is_told_and_not_kept(model, talk, tmp_path, caplog):
    with engine_of(model, cache_dir=tmp_path, cache_dir_bytes=1000) as engine:
        answer(engine, talk)
    assert not list(tmp_path.iterdir())
    assert "cache_dir_bytes = 1000" in caplog.text


def test_idle_time_saves_what_has_grown(model, talk, tmp_path):
    with engine_of(model, cache_dir=tmp_path) as engine:
        prefixes(engine).idle_s = 0.05
        first = answer(engine, talk)[0]
        until(lambda: files(tmp_path))
        first_files = files(tmp_path)
        talk = talk + first + random_ids(model.config, 100, seed=5)
        answer(engine, talk)
        # the longer one contains it
        until(lambda: files(tmp_path) != first_files and len(files(tmp_path)) == 1)
        counts = prefixes(engine).counts
        assert (counts["files"], counts["bytes"]) == (1, files(tmp_path)[0].stat().st_size)


def test_a_request_stops_what_is_saved_while_idle(model, talk, tmp_path, monkeypatch):
    saving, running, go_on = threading.Event(), threading.Event(), SavedPrefixes._give_way

    def wait_for_a_request(self, kind, took_s):
        saving.set()
        assert running.wait(60)
        go_on(self, kind, took_s)

    monkeypatch.setattr(SavedPrefixes, "_give_way", wait_for_a_request)
    with engine_of(model, cache_dir=tmp_path) as engine:
        prefixes(engine).idle_s = 0.05
        answer(engine, talk)
        assert saving.wait(60)
        with engine.batch() as batch:
            batch.join(random_ids(model.config, 50, seed=1), masked=True)  # waits for a mask
            running.set()
            until(lambda: not list(tmp_path.iterdir()))  # neither a file, nor a part of one
        until(lambda: files(tmp_path))


def test_a_full_disk_is_told_once_and_requests_go_on(model, talk, tmp_path, caplog, monkeypatch):
    tries = []

    def fail(*arguments):
        tries.append(arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saved, "write", fail)
    with engine_of(model, cache_dir=tmp_path) as engine, engine_of(model) as fresh:
        prefixes(engine).idle_s = 0.02
        for i in range(3):
            prompt = random_ids(model.config, 300, seed=10 + i)
            assert answer(engine, prompt) == answer(fresh, prompt)
            # every prompt is tried, and the user is told once
            until(lambda i=i: len(tries) > i)
        until(lambda: caplog.records)
        # with room again the earlier three are saved as well
        monkeypatch.undo()
        answer(engine, talk)
        until(lambda: len(files(tmp_path)) == 4)
    assert [record.getMessage() for record in caplog.records] == [
        f"prefixes cannot be saved in {tmp_path}: [Errno 28] No space left on device; "
        "they are computed again after a restart"
    ]
