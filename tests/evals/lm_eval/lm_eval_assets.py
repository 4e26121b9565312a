"""Assets of the lm-eval tests: a tiny bf16 model, and data sets in lm-eval's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from laneformer.hf.tokenizer import write_tokenizer
from tests.laneformer.engine.assets import write_folder
from tests.laneformer.hf.hf_assets import VOCAB_SIZE, random_model, sentencepiece_model
from tests.records.lines import write_lines

CONTEXT = 512
QUESTIONS = [
    ("Which gas do plants take in?", ["oxygen", "carbon dioxide", "helium", "nitrogen gas"], 1),
    ("What pulls a stone to the ground?", ["gravity", "light", "sound"], 0),
    ("Which of these is a mammal?", ["a trout", "a wren", "a bat", "an ant"], 2),
    ("What does a thermometer measure?", ["mass", "time", "length", "temperature"], 3),
    ("Which planet is closest to the sun?", ["Mercury", "Earth", "Mars", "Saturn"], 0),
]
ESSAYS = [
    "Dr. Ames met Mr. Low at 5 p.m. They spoke. Dr. Ames left.",
    "It rained, e.g. on Mr. Low. He ran. He fell.",
]


def write_tiny(
    folder: Path, context: int = CONTEXT, vocab_size: int = VOCAB_SIZE, **tokenizer: Any
) -> Path:
    """Write a model folder with random bf16 weights whose choices depend on the text."""
    model = random_model(max_position_embeddings=context, vocab_size=vocab_size).bfloat16()
    write_folder(folder, model, bos_token_id=1, eos_token_id=2)
    (folder / "tokenizer.model").write_bytes(
        sentencepiece_model(vocab_size=vocab_size, **tokenizer)
    )
    write_tokenizer(folder / "tokenizer.model", folder, context)
    return folder


def write_configs(folder: Path, configs: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
    """Write a data set as the hub stores it: rows by config and split, README.md."""
    header = ["---", "configs:"]
    for config, splits in configs.items():
        header += [f"- config_name: {config}", "  data_files:"]
        for split, rows in splits.items():
            header += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
            write_lines(folder / config / f"{split}.jsonl", rows)
    (folder / "README.md").write_text("\n".join([*header, "---", ""]))


def write_data(folder: Path, questions: Sequence[tuple[str, list[str], int]] = QUESTIONS) -> Path:
    rows = [
        {
            "id": str(number),
            "question": question,
            "answerKey": "ABCD"[gold],
            "choices": {"text": texts, "label": list("ABCD"[: len(texts)])},
        }
        for number, (question, texts, gold) in enumerate(questions)
    ]
    write_configs(
        folder / "allenai/ai2_arc",
        {"ARC-Easy": dict.fromkeys(("train", "validation", "test"), rows)},
    )
    essays = [{"text": text * 200} for text in ESSAYS]
    write_lines(folder / "baber/paul_graham_essays/train.jsonl", essays)
    return folder
