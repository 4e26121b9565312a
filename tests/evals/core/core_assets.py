"""Small models and rows for the tests of CORE: Laneformer and Llama folders, hand-made rows."""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from evals.core.tasks import TASKS, Bundle, Task
from evals.scorer import Prompt, Scorer, Scores
from laneformer import Laneformer, LaneformerConfig
from laneformer.hf.tokenizer import write_tokenizer
from tests.laneformer.engine.assets import random_model, write_folder
from tests.records.lines import write_lines

VOCAB = 320
CHOICE_ROWS = [
    {
        "query": f"The {a} looked at the {b}, because",
        "choices": [f"the {a} was old.", f"it was {b}", "no."],
        "gold": i % 3,
    }
    for i, (a, b) in enumerate(
        [("cat", "dog"), ("tree", "moon"), ("man", "sea"), ("king", "rat"), ("cook", "pan")]
    )
]
SCHEMA_ROWS = [
    {
        "context_options": [f"The {a} hit the {b} and the {a}", f"The {a} hit the {b} and the {b}"],
        "continuation": "fell down.",
        "gold": i % 2,
    }
    for i, (a, b) in enumerate([("cat", "door"), ("tree", "car"), ("man", "wall"), ("rat", "box")])
]
TEXT_ROWS = [
    {
        "context": f"  {a} and {b} make ",
        "continuation": f"{a + b}",
        "category": "even" if i % 2 else "odd",
    }
    for i, (a, b) in enumerate([(1, 2), (2, 2), (3, 4), (1, 9), (5, 6), (7, 7)])
]
ROWS = {"multiple_choice": CHOICE_ROWS, "schema": SCHEMA_ROWS, "language_modeling": TEXT_ROWS}


def task(label: str) -> Task:
    return next(task for task in TASKS if task.label == label)


@functools.cache
def sentencepiece_model() -> bytes:
    model = io.BytesIO()
    text = [
        " ".join(str(value) for value in row.values()) for rows in ROWS.values() for row in rows
    ]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 3),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return model.getvalue()


def write_text_parts(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    write_tokenizer(folder / "tokenizer.model", folder, 128)


def write_laneformer(folder: Path, context: int = 128) -> Laneformer:
    """Write a Laneformer folder as an export does, with weights so large that choices differ."""
    config = LaneformerConfig(
        hidden_size=48,
        intermediate_size=88,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_lanes=4,
        broadcast_delay=2,
        sliding_window=24,
        swa_layers=(0, 1),
        max_position_embeddings=context,
        vocab_size=VOCAB,
    )
    model = random_model(config, seed=3)
    write_text_parts(folder)
    # which is not there
    code = {"AutoConfig": "x.X", "AutoModel": "y.Y", "AutoModelForCausalLM": "y.Z"}
    write_folder(folder, model, auto_map=code, bos_token_id=1, eos_token_id=2)
    return model


def write_llama(folder: Path, **config: Any) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    torch.manual_seed(5)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    slides = "sliding_window" in config
    values = {**sizes, **config}
    model = (
        MistralForCausalLM(MistralConfig(**values))
        if slides
        else LlamaForCausalLM(LlamaConfig(**values))
    )
    write_text_parts(folder)
    model.eval().save_pretrained(folder)
    return model


def write_bundle(folder: Path, labels: list[str], root: str = "eval_data") -> Bundle:
    for label in labels:
        write_lines(folder / root / task(label).path, ROWS[task(label).type])
    return Bundle(folder)


def score_one(scorer: Scorer, ids: Sequence[int], start: int) -> Scores:
    ((scores,),) = scorer.score([[Prompt(list(ids), start)]])
    return scores


def eval_data() -> Path:
    folder = Path(os.environ.get("LANEFORMER_EVAL_DATA", "")) / "core"
    if "LANEFORMER_EVAL_DATA" not in os.environ or not folder.is_dir():
        pytest.skip(
            "LANEFORMER_EVAL_DATA does not name a folder with core/: the public rows of CORE are needed"
        )
    return folder
