"""Drafts from any source (the text itself, a small model, the model's own head): the same tokens, in fewer passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import Laneformer
from laneformer.config import DRAFT_IDS
from laneformer.engine import Engine, bench
from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    random_model,
    small_config,
    write_folder,
)

LONG = {"max_position_embeddings": 256}
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_k": 5, "min_p": 0.05, "seed": 3, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
]  # fmt: skip
CHEAP = 0.001  # of the cost of a pass: so that many are made
SOURCES = ("text", "model", "head")


def model_with_head(seed: int = 0, dtype: str = "fp32", **overrides: Any) -> Laneformer:
    model = random_model(small_config(**{"num_nextn_predict_layers": 1, **LONG, **overrides}), seed, dtype)
    if ids := model.config.draft_vocab_size:
        spread = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(seed))[:ids]
        model.state_dict()[DRAFT_IDS].copy_(spread.sort().values)
    return model


def set_draft_cost(engine: Engine, column: float = CHEAP, draft: float = CHEAP) -> Engine:
    engine._open().fix_cost(column, draft)  # type: ignore[attr-defined]
    return engine


@contextlib.contextmanager
def drafting(source: str, draft: float = CHEAP, threads: int = 2, **overrides: Any) -> Iterator[Engine]:
    """An engine whose drafts come from there, and cost as much."""
    with contextlib.ExitStack() as opened:
        if source == "head":
            model = model_with_head(draft_vocab_size=40, **overrides)
        else:
            model = random_model(small_config(**LONG, **overrides))
        engine = opened.enter_context(engine_of(model, threads=threads))
        if source == "model":
            small = random_model(
                small_config(**LONG, **{**overrides, "num_hidden_layers": 3, "swa_layers": ()}), seed=1
            )
            other = opened.enter_context(engine_of(small, threads=threads))
            engine._open().draft_with(other._open())  # type: ignore[attr-defined]
        yield set_draft_cost(engine, draft=draft)


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("source", SOURCES)
def test_no_token_and_no_bit_changes(source: str, sampling: dict[str, Any]) -> None:
    options = {"max_new_tokens": 60, "logprobs": 2, **sampling}
    with drafting(source, vocab_size=12 if source == "text" else 100) as engine:
        prompt = random_ids(engine.config, 150, 2)  # read in two passes
        plain = engine.generate_detailed(prompt, speculate=0, reuse_prefix=False, **options)
        assert plain.statistics.proposed_tokens == 0
        for speculate in (2, 31):
            for reuse in (False, True):
                quick = engine.generate_detailed(prompt, speculate=speculate, reuse_prefix=reuse, **options)
                assert quick.tokens == plain.tokens
                assert quick.statistics.proposed_tokens > 0
        if source == "text":
            accepted = quick.statistics.accepted_tokens
            assert 0 < accepted < quick.statistics.proposed_tokens, "both right and wrong ones"


@pytest.mark.parametrize("source", SOURCES[1:])
def test_requests_that_join_get_what_each_gets_alone(source: str) -> None:
    """Some join late, one is cancelled, one is drawn under masks, one is scored."""
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0}
    with drafting(source) as engine:
        prompts = [random_ids(engine.config, length, length) for length in (3, 140, 30, 31)]
        plain = engine.generate_batch(prompts, speculate=0, **options)
        assert engine.generate_batch(prompts, reuse_prefix=False, **options) == plain
        assert engine.statistics.proposed_tokens > 0
        with engine.batch() as batch:
            tokens: dict[int, list[int]] = {
                batch.join(prompts[0], seed=5, **options): [],
                batch.join(prompts[1], seed=6, **options): [],
            }
            cancelled, scored = batch.join(prompts[3], seed=9, **options), batch.score(prompts[1])
            scores = None
            while any(len(ids) < 40 for ids in tokens.values()):
                for update in batch.updates(1.0):
                    tokens.get(update.ticket, []).extend(token.id for token in update.tokens)
                    scores = update.scores if update.ticket == scored else scores
                if len(tokens) == 2:
                    batch.leave(cancelled)
                    tokens[batch.join(prompts[2], seed=7, **options)] = []
                    tokens[masked := batch.join(prompts[0], seed=5, masked=True, **options)] = []
                    for index in range(40):
                        batch.allow(masked, index, np.full(4, 2**32 - 1, np.uint32))
        alone = [
            engine.generate(prompts[i], seed=seed, speculate=0, **options)
            for i, seed in ((0, 5), (1, 6), (2, 7), (0, 5))
        ]
        assert list(tokens.values()) == alone
        assert scores is not None
        assert np.array_equal(scores.logprobs, engine.logprobs(prompts[1]))


def test_drafts_that_do_not_pay_are_not_made() -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "reuse_prefix": False}
    statistics = []
    for source in ("text", "model"):
        with drafting(source, draft=2.0) as engine:
            prompt = random_ids(engine.config, 30, 3)
            statistics.append(engine.generate_detailed(prompt, **options).statistics)
    assert statistics[0] == statistics[1]


def test_forced_acceptance_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "DRAFTED_ROUNDS", 2)
    with drafting("text") as engine:
        figures = bench.synthetic(engine, [1.0, 0.5])
        assert 2.3 < figures["tokens_a_pass"] < 2.7  # 2.5 on the average, 76 draws
        assert figures["speed_up"] > 0
        assert bench.synthetic(engine, [0.0])["tokens_a_pass"] == 1.0
        with pytest.raises(ValueError, match="is outside 0"):
            bench.synthetic(engine, [0.5, 1.5])
    with drafting("head") as engine:
        figures = bench.synthetic(engine, [1.0, 1.0])
        assert figures["right"] == 1.0
        assert 2.5 < figures["tokens_a_pass"] <= 3.0
        set_draft_cost(engine, draft=5.0)
        assert bench.synthetic(engine, [1.0, 1.0])["tokens_a_pass"] == 1.0


def test_a_repetition_is_guessed_and_ends_where_it_would_without() -> None:
    force = {"logit_bias": {5: 100}, "speculate": 31}
    with engine_of(random_model(small_config())) as engine:
        result = engine.generate_detailed([5] * 8, max_new_tokens=80, **{**force, "speculate": 9})
        assert result.ids == [5] * 80
        assert result.statistics.accepted_tokens >= 70  # at most ten tokens a pass
        assert result.statistics.passes == 80 - result.statistics.accepted_tokens
        for new in range(1, 12):
            assert engine.generate([5] * 8, max_new_tokens=new, **force) == [5] * new
        assert engine.generate([5] * 90, max_new_tokens=50, **force) == [5] * 7  # the context is full
        assert engine.generate([5] * 8, max_new_tokens=50, stop_ids=[5], **force) == [5]


@pytest.mark.parametrize("sampling", SAMPLING[:2])
def test_a_model_that_drafts_for_itself_is_always_right(sampling: dict[str, Any]) -> None:
    model = random_model(small_config(**LONG))
    prompt, options = random_ids(model.config, 40, 1), {"max_new_tokens": 100, "ignore_eos": True}
    forced = random_ids(model.config, 5, 9)
    with engine_of(model, threads=3) as engine, engine_of(model, threads=3) as small:
        engine._open().draft_with(small._open())  # type: ignore[attr-defined]
        set_draft_cost(engine)
        figures = engine.generate_detailed(prompt, **options, **sampling).statistics
        assert figures.accepted_tokens == figures.proposed_tokens > 60
        assert figures.passes < 50
        # ids that no model would write, then its own again: wrong drafts leave nothing behind
        request = engine._requests.generation(prompt, options, replay=forced, quiet=True)
        statistics = engine._finished([request])[0].whole.statistics
    assert (
        statistics["proposed_tokens"] > statistics["accepted_tokens"] > 70
    )  # six of seven after the forced ones


def test_a_small_model_comes_from_a_folder_and_has_the_same_vocabulary(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    write_folder(large, random_model(small_config(num_hidden_layers=7, swa_layers=())))
    write_folder(small, random_model(small_config(vocab_size=104)))
    with pytest.raises(ValueError, match="take a small model of the same family"):
        Engine.from_pretrained(large, draft=small, cache=False)
    write_folder(small, random_model(small_config()))
    with Engine.from_pretrained(large, draft=small, cache=False) as engine:
        assert engine.draft_model
        assert engine.draft_model.weight_bytes > 0
        assert len(engine.generate([1, 2, 3], max_new_tokens=20)) == 20
    with pytest.raises(ValueError, match="takes the CPU and one process"):
        Engine.from_pretrained(large, draft=small, cache=False, processes=2)
