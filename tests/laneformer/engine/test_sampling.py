"""Penalties, bias and minimum length against numpy: alone, and inside the decode loop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from laneformer.engine import GenerationOptions
from laneformer.engine.cpu import _core
from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config


def reference_logits(logits, prompt, output, options: GenerationOptions) -> np.ndarray:
    """Steps 1 to 4 of GenerationOptions, in float64."""
    x = logits.astype(np.float64)
    seen = np.unique([*prompt, *output]).astype(int)
    x[seen] = np.where(
        x[seen] < 0, x[seen] * options.repetition_penalty, x[seen] / options.repetition_penalty
    )
    counts = np.bincount(np.array(output, int), minlength=len(x))
    x -= options.frequency_penalty * counts + options.presence_penalty * (counts > 0)
    for token, bias in options.logit_bias.items():
        x[token] += bias
    if len(output) < options.min_new_tokens:
        x[list(options.stop_ids)] = -np.inf
    return x


def random_options(rng, **fixed) -> GenerationOptions:
    return GenerationOptions(
        repetition_penalty=float(rng.uniform(0.7, 2)),
        frequency_penalty=float(rng.uniform(-1, 1)),
        presence_penalty=float(rng.uniform(-1, 1)),
        logit_bias={int(i): float(rng.uniform(-3, 3)) for i in rng.integers(0, 40, 5)},
        min_new_tokens=int(rng.integers(0, 12)),
        stop_ids=rng.integers(0, 40, 3).tolist(),
        **fixed,
    )


def drawn(logits, prompt, output, options: GenerationOptions) -> int:
    position = len(prompt) + len(output) - 1
    return _core.sample(logits, options.requests([[0]], len(logits))[0], prompt, output, position)


def mismatches(change_prompt: bool) -> int:
    """Trials of 300 in which the likeliest token is not numpy's; with a planted error, the
    prompt counts as output.
    """
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(300):
        logits = rng.normal(scale=2, size=40).astype(np.float32)
        prompt, output = (rng.integers(0, 40, rng.integers(1, 20)).tolist() for _ in range(2))
        options = random_options(rng)
        expected = reference_logits(logits, prompt, output, options).argmax()
        if change_prompt:
            prompt, output = [], prompt + output
        wrong += drawn(logits, prompt, output, options) != expected
    return wrong


def test_adjusted_logits_are_numpys_and_the_comparison_can_fail():
    assert mismatches(change_prompt=False) == 0
    assert mismatches(change_prompt=True) > 0


def test_the_repetition_penalty_is_hugging_faces():
    rng = np.random.default_rng(1)
    for penalty in (0.8, 1.3, 3.0):
        process = RepetitionPenaltyLogitsProcessor(penalty)
        for _ in range(50):
            logits, ids = rng.normal(size=30).astype(np.float32), rng.integers(0, 30, 12).tolist()
            expected = int(process(torch.tensor([ids]), torch.from_numpy(logits[None]))[0].argmax())
            options = GenerationOptions(repetition_penalty=penalty)
            assert drawn(logits, ids[:6], ids[6:], options) == expected


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 4}])
def test_the_loop_applies_them_to_the_prompt_and_to_its_own_output(sampling):
    options = {
        "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.3, "logit_bias": {5: 2.0, 7: -100.0},
        **sampling,
    }  # fmt: skip
    with engine_of(random_model(small_config(), seed=3)) as engine:
        prompt = random_ids(engine.config, 20)
        output = engine.generate(prompt, max_new_tokens=40, **options)
        plain = engine.generate(prompt, max_new_tokens=40, **sampling)
        logits = engine.logits(prompt + output)[len(prompt) - 1 : -1]
    assert output != plain
    assert 7 not in output
    checked = GenerationOptions(**options)
    assert output == [drawn(row, prompt, output[:i], checked) for i, row in enumerate(logits)]
    if not sampling:
        expected = [
            reference_logits(row, prompt, output[:i], checked).argmax() for i, row in enumerate(logits)
        ]
        assert output == expected


def test_a_bias_of_100_forces_and_a_frequency_penalty_ends_a_loop():
    with engine_of(random_model(small_config(), seed=3)) as engine:
        assert engine.generate([1], max_new_tokens=4, logit_bias={9: 100}) == [9] * 4
        free = engine.generate([1], max_new_tokens=40, logit_bias={9: 3.0})
        damped = engine.generate([1], max_new_tokens=40, logit_bias={9: 3.0}, frequency_penalty=2.0)
    assert damped.count(9) < free.count(9)


def test_no_stop_id_before_min_new_tokens():
    with engine_of(random_model(small_config(), seed=2), eos_ids=(4,)) as engine:
        bias = {4: 100}
        assert engine.generate([1], max_new_tokens=30, logit_bias=bias) == [4]
        tokens = engine.generate([1], max_new_tokens=30, logit_bias=bias, min_new_tokens=9)
        assert len(tokens) == 10
        assert tokens.index(4) == 9
        assert engine.generate([1], max_new_tokens=5, logit_bias=bias, ignore_eos=True) == [4] * 5
        everything = list(range(100))  # nothing is left: an end, and no hang
        assert len(engine.generate([1], max_new_tokens=5, stop_ids=everything, min_new_tokens=3)) <= 5


def test_greedy_takes_the_first_of_the_largest_and_never_nan():
    rng, greedy = np.random.default_rng(1), GenerationOptions()
    for vocab in (1, 2, 15, 16, 17, 40, 333):
        for _ in range(20):
            logits = rng.integers(-3, 3, vocab).astype(np.float32)  # ties everywhere
            assert drawn(logits, [0], [], greedy) == logits.argmax()
            logits[rng.integers(0, vocab, vocab // 3)] = np.nan
            if not np.isnan(logits).all():
                assert drawn(logits, [0], [], greedy) == np.nanargmax(logits)
        assert drawn(np.full(vocab, np.nan, np.float32), [0], [], greedy) == 0
        assert drawn(np.full(vocab, -np.inf, np.float32), [0], [], greedy) == 0


def kept_by(logits, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The definition: sort, cut at the k-th, cut where the probability reaches top_p; equal logits together."""
    scaled = logits.astype(np.float64) / temperature
    least = np.sort(scaled)[-top_k] if top_k else -np.inf
    order = [i for i in np.argsort(-scaled, kind="stable") if scaled[i] >= least]
    weights = np.exp(scaled[order] - scaled.max())
    count = int(np.argmax(np.cumsum(weights) >= top_p * weights.sum())) + 1
    return set(np.flatnonzero(scaled >= scaled[order[count - 1]]).tolist()) & set(order)


