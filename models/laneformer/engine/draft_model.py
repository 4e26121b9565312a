"""What drafts in passes of its own (schedule/model_drafts.h): a small model, or the model's own head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import LaneformerConfig
from .cpu.decoder import CpuDecoder
from .cpu.packed import PackedWeights
from .decoder import Decoder
from .folder import read_checkpoint, with_context

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class DraftModel:
    name: str
    dtype: str
    weight_bytes: int


@dataclass(frozen=True)
class DraftHead:
    """For multi-token prediction. ids: that it can draft. weight_bytes: read for each draft."""

    ids: int
    weight_bytes: int

    @staticmethod
    def of(decoder: Decoder, config: LaneformerConfig) -> DraftHead | None:
        if not config.num_nextn_predict_layers or not decoder.draft_weight_bytes:
            return None
        return DraftHead(config.draft_vocab_size or config.vocab_size, decoder.draft_weight_bytes)


def draft_with(
    decoder: Decoder, config: LaneformerConfig, tokenizer: Tokenizer | None, path: Path, cache: bool = True
) -> DraftModel:
    """Load the folder or GGUF file at `path`, and let it draft for the decoder's model.

    ValueError for another vocabulary, and where the model runs on GPUs or in several processes.
    """
    if not isinstance(decoder, CpuDecoder) or not decoder.alone:
        raise ValueError(f"draft = {str(path)!r}: a draft model takes the CPU and one process; leave it out")
    checkpoint = read_checkpoint(path, None, decoder.threads)
    own, other = ids_of(tokenizer, config), ids_of(checkpoint.tokenizer, checkpoint.config)
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
        packed=PackedWeights(path, checkpoint.files) if cache else None,
    )
    decoder.draft_with(small)
    return DraftModel(path.name, small.dtype, small.weight_bytes)


def ids_of(tokenizer: Tokenizer | None, config: LaneformerConfig) -> tuple[int, dict[str, int]]:
    """The number of ids, and what each of them says where that is known."""
    return config.vocab_size, {} if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True)
