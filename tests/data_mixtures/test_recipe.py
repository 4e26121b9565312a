"""Recipes: the shipped ones say what was published, and wrong ones are refused by name."""

from pathlib import Path

import pytest

from data_mixtures import recipe

FOLDER = Path(recipe.__file__).parent
PUBLISHED_PERCENT = {
    "phase1": {"web": 63.2, "code": 21.0, "math": 6.3, "multilingual": 5.0, "qa": 4.5},
    "phase2": {"web": 10.0, "code": 59.01, "math": 30.01, "multilingual": 0.0, "qa": 1.0},
}
PHASE_TOKENS_B = {"phase1": 4000, "phase2": 2000}


def category_sums(plan: recipe.Recipe, phase: str) -> dict[str, int]:
    sums = dict.fromkeys(recipe.CATEGORIES, 0)
    for source in plan.sources:
        sums[source.category] += plan.phases[phase][source.name]
    return sums


@pytest.mark.parametrize(
    ("name", "phase"), [("demo", "phase1"), ("demo", "phase2"), ("phase1", "phase1"), ("phase2", "phase2")]
)
def test_shipped_recipes_have_the_published_shares(name, phase):
    sums = category_sums(recipe.load(FOLDER / f"{name}.toml"), phase)
    assert sums == {category: round(100 * share) for category, share in PUBLISHED_PERCENT[phase].items()}
    assert sum(sums.values()) == {"phase1": 10_000, "phase2": 10_002}[phase]


def test_no_source_of_the_2b_run_is_repeated_beyond_its_cap():
    plans = {phase: recipe.load(FOLDER / f"{phase}.toml") for phase in PHASE_TOKENS_B}
    assert plans["phase1"].sources == plans["phase2"].sources
    for source in plans["phase1"].sources:
        tokens_b = sum(
            PHASE_TOKENS_B[phase] * plan.phases[phase][source.name] / sum(plan.phases[phase].values())
            for phase, plan in plans.items()
        )
        assert tokens_b / source.expected_tokens_b < plans["phase1"].epoch_cap, source.name


def test_the_demo_has_a_source_for_every_category_and_little_text():
    plan = recipe.load(FOLDER / "demo.toml")
    assert {source.category for source in plan.sources} == set(recipe.CATEGORIES)
    assert sum(i.max_bytes for source in plan.sources for i in source.inputs) <= 30_000_000


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 11", "sead = 11", r"unknown recipe key 'sead'; did you mean 'seed'"),
        ("seed = 11", "", r"recipe lacks \['seed'\]"),
        ("seq_len = 32", "seq_len = 0", r"seq_len = 0 must be an integer from 1"),
        ("seq_len = 32", 'seq_len = "32"', r"seq_len = '32'"),
        ("valid_per_10000 = 1000", "valid_per_10000 = 9000", r"9000 must be an integer from 1 to 5000"),
        ("notes = 7", "notse = 7", r"unknown source in \[phase1\]: 'notse'; did you mean 'notes'"),
        ("notes = 7", "", r"\[phase1\] gives no weight to \['notes'\]; write 0"),
        ("notes = 7", "notes = 0.7", r"\[phase1\] weight 0 = 0.7 must be an integer"),
        ("notes = 7", "notes = 99999", r"sum to 100002; the sum must be between 1 and 32768"),
        ('category = "web"', 'category = "wep"', r"'notes': 'wep'; did you mean 'web'"),
        ('kind = "text"', 'kind = "txt"', r"unknown input kind 'txt'; did you mean 'text'"),
        ('kind = "arithmetic"', 'kind = "docstrings"', r"'docstrings' needs paths"),
        ("max_bytes = 60_000", "max_byte = 60_000", r"unknown source 'sums': input key 'max_byte'"),
        ("vocab_size = 400", "vocab_size = 70_000", r"tokenizer.vocab_size = 70000 must be .* 300 to 65536"),
        ("[sources.notes]", '[sources."../notes"]', r"source name '../notes' becomes a folder"),
        ("[phase1]", "[phase1", r"tiny.toml: "),
    ],
)  # fmt: skip
def test_wrong_recipes_are_refused(recipe_path, old, new, message):
    text = recipe_path.read_text()
    assert old in text
    recipe_path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        recipe.load(recipe_path)


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no such file: .*none\.toml"):
        recipe.load(tmp_path / "none.toml")
