"""The page of all keys of a recipe is what the code says, and every key has its help text."""

import dataclasses

import pytest

from tools.check import recipe_keys


def test_the_page_is_that_of_the_code():
    assert recipe_keys.PAGE.read_text(encoding="utf-8") == recipe_keys.page(), (
        "run python -m tools.check.recipe_keys"
    )


@pytest.mark.parametrize("cls", recipe_keys.CLASSES)
def test_every_key_has_a_help_text(cls):
    known = set(recipe_keys.help_texts(cls)) | {
        name for base in cls.__bases__[:1] if base is not object for name in recipe_keys.help_texts(base)
    }
    assert {field.name for field in dataclasses.fields(cls)} - known <= {"name", "folder"}
    assert all(recipe_keys.help_texts(cls).values())
