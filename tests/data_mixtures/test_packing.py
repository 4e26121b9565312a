"""Tests of best-fit-decreasing packing: whole documents where they fit, each label once."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_mixtures.mixture import BEGINS, TRAINED
from data_mixtures.packing import best_fit, pack

SIZE = 64
LENGTHS = st.lists(st.integers(1, SIZE), max_size=80)


@given(LENGTHS)
def test_each_item_went_where_the_least_room_was(lengths):
    # the definition, computed slowly: fills after every item in decreasing order
    fills: list[int] = []
    for length in sorted(lengths, reverse=True):
        open_windows = [fill for fill in fills if fill + length <= SIZE]
        if open_windows:
            fills.remove(max(open_windows))
        fills.append(max(open_windows, default=0) + length)
    assert sorted(fills) == sorted(
        sum(lengths[i] for i in window) for window in pack(lengths, SIZE)
    )


@given(st.lists(st.integers(2, 5 * SIZE), max_size=40))
def test_documents_are_whole_where_they_fit_and_each_token_is_a_label_once(lengths):
    # a document's first token names it: 1 + 1000 n
    documents = [1 + np.arange(size, dtype=np.uint16) + 1000 * n for n, size in enumerate(lengths)]
    stream = np.concatenate([np.empty(0, np.uint16), *documents])
    packed = best_fit(stream, np.array(lengths, np.int64), np.arange(len(lengths)), SIZE, seed=3)
    count = len(packed.tokens) // SIZE
    assert len(packed.tokens) == len(packed.flags) == (count * SIZE + 1 if lengths else 0)
    rows = [slice(at * SIZE, (at + 1) * SIZE) for at in range(count)]
    # the window's last label is the next one's first token
    labels = [
        packed.tokens[window][1:][(packed.flags[window][1:] & TRAINED) > 0] for window in rows
    ]
    assert sorted(np.concatenate([[], *labels])) == sorted(
        np.concatenate([[], *(ids[1:] for ids in documents)])
    )
    assert not any(packed.flags[window][0] & TRAINED for window in rows)
    begins = np.flatnonzero(packed.flags & BEGINS)
    for n, document in enumerate(documents):
        places = np.flatnonzero(packed.tokens == document[0])
        assert len(places) == 1
        fits = packed.tokens[places[0] : places[0] + len(document)]
        whole = (
            np.array_equal(fits, document)
            and places[0] // SIZE == (places[0] + len(document) - 1) // SIZE
        )
        assert whole == (lengths[n] <= SIZE)
        # one mark inside of a document's first window: its own beginning
        inside = (begins >= places[0]) & (begins < places[0] + min(len(document), SIZE))
        assert begins[inside].tolist() == places.tolist(), "padding and other documents are apart"
    assert [
        int(t) // 1000 for t in packed.tokens[(packed.tokens % 1000 == 1)]
    ] == packed.order.tolist()
    # a document of several windows repeats one token at each cut
    used = sum(size + max(-(-(size - 1) // (SIZE - 1)) - 1, 0) for size in lengths)
    assert packed.padding == count * SIZE - used == int((packed.tokens[: count * SIZE] == 0).sum())
