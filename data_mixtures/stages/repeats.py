"""Documents in which a run of tokens is repeated many times in a row, such as "ha ha ha" or an empty table.

The rule of OLMo-core's InstanceFilterConfig, which masks such windows while training because they cause loss
spikes: 1 to 13 tokens, 32 times in a row. Here the document is dropped before the shuffle. Windows are fixed
by the stream of tokens and each is delivered once, so to leave out a window would leave out the ends of two
other documents with it.
"""

from __future__ import annotations

import numpy as np

MAX_PERIOD, TIMES = 13, 32


def repeated(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool (documents,): which of the documents that lie in `tokens` one after the other hold such a run."""
    ends = np.cumsum(lengths, dtype=np.int64)
    has_run = np.zeros(len(lengths), bool)
    for period in range(1, MAX_PERIOD + 1):  # in a run, token i equals token i + period, which sums tell
        shortest = (TIMES - 1) * period
        equal = np.cumsum(np.append(False, tokens[:-period] == tokens[period:]), dtype=np.int32)
        starts = np.flatnonzero(equal[shortest:] - equal[:-shortest] == shortest)
        document = np.searchsorted(ends, starts, side="right")
        has_run[document[starts + shortest + period <= ends[document]]] = True
    return has_run
