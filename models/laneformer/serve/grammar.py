"""Answers of a given form, through llguidance: a mask over the vocabulary before every draw.

`Grammars` belongs to a model, `Grammar` to one request. The mask needs the last token only, so it is computed
while the next pass over the weights runs.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ..engine.channels import (
    ANSWER,
    CALL_ID,
    CALL_NUMBER,
    CHANNEL,
    CHOSEN,
    CONSTRAIN,
    MESSAGE,
    NEXT,
    AnswerReader,
)
from ..engine.text import TextStream
from .bodies import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

MAX_SCHEMA_BYTES = 64 * 1024  # of all the schemas of a request together
MAX_PARTS_SEARCHED = 100  # for the place of an error
MAX_LEFT_OUT = 16  # keywords of one schema
MAX_MULTIPLE = 10_000  # 0.1 s to compile, in proportion
WORD_BITS = 32  # of a mask
SHOWN_CHARS = 300  # of a message of llguidance
# nine: what Mistral's templates take
CHOICES = {CALL_ID: "/[a-zA-Z0-9]{9}/", CALL_NUMBER: "/[0-9]{1,4}/"}
# a space, or a line break with its indentation: without a bound, a small model can write white space
# until its end
COMPILED_WITH = {"whitespace_pattern": r"( |\n( {0,32}|\t{0,16}))"}


class Grammars:
    """Compiles grammars for one tokenizer. RequestError for those that are wrong, or too
    large, or without llguidance.

    vocab_size: V, rows of the embedding table, which may be more than the tokenizer has ids. eos_ids:
    what ends a text. harmony: answers are written in that format.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], harmony: bool = False
    ):
        self.tokenizer, self.vocab_size, self.eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self.harmony = harmony

    def prepare(self) -> None:
        """Make now what the first grammar would wait for; nothing where there can be none."""
        with contextlib.suppress(ValueError):
            _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """llguidance's form of the tokenizer: 0.2 s for 49,152 ids."""
        if not self.eos_ids:
            raise ValueError(
                "response_format and tools need a model with an end-of-text id; this one has none"
            )
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise ValueError(
                "response_format and tools need the package llguidance: pip install 'laneformer[grammar]'"
            ) from None
        plain = type(self.tokenizer).from_str(self.tokenizer.to_str())
        plain.no_truncation()
        plain.no_padding()
        n_vocab = max(self.vocab_size, 1 + max(plain.get_vocab().values()))
        return LLTokenizer(plain.to_str(), n_vocab=n_vocab, eos_token=list(self.eos_ids))

    def of_schema(self, schema: Any, what: str) -> Grammar:
        """JSON that the schema allows, keys in its order; `what` names it in errors."""
        rule = self.json_rule(schema, what)
        return self.of_lark(
            self.in_harmony(f"final {rule}") if self.harmony else f"start: {rule}", what
        )

    def in_harmony(self, answer: str) -> str:
        """Rules of an answer: one reasoning or none, then `answer`. In that, `final` begins a message for
        people, `preamble` is one before a call, and `kind` comes between a function and its arguments.
        """
        return f"""start: (analysis TEXT more)? {answer}
            analysis: {self.literal(CHANNEL + "analysis" + MESSAGE)}
            preamble: {self.literal(CHANNEL + "commentary" + MESSAGE)} TEXT more
            more: {self.literal(NEXT)}
            final: {self.literal(ANSWER)}
            kind: ({self.literal(f" {CONSTRAIN}json")} | " json")? {self.literal(MESSAGE)}
            TEXT: /(.|\\n)*/"""

    def json_rule(self, schema: Any, what: str, unused: list[str] | None = None) -> str:
        """The part of a Lark grammar that stands for JSON of a schema; RequestError says where the schema is wrong.

        unused: for the schema of an object, of which what no grammar can demand is left out; gets the places of
        keywords that llguidance refuses.
        """
        with name_in_errors(what):
            if not isinstance(schema, dict | bool):
                raise ValueError(
                    f"{what} = {schema!r:.80} must be a JSON schema: an object, true or false"
                )
            check_size(json.dumps(schema), what)
            if isinstance(schema, dict):
                schema = {**schema, "x-guidance": COMPILED_WITH | {"lenient": unused is not None}}
            if unused is not None:
                schema = copy.deepcopy(schema)
                unused += [what + place for place in self._leave_out_refused(schema)]
                schema.setdefault("type", "object")
            rule = f"%json {json.dumps(schema)}"
            if math.lcm(*_multiples(schema)) > MAX_MULTIPLE:
                raise ValueError(
                    f"{what}: the least common multiple of all multipleOf is above {MAX_MULTIPLE:,}"
                )
            if error := self._error(schema):
                raise ValueError(
                    f"{what}{self._place(schema, error)[:SHOWN_CHARS]}: {error[:SHOWN_CHARS]}"
                )
        return rule

    @cached_property
    def _control(self) -> dict[str, int]:
        """Tokens that no text of a grammar matches: llguidance's choice, <think> as well as <|im_end|>."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {token.content: i for i, token in added if self._tokenizer.is_special_token(i)}

    def literal(self, text: str) -> str:
        """The part of a Lark grammar that stands for this text, control tokens in it as such, and choices of a form."""
        names = sorted(self._control, key=len, reverse=True)
        parts = re.split("|".join((f"({CHOSEN}", *map(re.escape, names))) + ")", text)
        written = CHOICES | {name: f"<[{i}]>" for name, i in self._control.items()}
        return " ".join(
            written.get(part) or json.dumps(part, ensure_ascii=False) for part in parts if part
        )

    def text_tokens(self, but: str) -> str:
        """The part that stands for one token that is text to people though none to llguidance; "" without such."""
        added = self.tokenizer.get_added_tokens_decoder()
        ids = [i for name, i in self._control.items() if not added[i].special and name != but]
        return f"<[{','.join(map(str, ids))}]>" if ids else ""

    def of_lark(self, lark: str, what: str = "tools") -> Grammar:
        """A grammar in llguidance's variant of Lark's syntax, made of rules that have been checked."""
        with name_in_errors(what):
            check_size(lark, "the schemas of a request together")
            matcher = self._matcher(lark)
            matcher.compute_bitmask()
            if matcher.is_error():
                raise ValueError(
                    f"the schema allows no answer: {matcher.get_error()[:SHOWN_CHARS]}"
                )
            return Grammar(matcher, self.vocab_size, self._tokenizer.vocab_size, self.eos_ids)

    def _matcher(self, grammar: str) -> LLMatcher:
        tokenizer = self._tokenizer  # first: it names the extra
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(
            tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )

    def _error(self, schema: Any) -> str:
        return self._matcher(json.dumps({"grammars": [{"json_schema": schema}]})).get_error()

    def _place(self, schema: Any, error: str) -> str:
        """Where the schema is wrong: the innermost part that has this error by itself, as ".properties.a"."""
        places = self._wrong_parts(schema) if isinstance(schema, dict) else []
        return max(
            (place for place, _, own_error in places if own_error == error), key=len, default=""
        )

    def _wrong_parts(self, schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
        """Places, parts and errors of those that are wrong by themselves; of a large schema not all are searched."""
        parts = [("", schema), *list(_parts(schema))[:MAX_PARTS_SEARCHED]]
        return [
            (place, part, error)
            for place, part in parts
            if (error := self._error(shared_of(schema) | part))
        ]

    def _leave_out_refused(self, schema: dict[str, Any]) -> list[str]:
        """Delete the keywords that llguidance refuses, at most MAX_LEFT_OUT; their places."""
        left_out: list[str] = []
        while len(left_out) < MAX_LEFT_OUT and self._error(schema):
            place, part, _ = max(self._wrong_parts(schema), key=lambda wrong: len(wrong[0]))
            names = sorted(part.keys() - {"x-guidance"}, key=lambda name: (name == "type", name))
            shared = shared_of(schema)
            without = {name: shared | {n: part[n] for n in part if n != name} for name in names}
            name = next((name for name in names if not self._error(without[name])), names[0])
            del part[name]
            left_out.append(f"{place}.{name}")
        return left_out


def shared_of(schema: dict[str, Any]) -> dict[str, Any]:
    """What holds for every part of a schema."""
    return {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}


@contextlib.contextmanager
def name_in_errors(what: str) -> Iterator[None]:
    """The field to which a client's mistake belongs."""
    try:
        yield
    except RecursionError:
        raise RequestError(f"{what} is nested too deeply", what) from None
    except ValueError as error:
        raise RequestError(str(error), what) from None


