"""Small real things for the Hugging Face tests: a SentencePiece model of standard-library code, and a random model."""

from __future__ import annotations

import functools
import io
import sysconfig
from pathlib import Path

import sentencepiece
import torch

from laneformer import Laneformer, LaneformerConfig

VOCAB_SIZE = 1024


@functools.cache
def stdlib_sources(count: int = 120) -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))[:count]
    return [file.read_text(errors="replace") for file in files]


@functools.cache
def sentencepiece_model(add_dummy_prefix: bool = True, **overrides: object) -> bytes:
    model = io.BytesIO()
    options = {
        "model_type": "bpe", "vocab_size": VOCAB_SIZE, "byte_fallback": True, "split_digits": True,
        "allow_whitespace_only_pieces": True, "add_dummy_prefix": add_dummy_prefix, "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity", "character_coverage": 0.9999, "num_threads": 1, "minloglevel": 2,
    }  # fmt: skip
    lines = (line for text in stdlib_sources(60) for line in text.split("\n"))
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **{**options, **overrides})
    return model.getvalue()


def small_config(**overrides: object) -> LaneformerConfig:
    """Wide enough initialisation that attention and greedy choices depend on the text."""
    values = {"vocab_size": VOCAB_SIZE, "sliding_window": 16, "initializer_range": 0.15, **overrides}
    return LaneformerConfig.from_flavor("tiny", **values)


def random_model(seed: int = 0, **overrides: object) -> Laneformer:
    model = Laneformer(small_config(**overrides)).eval()
    model.init_weights(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.add_(0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name))))
    return model
