"""Drafts by the model's own head: its logits are those of model.py. That no token changes: test_speculate.py."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import Laneformer, LaneformerConfig
from laneformer.config import DRAFT_IDS
from laneformer.engine import Engine
from tests.laneformer.drafts import draft_logits
from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    random_model,
    small_config,
    widened,
    write_folder,
)
from tests.laneformer.engine.test_speculate import model_with_head, set_draft_cost


def take_drafts(engine: Engine) -> list[tuple[list[int], int, np.ndarray]]:
    """The text, the drafts before this one, and its logits (V,): of all since the last call, if there was one."""
    return engine._open().recorded_drafts()  # type: ignore[attr-defined]


@torch.no_grad()
def reference(wide: Laneformer, ids: list[int], drafts: int) -> np.ndarray:
    """Logits (V,) of the draft after `ids`, of which the last `drafts` were drafted after the others."""
    logits = draft_logits(wide, torch.tensor([ids]), drafts + 1)[drafts][0, -1].numpy()
    if DRAFT_IDS in wide.state_dict():
        impossible = np.ones(len(logits), bool)
        impossible[wide.state_dict()[DRAFT_IDS].long().numpy()] = False
        logits[impossible] = -np.inf
    return logits


def largest_error(model: Laneformer, engine: Engine) -> float:
    """Of the logits of the last draft of each step, beyond eight times the error that float32 makes of the same draft
    in PyTorch.
    """
    of_step, worst = {step: (ids, logits) for ids, step, logits in take_drafts(engine)}, -np.inf
    assert len(of_step) >= 4
    double, single = widened(model, torch.float64), widened(model, torch.float32)
    for step, (ids, logits) in of_step.items():
        exact = reference(double, ids, step)
        assert np.array_equal(np.isinf(logits), np.isinf(exact))
        can = np.isfinite(exact)
        rounding = np.abs(reference(single, ids, step)[can] - exact[can]).max()
        worst = max(worst, float(np.abs(logits[can] - exact[can]).max() - 8 * rounding))
    return worst


@pytest.mark.job
@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        ({"broadcast_delay": 0}, 1),
        ({"broadcast_delay": 1}, 2),
        ({}, 8),  # two of each lane
        ({"deliver_tail": False}, 2),
        ({"broadcast_delay": 3, "draft_vocab_size": 40}, 3),
        ({"lm_head_type": "replicate", "draft_vocab_size": 40}, 2),
        ({"lm_head_type": "replicate", "pre_norm_lane_agg": True, "deliver_tail": False}, 2),
        ({"use_early_comm": False, "replicated_rmsn_scale": False}, 2),
        ({"num_lanes": 1}, 1),
        ({"flush": True}, 3),  # the head reads what the flush has summed, and sums nothing again
        ({"flush": True, "first_late_layer": 3, "broadcast_delay": 1, "deliver_tail": False}, 8),
        ({"dtype": "bf16", "draft_vocab_size": 40}, 2),
        ({"dtype": "fp16", "draft_vocab_size": 40}, 2),
    ],
)
def test_logits_of_drafts_are_the_models(overrides: dict[str, Any], threads: int) -> None:
    """Also after a prompt from the cache, whose keys of the head are kept as well."""
    model = model_with_head(**overrides)
    prompt = random_ids(model.config, 150, 1)  # two passes
    with engine_of(model, threads=threads) as engine:
        take_drafts(set_draft_cost(engine))
        engine.generate(prompt, max_new_tokens=20)
        assert largest_error(model, engine) < 0
        again = engine.generate_detailed(prompt, max_new_tokens=20, temperature=1.5, seed=1).statistics
        assert again.reused_tokens == len(prompt) - 1
        assert largest_error(model, engine) < 0


@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.999), ("int4", 0.9)])
def test_quantised_drafts_are_near(dtype: str, least: float) -> None:
    model = model_with_head(dtype="bf16", draft_vocab_size=40)
    with engine_of(model, dtype=dtype, threads=2) as engine:
        take_drafts(set_draft_cost(engine))
        engine.generate(random_ids(model.config, 30, 1), max_new_tokens=20)
        ids, step, logits = take_drafts(engine)[0]
    exact = reference(widened(model, torch.float64), ids, step)
    can = np.isfinite(exact)
    assert np.corrcoef(logits[can], exact[can])[0, 1] > least


@functools.cache
def learnt() -> tuple[Laneformer, list[int]]:
    """A head that has learnt one text of its model by heart, and the text's prompt."""
    torch.manual_seed(0)
    model = model_with_head()
    prompt = random_ids(model.config, 60, 1)
    with engine_of(model) as engine:
        text = torch.tensor([prompt + engine.generate(prompt, max_new_tokens=50, speculate=0)])
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("mtp."))
    head = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(head, lr=0.01)
    for _ in range(45):
        losses = [
            torch.nn.functional.cross_entropy(logits[0], text[0, step + 1 :][: logits.shape[1]])
            for step, logits in enumerate((x[:, :-1] for x in draft_logits(model, text, 3)), 1)
        ]
        optimizer.zero_grad()
        sum(losses).backward()
        optimizer.step()
    return model, prompt


