"""Masks over the vocabulary that force answers into a form, through llguidance."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
from .bodies import RequestError, walk_values

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

MAX_SCHEMA_BYTES = 64 * 1024  # of all schemas of a request together
MAX_PARTS_SEARCHED = 100  # for the place of an error
MAX_LEFT_OUT = 16  # keywords of one schema
MAX_MULTIPLE = 10_000  # takes 0.1 s to compile, and the time grows in proportion
WORD_BITS = 32  # of a mask
SHOWN_CHARS = 300  # of a message of llguidance
# Mistral's templates take ids of nine characters
CHOICES = {CALL_ID: "/[a-zA-Z0-9]{9}/", CALL_NUMBER: "/[0-9]{1,4}/"}
# A space, or a line break with its indentation: without a bound, a small model can write white
# space up to its limit of tokens
COMPILED_WITH = {"whitespace_pattern": r"( |\n( {0,32}|\t{0,16}))"}


@dataclass
class Grammars:
    """Compiles grammars for one model; RequestError for those that are wrong or too large."""

    tokenizer: Tokenizer
    vocab_size: int  # V, rows of the embedding table; the tokenizer may have fewer ids
    eos_ids: Sequence[int]
    harmony: bool = False  # answers are written in this format

    def prepare(self) -> None:
        # ValueError: this model supports no grammars; requests that need one are refused
        with contextlib.suppress(ValueError):
            _ = self._tokenizer

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """llguidance's form of the tokenizer; making it takes 0.2 s for 49,152 ids."""
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
        # Truncation and padding, which llguidance refuses, are off in what text_files.py reads
        n_vocab = max(self.vocab_size, 1 + max(self.tokenizer.get_vocab().values()))
        return LLTokenizer(self.tokenizer.to_str(), n_vocab=n_vocab, eos_token=list(self.eos_ids))

    def compile_schema(self, schema: Any, what: str) -> Grammar:
        """Return the grammar of JSON that a schema allows; `what` names it in errors."""
        rule = self.write_json_rule(schema, what)
        return self.compile_lark(
            self.write_harmony_rules(f"final {rule}") if self.harmony else f"start: {rule}", what
        )

    def write_harmony_rules(self, answer: str) -> str:
        """Return Lark rules of an answer in harmony: at most one reasoning, then `answer`."""
        # final begins a message for people, preamble is one before a call, kind comes between a
        # function and its arguments
        return f"""start: (analysis TEXT more)? {answer}
            analysis: {self.write_literal(CHANNEL + "analysis" + MESSAGE)}
            preamble: {self.write_literal(CHANNEL + "commentary" + MESSAGE)} TEXT more
            more: {self.write_literal(NEXT)}
            final: {self.write_literal(ANSWER)}
            kind: ({self.write_literal(f" {CONSTRAIN}json")} | " json")? {self.write_literal(MESSAGE)}
            TEXT: /(.|\\n)*/"""

    def write_json_rule(self, schema: Any, what: str, unused: list[str] | None = None) -> str:
        """Return the part of a Lark grammar that stands for JSON of a schema."""
        # unused, for the parameters of a tool: keywords that no grammar can demand are left out,
        # and their places added to it. Without it such a keyword is an error.
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
            # Check this first: compiling such a schema would take minutes
            if math.lcm(*_find_multiples(schema)) > MAX_MULTIPLE:
                raise ValueError(
                    f"{what}: the least common multiple of all multipleOf is above {MAX_MULTIPLE:,}"
                )
            if error := self._find_error(schema):
                raise ValueError(
                    f"{what}{self._locate_error(schema, error)[:SHOWN_CHARS]}: {error[:SHOWN_CHARS]}"
                )
        return rule

    @cached_property
    def _control(self) -> dict[str, int]:
        """Control tokens, by llguidance's choice: no text of a grammar matches them."""
        added = self.tokenizer.get_added_tokens_decoder().items()
        return {token.content: i for i, token in added if self._tokenizer.is_special_token(i)}

    def write_literal(self, text: str) -> str:
        """Return the part of a Lark grammar for a text with control tokens and CHOSEN marks."""
        # Longest first: a name may begin with another one
        names = sorted(self._control, key=len, reverse=True)
        parts = re.split("|".join((f"({CHOSEN}", *map(re.escape, names))) + ")", text)
        spellings = CHOICES | {name: f"<[{i}]>" for name, i in self._control.items()}
        return " ".join(
            spellings.get(part) or json.dumps(part, ensure_ascii=False) for part in parts if part
        )

    def write_text_tokens(self, but: str) -> str:
        """Return the part for one control token that people see as text, if there is any."""
        added = self.tokenizer.get_added_tokens_decoder()
        ids = [i for name, i in self._control.items() if not added[i].special and name != but]
        return f"<[{','.join(map(str, ids))}]>" if ids else ""

    def compile_lark(self, lark: str, what: str = "tools") -> Grammar:
        with name_in_errors(what):
            check_size(lark, "the schemas of a request together")
            matcher = self._make_matcher(lark)
            # Some contradictions show only when the first token is asked for
            matcher.compute_bitmask()
            if matcher.is_error():
                raise ValueError(
                    f"the schema allows no answer: {matcher.get_error()[:SHOWN_CHARS]}"
                )
            return Grammar(matcher, self.vocab_size, self._tokenizer.vocab_size, self.eos_ids)

    def _make_matcher(self, grammar: str) -> LLMatcher:
        # Before the import: without the package this raises the error that names the extra
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(
            tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False)
        )

    def _find_error(self, schema: Any) -> str:
        return self._make_matcher(json.dumps({"grammars": [{"json_schema": schema}]})).get_error()

    def _locate_error(self, schema: Any, error: str) -> str:
        """Return the place of the innermost part with this error, as .properties.a."""
        places = self._find_wrong_parts(schema) if isinstance(schema, dict) else []
        return max(
            (place for place, _, own_error in places if own_error == error), key=len, default=""
        )

    def _find_wrong_parts(self, schema: dict[str, Any]) -> list[tuple[str, dict[str, Any], str]]:
        """Return places, parts and errors of the parts that are wrong by themselves."""
        parts = itertools.islice(_walk_objects(schema), 1 + MAX_PARTS_SEARCHED)
        shared = pick_shared(schema)
        errors = ((place, part, self._find_error(shared | part)) for place, part in parts)
        return [error for error in errors if error[2]]

    def _leave_out_refused(self, schema: dict[str, Any]) -> list[str]:
        """Delete keywords that llguidance refuses, and return their places."""
        left_out: list[str] = []
        while len(left_out) < MAX_LEFT_OUT and self._find_error(schema):
            place, part, _ = max(self._find_wrong_parts(schema), key=lambda wrong: len(wrong[0]))
            names = sorted(part.keys() - {"x-guidance"}, key=lambda name: (name == "type", name))
            shared = pick_shared(schema)
            reduced = {name: shared | {n: part[n] for n in part if n != name} for name in names}
            # Removing any keyword may help; "type" is tried last, since it says the most
            name = next((name for name in names if not self._find_error(reduced[name])), names[0])
            del part[name]
            left_out.append(f"{place}.{name}")
        return left_out


