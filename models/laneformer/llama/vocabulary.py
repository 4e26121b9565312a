"""The vocabulary in a GGUF file's metadata, by llama.cpp's rules: pieces, their types, special ids.

An id that a file leaves out, or that does not exist, has llama.cpp's default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIX, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # token types
DEFAULTS = {"bos": 1, "eos": 2, "unknown": 0}  # ids of SentencePiece's vocabularies
# pre-tokenizers, unless the file says
BEGINS_WITH_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
# of turns and texts, by their text: files often name one end alone, and mark others as ordinary
# pieces
ENDS = frozenset(
    {
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<end_of_turn>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<end_of_utterance>",
        "<|fim_pad|>",
        "<fim_pad>",
        "<|repo_name|>",
        "<reponame>",
        "<|file_sep|>",
    }
)
NAMED_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# the latter ends a message, not the answer
HARMONY_ENDS, HARMONY_TURN = {"<|return|>", "<|call|>"}, "<|end|>"
BESIDE = "Put the model's tokenizer.json beside the file: it is used then"


class Vocabulary:
    """A GGUF file's vocabulary.

    Attributes:
        pieces: Text of each id.
        types: Of each piece.
        values: The file's other fields of the tokenizer.
    """

    def __init__(self, metadata: Mapping[str, Any], rows: int | None = None):
        """Read the vocabulary; raise ValueError for lists whose lengths do not fit.

        Args:
            rows: Of the embedding.
        """
        self.metadata = metadata
        self.values = {
            name.removeprefix(PREFIX): v for name, v in metadata.items() if name.startswith(PREFIX)
        }
        self.pieces: list[str] = self.values.get("tokens") or []
        self.types: list[int] = self.values.get("token_type") or [NORMAL] * len(self.pieces)
        # without pieces, each row of the embedding has an id
        self.size = len(self.pieces) if "tokens" in self.values else rows or 0
        for name in ("token_type", "scores"):
            if len(values := self.values.get(name) or self.pieces) < len(self.pieces):
                raise ValueError(
                    f"{PREFIX}{name} has {len(values)} entries for {len(self.pieces)} tokens"
                )
        if rows is not None and self.size > rows:
            raise ValueError(
                f"{PREFIX}tokens has {self.size} entries, but the embedding {rows} rows"
            )

    def is_id(self, value: Any) -> bool:
        return isinstance(value, int) and 0 <= value < self.size

    def special_id(self, name: str) -> int | None:
        default = DEFAULTS.get(name) if self.values.get("model") == "llama" else None
        return next(filter(self.is_id, (self.values.get(f"{name}_token_id"), default)), None)

    def eos_ids(self) -> list[int]:
        ends = {i for i in map(self.special_id, NAMED_ENDS) if i is not None}
        ends.update(filter(self.is_id, self.values.get("eos_token_ids") or ()))
        ends.update(i for i, piece in enumerate(self.pieces) if piece in ENDS)
        texts = {i: self.pieces[i] for i in ends if i < len(self.pieces)}
        if set(texts.values()) >= HARMONY_ENDS:
            ends -= {i for i, text in texts.items() if text == HARMONY_TURN}
        return sorted(ends)

    @property
    def begins_with(self) -> int | None:
        # every text and conversation begins with it, whatever the template writes
        default = self.values.get("model") == "llama" or self.values.get("pre") in BEGINS_WITH_BOS
        return self.special_id("bos") if self.values.get("add_bos_token", default) else None

    def tokenizer_config(self) -> dict[str, Any]:
        others = {
            name.removeprefix(f"{TEMPLATE}."): value
            for name, value in self.metadata.items()
            if name.startswith(f"{TEMPLATE}.")
        }
        default = self.metadata.get(TEMPLATE)
        ids = {
            "bos_token": self.special_id("bos"),
            "eos_token": self.special_id("eos"),
            "unk_token": self.special_id("unknown"),
            "pad_token": self.special_id("padding"),
            "conversation_bos": self.begins_with,
        }
        tokens = {
            name: self.pieces[i]
            for name, i in ids.items()
            if i is not None and i < len(self.pieces)
        }
        return {**tokens, "chat_template": {"default": default, **others} if default else others}
