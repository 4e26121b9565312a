"""gigatoken as the encoder of a tokenizer: 10 to 150 times as fast as `tokenizers` and sentencepiece.

A tokenizer that it cannot load (Unigram, other normalizers), or that it encodes differently, has no
fast encoder (docs/decisions/data-pipeline.md).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Texts = Sequence[str] | Sequence[bytes]
Encoded = tuple[np.ndarray, np.ndarray]  # ids of all texts in a row, and how many each has
Encode = Callable[[Texts], Encoded]
# where encoders differ: spaces, line ends, cases, numbers, normal forms, scripts, signs, words of
# specials
PROBES = (
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    " \n \n",
    "\t\tx\r\n\r\n y",
    "a",
    " a",
    "a  b   c ",
    "\u00a0x\u2003y\u3000z",
    "It's I'LL we'd they'Re 'tis",
    "3.14159 12345678 1,000,000 ٣٤٥ ½ ²",
    "HTMLParser camelCase SHOUT_case x86_64",
    "def f(x):\n    return x[0] + 1  # why?\n\n\nclass A: pass\n",
    "https://a.b/c?d=e&f=g#h !!!???... --- ==> ->",
    "Å A\u030a ﬁ ǅ ß İ ı ſ",
    "日本語の文章です。 한국어 ไทย עברית العربية हिन्दी Ελληνικά русский",
    "😀👩‍👩‍👧 🇩🇪 \U0001f9d1\u200d\U0001f680",
    "x" * 300,
    " " * 300,
    "=" * 300,
    "ab" * 200,
    "0" * 300,
    "\u2581 \u2581\u2581x",
    "\ufeffx\u200by\u00ad",
    "e\u0301\u0301",
    "<s> </s> <unk> <pad> <0x0A> <|endoftext|> <|begin_of_text|> <|im_end|> [INST] [/INST]",
)


def of_json(path: Path) -> Encode | None:
    spec = json.loads(path.read_text(encoding="utf-8"))
    # gigatoken finds every added token in a text, and has no option against it: "<s>" in a document
    # would become the control id. So it gets the tokenizer without its special tokens
    spec["added_tokens"] = [
        token for token in spec.get("added_tokens") or () if not token["special"]
    ]
    return _encoder(lambda: spec)


def of_sentencepiece(model: bytes) -> Encode | None:
    def convert() -> dict[str, Any]:
        from gigatoken._load.sentencepiece import sentencepiece_to_tokenizer_json

        spec = json.loads(sentencepiece_to_tokenizer_json(model))
        special = {token["content"] for token in spec["added_tokens"] if token["special"]}
        excluded = (
            special | {spec["model"]["unk_token"]} | {f"<0x{byte:02X}>" for byte in range(256)}
        )
        spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["special"]]
        # derived from the pieces; drop merges to pieces that sentencepiece never makes of text
        spec["model"]["merges"] = [
            pair for pair in spec["model"]["merges"] if "".join(pair) not in excluded
        ]
        return spec

    return _encoder(convert)


def _encoder(convert: Callable[[], dict[str, Any]]) -> Encode | None:
    try:
        import awkward
        import gigatoken

        backend = gigatoken.Tokenizer.from_json(json.dumps(convert()))
    except Exception as error:
        # a package that is missing, or what it does not support, in errors of any kind
        logging.getLogger(__name__).debug("no fast encoder: %s", error)
        return None

    def encode(texts: Texts) -> Encoded:
        rows = backend.encode_batch(list(texts), parallel=False)
        lengths = np.asarray(awkward.num(rows, axis=1), np.int64)
        return np.asarray(awkward.flatten(rows), np.uint32), lengths

    return encode
