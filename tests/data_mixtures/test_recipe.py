"""Tests that shipped recipes state what was published, and that wrong ones are refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from data_mixtures import recipe, recipe_file

FOLDER = Path(recipe.__file__).parent
PUBLISHED_PERCENT = {
    "phase1": {"web": 63.2, "code": 21.0, "math": 6.3, "multilingual": 5.0, "qa": 4.5},
    "phase2": {"web": 10.0, "code": 59.01, "math": 30.01, "multilingual": 0.0, "qa": 1.0},
}


def category_sums(plan: recipe.Recipe, phase: str) -> dict[str, int]:
    sums = dict.fromkeys(PUBLISHED_PERCENT[phase], 0)
    for source in plan.sources:
        sums[source.category] += plan.phases[phase][source.name]
    return sums


@pytest.mark.parametrize("name", ["demo", "nemotron", "nemotron-code"])
def test_shipped_recipes_have_the_published_shares(name):
    plan = recipe_file.load(FOLDER / f"{name}.toml")
    # basis points; phase 2 as published sums to 100.02 %
    for phase, total in (("phase1", 10_000), ("phase2", 10_002)):
        sums = category_sums(plan, phase)
        assert sums == {
            kind: round(100 * share) for kind, share in PUBLISHED_PERCENT[phase].items()
        }
        assert sum(sums.values()) == total


def test_every_source_of_the_2b_run_says_where_it_is_and_on_what_terms():
    sources = recipe_file.load(FOLDER / "nemotron.toml").sources
    assert len(sources) == 36
    for source in sources:
        assert re.fullmatch(r"nvidia/Nemotron-[\w.-]+", source.repo)
        assert re.fullmatch(r"[0-9a-f]{7,40}", source.revision)
        assert source.gate in ("manual", "automatic", "gated", "none", "not checked")
        assert all(
            (source.configs, source.licence, source.text_columns, source.expected_tokens_b > 0)
        )
    places = [(source.repo, config) for source in sources for config in source.configs]
    # no folder of a repository is in two sources
    assert len(set(places)) == len(places)


def test_long_windows_have_three_fifths_of_phase_2_and_long_documents_by_length():
    long, short = (recipe_file.load(FOLDER / f"nemotron{profile}.toml") for profile in ("-64k", ""))
    overrides = ("seq_len", "packing", "windows_per_shard", "seed", "sources", "phases", "keep")
    assert replace(long, **{key: getattr(short, key) for key in overrides}) == short
    # shards of both have as many tokens
    assert long.seq_len * long.windows_per_shard == short.seq_len * short.windows_per_shard
    (weights,) = long.phases.values()
    of_phase_2 = {name: weight for name, weight in short.phases["phase2"].items() if weight}
    buckets = {name: weight for name, weight in weights.items() if name not in of_phase_2}
    assert weights == weights | of_phase_2
    assert sum(of_phase_2.values()) / sum(weights.values()) == 0.6
    # the other two fifths go to documents by length, a third to each bucket
    for size in ("8k", "16k", "32k"):
        share = sum(weight for name, weight in buckets.items() if name.endswith(f"-{size}"))
        assert share == pytest.approx(sum(buckets.values()) / 3, abs=1)
    for name in buckets:
        assert long.source(name).expected_tokens_b is None, "nobody has counted"
        assert long.source(name).steps


def test_a_shared_list_gives_what_is_said_of_a_repository_and_what_a_source_says_instead():
    sources = {source.name: source for source in recipe_file.load(FOLDER / "nemotron.toml").sources}
    assert "fact-seeking" not in sources, "listed, and in no phase"
    rqa = sources["rqa"]
    wiki = sources["wiki-rewrite"]
    assert (rqa.repo, rqa.revision, rqa.gate) == (wiki.repo, wiki.revision, wiki.gate)
    assert (rqa.licence, wiki.licence) == ("CC-BY-4.0", "CC-BY-SA-4.0 and GFDL")
    assert sources["code2-qa"].text_columns == ("text", "content")
    assert sources["cc2-hq"].text_columns == ("text",)
    assert (sources["cc2-mq"].keep, sources["cc2-hq"].keep) == (0.11, 1.0), "[keep] of the recipe"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("seed = 11", "sead = 11", r"unknown recipe key 'sead'; did you mean 'seed'"),
        ("[phase1]", "[pretrain]", r"\[pretrain\]: phases are named \[phase1\], \[phase2\]"),
        ("seq_len = 32", 'seq_len = "32"', r"seq_len = '32'"),
        (
            "valid_per_10000 = 1000",
            "valid_per_10000 = 9000",
            r"9000: it should be less than or equal to 5000",
        ),
        ("notes = 7", "notse = 7", r"unknown source in \[phase1\]: 'notse'; did you mean 'notes'"),
        ("notes = 7", "", r"\[phase1\] gives no weight to \['notes'\]; write 0"),
        ("notes = 7", "notes = 0.7", r"\[phase1\] weight 0 = 0.7 must be an integer"),
        ("notes = 7", "notes = 99999", r"sum to 100002; the sum must be between 1 and 32768"),
        ('kind = "text"', 'kind = "txt"', r"unknown input kind 'txt'; did you mean 'text'"),
        (
            "max_bytes = 60_000",
            "max_byte = 60_000",
            r"unknown key 'inputs.0.max_byte'; did you mean 'max_bytes'",
        ),
        ("[sources.notes]", '[sources."../notes"]', r"source name '../notes' becomes a folder"),
        ("[sources.notes]", "[sources.order]", r"source name 'order' is that of a stage's folder"),
        ("[phase1]", "[phase1", r"tiny.toml: "),
        (
            "[phase1]",
            "[filter]\nmin_char = 3\n[phase1]",
            r"unknown key 'filter.min_char'; did you mean 'min_chars'",
        ),
        (
            "[phase1]",
            "[filter]\nmax_chars = 3\n[phase1]",
            r"max_chars = 3 is less than min_chars = 64",
        ),
        (
            "[phase1]",
            "[filter.benchmarks]\nx = 3\n[phase1]",
            r"filter.benchmarks.x = 3: it should be a valid string",
        ),
    ],
)
def test_wrong_recipes_are_refused(recipe_path, old, new, message):
    text = recipe_path.read_text()
    assert old in text
    recipe_path.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        recipe_file.load(recipe_path)


SHORTEST = """
tokenizer = "tokenizer.json"
[sources.mine]
inputs = [{ kind = "jsonl", paths = ["corpus/*.jsonl.gz", "s3://bucket/*.jsonl", "/there/*"], files = 9 }]
[sources.theirs]
repo = "owner/name"
valid_per_10000 = 0
[phase1]
mine = 60
theirs = 40
"""


def test_what_a_recipe_does_not_say_has_a_default(tmp_path):
    (tmp_path / "own.toml").write_text(SHORTEST)
    shortest = recipe_file.load(tmp_path / "own.toml")
    mine, theirs = shortest.sources
    assert mine.inputs[0].paths == ("corpus/*.jsonl.gz", "s3://bucket/*.jsonl", "/there/*")
    assert (mine.inputs[0].field, mine.category, mine.min_bytes) == ("text", "other", 1)
    assert (theirs.configs, theirs.revision, theirs.expected_tokens_b) == (("",), "main", None)
    tokenizer = recipe.TokenizerFile(str(tmp_path / "tokenizer.json"))
    assert (shortest.seq_len, shortest.folder, shortest.tokenizer) == (4096, tmp_path, tokenizer)
    assert (shortest.valid_per_10000_of("mine"), shortest.valid_per_10000_of("theirs")) == (
        shortest.valid_per_10000,
        0,
    )


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'repo = "owner/name"',
            "",
            r"source 'theirs' needs either inputs = .* or repo = 'owner/name'",
        ),
        ("valid", 'configs = "x"\nvalid', r"configs = 'x': it should be a valid list"),
        (
            "files = 9",
            "files = true",
            r"source 'mine': inputs.0.files = True: it should be a valid integer",
        ),
        (
            "files = 9",
            'content_url = "s3://b/{sha1}"',
            r"content_url = 's3://b/{sha1}' of kind 'jsonl'",
        ),
        (
            '"jsonl"',
            '"resolved"',
            r"content_url = '' of kind 'resolved': resolved, and it alone, needs a URL",
        ),
        (
            "[phase1]",
            "[keep]\nmien = 0.5\n[phase1]",
            r"source in \[keep\]: 'mien'; did you mean 'mine'",
        ),
        (
            "[phase1]",
            "[keep]\nmine = 0\n[phase1]",
            r"source 'mine': keep = 0: it should be greater than 0",
        ),
        ('tokenizer = "tokenizer.json"', "seed = 1", r"recipe: lacks 'tokenizer'"),
        ('tokenizer = "tokenizer.json"', "tokenizer = 3", r"tokenizer: 3 must be a table of keys"),
    ],
)
def test_values_of_another_type_are_refused(tmp_path, old, new, message):
    assert old in SHORTEST
    (tmp_path / "own.toml").write_text(SHORTEST.replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        recipe_file.load(tmp_path / "own.toml")


def test_a_missing_recipe_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no such file: .*none\.toml"):
        recipe_file.load(tmp_path / "none.toml")
