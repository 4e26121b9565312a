"""Tests of the filter's steps: what they drop, change, need, and refuse."""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import xxhash

from data_mixtures import recipe_file
from data_mixtures.document_ids import shuffle_key
from data_mixtures.stages import quality, stage
from tests.data_mixtures.stages.filtered import make_recipe, run_filter

PROSE = "".join(
    f"In the year {i} the people of the town began to build a bridge, and it held. "
    for i in range(20)
).strip()
MAIL = PROSE + " Write to ada@lovelace.org or to ben@town.org about it."
LIST = "\n".join(["apples", "bricks", "coins"] * 40)


def load(*steps):
    recipe = make_recipe(["notes"])
    return quality.load(
        quality.steps_of(replace(recipe, filter=replace(recipe.filter, steps=steps)), "notes")
    )


def run(step, text: str = PROSE):
    return load(step)[0](text)


def filter_texts(out: Path, texts: list[str], of_recipe: tuple, **of_source):
    recipe = make_recipe(["notes"], steps=of_recipe)
    sources = (replace(recipe.sources[0], **of_source),)
    recipe = replace(recipe, sources=sources)
    work = run_filter(out, {"notes": [texts]}, recipe)
    folder, receipt = stage.result(out, "filter", stage.Unit("notes", 0))
    return pq.read_table(folder / stage.DOCUMENTS), receipt["counts"], work


def test_formatters_give_the_same_whatever_came_before():
    step = load("pii")[0]
    first = step(MAIL)
    assert first[1] is None
    assert "email@example.com" in first[0]
    assert "lovelace" not in first[0]
    assert [step(MAIL), step("me@home.org"), step(MAIL)] == [
        first,
        ("email@example.com", None),
        first,
    ]


def test_what_a_step_drops_is_counted_under_its_name_and_changed_text_has_its_own_id(tmp_path):
    pattern = {"name": "regex", "regex_exp": "forbidden"}
    texts = [
        MAIL,
        PROSE,
        "A forbidden text that goes on for long enough. " * 3,
        "-----\n" * 30,
        PROSE,
    ]
    table, counts, _ = filter_texts(tmp_path / "a", texts, ("symbol_lines", pattern, "pii"))
    assert counts["dropped"] | {"regex": 1, "empty": 1} == counts["dropped"]
    assert (counts["read"], counts["kept"]) == (5, 3)
    remaining = table.column("text").to_pylist()
    assert remaining == [load("pii")[0](MAIL)[0], PROSE, PROSE]
    assert table.column("doc_id").to_pylist() == [
        xxhash.xxh3_128_digest(text.encode()) for text in remaining
    ]


# characters
LONG = {"8k": (32_000, 64_000), "16k": (64_000, 128_000), "32k": (128_000, 10_000_000)}


