"""Left-out sequences: the mapping against a list, and contradictions of a checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from records.files import read_json
from records.skips import SkipList, append_skips, ranges_of, read_skip_list

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 9)).map(lambda w: (w[0], w[0] + w[1])), max_size=6
)


@given(RANGES, st.integers(0, 40), st.integers(1, 30))
def test_numbers_are_those_in_no_range(ranges, first, count):
    skipped = {g for a, b in ranges for g in range(a, b)}
    remaining = [g for g in range(200) if g not in skipped]
    skips = SkipList(ranges)
    assert skips.numbers(first, count).tolist() == remaining[first : first + count]
    assert skips.reach(first) == (remaining[first - 1] + 1 if first else 0)


@given(st.sets(st.integers(0, 50)))
def test_ranges_of_is_the_way_back(numbers):
    ordered = np.array(sorted(numbers), dtype=np.int64)
    assert sorted(numbers) == [g for first, last in ranges_of(ordered) for g in range(first, last)]


def test_ranges_that_mean_nothing():
    for interval in (5, 5), (-1, 3), (4, 2), (1, 2, 3):
        with pytest.raises(ValueError, match="skipped range"):
            SkipList([interval])


def test_the_run_folder_remembers(tmp_path):
    append_skips(tmp_path, [[8, 12]], "step 3: the loss is nan")
    append_skips(tmp_path, [[20, 24]], "step 6: the loss is nan")
    assert read_skip_list(tmp_path, [(0, 2)]).ranges == [(0, 2), (8, 12), (20, 24)]
    entries = read_json(tmp_path / "skip_sequences.json")
    assert [entry["reason"][:6] for entry in entries] == ["step 3", "step 6"]


@pytest.mark.job
def test_the_loader_goes_on_behind_a_range_and_refuses_a_contradiction(data_folder):
    pytest.importorskip("torchtitan")
    from train.data import MixtureLoader

    def loader(*ranges):
        return MixtureLoader(data_folder / "phase1.lock.json", 0, 2, 2, 1, SkipList(ranges))

    ahead = loader((5, 9))
    ahead.state.sequences = 4
    # a skipped range that lies ahead of the position contradicts nothing
    loader().load_state_dict(ahead.state_dict())
    ahead.state.sequences = 8
    for ranges in ((), ((5, 8),), ((0, 1), (5, 9))):
        with pytest.raises(ValueError, match="has left out the sequences"):
            loader(*ranges).load_state_dict(ahead.state_dict())
    same = loader((5, 9), (100, 120))
    same.load_state_dict(ahead.state_dict())
    assert [place["sequence"] for place in same.locate(4, 4)] == [4, 9, 10, 11]
    assert same.state_dict()["mixture"] == ahead.state_dict()["mixture"]
