"""The sentencepiece model of a data folder: trained here with the Llama-2 conventions, or brought along.

Conventions: <unk> 0, <s> 1, </s> 2, no pad; BPE with byte fallback, so no text is ever unknown; identity normalizer,
spaces kept, digits split one by one. Text is never parsed for control tokens: "<s>" in a document is three characters.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import sentencepiece

from data_mixtures.recipe import MAX_VOCAB_SIZE, TokenizerTraining

UNK, BOS, EOS = 0, 1, 2
MAX_LINE_BYTES = 65_536  # longer lines are left out of the training sample (sentencepiece would do it silently)


def train(texts: Iterable[str], training: TokenizerTraining) -> bytes:
    """A serialized model from texts, line by line (so a newline stays the byte piece <0x0A>, as in Llama-2)."""
    lines = (line for text in texts for line in text.split("\n") if line and len(line.encode()) <= MAX_LINE_BYTES)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=training.vocab_size,
        character_coverage=training.character_coverage,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        add_dummy_prefix=True,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        max_sentence_length=MAX_LINE_BYTES,
        unk_id=UNK,
        bos_id=BOS,
        eos_id=EOS,
        pad_id=-1,
        num_threads=1,  # the result must not depend on the machine
        minloglevel=1,
    )
    return model.getvalue()


def load(path: Path) -> sentencepiece.SentencePieceProcessor:
    """Open a model and check that it fits: at most 65,536 pieces, <unk> <s> </s> as 0 1 2. ValueError otherwise."""
    if not path.is_file():
        raise ValueError(f"tokenizer model {path} does not exist; give the path of a sentencepiece tokenizer.model")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    if processor.vocab_size() > MAX_VOCAB_SIZE:
        raise ValueError(f"{path} has {processor.vocab_size()} pieces; tokens are uint16, so at most {MAX_VOCAB_SIZE}")
    ids = (processor.unk_id(), processor.bos_id(), processor.eos_id())
    if ids != (UNK, BOS, EOS):
        raise ValueError(f"{path} has <unk>, <s>, </s> = {ids}; Laneformer data needs {(UNK, BOS, EOS)} as in Llama-2")
    return processor


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def encode(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """BOS + pieces + EOS of every text: (tokens uint16 of all documents in a row, lengths uint32 per document)."""
    documents = [[BOS, *ids, EOS] for ids in processor.encode(texts)]
    lengths = np.array([len(document) for document in documents], dtype=np.uint32)
    tokens = np.array([token for document in documents for token in document], dtype="<u2")
    controls = int(((tokens == BOS) | (tokens == EOS)).sum())
    if controls != 2 * len(texts):
        raise ValueError(
            "the tokenizer makes <s> or </s> out of ordinary text; it must not define them as user symbols"
        )
    return tokens, lengths
