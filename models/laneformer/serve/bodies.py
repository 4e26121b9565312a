"""Bodies of requests: JSON, read apart from the event loop; every field is used, taken without effect, or refused.

null stands for an absent field, and an empty text, list or object asks for nothing. What a client sends that
changes nothing is named in the header `warnings` of the answer; all else is refused by name.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from .fields import Values

MAX_UNUSED = 64  # names of one request
MAX_VALUES = 2**20  # of JSON, about, whatever the context
SHOWN_CHARS = 80  # of a value or a name
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # escaped
HALF_PAIR = re.compile("[\ud800-\udfff]")
EMPTY: tuple[Any, ...] = ("", [], {})  # ask for nothing


class RequestError(ValueError):
    """A request that cannot be answered: the client's fault. status: of HTTP; the others are OpenAI's fields."""

    def __init__(
        self, message: str, param: str | None, code: str | None = "invalid_value", status: int = 400
    ):
        super().__init__(message)
        self.param, self.code, self.status_code = param, code, status

    def rename(self, name: str, own_name: str) -> RequestError:
        """By another name of its field, or of a part of it; a pattern of `re`."""
        message, param = (
            re.sub(name, own_name, text, count=1) for text in (str(self), self.param or "")
        )
        return RequestError(message, param or None, self.code, self.status_code)


@dataclass
class Reading:
    """How a body is read. strict: refuses fields without effect. unused: the names of those so far."""

    strict: bool = True
    max_values: int = MAX_VALUES  # of JSON, about: while they are checked no other thread runs
    unused: dict[str, None] = field(default_factory=dict)

    def pass_over(self, name: str, message: str, place: str = "") -> None:
        """A field without effect. message: why, where it is refused."""
        if self.strict:
            refuse(name, message, "unknown_parameter")
        if len(self.unused) < MAX_UNUSED:
            self.unused[place + name[:SHOWN_CHARS]] = None

    @property
    def headers(self) -> dict[str, str]:
        """Names that no header may hold are spelled as in JSON."""
        spelled_names = [json.dumps(name)[1:-1].replace(",", "") for name in self.unused]
        return {"warnings": ", ".join(spelled_names)} if spelled_names else {}


STRICTLY = Reading()


class Body(BaseModel):
    """A JSON object with known fields of exact types; the tables of others are as in fields.py.

    place: of the object. is_open: unknown names have no effect, but for those that are as like a known one as `typo`.
    own_names: for names in errors, as patterns and replacements of `re`.
    """

    model_config = ConfigDict(strict=True)
    harmless: ClassVar[Mapping[str, Values]] = {}
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    refused: ClassVar[Mapping[str, str]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    place: ClassVar[str] = ""
    is_open: ClassVar[bool] = False
    typo: ClassVar[float] = 0.8
    own_names: ClassVar[Mapping[str, str]] = {}
    known: ClassVar[frozenset[str]]  # names of fields

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _take_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        reading, fields = info.context or STRICTLY, {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.known:
                fields[name] = value
            elif (own_name := cls.renamed.get(name)) in cls.known:
                fields.setdefault(own_name, value)
            elif value not in EMPTY and not is_one_of(value, cls.neutral.get(name)):
                cls._take_unused(name, value, reading)
        return fields

    @classmethod
    def _take_unused(cls, name: str, value: Any, reading: Reading) -> None:
        if name in cls.harmless:
            silent = cls.harmless[name]
            if silent is not None and not is_one_of(value, silent):
                reading.pass_over(
                    name, f"{name} = {quote(value)} has no effect; leave it out", cls.place
                )
        elif name in cls.refused:
            refuse(name, f"{name} is not supported: {cls.refused[name]}", "unsupported_parameter")
        elif name in cls.neutral:
            allowed = f"use one of {[*cls.neutral[name]]}, or leave it out"
            refuse(name, f"{name} = {quote(value)} is not supported; {allowed}")
        else:
            shown = name[:SHOWN_CHARS]
            near = difflib.get_close_matches(shown, cls.known, n=1, cutoff=cls.typo)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"known are {', '.join(sorted(cls.known))}"
            )
            message = f"{shown} is unknown; {hint}"
            if near or not cls.is_open:
                refuse(name, message, "unknown_parameter")
            reading.pass_over(name, message, cls.place)

    @classmethod
    def read(cls, raw: bytes, reading: Reading) -> Self:
        """The object that these bytes hold; RequestError says what is wrong with them."""
        try:
            value = parse_json(raw, reading.max_values)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the body is not a JSON object: {error}", None, "invalid_json"
            ) from None
        if SURROGATE.search(raw):
            check_surrogates(value)
        return cls.from_fields(value, reading)

    @classmethod
    def from_fields(cls, value: Any, reading: Reading) -> Self:
        """The object with these fields; RequestError says what is wrong with them."""
        try:
            return cls.model_validate(value, context=reading)
        except ValidationError as error:
            refusal = explain_errors(error.errors(include_url=False))
            for name, own_name in cls.renamed.items():
                if refusal.param == own_name and name in value:
                    refusal = refusal.rename(own_name, name)
            raise refusal from None

    def rename(self, error: RequestError) -> RequestError:
        """With the names of this body's API."""
        for pattern, own_name in self.own_names.items():
            error = error.rename(pattern, own_name)
        return error


