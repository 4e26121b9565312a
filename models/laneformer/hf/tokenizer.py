"""The data's tokenizer as a `tokenizer.json` with the same ids, which needs `tokenizers` alone at run time.

A tokenizer.json keeps its pieces; a SentencePiece BPE model is converted and compared with
SentencePiece on every piece and on texts that are known to go wrong.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from ..llama.tokenizer import SPACE, begin_with, sentencepiece_bpe

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

CHAT_TEMPLATE, TOOLS_TEMPLATE = (  # as published, and with system messages and tools
    Path(__file__).with_name(name) for name in ("chat_template.jinja", "chat_template_tools.jinja")
)
PADDING = ("<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>")  # well-known names
PROBES = [
    "",
    " ",
    "  ",
    "   x",
    "a",
    " a",
    "a ",
    "a  b",
    "\t",
    "\n",
    "\n\n\n",
    "\r\n",
    " " * 17 + "x",
    SPACE,
    f"a{SPACE}b",
    "\tif x:\n\t\treturn  1\n",
    "def f(x):\n        return x  # eight spaces\n" + "\n" * 5 + "-" * 40 + "=" * 9,
    "0123456789 3.14 1e-5",
    "aaaaaaaaaaaaa bbbbbbb ababababa",
    "\x00\x7f\u200b\ufeff",
    "naïve café Ærø ﬁ Å Ａ ½",
    "日本語 한국어 русский العربية",
    "😀👩\u200d👩\u200d👧 🇫🇷",
]


def open_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    """Return a tokenizer with BOS in front, and its special tokens by "bos_token", ..."""
    if path.suffix == ".json":
        return _tokenizer_from_json(path)
    return tokenizer_from_sentencepiece(path), _special_of(_sentencepiece(path))


def _sentencepiece(model: Path | str) -> SentencePieceProcessor:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(model))


def _special_of(sp: SentencePieceProcessor) -> dict[str, str]:
    if sp.eos_id() < 0:
        raise ValueError(
            "the SentencePiece model has no piece that ends a document; train it with eos_id set"
        )
    bos_id = sp.eos_id() if sp.bos_id() < 0 else sp.bos_id()
    ids = {
        "unk_token": sp.unk_id(),
        "bos_token": bos_id,
        "eos_token": sp.eos_id(),
        # a token that no text has: the loss of `</s>` as padding would be masked away
        "pad_token": sp.unk_id(),
    }
    return {name: sp.id_to_piece(i) for name, i in ids.items()}


def _tokenizer_from_json(path: Path) -> tuple[Tokenizer, dict[str, str]]:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read as a tokenizer.json: {error}") from error
    # settings that the file may have
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config_path = path.with_name("tokenizer_config.json")
    values = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
    token_values = {name: values.get(name) for name in ("bos_token", "eos_token", "pad_token")}
    tokens = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in token_values.items()
    }
    eos, unk = tokens.get("eos_token"), getattr(tokenizer.model, "unk_token", None)
    # without a token to begin a document, EOS begins one
    bos = tokens.get("bos_token") or eos
    if eos is None or bos is None or None in map(tokenizer.token_to_id, (bos, eos)):
        raise ValueError(
            f"{config_path} must name eos_token and bos_token of {path}; the one in the data folder does"
        )
    begin_with(bos, tokenizer)
    pads = (tokens.get("pad_token"), *PADDING, unk)
    pad = next(
        (p for p in pads if p and p not in (bos, eos) and tokenizer.token_to_id(p) is not None),
        None,
    )
    special = {"unk_token": unk, "bos_token": bos, "eos_token": eos, "pad_token": pad}
    return tokenizer, {name: token for name, token in special.items() if token}


def tokenizer_from_sentencepiece(model: Path | str) -> Tokenizer:
    """Convert a `tokenizer.model`, BOS in front; raise ValueError where ids would differ."""
    sp = _sentencepiece(model)
    pieces, special = [sp.id_to_piece(i) for i in range(len(sp))], _special_of(sp)
    if not any(sp.is_byte(i) for i in range(len(sp))):
        raise ValueError(
            f"{model} has no byte pieces; train it with byte_fallback=True, or some text has no ids"
        )
    ordinary = [
        i for i in range(len(sp)) if not (sp.is_control(i) or sp.is_unknown(i) or sp.is_byte(i))
    ]
    # a piece's score is its rank: each split into two known pieces is a merge of that rank
    scores = {pieces[i]: sp.get_score(i) for i in ordinary}
    tokenizer = sentencepiece_bpe(
        pieces, scores, special["unk_token"], sp.normalize("x") == f"{SPACE}x"
    )
    # texts that are known to go wrong, and every piece of the vocabulary
    for text in PROBES + [pieces[i].replace(SPACE, " ") for i in ordinary]:
        check_same_ids(tokenizer, sp, text)
    # a user-defined symbol, whose score is 0, never merges with what stands beside it
    letters = [piece for piece in scores if len(piece) == 1][:200]
    for piece in (piece for piece, score in scores.items() if score >= 0):
        text = "".join(f"{letter}{piece}{letter}" for letter in letters)
        check_same_ids(tokenizer, sp, text.replace(SPACE, " "))
    control = dict.fromkeys(
        [*special.values(), *(pieces[i] for i in range(len(sp)) if sp.is_control(i))]
    )
    # after the comparison, as SentencePiece reads "<s>" in a text as plain characters. Here it becomes
    # the token, as in every Llama tokenizer of Transformers (the chat template needs it for "</s>"),
    # and the text behind it starts anew, with a dummy prefix of its own
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in control]
    )
    begin_with(special["bos_token"], tokenizer)
    return tokenizer


def check_same_ids(tokenizer: Tokenizer, sp: SentencePieceProcessor, text: str) -> None:
    ours, theirs = tokenizer.encode(text, add_special_tokens=False).ids, sp.encode(text)
    if ours != theirs:
        raise ValueError(
            f"tokenizer.json would encode {text[:80]!r} as {ours[:16]}, but SentencePiece gives {theirs[:16]}. Only "
            "BPE models with the identity normaliser, remove_extra_whitespaces=False, "
            "treat_whitespace_as_suffix=False and no user_defined_symbols can be converted"
        )


def write_tokenizer(
    path: Path, out: Path, max_length: int, template: Path = CHAT_TEMPLATE
) -> tuple[Tokenizer, dict[str, str]]:
    """Write tokenizer.json, tokenizer_config.json and `template` to `out`; return `open_tokenizer`."""
    tokenizer, special = open_tokenizer(path)
    save_tokenizer(tokenizer, special, out, max_length)
    shutil.copyfile(template, out / CHAT_TEMPLATE.name)
    return tokenizer, special


def save_tokenizer(
    tokenizer: Tokenizer, special: dict[str, str], out: Path, max_length: int
) -> None:
    """Write tokenizer.json and tokenizer_config.json, as Transformers reads them."""
    tokenizer.save(str(out / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # others are rebuilt from their class by 5.x, with other ids
        **special,
        "padding_side": "left",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def list_token_ids(tokenizer: Tokenizer, special: dict[str, str]) -> dict[str, Any]:
    """Return the ids of special tokens that config.json names: all but that of unknown text."""
    names = [name for name in special if name != "unk_token"]
    ids = {f"{name}_id": tokenizer.token_to_id(special[name]) for name in names}
    return {name: i for name, i in ids.items() if i is not None}
