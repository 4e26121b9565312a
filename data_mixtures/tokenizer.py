"""Tokenizers of data folders: a sentencepiece model, or a Hugging Face tokenizer.json.

A document is bos_id, its text's ids, eos_id; if both are the same id (GPT-2, Qwen), it only begins
each document. Text is never parsed for control tokens: "<s>" in a document is three characters.
"""

from __future__ import annotations

import abc
import functools
import io
import json
import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
import tokenizers

from data_mixtures import fast_encoder, shards
from data_mixtures.recipe import TokenizerFile, TokenizerTraining
from laneformer.hf.tokenizer import open_tokenizer
from records.files import file_sha256, write_atomically, write_json

# begin and end of a document in well-known vocabularies
KNOWN_NAMES = (
    ("<s>", "</s>"),
    ("<|begin_of_text|>", "<|end_of_text|>"),
    ("<bos>", "<eos>"),
    ("[BOS]", "[EOS]"),
    ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ("<|endoftext|>", "<|endoftext|>"),
)
# longer lines are left out of the training sample, as sentencepiece would do
MAX_LINE_BYTES = 65_536
_PROBED = 1000


def train(texts: Iterable[str], training: TokenizerTraining) -> bytes:
    # line by line, so a newline stays the byte piece <0x0A>, as in Llama-2
    every = chain.from_iterable(text.split("\n") for text in texts)
    lines = (line for line in every if 0 < len(line.encode()) <= MAX_LINE_BYTES)
    model = io.BytesIO()
    size = training.vocab_size
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
            # no pad; with byte fallback no text is unknown
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=1,  # the result must not depend on the machine
            minloglevel=1,
        )
    except RuntimeError as error:  # sentencepiece's only kind of error
        raise ValueError(
            f"no tokenizer of {size} pieces can be trained on this text: {error}"
        ) from error
    return model.getvalue()


def load(path: Path, bos: str | None = None, eos: str | None = None) -> Tokenizer:
    """Open a sentencepiece model or a tokenizer.json.

    Args:
        bos, eos: tokens at the ends of a document, for a tokenizer.json only.

    Raises:
        ValueError: the file cannot be read, or these tokens cannot be found.
    """
    if not path.is_file():
        raise ValueError(
            f"tokenizer {path} does not exist; give a tokenizer.json or a sentencepiece model"
        )
    if path.suffix == ".json":
        return JsonTokenizer(path, bos, eos)
    if bos or eos:
        raise ValueError(
            f"{path}: bos and eos are the sentencepiece model's own; a tokenizer.json needs names"
        )
    try:
        return SentencepieceTokenizer(sentencepiece.SentencePieceProcessor(model_file=str(path)))
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} cannot be used as a sentencepiece model: {error}") from error


def load_from_recipe(settings: TokenizerFile) -> Tokenizer:
    return load(Path(settings.path), settings.bos, settings.eos)


def copy_from_recipe(settings: TokenizerFile, folder: Path) -> Path:
    """Copy a recipe's tokenizer into a folder; return its path."""
    path = Path(settings.path)
    names = load_from_recipe(settings).names
    target = folder / (shards.TOKENIZER_JSON if names else shards.TOKENIZER_MODEL)
    if names:
        # tokenizer_config.json beside a tokenizer.json names the tokens at the ends of a document
        beside = path.with_name(shards.TOKENIZER_CONFIG)
        config = shards.read_json(beside, "mend it") if beside.is_file() else {}
        config |= {"bos_token": names[0], "eos_token": names[1]}
        write_json(folder / shards.TOKENIZER_CONFIG, config)
    write_atomically(target, path.read_bytes())
    return target


def check_exportable(settings: TokenizerFile) -> None:
    """Raise ValueError if a recipe's tokenizer cannot be read or exported."""
    with tempfile.TemporaryDirectory() as folder:
        path = copy_from_recipe(settings, Path(folder))
        try:
            # the export's own rule: it opens the tokenizer, and compares ids with those of
            # sentencepiece
            open_tokenizer(path)
        except ValueError as error:
            reason = str(error).replace(str(path), settings.path)
            raise ValueError(f"tokenizer {settings.path} cannot be exported: {reason}") from error


