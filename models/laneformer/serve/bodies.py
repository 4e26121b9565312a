"""Bodies of requests: JSON in which every field is used, named as without effect, or refused by name.

null stands for an absent field, and an empty text, list or object asks for nothing.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from .fields import SILENT, Values

MAX_UNUSED = 64  # names in the header of one answer
MAX_VALUES = 2**20  # of JSON in a body, about, whatever the context
SHOWN_CHARS = 80  # of a value or a name in an error
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
HALF_PAIR = re.compile("[\ud800-\udfff]")
EMPTY: tuple[Any, ...] = ("", [], {})


class RequestError(ValueError):
    """A request that a client got wrong; `param` and `code` are OpenAI's fields."""

    def __init__(
        self, message: str, param: str | None, code: str | None = "invalid_value", status: int = 400
    ):
        super().__init__(message)
        self.param = param
        self.code = code
        self.status_code = status

    def translate(self, names: Mapping[str, str]) -> RequestError:
        """Return the error with its field by another name, in `param` and in the message."""
        message, param = (translate_field(text, names) for text in (str(self), self.param or ""))
        return RequestError(message, param or None, self.code, self.status_code)


@dataclass
class Reading:
    """How a body is read: `strict` refuses fields without effect, `unused` collects their names."""

    strict: bool = True
    max_values: int = MAX_VALUES  # no other thread runs while pydantic checks them
    unused: dict[str, None] = field(default_factory=dict)

    def pass_over(self, name: str, message: str, place: str = "") -> None:
        """Note a field without effect; `message` explains where it is refused."""
        if self.strict:
            refuse(name, message, "unknown_parameter")
        if len(self.unused) < MAX_UNUSED:
            self.unused[place + name[:SHOWN_CHARS]] = None

    @property
    def headers(self) -> dict[str, str]:
        """The header `warnings`, if there is anything to name."""
        # Names that no header may hold are spelled as in JSON
        spelled_names = [json.dumps(name)[1:-1].replace(",", "") for name in self.unused]
        return {"warnings": ", ".join(spelled_names)} if spelled_names else {}


STRICTLY = Reading()


