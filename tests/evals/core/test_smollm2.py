"""Test that SmolLM2-135M-Instruct gets as many right answers as in the protocol's own code.

Opt-in: `python -m tests.smollm2` makes the folder that LANEFORMER_SMOLLM2 names,
LANEFORMER_EVAL_DATA the public rows. The counts are those of nanochat's core_eval on the same
float32 weights, BOS id 1 (<|im_start|>), sequences of 2048.
"""

import os
from pathlib import Path

import pytest

from evals.core.evaluate import Settings, score_task
from evals.core.tasks import Bundle
from evals.items import Partial
from evals.scorer import Answerer, open_scorer
from tests.evals.core.core_assets import eval_data, task


@pytest.mark.rotate
@pytest.mark.parametrize("backend", ["transformers", "engine"])
def test_counts_of_the_reference(backend):
    folder = os.environ.get("LANEFORMER_SMOLLM2")
    if not folder:
        pytest.skip("LANEFORMER_SMOLLM2 is not set: python -m tests.smollm2 makes the folder")
    scorer = open_scorer(Path(folder), Answerer(backend, "cpu", max_length=2048))
    assert scorer.bos_id == 1
    for label, limit, right in (
        ("copa", 100, 56),
        ("bigbench_repeat_copy_logic", 16, 0),
        ("bigbench_operators", 40, 8),
    ):
        settings = Settings("nanochat", limit=limit)
        answers = score_task(task(label), Bundle(eval_data()), settings, scorer, Partial())
        assert (len(answers), sum(answer["right"] for answer in answers)) == (limit, right), label
    scorer.close()
