"""Tokenizers of several kinds, and answers drawn under a grammar."""

import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np
from tokenizers import AddedToken, Tokenizer

from laneformer import Laneformer
from laneformer.engine import Batch
from laneformer.llama.tokenizer import tokenizer_of
from laneformer.llama.vocabulary import Vocabulary
from laneformer.serve.grammar import Grammar, Grammars
from tests.laneformer.engine.assets import engine_of, random_model, small_config
from tests.tokenizer_assets import byte_level

TEXTS = [
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}',
    '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": -7.25}}\n</tool_call>',
    '[{"é": null}, {"東京": true}, "2024-01-31T10:00:00Z", "a@b.org"] false, the answer is "x".\n  ',
]
SPECIAL = ["<s>", "</s>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]"]
CALL_TAGS = "<tool_call>", "</tool_call>", "<|calls|>", "<|call|>", "<|arguments|>", "[CALL_ID]"
EOS = "</s>", "<|im_end|>"
UNUSED = 45  # rows of the embedding table behind the tokenizer's last id


@functools.cache
def make_bytes_tokenizer() -> Tokenizer:
    return byte_level(TEXTS * 20, SPECIAL, 420)


@functools.cache
def make_pieces_tokenizer() -> Tokenizer:
    """Return a GGUF file's tokenizer: SentencePiece BPE with byte fallback."""
    words = ["▁{", '{"', '":', '",', '"}', "▁▁", "tool", "_call", "▁the", "ame", "é", '▁"', "},"]
    syllables = ["▁", "é", "ol", "to", "ca", "ll", "call", "am", "me", "th", "he", "the"]
    plain = [*(chr(i) for i in range(33, 127)), *syllables]
    pieces = [
        "<unk>",
        *SPECIAL,
        *(f"<0x{i:02X}>" for i in range(256)),
        *dict.fromkeys(plain + words),
    ]
    types = [2] + [3] * len(SPECIAL) + [6] * 256
    types += [1] * (len(pieces) - len(types))
    scores = [-float(i) for i in range(len(pieces))]
    values = {
        "model": "llama",
        "tokens": pieces,
        "token_type": types,
        "bos_token_id": 1,
        "scores": scores,
    }
    return tokenizer_of(
        Vocabulary({f"tokenizer.ggml.{name}": value for name, value in values.items()})
    )


@functools.cache
def make_tagged_tokenizer() -> Tokenizer:
    """Return a tokenizer like Qwen's, whose tags are tokens that decoding shows."""
    tokenizer = Tokenizer.from_str(make_bytes_tokenizer().to_str())
    tokenizer.add_tokens(
        [AddedToken(name, normalized=False) for name in ("<think>", "</think>", *CALL_TAGS)]
    )
    return tokenizer


TOKENIZERS = {
    "bytes": make_bytes_tokenizer,
    "pieces": make_pieces_tokenizer,
    "tagged": make_tagged_tokenizer,
}


@functools.cache
def grammars(kind: str = "bytes") -> Grammars:
    tokenizer = TOKENIZERS[kind]()
    eos_ids = [tokenizer.token_to_id(name) for name in EOS]
    size = tokenizer.get_vocab_size() + UNUSED
    return Grammars(tokenizer, size + -size % 4, eos_ids)


@functools.cache
def _model(kind: str) -> Laneformer:
    return random_model(
        small_config(vocab_size=grammars(kind).vocab_size, max_position_embeddings=2048)
    )


@contextlib.contextmanager
def batch_of(kind: str = "bytes") -> Iterator[Batch]:
    # such a model's text has a form only where a grammar enforces one
    compiler = grammars(kind)
    with (
        engine_of(_model(kind), threads=1, eos_ids=compiler.eos_ids) as engine,
        engine.batch() as batch,
    ):
        yield batch


def draw_answer(batch, grammar, prompt=(3, 1), **options) -> tuple[list[int], str]:
    """Draw ids under a grammar as the scheduler does; return them and the finish reason."""
    ids = []
    ticket = batch.join(
        prompt, masked=True, **{"temperature": 1.0, "max_new_tokens": 600, **options}
    )
    batch.allow(ticket, 0, grammar.mask(0))
    while True:
        for update in batch.updates(5.0):
            assert update.error is None
            for token in update.tokens:
                ids.append(token.id)
                grammar.accept(token.id)
            if update.finish_reason is not None:
                return ids, update.finish_reason
            batch.allow(ticket, len(ids), grammar.mask(len(ids)))


def text_of(kind: str, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
    compiler = grammars(kind)
    before = compiler.tokenizer.encode("x", add_special_tokens=False).ids
    text_ids = [i for i in ids if i not in compiler.eos_ids]
    decode = functools.partial(compiler.tokenizer.decode, skip_special_tokens=skip_special_tokens)
    return decode([*before, *text_ids])[len(decode(before)) :]


def tokens_allowed(grammar: Grammar, ids: Sequence[int]) -> int:
    """Return how many of the first ids a grammar allows."""
    for index, token_id in enumerate(ids):
        if token_id not in list_allowed(grammar.mask(index)):
            return index
        grammar.accept(token_id)
    return len(ids)


def list_allowed(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
