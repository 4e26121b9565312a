"""The tokenizer of a data folder: a sentencepiece model, given or trained here, or
a Hugging Face tokenizer.json.

A document is bos_id, its text's ids, eos_id; where both are the same id (GPT-2, Qwen), that one begins each
document. Text is never parsed for control tokens: "<s>" in a document is three characters, and a tokenizer
that makes a control id of a text is refused. Ids come from the file: sentencepiece models hold them, for a
tokenizer.json they are named by the recipe, by tokenizer_config.json or special_tokens_map.json beside it, or
are known by their names.

Trained here: <unk> 0, <s> 1, </s> 2, no pad; BPE with byte fallback, so no text is ever unknown; identity
normalizer, spaces kept, digits split one by one.
"""

from __future__ import annotations

import abc
import io
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from data_mixtures import shards
from data_mixtures.recipe import TokenizerFile, TokenizerTraining
from records.files import file_sha256

# begin and end of a document in well-known vocabularies
KNOWN_NAMES = (
    ("<s>", "</s>"), ("<|begin_of_text|>", "<|end_of_text|>"), ("<bos>", "<eos>"), ("[BOS]", "[EOS]"),
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"), ("<|endoftext|>", "<|endoftext|>"),
)  # fmt: skip
# segments: spaces, then letters, or one digit, or signs; for models with other pieces all up to the next
# space. sentencepiece takes the character ▁ (2581) in a text for a space
_PATTERNS = (
    re.compile(
        r"[ ▁]*+(?:[A-Za-z\xc0-\u1fff\u2c00-\U0010ffff]++|[0-9]"
        r"|[\x00-\x09\x0b-\x1f!-/:-@\[-`{-\xbf\u2000-\u2580\u2582-\u2bff]++)|[ ▁]++|\n"
    ),
    re.compile(r"[ ▁]*+[^ ▁\n]++|[ ▁]++|\n"),
)
_PROBE = "  a  \n\n b\t ﬁ Å\u0301 东  "  # what normalizers change, strip or collapse
_SEGMENTS, _SEGMENT_CHARS = 1 << 18, 64  # at most in the table: about 50 MB
MAX_LINE_BYTES = (
    65_536  # longer lines are left out of the training sample (sentencepiece would do it silently)
)


def train(texts: Iterable[str], training: TokenizerTraining) -> bytes:
    """A serialized model from texts, line by line (so a newline stays the byte piece <0x0A>, as in Llama-2)."""
    lines = (
        line for text in texts for line in text.split("\n") if line and len(line.encode()) <= MAX_LINE_BYTES
    )
    model, size = io.BytesIO(), training.vocab_size
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
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
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,  # the result must not depend on the machine
            minloglevel=1,
        )
    except RuntimeError as error:  # sentencepiece's only kind of error
        raise ValueError(f"no tokenizer of {size} pieces can be trained on this text: {error}") from error
    return model.getvalue()


def load(path: Path, bos: str | None = None, eos: str | None = None) -> Tokenizer:
    """Open a sentencepiece model or a tokenizer.json. bos, eos: tokens of the latter that begin
    and end a document.

    ValueError for a file that cannot be read, or where these tokens cannot be found.
    """
    if not path.is_file():
        raise ValueError(f"tokenizer {path} does not exist; give a tokenizer.json or a sentencepiece model")
    if path.suffix == ".json":
        return JsonTokenizer(path, bos, eos)
    if bos or eos:
        raise ValueError(
            f"{path}: bos and eos are those of the sentencepiece model; only a tokenizer.json needs names"
        )
    try:
        return SentencepieceTokenizer(sentencepiece.SentencePieceProcessor(model_file=str(path)))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} cannot be used as a sentencepiece model: {error}") from error


def load_given(given: TokenizerFile) -> Tokenizer:
    """The tokenizer that a recipe names. ValueError as `load`."""
    return load(Path(given.path), given.bos, given.eos)


def facts(path: Path) -> dict[str, Any]:
    """What source.json and the lock say of a tokenizer."""
    made = load(path)
    ids = {"vocab_size": made.vocab_size, "token_bytes": made.dtype.itemsize}
    return {"tokenizer_sha256": file_sha256(path), **ids, "bos_id": made.bos_id, "eos_id": made.eos_id}


