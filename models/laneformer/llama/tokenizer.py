"""Build a `tokenizers.Tokenizer` from a GGUF file's pieces: byte-level BPE or SentencePiece BPE."""

from __future__ import annotations

from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from .vocabulary import (
    BEGINS_WITH_BOS,
    BESIDE,
    CONTROL,
    ENDS,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
)

SPACE = "\u2581"  # SentencePiece's visible space
_REST = r"\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n{slash}]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _ENDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = r"[^\r\n\p{{L}}\p{{N}}]?(?:{upper}*{lower}+|{upper}+{lower}*){ends}|"  # "camelCase" is two words
_TEKKEN = _CASED.format(upper=_UPPER, lower=_LOWER, ends="") + _REST.format(digits="", slash="/")
_GPT4O = _CASED.format(upper=_UPPER, lower=_LOWER, ends=_ENDS + "?") + _REST.format(
    digits="{1,3}", slash="/"
)
_LLAMA3 = _WORDS + _REST.format(digits="{1,3}", slash="")
_QWEN2 = _WORDS + _REST.format(digits="", slash="")
# The file gives the rule that cuts a text before merges (the pre-tokenizer) by name only. The names
# known here have the rules of their models' own tokenizer.json; others are refused, as ids that are
# almost right would make a model worse without an error.
# Values: the pattern of a piece; None: GPT-2's own. OLMo 2 and 3 and Phi 4 come as dbrx, Phi 4 mini as
# gpt-4o, Granite 3 as refact.
PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "dbrx": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
    "gpt-4o": _GPT4O,
    "smollm": None,
    "refact": None,
    "gpt-2": None,
}
WHOLE_WORDS = BEGINS_WITH_BOS  # a word that is a piece is taken without merging
SINGLE_DIGITS = ("smollm", "refact")


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer, BOS in front where the model wants it; ValueError for unknown kinds."""
    pieces, types, values = vocabulary.pieces, vocabulary.types, vocabulary.values
    kind, pre = values.get("model"), values.get("pre")
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model = {kind!r} is not supported; 'gpt2' and 'llama' are. {BESIDE}"
        )
    if kind == "gpt2" and pre not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre = {pre!r} is unknown; known are {list(PRE_TOKENIZERS)}. {BESIDE}"
        )
    for name in ("tokens", "merges" if kind == "gpt2" else "scores"):
        if name not in values:
            raise ValueError(f"the file lacks tokenizer.ggml.{name}. {BESIDE}")
    numbered = list(enumerate(zip(pieces, types, strict=False)))
    if kind == "gpt2" and pre:
        tokenizer = byte_level_bpe(pieces, values["merges"], pre)
    else:
        scores = {piece: values["scores"][i] for i, (piece, t) in numbered if t == NORMAL}
        unk = vocabulary.special_id("unknown")
        dummy_prefix = values.get("add_space_prefix", True)
        tokenizer = sentencepiece_bpe(
            pieces, scores, None if unk is None else pieces[unk], dummy_prefix
        )
    bos = vocabulary.begins_with
    for i, (piece, t) in numbered:
        if t in (UNKNOWN, CONTROL, USER_DEFINED) or piece in ENDS or i == bos:
            special = t != USER_DEFINED or piece in ENDS
            tokenizer.add_tokens([AddedToken(piece, special=special, normalized=False)])
    if bos is not None:
        begin_with(pieces[bos], tokenizer)
    return tokenizer


def byte_level_bpe(pieces: list[str], merges: list[str], pre: str) -> Tokenizer:
    pairs = [merge.partition(" ")[::2] for merge in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre in WHOLE_WORDS))
    pattern = PRE_TOKENIZERS[pre]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre in SINGLE_DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Sequence(steps),
        decoders.ByteLevel(),
    )
    return tokenizer


def sentencepiece_bpe(
    pieces: list[str], scores: dict[str, float], unk: str | None, dummy_prefix: bool
) -> Tokenizer:
    """Return a SentencePiece BPE with byte pieces.

    Args:
        scores: Of ordinary pieces, which alone are merged.
    """
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = merges_by_score(scores)
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    )
    spaces: normalizers.Normalizer = normalizers.Replace(" ", SPACE)
    steps: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if dummy_prefix:
        # a space in front of the text, which decoding strips again
        spaces = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer, tokenizer.decoder = spaces, decoders.Sequence(steps)
    return tokenizer


def merges_by_score(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Return every split of every piece into two pieces, best score first, then longest piece first."""
    merges = []
    # Llama-2 gives equal scores to runs of spaces. SentencePiece merges these leftmost first, so a
    # run grows at its left end until no longer piece exists: the same as longest first
    for piece in sorted(scores, key=lambda piece: (-scores[piece], -len(piece))):
        splits = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(left, right) for left, right in splits if left in scores and right in scores]
    return merges


def begin_with(bos: str, tokenizer: Tokenizer) -> None:
    begin = [(bos, tokenizer.token_to_id(bos))]
    tokenizer.post_processor = processors.TemplateProcessing(
        [bos, "$A"], [bos, "$A", bos, "$B"], begin
    )