def check_size(text: str, what: str) -> None:
    if len(text) > MAX_SCHEMA_BYTES:
        raise ValueError(
            f"{what}: {len(text):,} bytes of JSON; at most {MAX_SCHEMA_BYTES:,} are allowed"
        )


def _multiples(schema: Any) -> Iterator[int]:
    """Digits of all `multipleOf`: an automaton has a state for each remainder, of an intersection their product."""
    for _, part in _parts({"": schema}):
        number = part.get("multipleOf")
        if isinstance(number, int | float) and math.isfinite(number):
            _, digits, exponent = Decimal(str(float(number))).normalize().as_tuple()
            yield int("".join(map(str, digits))) * 10 ** max(int(exponent), 0) or 1


def _parts(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object inside of a JSON value, with its path."""
    values = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, inner in values:
        place = f"{path}.{key}" if isinstance(value, dict) else f"{path}[{key}]"
        if isinstance(inner, dict):
            yield place, inner
        yield from _parts(inner, place)


class Grammar:
    """One answer's place in its grammar; once that is complete, only end-of-text ids are left."""

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, tokenizer_size: int, eos_ids: Sequence[int]
    ):
        self._matcher, self._vocab_size, self._eos_ids = matcher, vocab_size, eos_ids
        self._words = -(-tokenizer_size // WORD_BITS)
        self._accepted, self._ended = 0, False

    def copy(self) -> Grammar:
        """For another answer, from the beginning."""
        return Grammar(
            self._matcher.deep_copy(), self._vocab_size, self._words * WORD_BITS, self._eos_ids
        )

    def mask(self, index: int) -> np.ndarray:
        """The ids that new token `index` may be: bit id % 32 of word id // 32, uint32 (ceil(V / 32),)."""
        assert index == self._accepted, (
            f"the mask of token {index} after {self._accepted} were accepted"
        )
        words = np.zeros(self._words, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check(index)
        words = words[: -(-self._vocab_size // 32)]
        # the tokenizer may have more ids
        words[-1] &= np.uint32(0xFFFFFFFF >> -self._vocab_size % 32)
        return words

    def accept(self, token_id: int) -> None:
        """Go on behind a token that the last mask allowed."""
        self._accepted += 1
        if not self._ended:
            self._matcher.consume_token(token_id)
            self._check(self._accepted - 1)
        self._ended |= token_id in self._eos_ids

    def _check(self, index: int) -> None:
        if self._matcher.is_error():
            raise RuntimeError(f"the grammar failed at token {index}: {self._matcher.get_error()}")


class ReasoningBudget:
    """A grammar that ends a reasoning after `tokens` tokens: then the next ids are `ending`, the end tag's. Before and
    after, any id may come, or those of `grammar`.

    reader, stream: make those of an answer.
    """

    def __init__(
        self,
        tokens: int,
        reader: Callable[[], AnswerReader],
        ending: list[int],
        stream: Callable[[], TextStream],
        vocab_size: int,
        grammar: Grammar | None,
    ):
        self._given = tokens, reader, ending, stream, vocab_size, grammar
        self._tokens, self._left, self._ended = tokens, [*ending], False
        self._reader, self._stream, self._grammar = reader(), stream(), grammar and grammar.copy()
        self._any = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
        self._any[-1] >>= np.uint32(-vocab_size % 32)

    def copy(self) -> ReasoningBudget:
        return ReasoningBudget(*self._given)

    def mask(self, index: int) -> np.ndarray:
        self._ended |= self._reader.inside and index >= self._tokens
        if not (self._ended and self._left):
            return self._grammar.mask(index) if self._grammar else self._any
        only = np.zeros_like(self._any)
        only[self._left[0] // 32] = np.uint32(1 << self._left[0] % 32)
        return only

    def accept(self, token_id: int) -> None:
        if self._grammar:
            self._grammar.accept(token_id)
        if self._ended:
            self._left = self._left[1:]
        else:
            self._reader.push(self._stream.push(token_id))


AnswerGrammar = Grammar | ReasoningBudget
