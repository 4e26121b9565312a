"""Tests that docs/recipe-keys.md matches the code, and that every key has its help text."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

import docstring_parser

from data_mixtures import recipe

PAGE = Path(__file__).resolve().parents[3] / "docs/recipe-keys.md"
CLASSES = (
    recipe.Recipe,
    recipe.Source,
    recipe.LocalSource,
    recipe.Input,
    recipe.HubSource,
    recipe.TokenizerFile,
    recipe.TokenizerTraining,
    recipe.Filter,
    recipe.Dedup,
)
START = """# Keys of a recipe

Made from `data_mixtures/recipe.py` by `python -m tests.tools.check.test_recipe_keys`. A key without a default is
required; any other key is refused with the nearest known name. `base = "other.toml"` takes the keys of another recipe,
changed where this one says something else. [Your own data](own-data.md) has examples.
"""


def test_the_page_is_that_of_the_code():
    command = "run python -m tests.tools.check.test_recipe_keys"
    assert PAGE.read_text(encoding="utf-8") == page(), command


def test_every_key_has_a_help_text():
    for cls in CLASSES:
        bases = [base for base in cls.__bases__[:1] if base is not object]
        keys = {key for one in (cls, *bases) for key in help_texts(one)}
        assert {field.name for field in dataclasses.fields(cls)} - keys <= {"name", "folder"}
        assert all(help_texts(cls).values())


def page() -> str:
    return "\n".join([START, *(section(cls) for cls in CLASSES)])


def section(cls: Any) -> str:
    """Return the table of the keys that a class adds to its base."""
    texts, hints = help_texts(cls), typing.get_type_hints(cls)
    rows = [
        f"| `{field.name}` | {in_toml(hints[field.name])} | {default(field)} | {texts[field.name]} |"
        for field in dataclasses.fields(cls)
        if field.name in texts
    ]
    title, _, more = (cls.__doc__ or "").rstrip(".").partition(": ")
    heading = f"## {title}" + (f"\n\n{more[:1].upper()}{more[1:]}." if more else "")
    return "\n".join([heading, "", "| key | type | default | |", "|---|---|---|---|", *rows, ""])


def in_toml(hint: Any) -> str:
    """Return a field's type in TOML's terms."""
    kinds = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(in_toml(kind) for kind in kinds if kind is not type(None)))
    if typing.get_origin(hint) is tuple:
        return f"list of {in_toml(kinds[0])}s"
    names = {str: "string", Path: "string", int: "integer", float: "number", bool: "boolean"}
    return names.get(hint, "table")


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is field.default_factory is dataclasses.MISSING:
        return ""
    if field.default_factory is not dataclasses.MISSING or field.default in (None, (), ("",), ""):
        return "none"
    value = field.default
    if isinstance(value, tuple):
        return f"`{list(value)}`".replace("'", '"')
    return f"`{value:_}`" if isinstance(value, int) and value > 9999 else f"`{str(value).lower()}`"


def help_texts(cls: Any) -> dict[str, str]:
    # the strings below the fields of a class; a field without one is no key
    described = docstring_parser.parse_from_object(cls).params
    return {
        key.arg_name: " ".join((key.description or "").split()).replace("|", "\\|")
        for key in described
    }


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