class Tokenizer(abc.ABC):
    """Text to token ids and back. vocab_size: one more than the largest id; dtype: of tokens on disk.

    names: of the tokens that begin and end a document, where the file itself does not say which they are.
    """

    names: tuple[str, str] | None = None

    def __init__(self, vocab_size: int, bos_id: int, eos_id: int, control_ids: Iterable[int]) -> None:
        self.vocab_size, self.bos_id, self.eos_id = vocab_size, bos_id, eos_id
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._is_control = np.zeros(vocab_size, dtype=bool)
        self._is_control[[bos_id, eos_id, *control_ids]] = True
        self._begin = self._bytes([bos_id])
        self._end = b"" if eos_id == bos_id else self._bytes([eos_id])

    @abc.abstractmethod
    def encode_text(self, text: str) -> bytes:
        """The ids of a text alone, as on disk."""

    @abc.abstractmethod
    def decode_ids(self, ids: list[int]) -> str:
        """The text of ids without control ids."""

    def is_exact(self, text: str) -> bool:
        """Whether `encode_text` gives what the library that it replaces gives."""
        return True

    def encode(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Documents: (tokens of all in a row, lengths uint32 of each). ValueError for text
        that makes control ids.
        """
        documents = [self._begin + self.encode_text(text) + self._end for text in texts]
        tokens = np.frombuffer(b"".join(documents), self.dtype)
        lengths = np.array([len(document) // self.dtype.itemsize for document in documents], dtype=np.uint32)
        control = self._is_control[tokens]
        if np.count_nonzero(control) != len(texts) * len(self._begin + self._end) // self.dtype.itemsize:
            number = int(
                np.argmax(np.add.reduceat(control, np.cumsum(lengths, dtype=np.int64) - lengths, dtype=int))
            )
            raise ValueError(
                f"the tokenizer makes control tokens of ordinary text, such as {texts[number]!r:.200}; it must not "
                "define <s> or </s> as user symbols, and special tokens must be no pieces of its model"
            )
        return tokens, lengths

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, control ids left out."""
        return self.decode_ids([int(i) for i in ids if not self._is_control[i]])

    def _bytes(self, ids: list[int]) -> bytes:
        return np.array(ids, self.dtype).tobytes()


class JsonTokenizer(Tokenizer):
    """A tokenizer.json: no special token is found in text, nothing is added to it or cut off."""

    def __init__(self, path: Path, bos: str | None, eos: str | None) -> None:
        try:
            self._made = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} cannot be read as a Hugging Face tokenizer.json: {error}") from error
        self._made.no_truncation()
        self._made.no_padding()
        self._made.encode_special_tokens = True
        special = {
            each.content: i for i, each in self._made.get_added_tokens_decoder().items() if each.special
        }
        self.names = _begin_and_end(path, bos, eos, special)
        bos_id, eos_id = (special[name] for name in self.names)
        unknown = getattr(self._made.model, "unk_token", None)
        control = [i for name, i in special.items() if name != unknown]
        super().__init__(max(self._made.get_vocab().values()) + 1, bos_id, eos_id, control)

    def encode_text(self, text: str) -> bytes:
        return self._bytes(self._made.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def decode_ids(self, ids: list[int]) -> str:
        return self._made.decode(ids, skip_special_tokens=False)


def _begin_and_end(path: Path, bos: str | None, eos: str | None, special: dict[str, int]) -> tuple[str, str]:
    """The names of the tokens that begin and end a document. ValueError when they are not known."""
    said: dict[str, str] = {}
    for file in ("special_tokens_map.json", shards.TOKENIZER_CONFIG):
        if (beside := path.with_name(file)).is_file():
            values = json.loads(beside.read_text(encoding="utf-8"))
            for name in ("bos_token", "eos_token"):
                if each := values.get(name):
                    said[name] = each["content"] if isinstance(each, dict) else each
    known = next((pair for pair in KNOWN_NAMES if special.keys() >= set(pair)), (None, None))
    eos = eos or said.get("eos_token") or (None if bos else known[1])
    bos = bos or (said.get("bos_token", eos) if "eos_token" in said else known[0] if eos == known[1] else eos)
    if bos not in special or eos not in special:
        raise ValueError(
            f"{path}: documents need special tokens (of added_tokens) at their ends, bos = {bos!r}, eos = {eos!r}; "
            'name them in the recipe, tokenizer = { path = "...", bos = "...", eos = "..." }, '
            f"of {list(special)[:20]}"
        )
    return bos, eos


class SentencepieceTokenizer(Tokenizer):
    """Text -> ids, equal to sentencepiece's on the whole text, and several times as fast where words repeat.

    Where no piece joins two kinds of characters (a word and the space or the sign behind it), no merge
    crosses such a place, and a text's ids are those of its segments in a row. Segments are looked up in a
    table that fills as they come; so the cost of a document is also linear in its length. Models that join
    them encode whole texts.
    """

    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        """ValueError for a model without </s>; one without <s> begins a document with </s>."""
        if (eos_id := processor.eos_id()) < 0:
            raise ValueError("it has no </s>, which ends a document; train it with eos_id set")
        bos_id = processor.bos_id() if processor.bos_id() >= 0 else eos_id
        control = [i for i in range(processor.vocab_size()) if processor.is_control(i)]
        super().__init__(processor.vocab_size(), bos_id, eos_id, control)
        self._processor = processor
        patterns = _PATTERNS if _keeps_text(processor) else ()
        self.pattern = next((each for each in patterns if _no_piece_is_cut(each, processor)), None)
        self._segments = _Segments(processor, self.dtype)
        self._first = " " if self._segments.newline_ids == 2 else ""  # most models put a space before a text

    def encode_text(self, text: str) -> bytes:
        if self.pattern is None or not text:
            return self._bytes(self._processor.encode(text))
        return b"".join(map(self._segments.__getitem__, self.pattern.findall(self._first + text)))

    def decode_ids(self, ids: list[int]) -> str:
        return self._processor.decode(ids)

    def is_exact(self, text: str) -> bool:
        return self.encode_text(text) == self._bytes(self._processor.encode(text))


class _Segments(dict[str, bytes]):
    """Segment -> its ids. A full table is emptied; frequent segments soon return."""

    def __init__(self, processor: sentencepiece.SentencePieceProcessor, dtype: np.dtype) -> None:
        super().__init__()
        self._processor, self._dtype = processor, dtype
        self.newline_ids = len(processor.encode("\n"))

    def __missing__(self, segment: str) -> bytes:
        # behind a newline a segment is encoded as in the middle of a text
        ids = np.array(self._processor.encode("\n" + segment)[self.newline_ids :], self._dtype).tobytes()
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
    """Whether each piece lies within one match of the pattern; where matches meet depends
    on two characters only.
    """
    ids = range(processor.vocab_size())
    ordinary = (
        i for i in ids if not (processor.is_byte(i) or processor.is_control(i) or processor.is_unknown(i))
    )
    return all(pattern.fullmatch(processor.id_to_piece(i)) for i in ordinary)
