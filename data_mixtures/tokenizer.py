"""The sentencepiece model of a data folder: trained here with the Llama-2 conventions, or given.

Conventions: <unk> 0, <s> 1, </s> 2, no pad; BPE with byte fallback, so no text is ever unknown; identity normalizer,
spaces kept, digits split one by one. Text is never parsed for control tokens: "<s>" in a document is three characters.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece

from data_mixtures.recipe import MAX_VOCAB_SIZE, TokenizerTraining

UNK, BOS, EOS = 0, 1, 2  # the ids of control tokens everywhere in data_mixtures
_BOS_BYTES, _EOS_BYTES = BOS.to_bytes(2, "little"), EOS.to_bytes(2, "little")
# segments: spaces, then letters, or one digit, or signs; for models with other pieces all up to the next space.
# sentencepiece takes the character ▁ (2581) in a text for a space
_PATTERNS = (
    re.compile(
        r"[ ▁]*+(?:[A-Za-z\xc0-\u1fff\u2c00-\U0010ffff]++|[0-9]"
        r"|[\x00-\x09\x0b-\x1f!-/:-@\[-`{-\xbf\u2000-\u2580\u2582-\u2bff]++)|[ ▁]++|\n"
    ),
    re.compile(r"[ ▁]*+[^ ▁\n]++|[ ▁]++|\n"),
)
_PROBE = "  a  \n\n b\t ﬁ Å\u0301 东  "  # what normalizers change, strip or collapse
_SEGMENTS, _SEGMENT_CHARS = 1 << 18, 64  # at most in the table: about 50 MB
MAX_LINE_BYTES = 65_536  # longer lines are left out of the training sample (sentencepiece would do it silently)


def train(texts: Iterable[str], training: TokenizerTraining) -> bytes:
    """A serialized model from texts, line by line (so a newline stays the byte piece <0x0A>, as in Llama-2)."""
    lines = (line for text in texts for line in text.split("\n") if line and len(line.encode()) <= MAX_LINE_BYTES)
    model, size = io.BytesIO(), training.vocab_size
    options = dict[str, Any](
        model_type="bpe",
        vocab_size=size,
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
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=model, **options)
    except RuntimeError as error:  # sentencepiece's only kind of error
        raise ValueError(f"no tokenizer of {size} pieces can be trained on this text: {error}") from error
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


def encode(processor: sentencepiece.SentencePieceProcessor, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """BOS + pieces + EOS of every text: (tokens uint16 of all documents in a row, lengths uint32 per document)."""
    encoder = _encoder(processor)
    documents = [_BOS_BYTES + encoder.encode(text) + _EOS_BYTES for text in texts]
    tokens = np.frombuffer(b"".join(documents), "<u2")
    lengths = np.array([len(document) // 2 for document in documents], dtype=np.uint32)
    if np.count_nonzero((tokens == BOS) | (tokens == EOS)) != 2 * len(texts):
        raise ValueError("the tokenizer makes <s> or </s> of ordinary text; it must not define them as user symbols")
    return tokens, lengths


class Encoder:
    """Text -> ids, equal to sentencepiece's on the whole text, and several times as fast where words repeat.

    Where no piece joins two kinds of characters (a word and the space or the sign behind it), no merge crosses such a
    place, and a text's ids are those of its segments in a row. Segments are looked up in a table that fills as they
    come; so the cost of a document is also linear in its length. Models that join them encode whole texts.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        self._processor = processor
        patterns = _PATTERNS if _keeps_text(processor) else ()
        self.pattern = next((each for each in patterns if _no_piece_is_cut(each, processor)), None)
        self._segments = _Segments(processor)
        self._first = " " if self._segments.newline_ids == 2 else ""  # most models put a space before a text

    def encode(self, text: str) -> bytes:
        """The ids as little-endian uint16."""
        if self.pattern is None or not text:
            return _id_bytes(self._processor.encode(text))
        return b"".join(map(self._segments.__getitem__, self.pattern.findall(self._first + text)))


_encoder = functools.lru_cache(maxsize=1)(Encoder)


class _Segments(dict[str, bytes]):
    """Segment -> its ids. A full table is emptied; frequent segments soon return."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        super().__init__()
        self._processor = processor
        self.newline_ids = len(processor.encode("\n"))

    def __missing__(self, segment: str) -> bytes:
        # behind a newline a segment is encoded as in the middle of a text
        ids = _id_bytes(self._processor.encode("\n" + segment)[self.newline_ids :])
        if len(segment) <= _SEGMENT_CHARS:
            if len(self) >= _SEGMENTS:
                self.clear()
            self[segment] = ids
        return ids


def _keeps_text(processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether this is a BPE that changes no text and has a piece for the newline alone."""
    newline = [processor.id_to_piece(i) for i in processor.encode("\n")]
    return (
        newline in [[*before, end] for before in ([], ["▁"]) for end in ("\n", "<0x0A>")]
        and [processor.id_to_piece(i) for i in processor.encode("\n\n")] == [*newline, newline[-1]]
        and processor.decode(processor.encode(_PROBE)) == _PROBE
        # ranks of merges; the pieces of a unigram model have logarithms of probabilities
        and all(processor.get_score(i).is_integer() for i in range(processor.vocab_size()))
    )


def _no_piece_is_cut(pattern: re.Pattern[str], processor: sentencepiece.SentencePieceProcessor) -> bool:
    """Whether each piece lies within one match of the pattern; where matches meet depends on two characters only."""
    ids = range(processor.vocab_size())
    ordinary = (i for i in ids if not (processor.is_byte(i) or processor.is_control(i) or processor.is_unknown(i)))
    return all(pattern.fullmatch(processor.id_to_piece(i)) for i in ordinary)


def _id_bytes(ids: list[int]) -> bytes:
    return np.array(ids, "<u2").tobytes()