def facts(path: Path) -> dict[str, Any]:
    """Return what source.json and locks record of a tokenizer."""
    tokenizer = load(path)
    values = tokenizer.vocab_size, tokenizer.dtype.itemsize, tokenizer.bos_id, tokenizer.eos_id
    return dict(zip(shards.TOKENIZER_FACTS, (file_sha256(path), *values), strict=True))


class Tokenizer(abc.ABC):
    """Text to token ids and back.

    vocab_size: one more than the largest id. dtype: of tokens on disk. names: of the tokens at the ends
    of a document, if the file does not define them.
    """

    names: tuple[str, str] | None = None

    def __init__(
        self, vocab_size: int, bos_id: int, eos_id: int, control_ids: Iterable[int]
    ) -> None:
        self.vocab_size = vocab_size
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._is_control = np.zeros(vocab_size, dtype=bool)
        self._is_control[[bos_id, eos_id, *control_ids]] = True
        self._ends = eos_id != bos_id

    @abc.abstractmethod
    def reference(self, text: str) -> list[int]:
        """Return the ids of a text by the tokenizer's own library."""

    @abc.abstractmethod
    def _fast_encoder(self) -> fast_encoder.Encode | None:
        """Return an encoder to be used only if it gives the ids of `reference`."""

    @abc.abstractmethod
    def decode_ids(self, ids: list[int]) -> str:
        """Return the text of ids without control ids."""

    @functools.cached_property
    def fast(self) -> fast_encoder.Encode | None:
        """The fast encoder, or None if it encodes a probe differently from the library."""
        encode = self._fast_encoder()
        special = self._list_spellings()[:_PROBED]
        around = [f"a{spelling}b {spelling}  {spelling}\n{spelling}" for spelling in special]
        probes = [*fast_encoder.PROBES, *special, *around, "".join(special), " ".join(special)]
        return encode if encode and all(self._agrees(encode, probe) for probe in probes) else None

    @abc.abstractmethod
    def _list_spellings(self) -> list[str]:
        """Return tokens that are, or must not be, found in text as spelled."""

    def is_exact(self, text: str) -> bool:
        return self.fast is None or self._agrees(self.fast, text)

    def _agrees(self, encode: fast_encoder.Encode, text: str) -> bool:
        return encode([text])[0].tolist() == self.reference(text)

    def encode(
        self, texts: Sequence[str] | Sequence[bytes], fast: bool = True
    ) -> tuple[np.ndarray, np.ndarray]:
        """Encode documents (bytes are UTF-8); return their tokens in a row, and their lengths (uint32).

        Args:
            fast: False to use the library alone.

        Raises:
            ValueError: the text makes control ids.
        """
        encode = (self.fast if fast else None) or self._reference_ids
        ids, sizes = encode(texts)
        if self._is_control[ids].any():
            if encode is self.fast:
                return self.encode(texts, fast=False)
            first = np.argmax(self._is_control[ids])
            text = texts[int(np.searchsorted(np.cumsum(sizes), first, side="right"))]
            raise ValueError(
                "the tokenizer makes control tokens of ordinary text, such as "
                f"{_decode_text(text)!r:.200}; it must not define <s> or </s> as user symbols, and "
                "special tokens must be no pieces of its model"
            )
        lengths = sizes + 1 + self._ends
        ends = np.cumsum(lengths)
        tokens = np.empty(int(lengths.sum()), self.dtype)
        is_text = np.ones(int(lengths.sum()), bool)
        begins = ends - lengths
        tokens[begins] = self.bos_id
        is_text[begins] = False
        if self._ends:
            tokens[ends - 1] = self.eos_id
            is_text[ends - 1] = False
        tokens[is_text] = ids
        return tokens, lengths.astype(np.uint32)

    def _reference_ids(
        self, texts: Sequence[str] | Sequence[bytes]
    ) -> tuple[np.ndarray, np.ndarray]:
        ids = [np.array(self.reference(_decode_text(text)), np.uint32) for text in texts]
        return np.concatenate([np.empty(0, np.uint32), *ids]), np.array(
            list(map(len, ids)), np.int64
        )

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_ids([int(i) for i in ids if not self._is_control[i]])