def pick_shared(schema: dict[str, Any]) -> dict[str, Any]:
    return {name: schema[name] for name in ("$defs", "definitions", "x-guidance") if name in schema}


@contextlib.contextmanager
def name_in_errors(what: str) -> Iterator[None]:
    """Raise a RequestError for the field that a client got wrong."""
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


def _find_multiples(schema: Any) -> Iterator[int]:
    # An automaton has a state for each remainder; an intersection of two has their product
    for _, part in _walk_objects(schema):
        number = part.get("multipleOf")
        if isinstance(number, int | float) and math.isfinite(number):
            _, digits, exponent = Decimal(str(float(number))).normalize().as_tuple()
            yield int("".join(map(str, digits))) * 10 ** max(int(exponent), 0) or 1


def _walk_objects(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    return ((place, part) for place, part in walk_values(value) if isinstance(part, dict))


@dataclass
class Grammar:
    """One answer's state in its grammar; after its end only end-of-text ids are allowed."""

    matcher: LLMatcher
    vocab_size: int
    tokenizer_size: int
    eos_ids: Sequence[int]
    accepted: int = field(default=0, init=False)
    ended: bool = field(default=False, init=False)

    def copy(self) -> Grammar:
        return dataclasses.replace(self, matcher=self.matcher.deep_copy())

    def mask(self, index: int) -> np.ndarray:
        """Return the ids allowed as new token `index`: uint32 (ceil(V / 32),), bit id % 32."""
        assert index == self.accepted, (
            f"the mask of token {index} after {self.accepted} were accepted"
        )
        words = np.zeros(-(-self.tokenizer_size // WORD_BITS), np.uint32)
        self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._check(index)
        words = words[: -(-self.vocab_size // WORD_BITS)]
        # The tokenizer may have more ids than the embedding table has rows
        words[-1] &= np.uint32(0xFFFFFFFF >> -self.vocab_size % WORD_BITS)
        return words

    def accept(self, token_id: int) -> None:
        """Advance by a token that the last mask allowed."""
        self.accepted += 1
        if not self.ended:
            self.matcher.consume_token(token_id)
            self._check(self.accepted - 1)
        self.ended |= token_id in self.eos_ids

    def _check(self, index: int) -> None:
        if self.matcher.is_error():
            raise RuntimeError(f"the grammar failed at token {index}: {self.matcher.get_error()}")


@dataclass
class ReasoningBudget:
    """A grammar that forces `ending`, the ids of the end tag, after `tokens` tokens of reasoning."""

    tokens: int
    make_reader: Callable[[], AnswerReader]
    ending: list[int]
    make_stream: Callable[[], TextStream]
    vocab_size: int
    grammar: Grammar | None

    def __post_init__(self) -> None:
        self._left = self.ending
        self._ended = False
        self._reader = self.make_reader()
        self._stream = self.make_stream()
        # Before and after the ending any id may come, or those of the answer's own grammar
        self._grammar = self.grammar and self.grammar.copy()
        self._any = np.full(-(-self.vocab_size // WORD_BITS), 0xFFFFFFFF, np.uint32)
        self._any[-1] >>= np.uint32(-self.vocab_size % WORD_BITS)

    def copy(self) -> ReasoningBudget:
        return dataclasses.replace(self)

    def mask(self, index: int) -> np.ndarray:
        # A reasoning that ends by itself leaves nothing to force
        self._ended |= self._reader.inside and index >= self.tokens
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