def test_each_bucket_of_the_long_mixture_gets_exactly_its_own_documents():
    shipped = recipe_file.load(Path(recipe_file.__file__).with_name("nemotron-64k.toml"))
    # around each limit of a bucket, in characters
    ends = [end + d for end in (32_000, 64_000, 128_000) for d in (-1, 0, 1)]
    lengths = [100, 5_000, *ends, 500_000]
    texts = [("ü.\n" * (n // 3) + "x" * (n % 3 + 1))[-n:] for n in lengths]
    assert [len(text) for text in texts] == lengths
    for size, (low, high) in LONG.items():
        step, *others = (
            shipped.source(f"{kind}-{size}").steps for kind in ("cc2-hq", "cc-code", "cc-math")
        )
        assert others == [step, step]
        chosen = [len(text) for text in texts if load(*step)[0](text)[1] is None]
        assert chosen == [n for n in lengths if low <= n < high] != []


def test_a_source_has_steps_of_its_own_and_what_is_kept_is_judged_by_the_text_as_it_is_written(
    tmp_path,
):
    texts = [f"{MAIL} ({i})" for i in range(40)]
    _, counts, _ = filter_texts(tmp_path / "a", texts, ("pii",), steps=())
    assert counts["kept"] == 40
    table, counts, work = filter_texts(tmp_path / "b", texts, ("pii",), keep=0.5)
    keys = [
        shuffle_key(identity, work.recipe.seed) for identity in table.column("doc_id").to_pylist()
    ]
    assert 8 < len(keys) < 32
    assert max(keys) < 2**63
    assert counts["dropped"]["not_kept"] == 40 - len(keys)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("gopher", "unknown filter step 'gopher'; did you mean 'gopher_"),
        (
            {"name": "regex", "regexp": "a"},
            "argument of filter step 'regex': 'regexp'; did you mean 'regex_exp'",
        ),
        ({"name": "pii", "remove_ip": True}, "did you mean 'remove_ips'"),
        ({"name": "regex", "exclusion_writer": 1}, "unknown argument"),
        ({"name": "regex"}, "missing 1 required positional argument: 'regex_exp'"),
        ({"name": "regex", "regex_exp": "("}, "filter step 'regex' with .*: missing"),
        ({"regex_exp": "x"}, "unknown filter step None"),
    ],
)
def test_a_step_that_cannot_be_is_refused(step, error):
    with pytest.raises(ValueError, match=error):
        load(step)


def test_a_missing_package_is_one_line(monkeypatch):
    monkeypatch.setattr(
        "datatrove.utils._import_utils._is_package_available", lambda name: name != "ftfy"
    )
    missing = r"filter step 'ftfy': .*ftfy.*pip install 'laneformer\[quality\]'"
    with pytest.raises(ValueError, match=missing) as error:
        load("ftfy")
    assert "\n" not in str(error.value)


@pytest.mark.job  # spacy takes seconds to be imported
def test_the_filters_of_the_web():
    pytest.importorskip("spacy")
    assert [run(name)[1] for name in ("gopher_quality", "c4_quality", "fineweb_quality")] == [
        None
    ] * 3
    assert run("gopher_quality", LIST)[1] == "gopher_quality:gopher_enough_stop_words"
    assert run({"name": "gopher_quality", "min_stop_words": 0}, LIST)[1] is None
    assert run("c4_quality", f"{PROSE}\nuses cookies\n")[0] == PROSE


@pytest.mark.job
def test_a_model_of_a_file(tmp_path):
    fasttext = pytest.importorskip("fasttext")
    pair = "__label__en the sun and the moon {0}\n__label__de die Sonne und der Mond {0}\n"
    (tmp_path / "train.txt").write_text("".join(pair.format(i) for i in range(200)))
    model = tmp_path / "tiny.bin"
    for dim in range(80, 120):
        with suppress(
            RuntimeError
        ):  # "Encountered NaN" when it ends before its thread has reported a loss
            options = {"minn": 2, "maxn": 4, "dim": dim, "bucket": 1000, "verbose": 0, "thread": 1}
            fasttext.train_supervised(str(tmp_path / "train.txt"), **options).save_model(str(model))
            break
    step = {"name": "language", "model": str(model), "languages": ["de"], "language_threshold": 0.5}
    assert run(step, "der Mond\nund die Sonne")[1] is None
    assert run(step, "the moon and the sun")[1] == "language"
    step = {"name": "fasttext", "model": str(model), "keep_labels": [["en", 0.5]]}
    assert run(step, "the moon and the sun")[1] is None
    assert run(step, "der Mond und die Sonne")[1] == "fasttext"
    with pytest.raises(ValueError, match=r"unknown label of .*tiny.bin 'fr'"):
        load({"name": "language", "model": str(model), "languages": ["fr"]})
    with pytest.raises(ValueError, match=r"must be the path of a file: lid.176.bin"):
        load({"name": "language", "languages": ["en"]})
    before = quality.identity([step])
    model.write_bytes(b"another")
    assert quality.identity([step]) != before