def _decode_text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode("utf-8")


class JsonTokenizer(Tokenizer):
    """A tokenizer.json; special tokens are not found in text, nothing is added or cut off."""

    def __init__(self, path: Path, bos: str | None, eos: str | None) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(
                f"{path} cannot be read as a Hugging Face tokenizer.json: {error}"
            ) from error
        self._path = path
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder().items()
        special = {token.content: i for i, token in added if token.special}
        self.names = _begin_and_end(path, bos, eos, special)
        bos_id, eos_id = (special[name] for name in self.names)
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        control = [i for name, i in special.items() if name != unknown]
        # not the number of tokens: ids may have gaps
        vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        super().__init__(vocab_size, bos_id, eos_id, control)

    def reference(self, text: str) -> list[int]:
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _fast_encoder(self) -> fast_encoder.Encode | None:
        return fast_encoder.of_json(self._path)

    def _list_spellings(self) -> list[str]:
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def decode_ids(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _begin_and_end(
    path: Path, bos: str | None, eos: str | None, special: dict[str, int]
) -> tuple[str, str]:
    """Return the tokens that begin and end a document; ValueError if unknown."""
    # the recipe's names first, then those of these files, then KNOWN_NAMES
    names: dict[str, Any] = {}
    for file in ("special_tokens_map.json", shards.TOKENIZER_CONFIG):
        if (beside := path.with_name(file)).is_file():
            values = json.loads(beside.read_text(encoding="utf-8"))
            names |= {name: values[name] for name in ("bos_token", "eos_token") if values.get(name)}
    names = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in names.items()
    }
    well_known = next((pair for pair in KNOWN_NAMES if special.keys() >= set(pair)), (None, None))
    eos = eos or names.get("eos_token") or (None if bos else well_known[1])
    if not bos and "eos_token" in names:
        bos = names.get("bos_token", eos)
    elif not bos:
        bos = well_known[0] if eos == well_known[1] else eos
    if bos not in special or eos not in special:
        raise ValueError(
            f"{path}: documents need special tokens (of added_tokens) at their ends, bos = {bos!r}, eos = {eos!r}; "
            'name them in the recipe, tokenizer = { path = "...", bos = "...", eos = "..." }, '
            f"of {list(special)[:20]}"
        )
    return bos, eos


class SentencepieceTokenizer(Tokenizer):
    def __init__(self, processor: sentencepiece.SentencePieceProcessor) -> None:
        """Raise ValueError for a model without </s>."""
        if (eos_id := processor.eos_id()) < 0:
            raise ValueError("it has no </s>, which ends a document; train it with eos_id set")
        # a model without <s> begins a document with </s>
        bos_id = processor.bos_id() if processor.bos_id() >= 0 else eos_id
        control = [i for i in range(processor.vocab_size()) if processor.is_control(i)]
        super().__init__(processor.vocab_size(), bos_id, eos_id, control)
        self._processor = processor

    def reference(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def _fast_encoder(self) -> fast_encoder.Encode | None:
        return fast_encoder.of_sentencepiece(self._processor.serialized_model_proto())

    def _list_spellings(self) -> list[str]:
        # user-defined pieces have the score 0, as control pieces and the first trained piece have
        processor = self._processor
        ids = (
            i
            for i in range(processor.vocab_size())
            if not processor.is_byte(i) and processor.get_score(i) == 0
        )
        return [processor.id_to_piece(i) for i in ids]

    def decode_ids(self, ids: list[int]) -> str:
        return self._processor.decode(ids)
