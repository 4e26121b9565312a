"""Packing: every conversation once and whole, nothing overlaps, windows are full, and the
result is a function.
"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_mixtures.mixture import BEGINS, TRAINED
from train.sft.conversations import Conversation
from train.sft.packing import pack, shuffled, streams

SIZE = 64
LENGTHS = st.lists(st.integers(1, SIZE), max_size=80)


def made(lengths: list[int]) -> list[Conversation]:
    """Conversations whose ids name them: number + 1 in all tokens, the second half trained."""
    each = enumerate(lengths)
    return [
        Conversation(n, np.full(size, n + 1, np.uint16), np.arange(size) >= (size + 1) // 2)
        for n, size in each
    ]


@given(LENGTHS)
def test_every_item_once_and_within_the_window(lengths: list[int]) -> None:
    windows = pack(lengths, SIZE)
    assert sorted(itertools.chain(*windows)) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in window) <= SIZE for window in windows)


@given(LENGTHS)
def test_no_two_windows_would_fit_into_one(lengths: list[int]) -> None:
    """So at most one is half empty, which bounds the padding; best fit also fills exact gaps."""
    fills = sorted(sum(lengths[i] for i in window) for window in pack(lengths, SIZE))
    assert all(a + b > SIZE for a, b in itertools.pairwise(fills))


@given(LENGTHS)
def test_each_item_went_where_the_least_room_was(lengths: list[int]) -> None:
    """Against the definition, computed slowly: fills after every item in decreasing order."""
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        open_windows = [fill for fill in fills if fill + length <= SIZE]
        if open_windows:
            fills.remove(max(open_windows))
        fills.append(max(open_windows, default=0) + length)
    assert sorted(fills) == sorted(sum(lengths[i] for i in window) for window in pack(lengths, SIZE))


def test_lengths_as_those_of_conversations_leave_little_padding() -> None:
    drawn = np.random.default_rng(1)
    lengths = np.clip(drawn.lognormal(5.5, 1.0, 20_000), 8, 4096).astype(int).tolist()
    windows = pack(lengths, 4096)
    assert sum(lengths) / (len(windows) * 4096) > 0.999


@given(LENGTHS.filter(bool))
def test_streams_hold_whole_conversations_and_untrained_padding(lengths: list[int]) -> None:
    conversations = made(lengths)
    windows = pack(lengths, SIZE)
    tokens, flags = streams(windows, conversations, SIZE, np.dtype("<u2"))
    assert len(tokens) == len(flags) == len(windows) * SIZE + 1
    begins = np.flatnonzero(flags & BEGINS)
    seen = set()
    for begin, end in itertools.pairwise([*begins, len(tokens)]):
        piece, trained = tokens[begin:end], flags[begin:end] & TRAINED > 0
        if piece[0] == 0:
            assert not piece.any()
            assert not trained.any()
            continue
        (number,) = set(piece.tolist())
        assert np.array_equal(piece, conversations[number - 1].ids)
        assert np.array_equal(trained, conversations[number - 1].trained)
        assert begin // SIZE == (end - 1) // SIZE, "a conversation lies in one window"
        seen.add(number - 1)
    assert seen == set(range(len(lengths)))
    assert set(range(0, len(tokens), SIZE)) <= set(begins.tolist()), "every window begins with a conversation"


def test_the_order_of_windows_is_a_function_of_keys_and_seed() -> None:
    windows, keys = [[i] for i in range(50)], list(range(100, 150))
    assert shuffled(windows, keys, 1) == shuffled(windows[::-1], keys, 1)
    assert sorted(shuffled(windows, keys, 1)) == windows
    assert len({str(shuffled(windows, keys, seed)) for seed in range(5)} | {str(windows)}) == 6
