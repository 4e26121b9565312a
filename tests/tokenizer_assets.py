"""Build small Hugging Face tokenizers from the parts of real ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)

from laneformer.engine.text_files import read_texts
from laneformer.prompts import PromptEncoder

# of Llama 3 and, but for the digits, Qwen 2.5
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(
    texts: Iterable[str],
    special: Sequence[str],
    vocab_size: int = 600,
    pattern: str | None = PATTERN,
    unused: int = 0,
) -> Any:
    """Train a byte-level BPE.

    special: added tokens, the first of which its post-processor puts before a text. unused: pieces
    that no text gives, before the added ones.
    """
    tokenizer = Tokenizer(models.BPE())
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = pre_tokenizers.Split(Regex(pattern), "isolated") if pattern else None
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain]) if split else plain
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    spec = json.loads(tokenizer.to_str())
    spec["model"]["vocab"] |= {f"unused {n}": tokenizer.get_vocab_size() + n for n in range(unused)}
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in special]
    )
    first = special[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        [first, "$A"], None, [(first, tokenizer.token_to_id(first))]
    )
    # a leftover of training that many published files have
    tokenizer.enable_truncation(8)
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path, **config: Any) -> Path:
    """Write tokenizer.json, and tokenizer_config.json if there is anything in it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


@functools.cache
def prompt_encoder(folder: Path) -> PromptEncoder:
    tokenizer, config, _ = read_texts(folder)
    assert tokenizer is not None
    return PromptEncoder(tokenizer, config)


def encode_chat(
    folder: Path, messages: Sequence[Mapping[str, Any]]
) -> tuple[list[int], list[bool]]:
    """Return a conversation's ids in a folder's chat template, and which are trained."""
    ids, answers = prompt_encoder(folder).encode_training(messages)
    return ids, [any(begin <= place < end for begin, end in answers) for place in range(len(ids))]
