"""Read a folder's tokenizer, chat templates and sampling options, as Transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .options import sampling_defaults

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
EXTRA = ("additional_special_tokens", "extra_special_tokens")  # lists of more
POINTER = b"version https://git-lfs.github.com/spec/"


class TextFiles(NamedTuple):
    tokenizer: Tokenizer | None
    # Hugging Face's, with the chat templates
    tokenizer_config: dict[str, Any]
    # options that the model recommends
    sampling: dict[str, Any]

    def fill_from(self, other: TextFiles) -> TextFiles:
        """Return these, with missing parts from another source."""
        config = {**other.tokenizer_config, **self.tokenizer_config}
        if self.tokenizer_config.get("chat_template"):
            # it belongs to the other source's template
            config.pop("conversation_bos", None)
        return TextFiles(self.tokenizer, config, self.sampling or other.sampling)


def read_texts(folder: Path) -> TextFiles:
    values = read_optional(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in values:  # older folders
        values |= read_optional(folder / "special_tokens_map.json")
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (default_template := folder / "chat_template.jinja").is_file():
        files["default"] = default_template
    if files:  # newer folders
        templates = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
        values["chat_template"] = templates["default"] if files.keys() == {"default"} else templates
    path = folder / "generation_config.json"
    generation = read_optional(path)
    try:
        sampling = sampling_defaults(generation)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; mend or remove that value") from None
    return TextFiles(read_tokenizer(folder, values), values, sampling)


def read_tokenizer(folder: Path, values: dict[str, Any]) -> Tokenizer | None:
    """Read tokenizer.json with the tokens that tokenizer_config.json adds; None without the file."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    refuse_pointer(path)
    try:
        tokenizer = Tokenizer.from_buffer(path.read_bytes())  # the name may be no UTF-8
        tokenizer.add_tokens(tokens_beside(folder, tokenizer, values))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from None
    tokenizer.no_truncation()  # many published files keep that of their training
    tokenizer.no_padding()
    return tokenizer


def tokens_beside(folder: Path, tokenizer: Tokenizer, values: dict[str, Any]) -> list[Any]:
    """Return added tokens that tokenizer.json lacks, or has with other properties."""
    from tokenizers import AddedToken

    lists = [values[name] for name in EXTRA if isinstance(values.get(name), list)]
    extra = [token for tokens in lists for token in tokens]
    special_tokens = [values[name] for name in SPECIAL if values.get(name)] + extra
    special = [token["content"] if isinstance(token, dict) else token for token in special_tokens]
    own_tokens = tokenizer.get_added_tokens_decoder()
    added = {
        int(i): AddedToken(**token) for i, token in values.get("added_tokens_decoder", {}).items()
    }
    if "added_tokens_decoder" not in values:
        for text, i in read_optional(folder / "added_tokens.json").items():
            if i not in own_tokens:
                added[i] = AddedToken(text, normalized=text not in special, special=text in special)
    present = {repr(token) for token in own_tokens.values()}
    tokens = [token for _, token in sorted(added.items()) if repr(token) not in present]
    contents = {token.content for token in (*own_tokens.values(), *tokens)}
    return tokens + [
        AddedToken(text, special=True) for text in dict.fromkeys(special) if text not in contents
    ]


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    refuse_pointer(path)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, expected a JSON object")
    return values


def read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def refuse_pointer(path: Path) -> None:
    """Raise ValueError for the pointer that Git leaves where LFS has not fetched a file."""
    with path.open("rb") as file:
        if file.read(len(POINTER)) == POINTER:
            raise ValueError(
                f"{path} is a pointer of Git LFS, not the file itself; run `git lfs pull` in its folder, or download it"
            )
