"""The page of all keys of a recipe is what the code says, and every key has its help text."""

import dataclasses

from tools.check import recipe_keys


def test_the_page_is_that_of_the_code():
    assert recipe_keys.PAGE.read_text(encoding="utf-8") == recipe_keys.page(), (
        "run python -m tools.check.recipe_keys"
    )


def test_every_key_has_a_help_text():
    for cls in recipe_keys.CLASSES:
        bases = [base for base in cls.__bases__[:1] if base is not object]
        keys = {key for one in (cls, *bases) for key in recipe_keys.help_texts(one)}
        assert {field.name for field in dataclasses.fields(cls)} - keys <= {"name", "folder"}
        assert all(recipe_keys.help_texts(cls).values())
