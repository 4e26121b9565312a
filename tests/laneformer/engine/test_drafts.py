"""Tests of drafts: their sources (the text, a small model, the model's own head) and their cost."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from laneformer import Laneformer
from laneformer.config import DRAFT_IDS
from laneformer.engine import Engine, bench
from laneformer.engine.cpu import _core
from tests.laneformer.drafts import draft_logits
from tests.laneformer.engine.assets import (
    core,
    engine_of,
    random_ids,
    small_model,
    widen_model,
    write_folder,
)

LONGEST = 64  # ids that agree
LONG = {"max_position_embeddings": 256}
CHEAP = 0.001  # of the cost of a pass: so that many are made


def longest_end(text: list[int], other: list[int], own: bool) -> tuple[int, int]:
    """Return, by brute force, the length of the longest end of `text` in `other` and the index after it."""
    best = (0, 0)
    for place in range(1, len(other)):
        pairs = zip(reversed(other[:place]), reversed(text), strict=False)
        length = min(LONGEST, len(list(itertools.takewhile(lambda p: p[0] == p[1], pairs))))
        if not (own and place == len(text)) and length >= max(2, best[0]):
            best = (length, place)
    return best


# test_goldens.py shows that no request's tokens depend on drafts, test_logprobs.py that no
# log-probability does.
@pytest.mark.parametrize("vocab", [3, 30, 3000])
def test_drafts_follow_the_longest_end_that_stood_before(vocab):
    draw, drafted = random.Random(vocab), 0
    phrases = [[draw.randrange(vocab) for _ in range(draw.randrange(2, 90))] for _ in range(6)]
    text = [draw.randrange(vocab) for _ in range(5)]
    drafter = _core.Drafter([], text, [])
    for _ in range(300):
        for i in draw.choice(phrases) if draw.random() < 0.1 else [draw.randrange(vocab)]:
            drafter.extend(i)
            text.append(i)
        drafts, odds = drafter.propose(5)
        length, place = longest_end(text, text, own=True)
        if vocab > 3:  # else the walk over a chain of many places may end before the longest one
            assert bool(drafts) == (length >= 2)
            follows = (text[place:] + drafts)[:5] if drafts else []
            assert drafts == follows
        assert odds == sorted(odds, reverse=True)
        drafted += bool(drafts)
    assert drafted > 20


def test_prediction_and_past_outputs_are_texts_too():
    past = [list(range(100, 140)), list(range(300, 310))]
    drafter = _core.Drafter(prediction=[7, 8, 9, 10, 11], prompt=[1, 2, 8, 9], past=past)
    assert drafter.propose(9)[0] == [
        10,
        11,
    ]  # and no further: the prompt does not follow a prediction
    for i in (104, 105):
        drafter.extend(i)
    assert drafter.propose(3)[0] == [106, 107, 108]
    for i in (308, 309):
        drafter.extend(i)
    assert drafter.propose(3)[0] == []  # that output's end


def test_odds_follow_what_was_right_and_drafts_are_tried_again():
    drafter = _core.Drafter([], [1, 2, 3, 4, 5, 6] * 4, [])
    first = drafter.propose(4)[1]
    # all of these drafts were wrong, so odds fall
    for _ in range(20):
        drafter.learn(4, 0)
    assert drafter.propose(4)[1][0] < 0.2 * first[0]
    for _ in range(400):  # proposals that were not tried
        drafter.learn(0, 0)
    assert drafter.propose(4)[1][0] > 0.8 * first[0]
    for _ in range(100):
        drafter.propose(4)
        drafter.learn(4, 4)
    assert drafter.propose(4)[1][3] > 0.9


def test_cost_is_what_passes_took():
    cost = _core.Cost()
    assert cost.of(1) == 1.0
    # the cost of one column and of four; others are interpolated or extrapolated
    for _ in range(50):
        cost.learn(1, 0.010)
        cost.learn(4, 0.014)
    assert cost.of(1) == pytest.approx(0.010)
    assert cost.of(3) == pytest.approx(0.010 + 0.004 * 2 / 3)
    assert cost.of(8) > cost.of(4)
    assert cost.of(64) == pytest.approx(2 * cost.of(32))
    cost.learn(1, 10.0)  # the thread had lost its core
    assert cost.of(1) < 0.012
    for _ in range(1000):
        cost.learn(1, 0.020)
    assert cost.of(4) > 0.020  # what was long ago counts no more


# ---- engines ----


def model_with_head(seed=0, dtype="fp32", **overrides) -> Laneformer:
    model = small_model(
        **{"num_nextn_predict_layers": 1, **LONG, **overrides}, seed=seed, dtype=dtype
    )
    if ids := model.config.draft_vocab_size:
        # any ids in ascending order, so that a draft's row is not its id
        spread = torch.randperm(
            model.config.vocab_size, generator=torch.Generator().manual_seed(seed)
        )[:ids]
        model.state_dict()[DRAFT_IDS].copy_(spread.sort().values)
    return model


def set_draft_cost(engine, column=CHEAP, draft=CHEAP) -> Engine:
    core(engine).fix_cost(column, draft)
    return engine


@pytest.mark.parametrize("each_column", [0.0, 0.25, 2.0])
def test_as_many_drafts_are_tried_as_their_columns_are_worth(each_column):
    with engine_of(small_model(vocab_size=100, max_position_embeddings=192)) as engine:
        core(engine).fix_cost(each_column)
        forced = {"logit_bias": {5: 100}, "max_new_tokens": 100}
        # the bias forces the same token for ever, so every draft of it is right
        repeats = engine.generate_detailed([5] * 40, **forced).statistics
        assert repeats.passes == 100 - repeats.accepted_tokens
        if each_column == 2.0:  # not even what is certain
            assert repeats.proposed_tokens == 0
        else:
            assert repeats.accepted_tokens > 60


def test_a_prediction_is_drafted_and_changes_no_token():
    with engine_of(small_model(max_position_embeddings=192)) as engine:
        prompt, options = [3, 1, 4, 1, 5], {"max_new_tokens": 60, "temperature": 1.0, "seed": 5}
        # the reference: the same draws without any drafts
        plain = engine.generate(prompt, **options, speculate=0)
        predicted = engine.generate_detailed(prompt, **options, prediction=plain)
        assert predicted.ids == plain
        assert predicted.statistics.accepted_tokens > 40


@pytest.mark.parametrize(("each_column", "temperature"), [(0.05, 1.0), (0.25, 0.0), (0.6, 1.0)])
def test_drafts_cost_next_to_nothing_where_they_fail(each_column, temperature):
    # measured as the cost of columns; with few ids, ends of the text recur often and predict little
    with engine_of(small_model(vocab_size=16, max_position_embeddings=512)) as engine:
        core(engine).fix_cost(each_column)
        for seed in range(3):
            prompt = [random.Random(seed).randrange(16) for _ in range(40)]
            options = {
                "max_new_tokens": 400,
                "temperature": temperature,
                "seed": seed,
                "ignore_eos": True,
            }
            statistics = engine.generate_detailed(prompt, **options, reuse_prefix=False).statistics
            assert statistics.passes + each_column * statistics.proposed_tokens < 1.03 * 400


@pytest.mark.parametrize("source", ["model", "head"])
def test_drafts_that_do_not_pay_are_not_made(source):
    large = model_with_head(draft_vocab_size=40) if source == "head" else small_model(**LONG)
    small = small_model(**LONG, num_hidden_layers=3, swa_layers=(), seed=1)
    with engine_of(large) as engine, engine_of(small) as other:
        if source == "model":
            core(engine).draft_with(core(other))
        # a draft costs as much as two passes
        take_drafts(set_draft_cost(engine, draft=2.0))
        engine.generate(random_ids(engine.config, 30, 3), max_new_tokens=60, reuse_prefix=False)
        assert not take_drafts(engine)


def test_drafts_end_with_the_context():
    with engine_of(small_model()) as engine:
        assert (
            engine.generate([5] * 90, max_new_tokens=50, logit_bias={5: 100}, speculate=31)
            == [5] * 7
        )


def test_a_model_that_drafts_for_itself_is_always_right():
    # equal seeds draw equal tokens, so that even sampled drafts are all accepted
    model = small_model(**LONG)
    options = {"max_new_tokens": 100, "ignore_eos": True, "temperature": 1.0, "seed": 7}
    with engine_of(model, threads=3) as engine, engine_of(model, threads=3) as small:
        core(engine).draft_with(core(small))
        set_draft_cost(engine)
        figures = engine.generate_detailed(random_ids(model.config, 40, 1), **options).statistics
    assert figures.accepted_tokens == figures.proposed_tokens > 60
    assert figures.passes < 50


def test_a_small_model_comes_from_a_folder_and_has_the_same_vocabulary(tmp_path):
    large, small = tmp_path / "large", tmp_path / "small"
    write_folder(large, small_model(num_hidden_layers=7, swa_layers=()))
    write_folder(small, small_model(vocab_size=104))
    with pytest.raises(ValueError, match="take a small model of the same family"):
        Engine.from_pretrained(large, draft=small, cache=False)
    write_folder(small, small_model())
    with Engine.from_pretrained(large, draft=small, cache=False) as engine:
        assert engine.draft_model
        assert engine.draft_model.weight_bytes > 0
        assert len(engine.generate([1, 2, 3], max_new_tokens=20)) == 20


# ---- the head ----


def take_drafts(engine) -> list[tuple[list[int], int, np.ndarray]]:
    """Return ids, the number of drafts at their end, and logits (V,) of each draft since the last call."""
    return core(engine).recorded_drafts()


@torch.no_grad()
def reference(wide: Laneformer, ids: list[int], drafts: int) -> np.ndarray:
    """Return the logits (V,) of the draft after `ids`, of which the last `drafts` were drafted."""
    logits = draft_logits(wide, torch.tensor([ids]), drafts + 1)[drafts][0, -1].numpy()
    if DRAFT_IDS in wide.state_dict():
        # a head over fewer ids never drafts the others
        impossible = np.ones(len(logits), bool)
        impossible[wide.state_dict()[DRAFT_IDS].long().numpy()] = False
        logits[impossible] = -np.inf
    return logits


def largest_error(model, engine) -> float:
    """Return the largest error of the last draft's logits, beyond eight times that of PyTorch in float32."""
    of_step, worst = {step: (ids, logits) for ids, step, logits in take_drafts(engine)}, -np.inf
    assert len(of_step) >= 4
    double, single = widen_model(model, torch.float64), widen_model(model, torch.float32)
    for step, (ids, logits) in of_step.items():
        exact = reference(double, ids, step)
        assert np.array_equal(np.isinf(logits), np.isinf(exact))
        can = np.isfinite(exact)
        rounding = np.abs(reference(single, ids, step)[can] - exact[can]).max()
        # ids outside the head's vocabulary are -inf on both sides
        worst = max(worst, float(np.abs(logits[can] - exact[can]).max() - 8 * rounding))
    return worst


