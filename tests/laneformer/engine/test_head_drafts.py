"""Drafts by the model's own head: its logits are those of model.py, and no token changes for them."""

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
from laneformer.engine import Engine, Statistics
from laneformer.engine.bench import synthetic
from tests.laneformer.engine.assets import (
    engine_of,
    random_ids,
    random_model,
    small_config,
    widened,
    write_folder,
)

HEAD = {"num_nextn_predict_layers": 1, "max_position_embeddings": 192}
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "top_k": 5, "seed": 3, "repetition_penalty": 1.1, "frequency_penalty": 0.1},
]
TINY_COST = 0.001  # of columns and drafts, so that many are made


def model_with_head(seed: int = 0, dtype: str = "fp32", **overrides: Any) -> Laneformer:
    model = random_model(small_config(**{**HEAD, **overrides}), seed, dtype)
    if ids := model.config.draft_vocab_size:
        spread = torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(seed))[:ids]
        model.state_dict()[DRAFT_IDS].copy_(spread.sort().values)
    return model


def drafting(engine: Engine, draft: float = TINY_COST) -> Engine:
    engine._open().fix_cost(TINY_COST, draft)  # type: ignore[attr-defined]
    return engine


def recorded(engine: Engine) -> list[tuple[list[int], int, np.ndarray]]:
    return engine._open().recorded_drafts()  # type: ignore[attr-defined]


@torch.no_grad()
def reference(model: Laneformer, ids: list[int], drafts: int, dtype: torch.dtype) -> np.ndarray:
    """Logits (V,) of the draft after `ids`, of which the last `drafts` were drafted after the others."""
    wide = widened(model, dtype)
    logits = wide.draft_logits(torch.tensor([ids]), drafts + 1)[drafts][0, -1].numpy()
    if DRAFT_IDS in model.state_dict():
        impossible = np.ones(len(logits), bool)
        impossible[model.state_dict()[DRAFT_IDS].numpy()] = False
        logits[impossible] = -np.inf
    return logits


def largest_error(model: Laneformer, engine: Engine, every: int = 5) -> float:
    """Of the drafts' logits, beyond eight times the error that float32 makes of the same draft in PyTorch."""
    drafts = recorded(engine)
    assert len({made for _, made, _ in drafts}) >= 4, "drafts of several steps"
    worst = -np.inf
    for ids, made, logits in drafts[::every]:
        exact = reference(model, ids, made, torch.float64)
        assert np.array_equal(np.isinf(logits), np.isinf(exact))
        can = np.isfinite(exact)
        rounding = np.abs(reference(model, ids, made, torch.float32)[can] - exact[can]).max()
        worst = max(worst, float(np.abs(logits[can] - exact[can]).max() - 8 * rounding))
    return worst


@pytest.mark.parametrize(
    ("overrides", "options"),
    [
        ({"broadcast_delay": 0}, {"threads": 1}),
        ({"broadcast_delay": 1}, {"threads": 2}),
        ({}, {"threads": 3}),
        ({}, {"threads": 8}),  # two of each lane
        ({"deliver_tail": False}, {"threads": 2}),
        ({"broadcast_delay": 3, "draft_vocab_size": 40}, {"threads": 3}),
        ({"lm_head_type": "replicate", "draft_vocab_size": 40}, {"threads": 2}),
        ({"lm_head_type": "replicate", "pre_norm_lane_agg": True, "deliver_tail": False}, {"threads": 2}),
        ({"use_early_comm": False, "replicated_rmsn_scale": False}, {"threads": 2}),
        ({"num_lanes": 1}, {"threads": 1}),
        ({"flush": True}, {"threads": 3}),  # the head reads what the flush has summed, and sums nothing again
        ({"flush": True, "first_late_layer": 3, "broadcast_delay": 1, "deliver_tail": False}, {"threads": 8}),
    ],
)
def test_logits_of_drafts_are_the_models(overrides: dict[str, Any], options: dict[str, Any]) -> None:
    model = model_with_head(**overrides)
    with engine_of(model, **options) as engine:
        recorded(drafting(engine))
        engine.generate(random_ids(model.config, 150, 1), max_new_tokens=20)  # the prompt takes two passes
        assert largest_error(model, engine) < 0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logits_of_drafts_with_narrow_weights(dtype: str) -> None:
    model = model_with_head(dtype=dtype, draft_vocab_size=40)
    with engine_of(model, threads=2) as engine:
        recorded(drafting(engine))
        engine.generate(random_ids(model.config, 30, 1), max_new_tokens=20)
        assert largest_error(model, engine) < 0


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_quantised_drafts_are_near(dtype: str) -> None:
    model = model_with_head(dtype="bf16", draft_vocab_size=40)
    with engine_of(model, dtype=dtype, threads=2) as engine:
        recorded(drafting(engine))
        engine.generate(random_ids(model.config, 30, 1), max_new_tokens=20)
        ids, made, logits = recorded(engine)[0]
    exact = reference(model, ids, made, torch.float64)
    can = np.isfinite(exact)
    assert np.corrcoef(logits[can], exact[can])[0, 1] > {"int8": 0.999, "int4": 0.9}[dtype]


