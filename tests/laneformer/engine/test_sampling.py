"""Tests of penalties, bias, minimum length, filters and draws against NumPy, alone and when decoding."""

from __future__ import annotations

import numpy as np
import pytest

from laneformer.engine import GenerationOptions
from laneformer.engine.cpu import _core
from laneformer.engine.requests import make_request
from tests.laneformer.engine.assets import engine_of, random_ids, small_model


def reference_logits(logits, prompt, output, options) -> np.ndarray:
    """Apply steps 1 to 4 of GenerationOptions in float64."""
    x = logits.astype(np.float64)
    used_ids = np.unique([*prompt, *output]).astype(int)
    penalty = options.repetition_penalty
    x[used_ids] = np.where(x[used_ids] < 0, x[used_ids] * penalty, x[used_ids] / penalty)
    counts = np.bincount(np.array(output, int), minlength=len(x))
    x -= options.frequency_penalty * counts + options.presence_penalty * (counts > 0)
    for token, bias in options.logit_bias.items():
        x[token] += bias
    if len(output) < options.min_new_tokens:
        x[list(options.stop_ids)] = -np.inf
    return x


def probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Apply temperature, then top-k, top-p and min-p, each to the rest; float64."""
    # equal logits stay or go together
    scaled = logits.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max())
    if top_k:
        weights[scaled < np.sort(scaled)[-min(top_k, len(scaled))]] = 0
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        last = int(np.argmax(np.cumsum(weights[order]) >= top_p * weights.sum()))
        weights[weights < weights[order[last]]] = 0
    weights[weights < min_p] = 0
    return weights / weights.sum()


def draw(logits, options, prompt=(0,), output=()) -> int:
    request = make_request(options, [0], len(logits))
    return _core.sample(logits, request, list(prompt), list(output), len(prompt) + len(output) - 1)


def draw_many(logits, count, **options) -> np.ndarray:
    settings = GenerationOptions(**{"temperature": 1.0, "seed": 5, **options})
    request = make_request(settings, [0], len(logits))
    return np.array([_core.sample(logits, request, [], [], position) for position in range(count)])


def test_adjusted_logits_are_numpys():
    # greedy: a wrong logit shows as another argmax
    rng = np.random.default_rng(0)
    for _ in range(300):
        logits = rng.normal(scale=2, size=40).astype(np.float32)
        prompt, output = (rng.integers(0, 40, rng.integers(1, 20)).tolist() for _ in range(2))
        options = GenerationOptions(
            repetition_penalty=float(rng.uniform(0.7, 2)),
            frequency_penalty=float(rng.uniform(-1, 1)),
            presence_penalty=float(rng.uniform(-1, 1)),
            logit_bias={int(i): float(rng.uniform(-3, 3)) for i in rng.integers(0, 40, 5)},
            min_new_tokens=int(rng.integers(0, 12)),
            stop_ids=rng.integers(0, 40, 3).tolist(),
        )
        expected = reference_logits(logits, prompt, output, options).argmax()
        assert draw(logits, options, prompt, output) == expected


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 4}])
def test_the_loop_applies_them_to_the_prompt_and_to_its_own_output(sampling):
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3}
    options = {**penalties, "logit_bias": {5: 2.0, 7: -100.0}, **sampling}
    with engine_of(small_model(seed=3)) as engine:
        prompt = random_ids(engine.config, 20)
        output = engine.generate(prompt, max_new_tokens=40, **options)
        plain = engine.generate(prompt, max_new_tokens=40, **sampling)
        logits = engine.logits(prompt + output)[len(prompt) - 1 : -1]
    assert output != plain
    assert 7 not in output
    checked = GenerationOptions(**options)
    assert output == [draw(row, checked, prompt, output[:i]) for i, row in enumerate(logits)]


def test_no_stop_id_before_min_new_tokens():
    with engine_of(small_model(seed=2), eos_ids=(4,)) as engine:
        bias = {4: 100}
        assert engine.generate([1], max_new_tokens=30, logit_bias=bias) == [4]
        tokens = engine.generate([1], max_new_tokens=30, logit_bias=bias, min_new_tokens=9)
        assert len(tokens) == 10
        assert tokens.index(4) == 9
        everything = list(range(100))  # nothing is left: an end, and no hang
        assert (
            len(engine.generate([1], max_new_tokens=5, stop_ids=everything, min_new_tokens=3)) <= 5
        )


def test_stop_ids_and_the_models_own_end():
    model = small_model(seed=2)
    with engine_of(model) as engine:
        tokens = engine.generate([1], max_new_tokens=30)
        # a token's first appearance
        position = next(i for i in range(5, 30) if tokens.index(tokens[i]) == i)
        stop = tokens[position]
        assert engine.generate([1], max_new_tokens=30, stop_ids=[stop]) == tokens[: position + 1]
    with engine_of(model, eos_ids=(stop,)) as engine:
        assert engine.generate([1], max_new_tokens=30) == tokens[: position + 1]
        assert engine.generate([1], max_new_tokens=30, ignore_eos=True) == tokens


def test_greedy_takes_the_first_of_the_largest_and_never_nan():
    rng, greedy = np.random.default_rng(1), GenerationOptions()
    for vocab in (1, 2, 15, 16, 17, 40, 333):
        for _ in range(20):
            logits = rng.integers(-3, 3, vocab).astype(np.float32)  # ties everywhere
            assert draw(logits, greedy) == logits.argmax()
            logits[rng.integers(0, vocab, vocab // 3)] = np.nan
            if not np.isnan(logits).all():
                assert draw(logits, greedy) == np.nanargmax(logits)
        assert draw(np.full(vocab, np.nan, np.float32), greedy) == 0
        assert draw(np.full(vocab, -np.inf, np.float32), greedy) == 0


DRAWS = 20_000


def chi_square(logits, expected, **options) -> tuple[float, int]:
    """Return the statistic of draws against these probabilities, and its degrees of freedom."""
    # no token of probability 0 may be drawn
    counts = np.bincount(draw_many(logits, DRAWS, **options), minlength=len(logits))
    possible = expected > 0
    assert counts[~possible].sum() == 0, "a token that the filters removed was drawn"
    means = DRAWS * expected[possible]
    return float(((counts[possible] - means) ** 2 / means).sum()), int(possible.sum()) - 1


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_sampling_follows_the_distribution(options):
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32)
    distance, freedom = chi_square(logits, probabilities(logits, **options), **options)
    # five standard deviations above the statistic's mean (fixed seeds, so it either holds or does
    # not)
    assert distance <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [1, 2, 40, 65, 3000])
def test_only_tokens_of_the_definition_are_drawn(vocab):
    rng = np.random.default_rng(vocab)
    shapes = {
        "flat": rng.normal(size=vocab),
        "ties": rng.integers(-3, 3, vocab),
        "equal": np.zeros(vocab),
        "outlier": np.r_[rng.normal(size=vocab - 1) * 1e-3, -80.0],
        # exp underflows for all but one
        "far": np.r_[rng.normal(size=vocab - 1), 300.0],
    }
    for name, values in shapes.items():
        logits = values.astype(np.float32)
        for top_k, top_p, min_p in (
            (0, 0.95, 0),
            (0, 0.3, 0),
            (min(40, vocab), 0.9, 0),
            (30, 0.8, 0.2),
        ):
            options = {"temperature": 0.8, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            possible = set(np.flatnonzero(probabilities(logits, **options)).tolist())
            tokens = set(draw_many(logits, 60, **options).tolist())
            assert tokens <= possible, (name, options)
            assert len(possible) > 1 or tokens == possible


def test_temperatures_whose_inverse_overflows_and_top_k_one_are_greedy():
    logits = np.random.default_rng(2).normal(size=50).astype(np.float32)
    for options in (*({"temperature": t} for t in (5e-324, 5.5e-309, 1e-30)), {"top_k": 1}):
        assert set(draw_many(logits, 20, **options)) == {logits.argmax()}