@pytest.mark.job
@pytest.mark.parametrize(
    ("overrides", "threads"),
    [
        ({"broadcast_delay": 0}, 1),
        ({}, 8),  # two of each lane
        ({"deliver_tail": False}, 2),
        ({"broadcast_delay": 3, "draft_vocab_size": 40}, 3),
        ({"lm_head_type": "replicate", "pre_norm_lane_agg": True, "deliver_tail": False}, 2),
        ({"use_early_comm": False, "replicated_rmsn_scale": False}, 2),
        ({"flush": True, "first_late_layer": 3, "broadcast_delay": 1, "deliver_tail": False}, 8),
        ({"dtype": "bf16", "draft_vocab_size": 40}, 2),
        ({"dtype": "fp16", "draft_vocab_size": 40}, 2),
    ],
)
def test_logits_of_drafts_are_the_models(overrides, threads):
    # also after a cached prompt, whose keys of the head are cached as well
    model = model_with_head(**overrides)
    prompt = random_ids(model.config, 150, 1)  # two passes
    with engine_of(model, threads=threads) as engine:
        take_drafts(set_draft_cost(engine))
        engine.generate(prompt, max_new_tokens=20)
        assert largest_error(model, engine) < 0
        again = engine.generate_detailed(
            prompt, max_new_tokens=20, temperature=1.5, seed=1
        ).statistics
        assert again.reused_tokens == len(prompt) - 1
        assert largest_error(model, engine) < 0


