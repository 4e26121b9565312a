"""Tests of packed weights beside the model: used if they match it, else rebuilt."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from laneformer.engine import Engine, machine
from laneformer.engine.cpu import _core, packed, packed_files
from laneformer.engine.cpu import decoder as cpu_decoder
from laneformer.engine.cpu.cache_files import hold
from laneformer.engine.cpu.packed import ALIGNMENT, PackedWeights
from laneformer.engine.cpu.packed_files import BUDGET, FOLDER, SOURCE, list_packed
from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    small_config,
    small_model,
    write_folder,
)

IDS = random_ids(small_config(), 30)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "hf", small_model(dtype="bf16"))


@pytest.fixture
def hash_sizes(monkeypatch):
    """Return the bytes of each hashed part in order."""
    sizes, content_hash = [], _core.content_hash
    monkeypatch.setattr(
        _core, "content_hash", lambda data: sizes.append(len(data)) or content_hash(data)
    )
    return sizes


@pytest.fixture
def loads(monkeypatch):
    """Return, for each load in order, whether it came from the cache."""
    cached, load = [], PackedWeights.load
    monkeypatch.setattr(
        PackedWeights, "load", lambda *args: cached.append(load(*args)) or cached[-1]
    )
    return cached


def logits_of(folder, **options) -> np.ndarray:
    with Engine.from_pretrained(folder, kv_dtype="fp32", **options) as engine:
        return engine.logits(IDS)


def only_file(folder):
    (path,) = (folder / FOLDER).glob("*.bin")
    return path


def test_a_second_start_maps_what_the_first_packed(folder, loads, hash_sizes):
    # it checks the hashes of every tape and the embedding once, and again if the file was touched
    expected = engine_of(small_model(dtype="bf16")).logits(IDS)
    hash_counts = []
    for start in range(6):
        np.testing.assert_array_equal(logits_of(folder), expected)
        hash_counts.append(len(hash_sizes))
        del hash_sizes[:]
        # a touched file must be checked again
        if start == 2:
            os.utime(only_file(folder))
        if start == 4:
            only_file(folder).with_suffix(".checked").write_text("no list of stamps")
    parts = len(packed.read_header(only_file(folder))[1]["parts"])
    assert hash_counts[0] > parts, "the weights, too"
    assert hash_counts[1:] == [parts, 0, parts, 0, parts]
    assert loads == [False] + [True] * 5


def test_what_changes_the_tapes_has_a_file_of_its_own(folder, loads):
    # tapes are cut for a number of threads, in one type
    plans = [
        {"threads": 1},
        {"threads": 6},
        {"threads": 1, "dtype": "int8"},
        {"threads": 1, "dtype": "int4"},
    ]
    first = [logits_of(folder, **plan) for plan in plans]
    again = [logits_of(folder, **plan) for plan in plans]
    np.testing.assert_array_equal(first, again)
    assert loads == [False] * 4 + [True] * 4
    assert len(list((folder / FOLDER).glob("*.bin"))) == 4
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "swa_layers": [0, 1]}))
    logits_of(folder, threads=1)
    assert not loads[-1], "a changed config is noticed"


def test_other_weights_under_the_same_name_and_times_are_noticed(folder, loads):
    before = logits_of(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes())  # copied: other times, same content
    logits_of(folder)
    times = path.stat()
    state = load_file(path)
    state["lm_head.weight"][0, 3, 5] *= -1  # one bit of one value
    save_file(state, path)
    # the same times, so only the content tells them apart
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = logits_of(folder)
    assert loads == [False, True, False]
    assert (before != after).any(1).all(), "every position's logit of row 3 changes"
    np.testing.assert_array_equal(logits_of(folder), after)


DAMAGE = {
    "one bit of a tape": lambda data: (
        data[:ALIGNMENT] + bytes([data[ALIGNMENT] ^ 1]) + data[ALIGNMENT + 1 :]
    ),
    "one bit of the embedding": lambda data: (
        data[: -ALIGNMENT + 9] + bytes([data[-ALIGNMENT + 9] ^ 128]) + data[-ALIGNMENT + 10 :]
    ),
    "cut short": lambda data: data[: ALIGNMENT + 100],
    "empty": lambda data: b"",
    "header of the wrong kind": lambda data: (2).to_bytes(8, "little") + b"[]" + data[10:],
    "offset out of range": lambda data: data.replace(str(ALIGNMENT).encode(), b"9" * 7, 1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_repaired(folder, loads, damage):
    expected = logits_of(folder)
    path = only_file(folder)
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    assert path.read_bytes() != whole
    # the first engine repairs the file, the second reads it
    for _ in range(2):
        np.testing.assert_array_equal(logits_of(folder), expected)
    assert loads == [False, False, True]


def test_without_room_on_the_disk_nothing_is_kept(folder, loads, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    np.testing.assert_array_equal(logits_of(folder), logits_of(folder))
    assert loads == [False, False]
    assert not list((folder / FOLDER).iterdir())


def test_the_hash_sees_every_word_and_their_order():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (9 << 20) + 13, np.uint8)  # three blocks, the last with a tail
    others = [data, data[:-1]]
    for size in (32, 4 << 20):  # blocks in another order
        others.append(np.concatenate((data[size : 2 * size], data[:size], data[2 * size :])))
    # single sign bits, and pairs that a chain without rotation may cancel
    for at in ([0], [7], [4 << 20], [(8 << 20) + 1], [len(data) - 1], [7, 15], [7, 39], [71, 103]):
        changed = data.copy()
        changed[at] ^= 0x80
        others.append(changed)
    assert len({_core.content_hash(other) for other in others}) == 12


def test_the_four_plans_used_last_stay(folder, loads):
    for threads in (1, 2, 3, 4):
        logits_of(folder, threads=threads)
    directory = folder / FOLDER
    logits_of(folder, threads=1)  # used again: 2 is now the oldest
    logits_of(folder, threads=1, context_tokens=64)  # packs nothing else
    logits_of(folder, threads=5)
    assert len(list(directory.glob("*.bin"))) == 4
    assert len(list(directory.glob("*.checked"))) == 1, "those that were read again"
    del loads[:]
    for threads in (1, 3, 4, 5, 2):
        logits_of(folder, threads=threads)
    assert loads == [True] * 4 + [False]


@pytest.mark.parametrize("why", ["file_system", "nodes"])
def test_weights_are_copied_to_where_they_are_read_fast(folder, monkeypatch, why):
    # from tmpfs, whose pages are small, and per memory node by the threads that read them
    plain = logits_of(folder, threads=3)
    copies = []
    copy_parts = _core.Decoder.copy_parts
    monkeypatch.setattr(
        _core.Decoder, "copy_parts", lambda decoder: copies.append(1) or copy_parts(decoder)
    )
    np.testing.assert_array_equal(logits_of(folder, threads=3), plain)
    assert copies == [], "a mapped file of this disk needs no copy"
    if why == "nodes":
        two = dataclasses.replace(machine.this_machine(), nodes=2)
        for module in (packed, cpu_decoder):
            monkeypatch.setattr(module, "this_machine", lambda: two)
    else:
        monkeypatch.setattr(packed, "file_system", lambda path: "tmpfs")
    with Engine.from_pretrained(folder, threads=3, kv_dtype="fp32") as engine:
        np.testing.assert_array_equal(engine.logits(IDS), plain)
        path = only_file(folder)
        path.write_bytes(bytes(path.stat().st_size))  # nothing is read from it any more
        np.testing.assert_array_equal(engine.logits(IDS), plain)
    assert copies == [1]


def test_the_file_system_of_a_path(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    device = tmp_path.stat().st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    # in mountinfo the type follows the dash, behind any number of optional fields
    lines = f"25 1 0:99 / / rw - ext4 /dev/vda rw\n36 25 {name} / /x rw shared:1 master:2 - tmpfs tmpfs rw\n"
    (tmp_path / "proc/self/mountinfo").write_text(lines)
    assert machine.file_system(tmp_path, root=tmp_path) == "tmpfs"
    assert machine.file_system(tmp_path, root=tmp_path / "nowhere") == ""


# ---- which files stay: the last used within one budget for all models, none without its model ----


@pytest.fixture
def models(tmp_path, monkeypatch):
    """Return three folders, the last of which cannot hold packed weights."""
    monkeypatch.delenv(BUDGET, raising=False)
    folders = [write_folder(tmp_path / name, small_model()) for name in "abc"]
    (folders[2] / FOLDER).write_text("a file where the directory would be")
    return folders


def start(folder, age_s=0.0) -> Path:
    """Start an engine and return its packed file, with the given time of last use."""
    with Engine.from_pretrained(folder, threads=1):
        pass
    path = next(entry.path for entry in list_packed() if entry.source == folder)
    used_s = path.stat().st_mtime - age_s
    os.utime(path, (used_s, used_s))
    return path


def test_the_files_used_longest_ago_leave_first(models, monkeypatch):
    first, second = start(models[0], 100.0), start(models[1], 200.0)
    second.with_suffix(".checked").touch()
    os.utime(second.with_suffix(".checked"), (0, 0))
    size = first.stat().st_size
    assert [entry.path for entry in list_packed()] == [second, first]
    # room for two of three files
    monkeypatch.setenv(BUDGET, str(2 * size + 1))
    third = start(models[2])
    assert [entry.path for entry in list_packed()] == [first, third]
    assert not second.with_suffix(".checked").exists()
    assert sum(entry.bytes for entry in list_packed()) == 2 * size


def test_a_file_that_an_engine_has_mapped_stays(models, monkeypatch):
    first, second = start(models[0], 200.0), start(models[1], 100.0)
    monkeypatch.setenv(BUDGET, str(2 * first.stat().st_size + 1))
    with Engine.from_pretrained(models[0], threads=1) as engine:
        os.utime(first.with_suffix(".checked"), (0, 0))  # whatever it says of its use
        expected = engine.logits([1, 2, 3])
        third = start(models[2])
        assert {entry.path for entry in list_packed()} == {first, third}
        assert (engine.logits([1, 2, 3]) == expected).all()
    assert not second.exists()
    del engine
    assert packed_files.remove(first), "the lock ended with the mapping"


def test_what_has_lost_its_model_is_removed(models):
    path = start(models[2])
    assert (path.parent / SOURCE).read_text() == str(models[2])
    shutil.rmtree(models[2])
    # of a version that did not say whose it is
    foreign = path.parent.parent / "0123456789abcdef" / "0.bin"
    foreign.parent.mkdir()
    foreign.write_bytes(b"12345678901")
    ownerless = foreign.with_name("1.bin")  # of this layout: nothing says whose
    shutil.copyfile(path, ownerless)
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
    (orphan_mark := first.with_name("1.checked")).write_text("")
    mark.write_text("")
    with young.open("rb") as writing:
        hold(writing)
        second = start(models[1])
    assert sorted(first.parent.iterdir()) == sorted([first, young])
    assert {entry.path for entry in list_packed()} == {first, second}
    assert not orphan_mark.exists()


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