@functools.cache
def learnt() -> tuple[Laneformer, list[int]]:
    """A head that has learnt one text of its model by heart, and the text's prompt."""
    torch.manual_seed(0)
    model = model_with_head()
    prompt = random_ids(model.config, 140, 1)
    with engine_of(model) as engine:
        text = torch.tensor([prompt + engine.generate(prompt, max_new_tokens=50, speculate=0)])
    head = [p for name, p in model.named_parameters() if name.startswith("mtp.")]
    optimizer = torch.optim.Adam(head, lr=0.01)
    for _ in range(60):
        loss = torch.stack(
            [
                torch.nn.functional.cross_entropy(logits[0], text[0, step + 1 :][: logits.shape[1]])
                for step, logits in enumerate((x[:, :-1] for x in model.draft_logits(text, 3)), 1)
            ]
        ).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model, prompt


def figures_of_learnt(threads: int = 2, **options: Any) -> Statistics:
    model, prompt = learnt()
    with engine_of(model, **{"threads": threads, **options}) as engine:
        plain = engine.generate(prompt, max_new_tokens=50, speculate=0)
        drafting(engine)
        quick = engine.generate_detailed(prompt, max_new_tokens=50, reuse_prefix=False)
        assert quick.ids == plain
        return quick.statistics


@pytest.mark.parametrize("threads", [1, 3])
def test_a_head_that_knows_the_text_is_right(threads: int) -> None:
    figures = figures_of_learnt(threads)
    assert figures.accepted_tokens >= 0.9 * figures.proposed_tokens
    assert figures.passes < 20


@pytest.mark.rotate
def test_the_head_runs_in_several_processes() -> None:
    figures = figures_of_learnt(threads=1, processes=2)
    assert figures.accepted_tokens >= 0.9 * figures.proposed_tokens


@pytest.mark.parametrize("sampling", SAMPLING)
def test_drafts_change_no_token_and_no_bit(sampling: dict[str, Any]) -> None:
    model = model_with_head(draft_vocab_size=40)
    prompt = random_ids(model.config, 150, 2)
    with engine_of(model, threads=2) as engine:
        plain = engine.generate_detailed(prompt, max_new_tokens=42, speculate=0, logprobs=2, **sampling)
        drafting(engine)
        for reuse in (False, True, True):
            quick = engine.generate_detailed(
                prompt, max_new_tokens=42, logprobs=2, reuse_prefix=reuse, **sampling
            )
            assert quick.tokens == plain.tokens
            assert quick.statistics.proposed_tokens > 0