@pytest.mark.job  # trains the head
@pytest.mark.parametrize(
    "options", [{"threads": 3}, pytest.param({"threads": 1, "processes": 2}, marks=pytest.mark.rotate)]
)
def test_a_head_that_knows_the_text_is_right(options: dict[str, Any]) -> None:
    model, prompt = learnt()
    with engine_of(model, **options) as engine:
        plain = engine.generate(prompt, max_new_tokens=50, speculate=0)
        set_draft_cost(engine)
        quick = engine.generate_detailed(prompt, max_new_tokens=50, reuse_prefix=False)
    assert quick.ids == plain
    assert quick.statistics.accepted_tokens >= 0.9 * quick.statistics.proposed_tokens
    assert quick.statistics.passes < 20


def test_drafts_that_do_not_pay_are_not_made() -> None:
    model = model_with_head()
    with engine_of(model) as engine:
        set_draft_cost(engine, draft=2.0)
        prompt, options = random_ids(model.config, 30, 3), {"max_new_tokens": 60, "reuse_prefix": False}
        engine.generate(prompt, **options)
        take_drafts(engine)
        engine.generate(prompt, **options)
        assert not take_drafts(engine)


def test_a_folder_with_a_head_loads_and_its_packed_weights_again(tmp_path: Path) -> None:
    model = model_with_head(dtype="bf16", draft_vocab_size=40)
    folder = write_folder(tmp_path / "model", model)
    answers = []
    for _ in range(2):  # the second time from the packed weights
        with Engine.from_pretrained(folder, threads=2, kv_dtype="fp32") as engine:
            assert engine.draft_head is not None
            assert engine.draft_head.ids == 40
            assert 0 < engine.draft_head.weight_bytes < engine.weight_bytes
            take_drafts(set_draft_cost(engine))
            answers.append(engine.generate([1, 2, 3], max_new_tokens=20))
            assert largest_error(model, engine) < 0
    assert answers[0] == answers[1]
    model.state_dict()[DRAFT_IDS][1] = 0
    with pytest.raises(ValueError, match="ascending order"):
        Engine.from_pretrained(write_folder(folder, model), cache=False)
    with engine_of(random_model(small_config())) as engine:
        assert engine.draft_head is None


def test_a_random_head_has_ids_of_every_lane() -> None:
    config = LaneformerConfig.from_flavor("tiny", num_nextn_predict_layers=1, draft_vocab_size=64)
    with warnings.catch_warnings(), Engine.random(config, threads=1) as engine:
        warnings.simplefilter("error")
        assert len(engine.generate([1, 2, 3], max_new_tokens=8)) == 8
