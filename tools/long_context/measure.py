"""What a trained run can do, at every length that it has seen and at the next: loss by position, answers by
hops.

A question counts as answered where its value is the likeliest token. The control loses the keys of one lane
in the layers that see everything, the lane by which `recall` suffers most: what is fetched must get worse.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from data_mixtures.shards import tokenizer_path
from laneformer import Laneformer, LaneformerConfig
from laneformer.hf.export import load_weights

from .data import long_texts, processor, scored_documents, split
from .tasks import KINDS, Document

TEXTS = 8  # long ones, for the loss by position


def load(run: Path, step: int, longest: int) -> Laneformer:
    """The run's model, whose weights fit any length."""
    values = json.loads((run / "model.json").read_text(encoding="utf-8"))
    model = Laneformer(LaneformerConfig.from_dict({**values, "max_position_embeddings": longest}))
    model.load_state_dict(load_weights(run / f"checkpoint/step-{step}", model.config))
    return model.float().eval()


@torch.no_grad()
def loss_by_position(
    model: Laneformer, text: Path, lock: Path, borders: list[int], context: int | None = None
) -> dict[str, float]:
    """Mean loss, in nats a token, of held-out long texts between the borders: "64-256" is positions 64 to 255.

    context: every token is seen with so many before it, and up to twice as many; default: with all.
    """
    tokenizer, length = processor(tokenizer_path(lock.parent)), borders[-1]
    step, losses = context or length, list[float]()
    for words in long_texts(split(text, True), 6 * length):
        ids = torch.tensor([tokenizer.bos_id(), *tokenizer.encode(words)][: length + 1])
        for begin in (
            range(0, length, step) if len(ids) == length + 1 and len(losses) < TEXTS * length else ()
        ):
            seen = ids[max(0, begin - step) : begin + step + 1]
            each = F.cross_entropy(model(seen[None, :-1])[0], seen[1:], reduction="none")
            losses += each[-min(step, length - begin) :].tolist()
    if not losses:
        raise ValueError(f"{text} has no held-out text of {length} tokens; give more text")
    mean = np.reshape(losses, (-1, length)).mean(0)
    return {f"{a}-{b}": float(mean[a:b].mean()) for a, b in zip([0, *borders], borders, strict=False)}


def answers(document: Document, lock: Path) -> tuple[list[int], list[tuple[int, int]]]:
    """Its ids, as a training document has them, and of each question the place of its value and its hops."""
    tokenizer = processor(tokenizer_path(lock.parent))
    ids, places = [tokenizer.bos_id(), *tokenizer.encode(document.text)], []
    for question in document.questions:
        ids += tokenizer.encode(question.line)
        assert tokenizer.id_to_piece(ids[-1]) == question.value, "a value is a piece of its own"
        places.append((len(ids) - 1, question.hops))
    return ids, places


@torch.no_grad()
def answered(model: Laneformer, documents: list[Document], lock: Path) -> dict[str, list[float]]:
    """By hops, questions answered, questions asked, and the nats of all answers: {"1": [9, 10, 2.5]}."""
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for ids, places in (answers(document, lock) for document in documents):
        logits = model(torch.tensor([ids[:-1]]))[0]
        losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none").tolist()
        likeliest = logits.argmax(-1).tolist()
        for at, hops in places:
            for i, more in enumerate((int(likeliest[at - 1] == ids[at]), 1, losses[at - 1])):
                found[str(hops)][i] += more
    return dict(sorted(found.items()))


def without_keys(model: Laneformer, lane: int) -> Laneformer:
    """Plant a fault: this lane's keys, in the layers that see everything, are all the same."""
    broken = copy.deepcopy(model)
    for i, layer in enumerate(broken.layers):
        if model.config.window(i) is None:
            layer.attention.wk.weight.data[lane] = 0  # type: ignore[union-attr, operator]
    return broken


def measured(
    run: Path, step: int, text: Path, lock: Path, lengths: list[int], scored: dict[str, int]
) -> dict[str, Any]:
    """Everything about one run, as JSON values. scored: documents of each kind, by length."""
    model = load(run, step, lengths[-1])
    borders = sorted({model.config.sliding_window, *lengths})
    documents = {
        (kind, length): scored_documents(lock, kind, length, scored[str(length)])
        for kind in KINDS for length in lengths
    }  # fmt: skip
    found = {f"{kind}-{length}": answered(model, each, lock) for (kind, length), each in documents.items()}
    short = {kind: documents[kind, lengths[0]] for kind in KINDS}
    broken = [without_keys(model, lane) for lane in range(model.config.num_lanes)]
    by_lane = [answered(each, short["recall"], lock)["1"][0] for each in broken]
    worst = broken[by_lane.index(min(by_lane))]
    return {
        "loss_by_position": loss_by_position(model, text, lock, borders),
        "loss_near": loss_by_position(model, text, lock, borders, lengths[0] // 2),
        "answered": found,
        "recall_without_lane": by_lane,
        "control": {f"{kind}-{lengths[0]}": answered(worst, each, lock) for kind, each in short.items()},
    }
