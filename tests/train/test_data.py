"""Tests of the loader: the same batches for any ranks, exact resume and counts, clear ends."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

pytest.importorskip("torchtitan")
from data_mixtures.mixture import Mixture, pin
from records.files import read_json
from records.skips import SkipList
from train.data import READ_AHEAD_BATCHES, MixtureLoader, read_ahead

GLOBAL_BATCH = 32


@pytest.fixture(scope="module")
def lock(data_folder):
    return data_folder / "phase1.lock.json"


@pytest.fixture(scope="module")
def wrap(lock):
    # the first sequence that is the second reading of a source
    mixture = Mixture.open(lock)
    windows = {entry["name"]: entry["windows"] for entry in read_json(lock)["sources"]}
    for number in range(sum(windows.values())):
        used = mixture.windows_per_source(number + 1)
        if any(used[name] > windows[name] for name in used):
            return number
    raise AssertionError("no source is read twice")


def loader(
    lock: Path,
    rank: int = 0,
    ranks: int = 1,
    batch: int = GLOBAL_BATCH,
    threads: int = 1,
    windows=(),
):
    return MixtureLoader(lock, rank, ranks, batch, threads, SkipList(windows))


def job(
    lock: Path, ranks: int, accumulation: int, threads: int = 2, windows=()
) -> list[MixtureLoader]:
    batch = GLOBAL_BATCH // ranks // accumulation
    return [loader(lock, rank, ranks, batch, threads, windows) for rank in range(ranks)]


def train(loaders: list[MixtureLoader], steps: int) -> tuple[np.ndarray, np.ndarray, str]:
    # on all ranks; windows (steps, G, S + 1), sources (steps, G) and the state that all ranks save
    micro_batches = steps * GLOBAL_BATCH // loaders[0].micro_batch
    read = [list(islice(of_rank, micro_batches)) for of_rank in loaders]
    batches = [batch for of_all_ranks in zip(*read, strict=True) for batch in of_all_ranks]
    tokens = [torch.cat([inputs["input"], labels[:, -1:]], dim=1) for inputs, labels in batches]
    sources = [inputs["source"] for inputs, _ in batches]
    (state,) = {of_rank.state_dict()["mixture"] for of_rank in loaders}
    shape = (steps, GLOBAL_BATCH, -1)
    return (
        torch.cat(tokens).numpy().reshape(shape),
        torch.cat(sources).numpy().reshape(shape[:2]),
        state,
    )


def read_sequences(lock: Path, numbers: list[int]) -> np.ndarray:
    mixture = Mixture.open(lock)
    return np.concatenate([mixture.sequences(number, 1)[0] for number in numbers]).reshape(
        -1, GLOBAL_BATCH, 33
    )


def places(loader: MixtureLoader) -> list[tuple[str, int]]:
    # of the first windows of its source `code`
    windows = [window for window in loader.locate(0, 40) if window["source"] == "code"]
    return [(window["shard"], window["token_offset"]) for window in windows]


def test_offsets_belong_to_content_and_not_to_a_name(data_folder, lock):
    # A third phase whose source `code` is another one: it starts at its beginning, and counts are
    # kept apart. A fourth one goes on in phase 1's `code`.
    (one,) = job(lock, 1, 1)
    train([one], steps=5)
    used = json.loads(one.state_dict()["mixture"])
    (other,) = job(lock, 1, 1)
    sha256 = other.mixture.contents["code"]
    other.mixture.contents = {**other.mixture.contents, "code": "f" * 64}
    other.mixture._file_sha256 = ["f" * 64] * len(other.mixture._file_sha256)
    fresh = places(other)
    with pytest.raises(ValueError, match=r"source 'code' is not the one of which .* windows twice"):
        other.start_phase_after(used)
    other.begin_again = ["code"]
    other.start_phase_after(used)
    assert "code" not in other.state.offsets
    assert other.state.offsets[f"code@{sha256[:8]}"] == used["windows"]["code"] > 0
    assert other.state.offsets["web"] == used["windows"]["web"]
    begins = places(other)
    assert begins == fresh
    assert other.tokens_before() == 5 * GLOBAL_BATCH * 32
    train([other], steps=2)
    state = other.state_dict()["mixture"]
    resumed = job(lock, 1, 1)[0]
    resumed.mixture = other.mixture
    resumed.load_state_dict({"mixture": state})
    assert resumed.state_dict()["mixture"] == state

    (last,) = job(lock, 1, 1)
    last.start_phase_after(json.loads(state))
    assert last.state.offsets["code"] == used["windows"]["code"]
    assert last.state.offsets["code@ffffffff"] == other.windows_per_source()["code"] > 0
    assert last.tokens_before() == 7 * GLOBAL_BATCH * 32


def test_tokens_of_a_phase_with_windows_of_another_length_stay_what_they_were(lock):
    # Phase 3 of long windows behind phase 1 and 2 of short ones, through a checkpoint of each.
    (one,) = job(lock, 1, 1)
    before = {
        "windows": 10,
        "windows_left_out": 2,
        "contents": "0" * 64,
        "lengths": 512,
        "read": [],
    }
    one.start_phase_after({key: {"long": value} for key, value in before.items()})
    train([one], steps=3)
    (again,) = job(lock, 1, 1)
    again.load_state_dict(one.state_dict())
    (next_phase,) = job(lock, 1, 1)
    next_phase.start_phase_after(json.loads(one.state_dict()["mixture"]))
    assert (one.tokens_before(), again.tokens_before()) == (8 * 512, 8 * 512)
    assert one.tokens_per_source()["long"] == again.tokens_per_source()["long"] == 8 * 512
    assert next_phase.tokens_before() == 8 * 512 + 3 * GLOBAL_BATCH * 32


def test_other_weights_are_refused_and_unchanged_data_continues(data_folder, tmp_path):
    # A source may grow where nothing that was read of it changed; else the error says what would
    # repeat.
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    lock = data / "phase1.lock.json"
    (one,) = job(lock, 1, 1)
    train([one], steps=3)
    state = one.state_dict()
    weights = dict.fromkeys(one.mixture.source_names, 1)
    other = pin(data, "other", weights, one.mixture.seed, one.mixture.seq_len, 4)
    with pytest.raises(
        ValueError, match=r"its first 96 sequences are others; .* start a new phase"
    ):
        job(other, 1, 1)[0].load_state_dict(state)

    (grown,) = job(lock, 1, 1)
    grown.mixture.fingerprint = "0" * 64
    grown.mixture.contents = dict.fromkeys(grown.mixture.contents, "f" * 64)
    # other content, and all that was read of it is the same
    grown.load_state_dict(state)
    grown.mixture._file_sha256[0] = "f" * 64
    with pytest.raises(
        ValueError, match=r"windows were read: 0 of these lie in files that are unchanged"
    ):
        grown.load_state_dict(state)


def test_any_cut_and_resumes_with_other_world_sizes_give_the_same_batches(lock, wrap):
    # Four lives of one run, across the end of an epoch with a left-out window at it, while readers
    # are ahead.
    start, out = (wrap // GLOBAL_BATCH - 3) * GLOBAL_BATCH, range(wrap - 3, wrap + 7)
    state, parts, read = None, [], []
    for ranks, accumulation in ((2, 2), (4, 1), (1, 4), (8, 2)):
        loaders = job(lock, ranks, accumulation, windows=[(out[0], out[-1] + 1)])
        for of_rank in loaders:
            if state is None:
                of_rank.state.sequences = start
            else:
                of_rank.load_state_dict({"mixture": state})
        tokens, sources, state = train(loaders, steps=2)
        parts.append(tokens)
        read += sources.ravel().tolist()
    assert start < wrap < start + 8 * GLOBAL_BATCH
    numbers = [n for n in range(start, start + 20 * GLOBAL_BATCH) if n not in out][
        : 8 * GLOBAL_BATCH
    ]
    assert np.array_equal(np.concatenate(parts), read_sequences(lock, numbers))
    unshifted = read_sequences(lock, list(range(start, start + 8 * GLOBAL_BATCH)))
    # a forgotten window would be seen
    assert not np.array_equal(np.concatenate(parts), unshifted)
    (last,) = job(lock, 1, 1, windows=[(out[0], out[-1] + 1)])
    assert read == [int(last.mixture.sequences(n, 1)[1][0]) for n in numbers]
    last.load_state_dict({"mixture": state})
    # loading and saving changes nothing
    assert last.state_dict()["mixture"] == state


def test_counts_are_those_of_the_batches_across_phases_and_windows(data_folder, lock):
    # Used up, left out and trained on, by source: counted one by one, and as the loader computes
    # them.
    left_out = [(10, 25), (70, 71)]
    (one,) = job(lock, 1, 2, windows=left_out)
    _, sources, state = train([one], steps=3)
    names = one.mixture.source_names
    tokens_read = {name: int((sources == i).sum()) * 32 for i, name in enumerate(names)}
    assert one.tokens_per_source() == tokens_read
    out = np.concatenate([one.mixture.sequences(a, b - a)[1] for a, b in left_out])
    assert one.count_skipped_windows() == {
        name: int((out == i).sum()) for i, name in enumerate(names)
    }

    (two,) = job(data_folder / "phase2.lock.json", 1, 1, windows=[(4, 6)])
    two.start_phase_after(json.loads(state))
    assert two.tokens_before() == 3 * GLOBAL_BATCH * 32
    assert two.tokens_per_source() == tokens_read
    tokens, sources, _ = train([two], steps=2)
    for i, name in enumerate(two.mixture.source_names):
        tokens_read[name] = tokens_read.get(name, 0) + int((sources == i).sum()) * 32
    assert two.tokens_per_source() == tokens_read
    assert sum(tokens_read.values()) == 5 * GLOBAL_BATCH * 32
    # code, which both phases use, goes on behind the last window that phase 1 used up
    following, whose = one.mixture.sequences(one.mixture_reach, 20)
    code = two.mixture.source_names.index("code")
    assert np.array_equal(tokens[sources == code][0], following[whose == names.index("code")][0])

    (again,) = job(data_folder / "phase2.lock.json", 1, 1, windows=[(4, 6)])
    again.load_state_dict(two.state_dict())
    assert again.tokens_per_source() == tokens_read
    assert again.tokens_before() == two.tokens_before()


def test_damage_ends_the_batches_at_its_own(data_folder, tmp_path):
    # Readers are ahead of it: the batches before it arrive, then the error as the mixture words it.
    data = tmp_path / "data"
    shutil.copytree(data_folder, data)
    content = bytearray((data / "web/shard-00001.bin").read_bytes())
    content[1234] ^= 1
    (data / "web/shard-00001.bin").write_bytes(content)
    batches = []
    damaged = loader(data / "phase1.lock.json", batch=8, threads=4)
    with pytest.raises(
        ValueError, match=r"web/shard-00001\.bin: block 0 of 1 \(bytes 0 to 4098\) is damaged"
    ):
        batches.extend(damaged)
    before = damaged.mixture.windows_per_source(len(batches) * 8)["web"]
    after = damaged.mixture.windows_per_source(len(batches) * 8 + 8)["web"]
    # the refused batch is the first with a window of the damaged shard
    assert before <= 64 < after
    assert json.loads(damaged.state_dict()["mixture"])["sequences"] == len(batches) * 8


@pytest.mark.parametrize("threads", [1, 3])
def test_readers_keep_the_order_and_their_bound_and_end_with_the_iterator(threads):
    started: list[int] = []

    def read(number):
        started.append(number)
        return number

    before, results = set(threading.enumerate()), read_ahead(read, threads)
    assert list(islice(results, 50)) == list(range(50))
    readers = set(threading.enumerate()) - before
    assert len(readers) == threads
    # one that hangs does not keep the process
    assert all(reader.daemon for reader in readers)
    # torch's threads are left alone
    with ThreadPoolExecutor(1) as executor:
        assert executor.submit(torch.get_num_threads).result() == torch.get_num_threads()
    results.close()
    assert not any(reader.is_alive() for reader in readers)
    # none twice
    assert len(set(started)) == len(started)
    assert max(started) < 50 + threads * READ_AHEAD_BATCHES


@pytest.mark.parametrize(
    "problem", [TypeError("no batch 3"), CheckpointException("no batch 3", {}), SystemExit(3)]
)
def test_what_a_reader_raises_reaches_the_training_thread(problem):
    # The very object, so that the run folder's reason is the reader's; also what is no Exception.

    def read(number):
        if number == 3:
            raise problem
        return number

    results = read_ahead(read, 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(type(problem)) as raised:
        next(results)
    assert raised.value is problem