class Body(BaseModel):
    """A JSON object with fields of exact types.

    Names that are no fields are looked up in the first four tables below, which fields.py
    describes. The bodies of other APIs are translated into chat completions (apis/blocks.py), whose
    fields are then named in errors and warnings; `api_names` has the client's names for them.
    """

    model_config = ConfigDict(strict=True)
    aliases: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[Mapping[str, Values]] = {}
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    refused: ClassVar[Mapping[str, str]] = {}
    place: ClassVar[str] = ""  # of the object in its request, before names in warnings
    is_open: ClassVar[bool] = False  # unknown names have no effect, unless they look like a typo
    typo: ClassVar[float] = 0.8  # similarity to a known name from which on an unknown one is a typo
    # For `translate_field`: names of a chat completion's fields, and those of this API
    api_names: ClassVar[Mapping[str, str]] = {}
    field_names: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.field_names = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _take_fields(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        reading = info.context or STRICTLY
        fields = {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.field_names:
                fields[name] = value
            elif (field_name := cls.aliases.get(name)) in cls.field_names:
                fields.setdefault(field_name, value)
            elif value not in EMPTY and not is_one_of(value, cls.neutral.get(name)):
                cls._take_unused(name, value, reading)
        return fields

    @classmethod
    def _take_unused(cls, name: str, value: Any, reading: Reading) -> None:
        if name in cls.ignored:
            silent_values = cls.ignored[name]
            if silent_values is not SILENT and not is_one_of(value, silent_values):
                reading.pass_over(
                    name, f"{name} = {quote(value)} has no effect; leave it out", cls.place
                )
        elif name in cls.refused:
            refuse(name, f"{name} is not supported: {cls.refused[name]}", "unsupported_parameter")
        elif name in cls.neutral:
            allowed = f"use one of {[*cls.neutral[name]]}, or leave it out"
            refuse(name, f"{name} = {quote(value)} is not supported; {allowed}")
        else:
            short_name = name[:SHOWN_CHARS]
            # A probable typo is refused even where other unknown names are accepted
            near = difflib.get_close_matches(short_name, cls.field_names, n=1, cutoff=cls.typo)
            hint = (
                f"did you mean {near[0]!r}?"
                if near
                else f"known are {', '.join(sorted(cls.field_names))}"
            )
            message = f"{short_name} is unknown; {hint}"
            if near or not cls.is_open:
                refuse(name, message, "unknown_parameter")
            reading.pass_over(name, message, cls.place)

    @classmethod
    def read(cls, raw: bytes, reading: Reading) -> Self:
        """Parse and check a body; RequestError explains what is wrong with it."""
        try:
            value = parse_json(raw, reading.max_values)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"the body is not a JSON object: {error}", None, "invalid_json"
            ) from None
        # The search in the bytes is fast; only bodies that may have one are walked
        if SURROGATE.search(raw):
            check_surrogates(value)
        return cls.from_fields(value, reading)

    @classmethod
    def from_fields(cls, value: Any, reading: Reading) -> Self:
        """Check the fields of a body; RequestError explains what is wrong with them."""
        try:
            return cls.model_validate(value, context=reading)
        except ValidationError as error:
            refusal = explain_errors(error.errors(include_url=False))
            for alias, field_name in cls.aliases.items():
                if refusal.param == field_name and alias in value:
                    refusal = refusal.translate({field_name: alias})
            raise refusal from None


def translate_field(text: str, names: Mapping[str, str]) -> str:
    """Return the name of a field, or a message with it, by the name that the client knows.

    With the `api_names` of the Messages API, "tools[0].function.parameters.type" becomes
    "tools[0].input_schema.type"; with those of Responses, "messages[3].content" becomes "input".

    Args:
        names: patterns of names, and their replacements.
    """
    for pattern, name in names.items():
        text = re.sub(pattern, name, text, count=1)
    return text


def is_one_of(value: Any, values: Values) -> bool:
    # In Python True == 1, in JSON they are two values
    return any(
        value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        for allowed in values or ()
    )


def parse_json(raw: bytes, max_values: int) -> Any:
    text = raw.decode()
    values = sum(map(text.count, ",[{"))
    if values > max_values:
        raise ValueError(
            f"it has about {values:,} values; at most {max_values:,} fit this model's context"
        )
    return json.loads(text)


def check_surrogates(value: Any) -> None:
    """Raise RequestError for half a surrogate pair, which no tokenizer takes, with its place."""
    for place, text in walk_values(value):
        if isinstance(text, str) and (half := HALF_PAIR.search(text)):
            param = place.removeprefix(".")
            raise RequestError(
                f"{param or 'a name in the body'} holds half a surrogate pair, {quote(half[0])}; "
                "send both halves of a character together",
                param or None,
            )


def walk_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a JSON value and all names and values in it, each with its place: ".a[0].b"."""
    pending = [("", value)]
    while pending:
        place, value = pending.pop()
        yield place, value
        inner: list[tuple[str, Any]] = []
        if isinstance(value, dict):
            for name, entry in value.items():
                inner += [(place, name), (f"{place}.{name}", entry)]
        elif isinstance(value, list):
            inner = [(f"{place}[{number}]", entry) for number, entry in enumerate(value)]
        # The last is taken first: values come in the order in which they are written
        pending += reversed(inner)


def refuse(name: str, message: str, code: str = "invalid_value") -> None:
    raise PydanticCustomError(
        "refused", "{message}", {"field": name, "message": message, "code": code}
    )


# What a field of several types takes; pydantic would list an error of each type
EXPECTED = {
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text, or a list of at most 16 texts, none of them empty",
    "content": "a text, or a list of parts {'type': 'text', 'text': ...}",
    "tool_choice": "'none', 'auto', 'required', or an object that names a tool",
}


def explain_errors(errors: Sequence[Any]) -> RequestError:
    """Return what a client is told, given the list of a pydantic ValidationError."""
    # Our own reason explains more than the list of types that did not match
    error = next((e for e in errors if e["type"] == "refused"), errors[0])
    path = list(error["loc"])
    expected = next((name for name in path if name in EXPECTED), None)
    if expected is not None:
        # After the name of the field, pydantic adds the type that it tried
        path = path[: path.index(expected) + 1]
    if error["type"] == "refused":
        refusal = error["ctx"]
        if not expected and path[-1:] != [refusal["field"]]:
            path.append(refusal["field"])
        return RequestError(refusal["message"], spell_path(path), refusal["code"])
    if not path:
        return RequestError(f"the body is not a JSON object: {error['msg']}", None, "invalid_json")
    param = spell_path(path)
    if error["type"] == "missing":
        return RequestError(f"{param} is missing", param, "missing_required_parameter")
    requirement = (
        f"it must be {EXPECTED[expected]}"
        if expected
        else error["msg"][:1].lower() + error["msg"][1:]
    )
    return RequestError(f"{param} = {quote(error['input'])}: {requirement}", param)


def quote(value: Any) -> str:
    """Return the beginning of a value as JSON, without writing all of it."""
    value = value[:SHOWN_CHARS] if isinstance(value, str) else value
    pieces = json.JSONEncoder(default=str).iterencode(value)
    return "".join(itertools.islice(pieces, SHOWN_CHARS))[:SHOWN_CHARS]


def spell_path(path: Sequence[str | int]) -> str:
    return "".join(
        # As OpenAI writes it: messages[0].content
        f"[{part}]" if isinstance(part, int) else f".{part}"
        for part in path
    ).removeprefix(".")
