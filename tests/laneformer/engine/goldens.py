"""200 requests of every kind to six random models, and the token ids that the engine must answer with.

    python -m tests.laneformer.engine.goldens     records goldens.json anew: only where tokens are meant to change

Weights are integers times a constant, so they are the same everywhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laneformer.engine import Engine, GeneratedToken, Update
from tests.laneformer.engine.assets import collect, small_config, with_fixed_cost

FILE = Path(__file__).with_suffix(".json")
REQUESTS = 34  # of each model
CACHE_BYTES = 1 << 20  # some prefixes are still there, others have gone
MODELS: dict[str, dict[str, Any]] = {
    "delay_2": {},
    "replicated_head": {"lm_head_type": "replicate", "broadcast_delay": 1, "dtype": "fp32"},
    "lane_head": {
        "lm_head_type": "lane",
        "broadcast_delay": 0,
        "dtype": "fp16",
        "kv_dtype": "bf16",
    },
    "two_lanes": {"num_lanes": 2, "broadcast_delay": 4, "vocab_size": 264, "kv_dtype": "fp32"},
    "int8": {"tie_word_embeddings": True, "dtype": "int8", "math": "int8"},
    "int4": {"use_early_comm": False, "dtype": "int4"},
}
ROUNDED = ("int8", "int4")


@dataclass(frozen=True)
class GoldenRequest:
    """A request: scored from `start` on unless that is 0, else generated, with each token within its mask."""

    ids: list[int]
    options: dict[str, Any]
    start: int = 0
    masks: Sequence[Sequence[int]] = ()


ENGINE_OPTIONS = ("dtype", "math", "kv_dtype")


def engine_of(name, num_nextn_predict_layers=0, **options) -> Engine:
    values = MODELS[name]
    config = small_config(
        max_position_embeddings=300,
        initializer_range=0.15,
        num_nextn_predict_layers=num_nextn_predict_layers,
        **{key: value for key, value in values.items() if key not in ENGINE_OPTIONS},
    )
    of_engine = {key: value for key, value in values.items() if key in ENGINE_OPTIONS}
    defaults = {"seed": 11, "cache_bytes": CACHE_BYTES, "eos_ids": [7], **of_engine}
    return with_fixed_cost(Engine.random(config, **defaults | options))


def requests(name) -> list[GoldenRequest]:
    draw, vocab = random.Random(name), MODELS[name].get("vocab_size", 100)
    shared = [[draw.randrange(vocab) for _ in range(200)] for _ in range(3)]
    return [_request(draw, vocab, shared) for _ in range(REQUESTS)]


def _request(draw, vocab, shared) -> GoldenRequest:
    # prompts often share a prefix or repeat themselves
    prompt = draw.choice(shared)[: draw.choice((0, 1, 20, 60, 140, 200))]
    prompt = prompt + [draw.randrange(vocab) for _ in range(draw.randrange(1, 30))]
    # 15% are scored, 15% have masks, the others generate freely
    kind = draw.random()
    if kind < 0.15:
        return GoldenRequest(
            prompt, {"top": draw.randrange(4)}, start=draw.randrange(1, len(prompt) + 1)
        )
    options = {"max_new_tokens": draw.randrange(1, 25)}
    for option, value in {
        "temperature": 0.8,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "seed": draw.randrange(2**63),
        "logprobs": 2,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.5,
        "reuse_prefix": False,
        "stop_ids": [draw.randrange(vocab) for _ in range(3)],
        "logit_bias": {draw.randrange(vocab): 3.0},
        "ignore_eos": True,
        "speculate": draw.choice((1, 4, 31)),
        "min_new_tokens": 1,
    }.items():
        if draw.random() < 0.35:
            options[option] = value
    if kind < 0.3:
        masks = [
            [draw.randrange(vocab) for _ in range(30)] for _ in range(options["max_new_tokens"])
        ]
        return GoldenRequest(prompt, options, masks=masks)
    if options.setdefault("speculate", 0):
        prompt = (prompt[-12:] * 3)[: len(prompt)] + prompt[-12:]
        # so that drafts are right now and then
        options["logit_bias"] = dict.fromkeys(prompt[-2:], 6.0)
    return GoldenRequest(prompt, options)


def mask_of(ids, vocab) -> np.ndarray:
    mask = np.zeros((vocab + 31) // 32, np.uint32)
    for i in ids:
        mask[i // 32] |= np.uint32(1 << i % 32)
    return mask


def join(batch, request, vocab, masks=None) -> int:
    # masks: how many masks come with the request; `allow` adds the others later
    if request.start:
        return batch.score(request.ids, start=request.start, **request.options)
    ticket = batch.join(request.ids, masked=bool(request.masks), **request.options)
    for index, ids in enumerate(request.masks[:masks]):
        batch.allow(ticket, index, mask_of(ids, vocab))
    return ticket


def ids_of(updates: Sequence[Update]) -> list[int]:
    """Return the ids of the tokens and of their likeliest alternatives, or of the scored positions."""
    assert updates[-1].error is None
    if (scores := updates[-1].scores) is not None:
        return scores.top_ids.ravel().tolist()
    return ids_of_tokens([token for update in updates for token in update.tokens])


def ids_of_tokens(tokens: Sequence[GeneratedToken]) -> list[int]:
    return [token.id for token in tokens] + [i for token in tokens for i, _ in token.top]


def alone(engine, request) -> list[int]:
    """Return the ids, then the counts of reused positions, passes, drafts and accepted drafts."""
    with engine.batch() as batch:
        ticket = join(batch, request, engine.config.vocab_size)
        updates = collect(batch, ticket)[ticket]
    return [*ids_of(updates), *vars(updates[-1].statistics).values()]


def side_by_side(engine, in_order, late_masks=False) -> list[list[int]]:
    """Return the ids of all requests, which join in order, as many at a time as there is room for.

    Args:
        late_masks: send each token's mask only after the token before it.
    """
    vocab, masks = engine.config.vocab_size, 1 if late_masks else None
    # the numbers of the requests that wait, and, by ticket, of those that run
    waiting, running = list(range(len(in_order))), dict[int, int]()
    updates: list[list[Update]] = [[] for _ in in_order]
    with engine.batch() as batch:
        while waiting or running:
            while waiting and len(running) < batch.max_joined:
                number = waiting.pop(0)
                # requests join in order, whenever one has ended
                running[join(batch, in_order[number], vocab, masks)] = number
            for update in batch.updates(10.0):
                number = running[update.ticket]
                updates[number].append(update)
                count = sum(len(u.tokens) for u in updates[number])
                for ids in in_order[number].masks[count : count + 1] if late_masks else ():
                    batch.allow(update.ticket, count, mask_of(ids, vocab))
                if update.finish_reason is not None:
                    del running[update.ticket]
    return [ids_of(u) for u in updates]


def goldens() -> dict[str, list[list[int]]]:
    return json.loads(FILE.read_text())


def record() -> Iterator[tuple[str, list[list[int]]]]:
    for name in MODELS:
        answers = {}
        for isa in ("auto", "portable"):
            with engine_of(name, threads=1, isa=isa) as engine:
                answers[isa] = [alone(engine, request) for request in requests(name)]
        # The portable kernels round differently, so no answer may depend on a tie. Rounded
        # activations
        # (int8, int4) may flip; their ids hold for all other instruction sets.
        if name not in ROUNDED and answers["auto"] != answers["portable"]:
            raise RuntimeError(
                f"{name}: an answer depends on rounding; take other weights or requests"
            )
        yield name, answers["auto"]


if __name__ == "__main__":
    answer_lines = {name: [json.dumps(ids) for ids in answers] for name, answers in record()}
    models = [f'"{name}": [\n' + ",\n".join(lines) + "\n]" for name, lines in answer_lines.items()]
    FILE.write_text("{\n" + ",\n".join(models) + "\n}\n")
