"""Packing: every conversation once and whole, nothing overlaps, windows are full, and the
result is a function.
"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_mixtures.mixture import BEGINS, TRAINED
from data_mixtures.packing import best_fit, pack, streams
from train.sft.conversations import Conversation

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
def test_each_item_went_where_the_least_room_was(lengths: list[int]) -> None:
    """Against the definition, computed slowly: fills after every item in decreasing order."""
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        open_windows = [fill for fill in fills if fill + length <= SIZE]
        if open_windows:
            fills.remove(max(open_windows))
        fills.append(max(open_windows, default=0) + length)
    assert sorted(fills) == sorted(sum(lengths[i] for i in window) for window in pack(lengths, SIZE))


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


@given(st.lists(st.integers(2, 5 * SIZE), max_size=40))
def test_documents_are_whole_where_they_fit_and_each_token_is_a_label_once(lengths: list[int]) -> None:
    documents = [1 + np.arange(size, dtype=np.uint16) + 1000 * n for n, size in enumerate(lengths)]
    stream = np.concatenate([np.empty(0, np.uint16), *documents])
    made = best_fit(stream, np.array(lengths, np.int64), np.arange(len(lengths)), SIZE, seed=3)
    count = len(made.tokens) // SIZE
    assert len(made.tokens) == len(made.flags) == (count * SIZE + 1 if lengths else 0)
    rows = [slice(at * SIZE, (at + 1) * SIZE) for at in range(count)]
    labels = [
        made.tokens[here][1:][(made.flags[here][1:] & TRAINED) > 0] for here in rows
    ]  # the window's last label is the next one's first token
    assert sorted(np.concatenate([[], *labels])) == sorted(
        np.concatenate([[], *(each[1:] for each in documents)])
    )
    assert not any(made.flags[here][0] & TRAINED for here in rows)
    for n, document in enumerate(documents):
        places = np.flatnonzero(made.tokens == document[0])
        assert len(places) == 1
        fits = made.tokens[places[0] : places[0] + len(document)]
        whole = (
            np.array_equal(fits, document) and places[0] // SIZE == (places[0] + len(document) - 1) // SIZE
        )
        assert whole == (lengths[n] <= SIZE)
    assert [int(t) // 1000 for t in made.tokens[(made.tokens % 1000 == 1)]] == made.order.tolist()
    used = sum(size + max(-(-(size - 1) // (SIZE - 1)) - 1, 0) for size in lengths)
    assert made.padding == count * SIZE - used == int((made.tokens[: count * SIZE] == 0).sum())
