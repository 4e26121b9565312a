"""A small model that drafts: the same tokens, in fewer passes; one that drafts for itself is always right."""

from __future__ import annotations

from pathlib import Path

import pytest

from laneformer.engine import Engine
from laneformer.engine.bench import synthetic
from tests.laneformer.engine.assets import engine_of, random_ids, random_model, small_config, write_folder

SAMPLING = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_k": 5, "seed": 3, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
]
CONFIG = small_config(max_position_embeddings=192)
DEEPER = small_config(max_position_embeddings=192, num_hidden_layers=7, swa_layers=())


def drafting(large: Engine, small: Engine, each_column: float = 0.02, draft: float = 0.05) -> Engine:
    """The first one, for which the other's model drafts; columns and drafts cost little, so that many are tried."""
    large._open().draft_with(small._open())  # type: ignore[attr-defined]
    large._open().fix_cost(each_column, draft)  # type: ignore[attr-defined]
    return large


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sampling", SAMPLING[:2])
def test_a_model_that_drafts_for_itself_is_always_right(sampling, threads) -> None:
    model, prompt = random_model(CONFIG), random_ids(CONFIG, 40, 1)
    with engine_of(model, threads=threads) as engine, engine_of(model, threads=threads) as small:
        plain = engine.generate_detailed(prompt, max_new_tokens=100, speculate=0, logprobs=2, **sampling)
        drafting(engine, small)
        quick = engine.generate_detailed(prompt, max_new_tokens=100, logprobs=2, **sampling)
    assert quick.tokens == plain.tokens
    figures = quick.statistics
    assert figures.accepted_tokens == figures.proposed_tokens > 60
    assert figures.passes < 50


@pytest.mark.parametrize("sampling", SAMPLING)
def test_another_model_changes_no_token_and_no_bit(sampling) -> None:
    large, small = random_model(DEEPER), random_model(CONFIG, seed=1)
    prompt = random_ids(CONFIG, 150, 2)  # the small model reads it in two passes
    with engine_of(large, threads=2) as engine, engine_of(small, threads=2) as other:
        plain = engine.generate_detailed(prompt, max_new_tokens=42, speculate=0, logprobs=2, **sampling)
        drafting(engine, other)
        for _ in range(2):  # the second time from cached prefixes, of both
            quick = engine.generate_detailed(prompt, max_new_tokens=42, logprobs=2, **sampling)
            assert quick.tokens == plain.tokens
        assert quick.statistics.proposed_tokens > 0


def test_requests_that_join_get_what_each_gets_alone() -> None:
    model = random_model(CONFIG)
    prompts = [random_ids(CONFIG, length, length) for length in (3, 140, 30, 31)]
    options = {"max_new_tokens": 40, "temperature": 1.0}
    with engine_of(model, threads=2) as engine, engine_of(random_model(CONFIG, seed=1), threads=2) as small:
        plain = engine.generate_batch(prompts, speculate=0, **options)
        drafting(engine, small)
        assert engine.generate_batch(prompts, **options) == plain
        with engine.batch() as batch:
            tickets = {
                batch.join(prompts[0], seed=5, **options): [],
                batch.join(prompts[1], seed=6, **options): [],
            }
            for _ in range(2):
                for update in batch.updates(1.0):
                    tickets[update.ticket] += update.tokens
            tickets[batch.join(prompts[2], seed=7, **options)] = []
            while any(len(tokens) < 40 for tokens in tickets.values()):
                for update in batch.updates(1.0):
                    tickets[update.ticket] += update.tokens
        joined = [[token.id for token in tokens] for tokens in tickets.values()]
        alone = [
            engine.generate(prompt, seed=seed, speculate=0, **options)
            for prompt, seed in zip(prompts, (5, 6, 7), strict=False)
        ]
        assert joined == alone


def test_drafts_that_do_not_pay_are_not_made() -> None:
    large, small = random_model(DEEPER), random_model(CONFIG, seed=1)
    prompt, options = random_ids(CONFIG, 30, 3), {"max_new_tokens": 60, "reuse_prefix": False}
    with engine_of(large) as engine, engine_of(small) as other:
        repetitions = engine.generate_detailed(prompt, **options).statistics
        drafting(engine, other, draft=2.0)
        assert engine.generate_detailed(prompt, **options).statistics == repetitions


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    write_folder(large, random_model(DEEPER))
    write_folder(small, random_model(small_config(vocab_size=104)))
    with pytest.raises(ValueError, match="take a small model of the same family"):
        Engine.from_pretrained(large, draft=small, cache=False)
    write_folder(small, random_model(CONFIG))
    with Engine.from_pretrained(large, draft=small, cache=False) as engine:
        assert engine.draft_model
        assert engine.draft_model.weight_bytes > 0
        assert len(engine.generate([1, 2, 3], max_new_tokens=20)) == 20
    with pytest.raises(ValueError, match="takes the CPU and one process"):
        Engine.from_pretrained(large, draft=small, cache=False, processes=2)


def test_forced_acceptance_is_what_was_asked_for() -> None:
    with engine_of(random_model(small_config(max_position_embeddings=256))) as engine:
        figures = synthetic(engine, [1.0, 0.5])
        assert 2.3 < figures["tokens_a_pass"] < 2.7  # 2.5 on the average, 76 draws
        assert figures["speed_up"] > 0
        assert synthetic(engine, [0.0])["tokens_a_pass"] == 1.0
        with pytest.raises(ValueError, match="is outside 0"):
            synthetic(engine, [0.5, 1.5])


def test_wrong_drafts_leave_nothing_behind() -> None:
    """Ids that no model would write, then its own again: it drafts them as if the wrong ones had never run."""
    model = random_model(CONFIG)
    forced, prompt = random_ids(CONFIG, 5, 9), random_ids(CONFIG, 40, 1)
    with engine_of(model) as engine, engine_of(model) as small:
        drafting(engine, small, each_column=0.001, draft=0.001)
        options = {"max_new_tokens": 100, "ignore_eos": True}
        request = engine._requests.generation(prompt, options, replay=forced, quiet=True)
        figures = engine._finished([request])[0].whole.statistics
    assert figures["proposed_tokens"] > figures["accepted_tokens"] > 70  # six of seven after the forced ones