@pytest.mark.parametrize("vocab", [1, 2, 65, 3000])
def test_only_tokens_of_the_definition_are_drawn(vocab):
    rng = np.random.default_rng(vocab)
    shapes = {
        "flat": rng.normal(size=vocab), "ties": rng.integers(-3, 3, vocab), "equal": np.zeros(vocab),
        "outlier": np.r_[rng.normal(size=vocab - 1) * 1e-3, -80.0], "far": np.r_[rng.normal(size=vocab - 1), 300.0],
    }  # fmt: skip
    for name, values in shapes.items():
        logits = values.astype(np.float32)
        for top_k, top_p in ((0, 0.95), (0, 0.3), (min(40, vocab), 0.9)):
            options = {"temperature": 0.8, "top_k": top_k, "top_p": top_p}
            kept = kept_by(logits, **options)
            found = {drawn(logits, [0], [], GenerationOptions(seed=seed, **options)) for seed in range(30)}
            assert found <= kept, (name, top_k, top_p)


def test_top_p_gives_the_tokens_that_a_sort_would_give():
    """`top_k` as large as the kept set draws among the same tokens, so every seed must give the same one."""
    rng = np.random.default_rng(8)
    for trial in range(25):
        logits = (rng.normal(size=3000) * rng.uniform(0.2, 5)).astype(np.float32)
        top_p = float(rng.uniform(0.05, 0.999))
        count = len(kept_by(logits, 0.8, 0, top_p))
        for seed in range(5):
            by_p = drawn(logits, [0], [], GenerationOptions(temperature=0.8, top_p=top_p, seed=seed))
            assert by_p == drawn(
                logits, [0], [], GenerationOptions(temperature=0.8, top_k=count, seed=seed)
            ), trial


@pytest.mark.parametrize("temperature", [5e-324, 5.5e-309, 1e-30])
def test_temperatures_whose_inverse_overflows_are_greedy(temperature):
    logits = np.random.default_rng(2).normal(size=50).astype(np.float32)
    assert drawn(logits, [0], [], GenerationOptions(temperature=temperature)) == logits.argmax()
