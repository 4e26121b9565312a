"""Documents in which a run of tokens is repeated many times in a row, such as "ha ha ha" or an empty table.

The rule of OLMo-core's InstanceFilterConfig, which masks such windows while training because they cause loss
spikes: 1 to 13 tokens, 32 times in a row. Here the document is dropped before the shuffle. Windows are fixed
by the stream of tokens and each is delivered once, so to leave out a window would leave out the ends of two
other documents with it.
"""

from __future__ import annotations

import numpy as np

MAX_PERIOD, TIMES = 13, 32
_SAMPLES = 4  # that lie in the shortest run


def repeated(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool (documents,): which of the documents that lie in `tokens` one after the other hold such a run.

    token i equals token i + period all along a run, so samples at a quarter of the shortest run's length find
    suspects in half a comparison per token; those are looked at in full.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    found = np.zeros(len(lengths), bool)
    for period in range(1, MAX_PERIOD + 1):
        shortest = (TIMES - 1) * period
        step = shortest // _SAMPLES
        same = tokens[:-period:step] == tokens[period::step]
        runs = (
            np.lib.stride_tricks.sliding_window_view(same, _SAMPLES)
            if len(same) >= _SAMPLES
            else same[:0, None]
        )
        suspects = np.unique(np.searchsorted(ends, np.flatnonzero(runs.all(axis=1)) * step, side="right"))
        for place in suspects[~found[suspects]]:
            document = tokens[ends[place] - lengths[place] : ends[place]]
            found[place] = _longest_run(document, period) >= shortest
    return found


def _longest_run(tokens: np.ndarray, period: int) -> int:
    """The most positions in a row at which a token equals the one `period` later."""
    differ = np.flatnonzero(tokens[:-period] != tokens[period:])
    return int(np.diff(differ, prepend=-1, append=max(len(tokens) - period, 0)).max()) - 1
