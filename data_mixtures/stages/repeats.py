"""Repeated n-grams of tokens ([filter] repeated_ngrams), which `tokenize` looks for.

The rule of OLMo-core's InstanceFilterConfig, which masks such windows while training because they
cause loss spikes: 1 to 13 tokens, 32 times in a row, such as "ha ha ha" or an empty table. Here the
document is dropped before the shuffle: windows are fixed by the stream of tokens, so to leave one out
would leave out the ends of two other documents with it.
"""

from __future__ import annotations

import numpy as np

MAX_PERIOD, TIMES = 13, 32  # tokens, and how often in a row


def find_repeats(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return which of the consecutive documents hold many repeats of an n-gram: bool (documents,)."""
    ends = np.cumsum(lengths, dtype=np.int64)
    has_run = np.zeros(len(lengths), bool)
    for period in range(1, MAX_PERIOD + 1):
        # in a run, token i equals token i + period, which sums tell
        shortest = (TIMES - 1) * period
        repeats = tokens[:-period] == tokens[period:]
        equal = np.cumsum(np.append(False, repeats), dtype=np.int32)
        starts = np.flatnonzero(equal[shortest:] - equal[:-shortest] == shortest)
        document = np.searchsorted(ends, starts, side="right")
        has_run[document[starts + shortest + period <= ends[document]]] = True
    return has_run
