"""Engine and Transformers on the same bf16 weights: they choose alike, but for choices that
bf16 cannot tell apart.

Half of the questions have four answers that float64 scores almost alike, so that rounding decides; half have
answers far apart. Every answer is one token. What bf16 may change is the error of a plain bf16 forward on
these questions, the largest of all, and the rounding of the log-probability itself, which lm-eval keeps in
bf16 (8 bits: 2^-8 of it).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from evals.lm_eval.__main__ import evaluate
from evals.lm_eval.models import ScorerLM
from evals.lm_eval.tasks import data_folder
from laneformer.engine import Engine
from tests.evals.lm_eval.lm_eval_assets import export_tiny, write_data

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.distributed is disabled")
QUESTIONS = 40


class Exam(NamedTuple):
    """exact: float64 log p of the choices (questions, 4); rounding: what bf16 may change of one of them."""

    hf_dir: Path
    data: Path
    exact: np.ndarray
    rounding: float


def answers_of(model: Any, exam: Exam) -> np.ndarray:
    """log p of every choice as lm-eval sees it, float64 (questions, 4)."""
    with data_folder(exam.data, ["arc_easy"]):
        result = evaluate(model, ["arc_easy"], exam.hf_dir, num_fewshot=0)
    samples = sorted(result["samples"]["arc_easy"], key=lambda sample: sample["doc_id"])
    return np.array([[score for score, _ in sample["filtered_resps"]] for sample in samples])


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Exam:
    hf_dir = export_tiny(tmp_path_factory.mktemp("tiny"))
    tokenizer = ScorerLM(hf_dir)
    words = [i for i in range(1024) if tokenizer.tokenizer.convert_ids_to_tokens(i)[1:].isalpha()]
    words = [i for i in words if tokenizer.tokenizer.convert_ids_to_tokens(i)[0] == "\u2581"]
    texts = tokenizer.tokenizer.convert_ids_to_tokens(words)
    questions, exact, rounded = [], [], []
    models = [
        AutoModelForCausalLM.from_pretrained(hf_dir, trust_remote_code=True, dtype=dtype)
        for dtype in (torch.float64, torch.bfloat16)
    ]
    for i in range(QUESTIONS):
        question = f"Why does {texts[i][1:]} come before {texts[-i - 1][1:]}?"
        ids = torch.tensor([tokenizer.tok_encode(f"Question: {question}\nAnswer:")])
        with torch.no_grad():
            scores = [m(ids).logits[0, -1].double().log_softmax(-1)[words].numpy() for m in models]
        ranks = scores[0].argsort()[::-1]
        if i % 2:
            chosen = ranks[[0, -1, -2, -3]]
        else:
            first = int((scores[0][ranks[:-3]] - scores[0][ranks[3:]]).argmin())
            chosen = ranks[first : first + 4]
        chosen = np.roll(chosen, i // 2)
        questions.append((question, [texts[k][1:] for k in chosen], 0))
        exact.append(scores[0][chosen])
        rounded.append(scores[1][chosen])
    data = write_data(tmp_path_factory.mktemp("data"), questions)
    error = np.abs(np.array(exact) - np.array(rounded)) + 2.0**-8 * np.abs(exact)
    return Exam(hf_dir, data, np.array(exact), float(error.max()))


@pytest.fixture(scope="module")
def transformers(exam: Exam) -> np.ndarray:
    model = HFLM(str(exam.hf_dir), trust_remote_code=True, dtype="bfloat16", add_bos_token=True, device="cpu")
    return answers_of(model, exam)


@pytest.mark.job
@pytest.mark.parametrize("math", ["exact", "bf16"])
def test_choices_differ_only_where_bf16_cannot_tell(
    exam: Exam, transformers: np.ndarray, math: Literal["exact", "bf16"]
) -> None:
    model = ScorerLM(exam.hf_dir)
    model.scorer.engine = Engine.from_pretrained(exam.hf_dir, math=math)
    ours = answers_of(model, exam)
    assert np.abs(ours - exam.exact).max() <= exam.rounding
    assert np.abs(transformers - exam.exact).max() <= exam.rounding
    mine, its, rows = ours.argmax(1), transformers.argmax(1), np.arange(QUESTIONS)
    gaps = np.abs(exam.exact[rows, mine] - exam.exact[rows, its])
    assert gaps.max() <= 2 * exam.rounding, "no tie: one of the two models is wrong"
    ties = mine != its
    assert ties.any(), "the questions are too easy to say anything of ties"
    decided = exam.exact[1::2]
    assert (np.sort(decided)[:, -1] - np.sort(decided)[:, -2]).min() > 2 * exam.rounding
    assert not ties[1::2].any()


def test_a_forgotten_bos_would_be_seen(exam: Exam) -> None:
    without = answers_of(ScorerLM(exam.hf_dir, add_bos=False), exam)
    assert np.abs(without - exam.exact).max() > 2 * exam.rounding
