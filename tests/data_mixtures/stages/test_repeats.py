"""Tests that repeated n-grams of tokens find exactly the documents of the plain rule."""

import numpy as np
import pytest

from data_mixtures.stages.repeats import MAX_PERIOD, TIMES, find_repeats


def plainly(document: list[int]) -> bool:
    return any(
        document[i : i + period] * TIMES == document[i : i + period * TIMES]
        for period in range(1, MAX_PERIOD + 1)
        for i in range(len(document) - period * TIMES + 1)
    )


@pytest.mark.parametrize("seed", range(3))
def test_exactly_the_documents_that_hold_a_run(seed):
    draw = np.random.default_rng(seed)
    documents = []
    for _ in range(60):
        before, after = (draw.integers(3, 40, draw.integers(0, 200)).tolist() for _ in range(2))
        gram = draw.integers(3, 40, draw.integers(1, 16)).tolist()
        # up to two tokens more or fewer than 32 repeats
        count = len(gram) * TIMES - int(draw.integers(-2, 3))
        run = (gram * (TIMES + 2))[:count] if draw.random() < 0.8 else []
        documents.append([1, *before, *run, *after, 2])
    expected = [plainly(document) for document in documents]
    assert 10 < sum(expected) < 50
    tokens = np.array([token for document in documents for token in document], np.uint16)
    assert (
        find_repeats(tokens, np.array([len(document) for document in documents])).tolist()
        == expected
    )


def test_a_run_does_not_reach_from_document_to_document_and_short_input_is_fine():
    tokens = np.full(60, 7, np.uint32)
    assert find_repeats(tokens, np.array([31, 29])).tolist() == [False, False]
    assert find_repeats(tokens, np.array([32, 28])).tolist() == [True, False]
    assert find_repeats(tokens[:0], np.array([], int)).tolist() == []
    assert find_repeats(tokens[:2], np.array([1, 1])).tolist() == [False, False]
