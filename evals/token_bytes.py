"""How many bytes of text each token id stands for: the denominator of bits per byte.

A tokenizer cuts text into pieces, and losses per token are comparable only between models that share it; losses per
byte are comparable between all. A byte token stands for one byte, `▁` for one space, any other piece for its UTF-8
bytes. Control tokens (BOS, EOS, unknown) stand for none. Over the ids of a text these counts add up to the bytes of
the text, plus one for the space that a Llama-2 tokenizer puts in front of it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

SPACE = "\u2581"  # ▁, how SentencePiece writes a space
BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")


def _bytes_of(piece: str) -> int:
    return 1 if BYTE_PIECE.fullmatch(piece) else len(piece.replace(SPACE, " ").encode())


def bytes_per_token(path: Path) -> np.ndarray:
    """Bytes of each token id, int64 (V,), 0 for control tokens; from a SentencePiece model or a `tokenizer.json`."""
    return _from_tokenizer_json(path) if path.suffix == ".json" else _from_sentencepiece(path)


def _from_sentencepiece(path: Path) -> np.ndarray:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ids = range(model.vocab_size())
    silent = [model.is_control(i) or model.is_unknown(i) or model.is_unused(i) for i in ids]
    return np.array([0 if silent[i] else _bytes_of(model.id_to_piece(i)) for i in ids], dtype=np.int64)


def _from_tokenizer_json(path: Path) -> np.ndarray:
    content = json.loads(path.read_text(encoding="utf-8"))
    model = content["model"]
    if not model.get("byte_fallback"):
        raise ValueError(
            f"{path} has no byte fallback, so its pieces are not plain text and their bytes cannot be counted; "
            "export the model with a SentencePiece BPE tokenizer"
        )
    added = {token["id"]: token for token in content.get("added_tokens", [])}
    pieces = {id_: piece for piece, id_ in model["vocab"].items()} | {i: t["content"] for i, t in added.items()}
    silent = {i for i, token in added.items() if token["special"]}
    silent |= {model["vocab"][model["unk_token"]]} if model.get("unk_token") else set()
    counts = [0 if i in silent else _bytes_of(pieces.get(i, "")) for i in range(max(pieces) + 1)]
    return np.array(counts, dtype=np.int64)
