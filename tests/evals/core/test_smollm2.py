"""SmolLM2-135M-Instruct in both backends: as many right answers as the protocol's own implementation counted.

Opt-in: `python -m tests.smollm2` makes the folder that LANEFORMER_SMOLLM2 names, LANEFORMER_EVAL_DATA the public
rows. The counts are those of nanochat's core_eval on the same float32 weights, BOS id 1 (<|im_start|>), sequences of
2048.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from evals.core.evaluate import Settings, score_task
from evals.core.tasks import Bundle
from evals.items import Partial
from evals.scorer import Scorer, Source, open_scorer
from tests.evals.core.core_assets import eval_data, task


@pytest.fixture(scope="module", params=["transformers", "engine"])
def smollm2(request: pytest.FixtureRequest) -> Iterator[Scorer]:
    folder = os.environ.get("LANEFORMER_SMOLLM2")
    if not folder:
        pytest.skip("LANEFORMER_SMOLLM2 is not set: python -m tests.smollm2 makes the folder")
    scorer = open_scorer(Path(folder), Source(request.param, "cpu", max_length=2048))
    assert scorer.bos_id == 1
    dtypes = {"transformers": "float32", "engine": "fp32"}
    assert (scorer.backend, scorer.dtype) == (request.param, dtypes[request.param])
    yield scorer
    scorer.close()


@pytest.mark.rotate
@pytest.mark.parametrize(
    ("label", "asked", "right"),
    [("copa", 100, 56), ("bigbench_repeat_copy_logic", 16, 0), ("bigbench_operators", 40, 8)],
)
def test_counts_of_the_reference(smollm2: Scorer, label: str, asked: int, right: int) -> None:
    settings = Settings("nanochat", limit=asked)
    answers = score_task(task(label), Bundle(eval_data()), settings, smollm2, Partial())
    assert len(answers) == asked
    assert sum(answer["right"] for answer in answers) == right
