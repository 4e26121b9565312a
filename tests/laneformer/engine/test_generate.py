"""Generation: greedy identity with PyTorch, sampling against numpy, streams, ends, and cancelling."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch

from laneformer.engine import Engine, GenerationOptions
from laneformer.engine.cpu import _core
from tests.laneformer.engine.assets import (
    TORCH_DTYPES,
    engine_of,
    random_ids,
    random_model,
    small_config,
    widened,
    write_folder,
)


@torch.no_grad()
def torch_greedy(model, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens in float32 without a cache, and each one's lead over the second best logit."""
    wide, ids, margins = widened(model, torch.float32), list(prompt), []
    for _ in range(new_tokens):
        best = wide(torch.tensor([ids]))[0, -1].topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], margins


def assert_same_tokens(tokens: list[int], expected: list[int], margins: list[float]) -> None:
    for i, (token, wanted) in enumerate(zip(tokens, expected, strict=True)):
        assert token == wanted, f"token {i}: {token} instead of {wanted}, whose lead was {margins[i]:.3g}"


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_greedy_equals_pytorch(dtype):
    for seed, prompt_length in itertools.product(
        range(3), (1, 5, 40)
    ):  # before, at and far beyond the window of 7
        model = random_model(small_config(), seed=seed, dtype=dtype)
        prompt = random_ids(model.config, prompt_length, seed)
        expected, margins = torch_greedy(model, prompt, 40)
        with engine_of(model, threads=2) as engine:
            assert_same_tokens(engine.generate(prompt, max_new_tokens=40), expected, margins)


def test_greedy_comparison_sees_a_wrong_delay():
    model = random_model(small_config())
    prompt = random_ids(model.config, 20)
    expected, margins = torch_greedy(model, prompt, 20)
    with (
        engine_of(model, small_config(broadcast_delay=1)) as engine,
        pytest.raises(AssertionError, match="whose lead"),
    ):
        assert_same_tokens(engine.generate(prompt, max_new_tokens=20), expected, margins)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 1.5, "seed": 3}, {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2}],
)
def test_threads_change_no_token(options):
    model = random_model(small_config(), seed=1)
    prompt = random_ids(model.config, 30)
    runs = []
    for threads in (1, 2, 3, 4, 9):
        with engine_of(model, threads=threads) as engine:
            runs.append(engine.generate(prompt, max_new_tokens=60, **options))
            assert engine.threads == threads
    assert all(run == runs[0] for run in runs)


def test_seeds_differ_and_repeat():
    with engine_of(random_model(small_config())) as engine:
        runs = [
            engine.generate([1, 2, 3], max_new_tokens=30, temperature=1.0, seed=seed) for seed in (0, 1, 0)
        ]
    assert runs[0] == runs[2] != runs[1]


def test_stream_yields_what_generate_returns():
    with engine_of(random_model(small_config())) as engine:
        expected = engine.generate([4, 5], max_new_tokens=50)
        assert list(engine.stream([4, 5], max_new_tokens=50)) == expected


def test_a_closed_stream_cancels_and_frees_the_engine():
    with engine_of(
        random_model(small_config(max_position_embeddings=20_000, swa_layers=(0, 1, 2, 3, 4)))
    ) as engine:
        expected = engine.generate([7], max_new_tokens=5)
        stream = engine.stream([7], max_new_tokens=19_000)
        assert [next(stream) for _ in range(3)] == expected[:3]
        with pytest.raises(RuntimeError, match="busy"):
            engine.generate([7])
        stream.close()
        assert engine.statistics.passes < 19_000, "the request ran to its end"
        engine.stream([7], max_new_tokens=19_000)  # never advanced: runs nothing
        assert engine.generate([7], max_new_tokens=5) == expected


