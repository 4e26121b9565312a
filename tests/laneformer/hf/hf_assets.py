"""Small inputs of the Hugging Face tests: a SentencePiece model of Python's sources, a model, a run."""

from __future__ import annotations

import functools
import io
import json
import sysconfig
from pathlib import Path

import sentencepiece
import torch

from laneformer import Laneformer, LaneformerConfig

VOCAB_SIZE = 1024
# float32 logits of about 10 from six layers of sums; padded batches and caches choose other kernels
# for the same sums
FLOAT32_TOLERANCE = 10 * 50 * 2.0**-24


@functools.cache
def stdlib_sources(count=120) -> list[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))[:count]
    return [file.read_text(errors="replace") for file in files]


@functools.cache
def sentencepiece_model(add_dummy_prefix: bool = True, **overrides) -> bytes:
    model = io.BytesIO()
    options = {
        "model_type": "bpe",
        "vocab_size": VOCAB_SIZE,
        "byte_fallback": True,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
        "add_dummy_prefix": add_dummy_prefix,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "character_coverage": 0.9999,
        "num_threads": 1,
        "minloglevel": 2,
    }
    lines = (line for text in stdlib_sources(60) for line in text.split("\n"))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=model, **{**options, **overrides}
    )
    return model.getvalue()


def small_config(**overrides) -> LaneformerConfig:
    # a wide initialisation makes attention and greedy choices depend on the text
    values = {
        "vocab_size": VOCAB_SIZE,
        "sliding_window": 16,
        "initializer_range": 0.15,
        **overrides,
    }
    return LaneformerConfig.from_flavor("tiny", **values)


def random_model(seed=0, **overrides) -> Laneformer:
    model = Laneformer(small_config(**overrides)).eval()
    model.init_weights(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                # scales of 1, as initialized, would hide one that is lost
                p.add_(
                    0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
                )
    return model


def write_run(folder, model, step=30) -> Path:
    """Write a run folder as training leaves it; return its checkpoint's path."""
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    line = {"step": step, "phase": "phase2", "tokens_total": 123_456, "loss": 4.25}
    # cut by a crash
    lines = [json.dumps({**line, "step": step - 1}), json.dumps(line), '{"step": 7, "los']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    state = {
        **model.state_dict(),
        "optimizer.state.norm.weight.exp_avg": torch.ones(3),
        "train_state": torch.tensor([step]),
    }
    checkpoint = folder / "checkpoint" / f"step-{step}"
    import torch.distributed.checkpoint as dcp  # its imports take two seconds of every collection

    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    return checkpoint
