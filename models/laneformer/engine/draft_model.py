"""A small model that drafts in passes of its own (schedule/model_drafts.h), in place of the model's own head."""

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
    """path: a folder or GGUF file. tokenizer: the large model's. cache: keep the packed weights on disk."""

    path: Path
    tokenizer: Tokenizer | None
    cache: bool


def load_draft_model(
    decoder: CpuDecoder, config: LaneformerConfig, source: DraftSource
) -> DraftModel:
    """Load a small model, and let it draft for the decoder's model; ValueError for another vocabulary."""
    path = source.path
    checkpoint = read_checkpoint(path, None, decoder.threads)
    own, other = (
        read_vocabulary(source.tokenizer, config),
        read_vocabulary(checkpoint.tokenizer, checkpoint.config),
    )
    if own != other:
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
    """The number of ids, and what each of them says where that is known."""
    return config.vocab_size, {} if tokenizer is None else tokenizer.get_vocab(
        with_added_tokens=True
    )