def test_one_request_at_a_time_from_many_python_threads():
    with engine_of(random_model(small_config())) as engine:
        expected, results = engine.generate([9, 8], max_new_tokens=40), []

        def ask() -> None:
            try:
                results.append(engine.generate([9, 8], max_new_tokens=40))
            except RuntimeError:
                results.append(None)

        askers = [threading.Thread(target=ask) for _ in range(8)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
    assert len(results) == 8
    assert all(result in (None, expected) for result in results)


def test_stop_ids_and_the_models_own_end(tmp_path):
    model = random_model(small_config(), seed=2)
    folder = write_folder(tmp_path, model)
    with Engine.from_pretrained(folder) as engine:
        tokens = engine.generate([1], max_new_tokens=30)
        position = next(i for i in range(5, 30) if tokens.index(tokens[i]) == i)  # a token's first appearance
        stop = tokens[position]
        assert engine.generate([1], max_new_tokens=30, stop_ids=[stop]) == tokens[: position + 1]
    with Engine.from_pretrained(write_folder(tmp_path, model, eos_token_id=[stop])) as engine:
        assert engine.eos_ids == (stop,)
        assert engine.generate([1], max_new_tokens=30) == tokens[: position + 1]
        assert engine.generate([1], max_new_tokens=30, ignore_eos=True) == tokens


def test_generation_ends_where_the_context_is_full():
    with engine_of(random_model(small_config())) as engine:
        full = random_ids(engine.config, engine.config.max_position_embeddings)
        assert len(engine.generate(full, max_new_tokens=10)) == 1
        assert len(engine.generate(full[:-3], max_new_tokens=10)) == 4


# --- sampling
# ---------------------------------------------------------------------------------------------------


def reference_probabilities(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Temperature, then top-k, top-p, min-p, each on what the one before left, in float64."""
    scaled = logits.astype(np.float64) / temperature
    order = np.lexsort((np.arange(len(logits)), -scaled))
    weights = np.exp(scaled - scaled.max())
    if top_k:
        weights[order[top_k:]] = 0
    before = np.concatenate(([0], np.cumsum(weights[order])[:-1])) / weights.sum()
    weights[order[before >= top_p]] = 0
    weights[weights < min_p] = 0
    return weights / weights.sum()


def draws(logits, count, **options) -> np.ndarray:
    request = GenerationOptions(**{"temperature": 1.0, "seed": 5, **options}).requests([[0]], len(logits))[0]
    return np.array([_core.sample(logits, request, [], [], i) for i in range(count)])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1},
    ],
)
def test_sampling_follows_the_distribution(options):
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32)
    expected, count = reference_probabilities(logits, **options), 20_000
    seen = np.bincount(draws(logits, count, **options), minlength=12)
    kept = expected > 0
    assert seen[~kept].sum() == 0, "a token that the filters removed was drawn"
    chi_square = ((seen[kept] - count * expected[kept]) ** 2 / (count * expected[kept])).sum()
    freedom = kept.sum() - 1
    # five standard deviations above the statistic's mean (fixed seeds, so it either holds or does not)
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom)


def test_the_chi_square_test_sees_a_wrong_temperature():
    logits = np.random.default_rng(1).normal(size=12).astype(np.float32)
    expected, count = reference_probabilities(logits), 20_000
    seen = np.bincount(draws(logits, count, temperature=1.1), minlength=12)
    assert ((seen - count * expected) ** 2 / (count * expected)).sum() > 11 + 5 * np.sqrt(22)


def test_filters_keep_the_same_set_as_numpy():
    rng = np.random.default_rng(2)
    for trial in range(100):
        logits = rng.normal(scale=2, size=40).astype(np.float32)
        options = {
            "top_k": int(rng.integers(0, 42)),
            "top_p": float(rng.uniform(0.05, 1)),
            "min_p": float(rng.uniform(0, 0.3)),
        }
        kept = np.flatnonzero(reference_probabilities(logits, **options))
        drawn = set(draws(logits, 300, seed=trial, **options).tolist())
        assert drawn <= set(kept.tolist())
        if len(kept) == 1:
            assert drawn == set(kept.tolist())


def test_greedy_takes_the_lowest_id_of_a_tie_and_top_k_one_is_greedy():
    logits = np.zeros(50, np.float32)
    logits[[7, 30]] = 3.0
    assert set(draws(logits, 5, temperature=0.0)) == {7}
    assert set(draws(logits, 50, top_k=1)) == {7}


def test_logits_that_overflowed_still_give_a_token():
    for bad in (np.nan, np.inf, -np.inf):
        logits = np.random.default_rng(3).normal(size=50).astype(np.float32)
        logits[::3] = bad
        for options in ({}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.5, "min_p": 0.1}):
            assert all(0 <= token < 50 for token in draws(logits, 20, **options))