def test_requests_that_join_get_what_each_gets_alone() -> None:
    """Some join late, one is cancelled, one is drawn under masks, one is scored."""
    model = model_with_head()
    prompts = [random_ids(model.config, length, length) for length in (3, 140, 30, 31)]
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0}
    with engine_of(model, threads=2) as engine:
        plain = engine.generate_batch(prompts, speculate=0, **options)
        drafting(engine)
        assert engine.generate_batch(prompts, reuse_prefix=False, **options) == plain
        with engine.batch() as batch:
            tickets: dict[int, list[int]] = {
                batch.join(prompts[0], seed=5, **options): [],
                batch.join(prompts[1], seed=6, **options): [],
            }
            cancelled, scored = batch.join(prompts[3], seed=9, **options), batch.score(prompts[1])
            scores = None
            while any(len(tokens) < 40 for tokens in tickets.values()):
                for update in batch.updates(1.0):
                    tickets.get(update.ticket, []).extend(token.id for token in update.tokens)
                    scores = update.scores if update.ticket == scored else scores
                if len(tickets) == 2:
                    batch.leave(cancelled)
                    tickets[batch.join(prompts[2], seed=7, **options)] = []
                    tickets[masked := batch.join(prompts[0], seed=5, masked=True, **options)] = []
                    for index in range(40):
                        batch.allow(masked, index, np.full(4, 2**32 - 1, np.uint32))
        alone = [
            engine.generate(prompts[i], seed=seed, speculate=0, **options)
            for i, seed in ((0, 5), (1, 6), (2, 7), (0, 5))
        ]
        assert list(tickets.values()) == alone
        assert scores is not None
        assert np.array_equal(scores.logprobs, engine.logprobs(prompts[1]))


def test_prefixes_keep_the_heads_keys() -> None:
    """Drafts after a prompt from the cache have the logits of those after one that was read."""
    model = model_with_head()
    prompt = random_ids(model.config, 140, 1)
    with engine_of(model, threads=2) as engine:
        drafting(engine)
        engine.generate(prompt, max_new_tokens=20)
        recorded(engine)
        again = engine.generate_detailed(prompt, max_new_tokens=40, temperature=1.5, seed=1).statistics
        assert again.reused_tokens == len(prompt) - 1
        assert largest_error(model, engine, every=2) < 0


def test_drafts_that_do_not_pay_are_not_made() -> None:
    model = model_with_head()
    prompt, options = random_ids(model.config, 30, 3), {"max_new_tokens": 60, "reuse_prefix": False}
    with engine_of(model) as engine:
        drafting(engine, draft=2.0)
        dear = engine.generate_detailed(prompt, **options).statistics
        recorded(engine)
        assert engine.generate_detailed(prompt, **options).statistics == dear
        assert not recorded(engine)
        assert engine.generate_detailed(prompt, speculate=0, **options).statistics.proposed_tokens == 0


def test_a_folder_with_a_head_loads_and_its_packed_weights_again(tmp_path: Path) -> None:
    model = model_with_head(dtype="bf16", draft_vocab_size=40)
    folder = write_folder(tmp_path / "model", model)
    written = []
    for _ in range(2):  # the second time from the packed weights
        with Engine.from_pretrained(folder, threads=2, kv_dtype="fp32") as engine:
            assert engine.draft_head is not None
            assert engine.draft_head.ids == 40
            assert 0 < engine.draft_head.weight_bytes < engine.weight_bytes
            recorded(drafting(engine))
            written.append(engine.generate([1, 2, 3], max_new_tokens=20))
            assert largest_error(model, engine) < 0
    assert written[0] == written[1]
    model.state_dict()[DRAFT_IDS][1] = 0
    with pytest.raises(ValueError, match="ascending order"):
        Engine.from_pretrained(write_folder(folder, model), cache=False)


def test_synthetic_acceptance_counts_the_heads_passes() -> None:
    model = model_with_head(max_position_embeddings=256)
    with engine_of(model) as engine:
        drafting(engine)
        figures = synthetic(engine, [1.0, 1.0])
        assert figures["right"] == 1.0
        assert 2.5 < figures["tokens_a_pass"] <= 3.0
        drafting(engine, draft=5.0)
        assert synthetic(engine, [1.0, 1.0])["tokens_a_pass"] == 1.0
    with engine_of(random_model(LaneformerConfig.from_dict(small_config().to_dict()))) as engine:
        assert engine.draft_head is None


def test_a_random_head_has_ids_of_every_lane() -> None:
    config = LaneformerConfig.from_flavor("tiny", num_nextn_predict_layers=1, draft_vocab_size=64)
    with warnings.catch_warnings(), Engine.random(config, threads=1) as engine:
        warnings.simplefilter("error")
        assert len(engine.generate([1, 2, 3], max_new_tokens=8)) == 8