def is_one_of(value: Any, values: Sequence[Any] | None) -> bool:
    """JSON's true is not 1."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool)
        for other in values or ()
    )


def parse_json(raw: bytes, max_values: int) -> Any:
    text = raw.decode()
    values = sum(map(text.count, ",[{"))
    if values > max_values:
        raise ValueError(
            f"it has about {values:,} values; at most {max_values:,} fit this model's context"
        )
    return json.loads(text)


def check_surrogates(value: Any, path: Sequence[str | int] = ()) -> None:
    """RequestError for a text with half a surrogate pair, which no encoding has and no tokenizer takes."""
    if isinstance(value, str) and (half := HALF_PAIR.search(value)):
        place = spell_path(path)
        message = f"{place or 'a name in the body'} holds half a surrogate pair, {quote(half[0])}; "
        raise RequestError(f"{message}send both halves of a character together", place or None)
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for name, part in parts:
        check_surrogates(name, path)
        check_surrogates(part, [*path, name])


def refuse(name: str, message: str, code: str = "invalid_value") -> None:
    raise PydanticCustomError(
        "refused", "{message}", {"field": name, "message": message, "code": code}
    )


EXPECTED = {  # of fields with several types
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text, or a list of at most 16 texts, none of them empty",
    "content": "a text, or a list of parts {'type': 'text', 'text': ...}",
    "tool_choice": "'none', 'auto', 'required', or an object that names a tool",
}


def explain_errors(errors: Sequence[Any]) -> RequestError:
    """What a client is told about a bad body; `errors` as of pydantic's validation error."""
    # a better reason than a type of several
    error = next((e for e in errors if e["type"] == "refused"), errors[0])
    path = list(error["loc"])
    expected = next((name for name in path if name in EXPECTED), None)
    if expected is not None:
        path = path[: path.index(expected) + 1]  # pydantic goes on with the type that it tried
    if error["type"] == "refused":
        refused = error["ctx"]
        if not expected and path[-1:] != [refused["field"]]:
            path.append(refused["field"])
        return RequestError(refused["message"], spell_path(path), refused["code"])
    if not path:
        return RequestError(f"the body is not a JSON object: {error['msg']}", None, "invalid_json")
    param = spell_path(path)
    if error["type"] == "missing":
        return RequestError(f"{param} is missing", param, "missing_required_parameter")
    wanted = (
        f"it must be {EXPECTED[expected]}"
        if expected
        else error["msg"][:1].lower() + error["msg"][1:]
    )
    return RequestError(f"{param} = {quote(error['input'])}: {wanted}", param)


def quote(value: Any) -> str:
    """The beginning of a value as JSON, without writing all of it."""
    value = value[:SHOWN_CHARS] if isinstance(value, str) else value
    pieces = json.JSONEncoder(default=str).iterencode(value)
    return "".join(itertools.islice(pieces, SHOWN_CHARS))[:SHOWN_CHARS]


def spell_path(path: Sequence[str | int]) -> str:
    """As OpenAI writes it: messages[0].content."""
    return "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in path
    ).removeprefix(".")