@pytest.mark.parametrize(("dtype", "least"), [("int8", 0.999), ("int4", 0.9)])
def test_quantised_drafts_are_near(dtype, least):
    model = model_with_head(dtype="bf16", draft_vocab_size=40)
    with engine_of(model, dtype=dtype, threads=2) as engine:
        take_drafts(set_draft_cost(engine))
        engine.generate(random_ids(model.config, 30, 1), max_new_tokens=20)
        ids, step, logits = take_drafts(engine)[0]
    exact = reference(widen_model(model, torch.float64), ids, step)
    # ids that the head does not score have -inf
    can = np.isfinite(exact)
    assert np.corrcoef(logits[can], exact[can])[0, 1] > least


def test_a_folder_with_a_head_loads_and_its_packed_weights_again(tmp_path, monkeypatch):
    model = model_with_head(dtype="bf16", draft_vocab_size=40)
    folder = write_folder(tmp_path / "model", model)
    answers = []
    for _ in range(2):  # the second time from the packed weights
        with Engine.from_pretrained(folder, threads=2, kv_dtype="fp32") as engine:
            assert engine.draft_head is not None
            assert engine.draft_head.ids == 40
            assert 0 < engine.draft_head.weight_bytes < engine.weight_bytes
            monkeypatch.setattr(bench, "DRAFTED_ROUNDS", 1)
            figures = bench.measure_drafts(engine)
            assert figures["ids"] == 40
            assert figures["speed_up"] > 0
            take_drafts(set_draft_cost(engine))
            answers.append(engine.generate([1, 2, 3], max_new_tokens=20))
            assert largest_error(model, engine) < 0
    assert answers[0] == answers[1]
    model.state_dict()[DRAFT_IDS][1] = 0
    with pytest.raises(ValueError, match="ascending order"):
        Engine.from_pretrained(write_folder(folder, model), cache=False)
