"""Tests of the order: exact shares at every prefix, a permutation, closed-form counts."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data_mixtures import order

PUBLISHED = ([6320, 2100, 630, 500, 450], [1000, 5901, 3001, 0, 100])
WEIGHTS = st.lists(st.integers(0, 400), min_size=1, max_size=30).filter(any)


def worst_deviation(places, weights):
    """Return the largest |served - due| in sequences, over all sources and prefixes."""
    total = sum(weights)
    # prefix sums by source: (places, sources)
    served = np.cumsum(places[:, None] == np.arange(len(weights)), axis=0)
    due = np.arange(1, total + 1)[:, None] * np.asarray(weights)
    return np.abs(served * total - due).max() / total


def tijdeman_bound(weights):
    return 1 - 1 / max(2 * np.count_nonzero(weights) - 2, 1)


@settings(max_examples=60)
@given(WEIGHTS)
@example(PUBLISHED[0])
@example(PUBLISHED[1])
@example([1] * 40 + [400] + [23] * 17)  # the largest deficit first is late by more than a sequence
def test_any_weights_deviate_by_less_than_a_sequence(weights):
    places, _ = order.pattern(weights)
    assert worst_deviation(places, weights) <= tijdeman_bound(weights) < 1


def read_strides(windows, begin=0):
    """List the windows of a shard as epoch 0 reads them."""
    return (np.arange(windows) * order.stride(windows) + begin) % windows


@settings(max_examples=60)
@given(st.integers(1, 4000), st.integers(0, 2**63 - 1), st.integers(1, 200))
def test_epoch_0_reads_each_window_once_and_those_of_a_document_far_apart(windows, seed, apart):
    windows_in_order = read_strides(windows, order.begin(seed, "web", "shard-00000.bin", windows))
    # the inverse: at which read a window comes
    place = np.empty(windows, dtype=np.int64)
    place[windows_in_order] = np.arange(windows)
    assert np.array_equal(np.sort(windows_in_order), np.arange(windows))
    if apart < windows:
        # of all pairs of windows that lie so far apart
        distance = np.abs(place[apart:] - place[:-apart])
        assert distance.min() >= windows / ((order.MAX_QUOTIENT + 2) * apart)


def test_the_stride_never_changes():
    assert [order.stride(windows) for windows in (1, 2, 6, 54, 150, 8192, 32_768, 131_072)] == [
        1, 1, 5, 35, 91, 5065, 20_249, 81_003,
    ]  # fmt: skip
    assert order.begin(7, "web", "shard-00003.bin", 131_072) == 23_704
    # runs pin this name: another order needs another one
    assert order.RULE == "golden-stride"


def permute_range(size, keys):
    return np.array([order.permute(item, size, keys) for item in range(size)])


@settings(max_examples=50)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(1, 4))
@example(1, 7, 1)
@example(256, 7, 1)
@example(257, 7, 1)
@example(10_007, 7, 1)
def test_permutation_is_a_bijection_and_mixes(size, seed, epoch):
    permuted = permute_range(size, order.round_keys(seed, "web", epoch))
    assert np.array_equal(np.sort(permuted), np.arange(size))
    if size > 1000:
        # a random permutation keeps about 1 item in place and about 1 neighbour pair; 20 would be 1
        # in 10**18
        assert (permuted == np.arange(size)).sum() < 20
        assert (np.diff(permuted) == 1).sum() < 20


def test_the_permutation_never_changes():
    # newer code must go on with a run's order: these values are from when it was made
    keys = order.round_keys(7, "web", 1)
    assert [order.permute(item, 10_007, keys) for item in range(5)] == [672, 6279, 1272, 4068, 1600]
    assert order.permute(10**12, 3 * 10**12, keys) == 385_436_415_090


def test_permutation_depends_on_seed_source_and_epoch():
    keys = [order.round_keys(*key) for key in ((1, "a", 1), (2, "a", 1), (1, "b", 1), (1, "a", 2))]
    permuted = [permute_range(5000, key) for key in keys]
    for i in range(4):
        for j in range(i):
            # about 1 equal place is expected by chance
            assert (permuted[i] == permuted[j]).sum() < 25


@settings(max_examples=40)
@given(WEIGHTS, st.integers(0, 20_000))
def test_closed_form_counts_equal_counted_ones(weights, sequences):
    places, _ = order.pattern(weights)
    counts = np.bincount(places[np.arange(sequences) % len(places)], minlength=len(weights))
    assert order.count_served(weights, places, sequences).tolist() == counts.tolist()


@pytest.mark.parametrize(
    "weights", [[], [0, 0], [-1, 2], [1.5, 1], [True, 2], [order.MAX_WEIGHT_SUM, 1]]
)
def test_bad_weights_are_refused(weights):
    with pytest.raises(ValueError, match="weight"):
        order.pattern(weights)
