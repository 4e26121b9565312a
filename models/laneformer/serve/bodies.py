"""Bodies of requests: JSON, read apart from the event loop; every field is used, taken without effect, or refused.

null stands for an absent field. What a client sends that changes nothing is named in the header `warnings`
of the answer; what would change it, and is not supported, is refused by name.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from json import decoder, scanner
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

MAX_UNUSED = 64  # names of one request
AT_ONCE = 50_000  # values of JSON that C reads in one go: meanwhile no other thread runs
MAX_VALUES = 2**20  # of JSON, about, whatever the context
TYPO = 0.85  # likeness of an unknown name to a known one that was meant
SHOWN_CHARS = 80  # of a value or a name
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # escaped
HALF_PAIR = re.compile("[\ud800-\udfff]")


class RequestError(ValueError):
    """A request that cannot be answered: the client's fault. status: of HTTP; the others are OpenAI's fields."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = "invalid_value", status: int = 400
    ):
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


@dataclass
class Reading:
    """How a body is read. strict: refuses unknown fields. unused: names of fields without effect so far."""

    strict: bool = True
    max_values: int = MAX_VALUES  # of JSON, about: while they are checked no other thread runs
    unused: dict[str, None] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        """Names that no header may hold are spelled as in JSON."""
        spelled_names = [json.dumps(name)[1:-1].replace(",", "") for name in self.unused]
        return {"warnings": ", ".join(spelled_names)} if spelled_names else {}


STRICTLY = Reading()


class Body(BaseModel):
    """A JSON object with known fields of exact types.

    refused: further known ones, and what to do instead. unused: those without effect, and the values that
    ask for none, so that they need no warning; None: all do. neutral: those that would change the answer,
    and the values with which they do not. renamed: other servers' names of fields. place: of the object.
    closed: all others are refused.
    """

    model_config = ConfigDict(strict=True)
    refused: ClassVar[Mapping[str, str]] = {}
    unused: ClassVar[Mapping[str, Sequence[Any] | None]] = {}
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {}
    renamed: ClassVar[Mapping[str, str]] = {}
    place: ClassVar[str] = ""
    closed: ClassVar[bool] = False

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        reading, fields = info.context or STRICTLY, {}
        for name, value in data.items():
            if value is None:
                continue
            if name in cls.model_fields:
                fields[name] = value
            elif name in cls.refused:
                refuse(name, f"{name} is not supported: {cls.refused[name]}", "unsupported_parameter")
            elif name in cls.renamed and not reading.strict:
                fields.setdefault(cls.renamed[name], value)
                reading.unused[cls.place + name] = None
            elif cls._harmless(name, value):
                continue
            elif cls.place + name not in reading.unused:
                cls._take(name, value, reading)
        return fields

    @classmethod
    def _harmless(cls, name: str, value: Any) -> bool:
        values = cls.unused.get(name, cls.neutral.get(name, ()))
        return values is None or any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in values
        )

    @classmethod
    def _take(cls, name: str, value: Any, reading: Reading) -> None:
        """A field that is not used."""
        spelled = f"{name[:SHOWN_CHARS]} = {quote(value)}"
        if name in cls.neutral or (reading.strict and name in cls.unused):
            allowed = [*(cls.neutral.get(name) or cls.unused[name] or ())]
            refuse(name, f"{spelled} is not supported; use one of {allowed}, or leave it out")
        if name not in cls.unused:
            likeness = 0.6 if reading.strict else TYPO
            names = [*cls.model_fields, *cls.refused]
            near = difflib.get_close_matches(name[:SHOWN_CHARS], names, n=1, cutoff=likeness)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(cls.model_fields))}"
            )
            if near or reading.strict or cls.closed or len(reading.unused) >= MAX_UNUSED:
                refuse(name, f"{name[:SHOWN_CHARS]} is unknown; {hint}", "unknown_parameter")
        reading.unused[cls.place + name[:SHOWN_CHARS]] = None

    @classmethod
    def read(cls, raw: bytes, reading: Reading) -> Self:
        """The object that these bytes hold; RequestError says what is wrong with them."""
        try:
            value = parse_json(raw, reading.max_values)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not a JSON object: {error}", None, "invalid_json") from None
        if SURROGATE.search(raw):
            check_surrogates(value)
        return cls.from_fields(value, reading)

    @classmethod
    def from_fields(cls, value: Any, reading: Reading) -> Self:
        """The object with these fields; RequestError says what is wrong with them."""
        try:
            return cls.model_validate(value, context=reading)
        except ValidationError as error:
            raise explain_errors(error.errors(include_url=False)) from None


