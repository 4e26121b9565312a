"""Load a small model that drafts in its own passes (schedule/pass_drafter.h), instead of a head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..config import LaneformerConfig
from .cpu.decoder import CpuDecoder
from .cpu.packed import PackedWeights
from .decoder import DraftModel
from .folder import read_checkpoint, with_context

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class DraftSource(NamedTuple):
    # a folder or GGUF file
    path: Path
    # the large model's
    tokenizer: Tokenizer | None
    # keep the packed weights on disk
    cache: bool


def load_draft_model(
    decoder: CpuDecoder, config: LaneformerConfig, source: DraftSource
) -> DraftModel:
    """Let a small model draft for the decoder's; ValueError for another vocabulary."""
    path = source.path
    checkpoint = read_checkpoint(path, None, decoder.threads)
    vocabulary, draft_vocabulary = (
        read_vocabulary(source.tokenizer, config),
        read_vocabulary(checkpoint.tokenizer, checkpoint.config),
    )
    if vocabulary != draft_vocabulary:
        raise ValueError(
            f"draft = {str(path)!r} has another vocabulary than the model: its {checkpoint.config.vocab_size} ids "
            f"would not mean what the model's {config.vocab_size} do; take a small model of the same family"
        )
    context = min(checkpoint.config.max_position_embeddings, config.max_position_embeddings)
    small = CpuDecoder(
        with_context(checkpoint.config, context),
        checkpoint.tensors,
        checkpoint.dtype,
        threads=decoder.threads,
        packed=PackedWeights(path, checkpoint.files) if source.cache else None,
    )
    decoder.draft_with(small)
    return DraftModel(path.name, small.dtype, small.weight_bytes)


def read_vocabulary(
    tokenizer: Tokenizer | None, config: LaneformerConfig
) -> tuple[int, dict[str, int]]:
    """Return the number of ids, and the id of each token, if known."""
    return config.vocab_size, {} if tokenizer is None else tokenizer.get_vocab(
        with_added_tokens=True
    )