class _Yielding(json.JSONDecoder):
    """Reads JSON in Python, so that other threads run meanwhile; strings at C's speed."""

    def __init__(self) -> None:
        super().__init__()
        self.parse_object, self.parse_array = decoder.JSONObject, decoder.JSONArray  # type: ignore[attr-defined]
        self.scan_once = scanner.py_make_scanner(self)  # type: ignore[attr-defined]


def parse_json(raw: bytes, max_values: int = MAX_VALUES) -> Any:
    text = raw.decode()
    values = sum(map(text.count, ",[{"))
    if values > max_values:
        raise ValueError(f"it has about {values:,} values; at most {max_values:,} fit this model's context")
    return json.loads(text, cls=_Yielding if values > AT_ONCE else None)


def check_surrogates(value: Any, path: Sequence[str | int] = ()) -> None:
    """RequestError for a text with half a surrogate pair, which no encoding has and no tokenizer takes."""
    if isinstance(value, str) and HALF_PAIR.search(value):
        place = spell_path(path)
        message = f"{place or 'a name in the body'} holds half a surrogate pair, {quote(HALF_PAIR.search(value)[0])}; "
        raise RequestError(f"{message}send both halves of a character together", place or None)
    for name, part in value.items() if isinstance(value, dict) else ():
        check_surrogates(name, path)
        check_surrogates(part, [*path, name])
    for i, part in enumerate(value if isinstance(value, list) else ()):
        check_surrogates(part, [*path, i])


def refuse(name: str, message: str, code: str = "invalid_value") -> None:
    raise PydanticCustomError("refused", "{message}", {"field": name, "message": message, "code": code})


EXPECTED = {  # of fields with several types
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text, or a list of at most 16 texts, none of them empty",
    "content": "a text, or a list of parts {'type': 'text', 'text': ...}",
    "tool_choice": "'none', 'auto', 'required', or an object that names a tool",
}


def explain_errors(errors: Sequence[Any]) -> RequestError:
    """What a client is told about a bad body; `errors` as of pydantic's validation error."""
    error = next(
        (e for e in errors if e["type"] == "refused"), errors[0]
    )  # a better reason than a type of several
    path = list(error["loc"])
    expected = next((name for name in path if name in EXPECTED), None)
    if expected is not None:
        path = path[: path.index(expected) + 1]  # pydantic goes on with the type that it tried
    if error["type"] == "refused":
        refused = error["ctx"]
        param = spell_path(path if expected else [*path, refused["field"]])
        return RequestError(refused["message"], param, refused["code"])
    if not path:
        return RequestError(f"the body is not a JSON object: {error['msg']}", None, "invalid_json")
    if error["type"] == "missing":
        return RequestError(f"{spell_path(path)} is missing", spell_path(path), "missing_required_parameter")
    wanted = f"it must be {EXPECTED[expected]}" if expected else error["msg"][:1].lower() + error["msg"][1:]
    return RequestError(f"{spell_path(path)} = {quote(error['input'])}: {wanted}", spell_path(path))


def quote(value: Any) -> str:
    """The beginning of a value as JSON, without writing all of it."""
    value = value[:SHOWN_CHARS] if isinstance(value, str) else value
    pieces = json.JSONEncoder(default=str).iterencode(value)
    return "".join(itertools.islice(pieces, SHOWN_CHARS))[:SHOWN_CHARS]


def spell_path(path: Sequence[str | int]) -> str:
    """As OpenAI writes it: messages[0].content."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
