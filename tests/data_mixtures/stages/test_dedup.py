"""Near copies: bands are datatrove's, no two documents that stay share one, and no held-out text is trained on."""

import itertools
import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from data_mixtures import recipe, recipe_file, shards
from data_mixtures.stages import dedup, documents, stage
from tests.data_mixtures.stages.filtered import do_all, filtered, make_recipe

WORDS = ["".join(letters) for letters in itertools.product("abcdefghijklmn", repeat=3)]


def texts_of(seed: int, families: int, copies: int) -> list[str]:
    """Families of texts of 120 words, of which a copy has up to 20 others."""
    draw = random.Random(seed)
    texts = []
    for _ in range(families):
        words = draw.choices(WORDS, k=120)
        for _ in range(draw.randint(1, copies)):
            changed = list(words)
            for _ in range(draw.choice([0, 1, 4, 20])):
                changed[draw.randrange(120)] = draw.choice(WORDS)
            texts.append(" ".join(changed))
    draw.shuffle(texts)
    return texts


def with_dedup(sources, **settings) -> recipe.Recipe:
    return replace(make_recipe(sources, Path("none")), dedup=recipe.Dedup(minhash=True, **settings))


def deduplicated(out: Path, texts, wanted: recipe.Recipe) -> dict[str, list[list[str]]]:
    """What stays, by source and unit."""
    filtered(out, texts, wanted)
    for kind in (dedup.Signatures, dedup.Bands, dedup.Dedup):
        do_all(kind(wanted, out, tuple(texts)))
    return {
        source: [
            [
                text
                for row, text in enumerate(unit)
                if row not in documents.near_copies(wanted, out, stage.Unit(source, n))
            ]
            for n, unit in enumerate(units)
        ]
        for source, units in texts.items()
    }


def is_held_out(text: str, wanted: recipe.Recipe) -> bool:
    return xxhash.xxh3_128_intdigest(text.encode()) % 2**64 < shards.held_out_below(wanted.valid_per_10000)


def bands_of(text: str, wanted: recipe.Recipe) -> set[int]:
    low = xxhash.xxh3_128_intdigest(text.encode()) % 2**64
    return set(dedup.signer(wanted.dedup)(text, low))


def expected(texts: dict[str, list[list[str]]], wanted: recipe.Recipe) -> list[str]:
    """The rule in memory: who comes first in every one of its bands, held-out documents before all others."""
    given = [text for units in texts.values() for unit in units for text in unit]
    order = sorted(range(len(given)), key=lambda i: (not is_held_out(given[i], wanted), i))
    firsts: dict[int, int] = {}
    for i in order:
        for band in bands_of(given[i], wanted):
            firsts.setdefault(band, i)
    return [text for i, text in enumerate(given) if all(firsts[each] == i for each in bands_of(text, wanted))]


def flat(texts: dict[str, list[list[str]]]) -> list[str]:
    return [text for units in texts.values() for unit in units for text in unit]


def datatrove_pairs(folder: Path, texts: list[str], wanted: recipe.Dedup) -> set[tuple[int, int]]:
    """The pairs that datatrove's own steps find with the same words and hash function."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.word_tokenizers import WhitespaceTokenizer

    config = MinhashConfig(wanted.n_grams, wanted.buckets, wanted.hashes_per_bucket)
    config.norm_config.norm_numbers = False
    tokenizer = WhitespaceTokenizer()
    tokenizer.word_tokenize = str.split
    signature = MinhashDedupSignature(str(folder / "signatures"), config, tokenizer)
    signature._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())
    signature.run([Document(text, str(i)) for i, text in enumerate(texts)], 0, 1)
    for bucket in range(wanted.buckets):
        buckets = MinhashDedupBuckets(str(folder / "signatures"), str(folder / "buckets"), config=config)
        buckets.run(None, bucket, wanted.buckets)
    found = [np.fromfile(path, "<u4").reshape(-1, 4) for path in (folder / "buckets").glob("*.dups")]
    return {(int(row[1]), int(row[3])) for rows in found for row in rows}


def test_bands_are_those_of_datatrove(tmp_path):
    """It lists a chain of pairs a band, whose ends are the documents that share it."""
    texts = list(dict.fromkeys(texts_of(1, 60, 6)))
    wanted = with_dedup(["a"])
    of_band = defaultdict(list)
    for i, text in enumerate(texts):
        for band in bands_of(text, wanted):
            of_band[band].append(i)
    ours = {pair for members in of_band.values() for pair in itertools.pairwise(members)}
    assert len(ours) > 50
    assert ours == {tuple(sorted(pair)) for pair in datatrove_pairs(tmp_path, texts, wanted.dedup)}


@pytest.mark.parametrize("seed", range(4))
def test_no_two_survivors_share_a_band_and_who_goes_shares_one_with_an_earlier(tmp_path, seed):
    texts = texts_of(seed, 40, 6)
    cuts = sorted(random.Random(seed).sample(range(len(texts)), 3))
    parts = [texts[a:b] for a, b in itertools.pairwise([0, *cuts, len(texts)])]
    wanted, units = with_dedup(["a", "b"]), {"a": [*parts[:2], []], "b": parts[2:]}
    stays = flat(deduplicated(tmp_path, units, wanted))
    assert stays == expected(units, wanted)
    bands = [bands_of(text, wanted) for text in stays]
    assert len(set().union(*bands)) == sum(map(len, bands))
    order = sorted(texts, key=lambda text: not is_held_out(text, wanted))
    gone = [i for i, text in enumerate(order) if text not in stays]
    before = [set().union(*(bands_of(text, wanted) for text in order[:i])) for i in gone]
    assert all(bands_of(order[i], wanted) & earlier for i, earlier in zip(gone, before, strict=True))
    assert 40 <= len(stays) < len(texts)


def test_near_copies_of_held_out_text_are_not_trained_on_whatever_the_order(tmp_path):
    wanted = with_dedup(["first", "second"])
    draw = random.Random(5)
    while True:
        held = " ".join(draw.choices(WORDS, k=120))
        copy = held + " and more"
        if is_held_out(held, wanted) and not is_held_out(copy, wanted):
            break
    texts = {"first": [[copy, *texts_of(2, 5, 1)]], "second": [texts_of(3, 5, 1), [held]]}
    stays = deduplicated(tmp_path, texts, wanted)
    assert stays["second"] == texts["second"]
    assert stays["first"] == [texts["first"][0][1:]]
    dropped = [stage.counts(tmp_path, "dedup", name, 1)[0]["near_duplicate"] for name in ("first", "second")]
    assert dropped == [1, 0]


def test_ranges_groups_and_empty_units_change_nothing(tmp_path, monkeypatch):
    texts = texts_of(4, 30, 5)
    units = {"a": [texts[:20], [], texts[20:40]], "b": [[], texts[40:]]}
    wanted = with_dedup(["a", "b"], buckets=3)
    whole = deduplicated(tmp_path / "whole", units, wanted)
    monkeypatch.setattr(dedup, "ROWS_PER_RANGE", 80)
    monkeypatch.setattr(documents, "GROUPS", 1)
    assert deduplicated(tmp_path / "parts", units, wanted) == whole
    assert len(dedup.Bands(wanted, tmp_path / "parts", ("a",)).units()) == 4
    assert [len(list((tmp_path / f"parts/signatures/{name}").iterdir())) for name in units] == [1, 1]
    assert len(flat(whole)) < len(texts)


def test_work_is_linear_every_row_is_read_once(tmp_path, monkeypatch):
    """As documents double, so do the rows that are written and read."""
    rows = {}
    for families in (20, 40):
        units = {"a": [texts_of(9, families, 1)[:families]]}
        monkeypatch.setattr(dedup, "ROWS_PER_RANGE", 50)
        wanted = with_dedup(["a"])
        deduplicated(tmp_path / str(families), units, wanted)
        made = dedup.Bands(wanted, tmp_path / str(families), ("a",)).units()
        rows[families] = sum(
            stage.receipt_of(tmp_path / str(families), "bands", each)["counts"]["rows"] for each in made
        )
        written = tmp_path / f"{families}/signatures/a/unit-00000/sorted.bin"
        assert written.stat().st_size == rows[families] * 14 == families * wanted.dedup.buckets * 14
    assert len(made) == 16


def test_what_is_done_stays_done_until_text_or_settings_change(tmp_path):
    texts = {"a": [texts_of(6, 8, 3)], "b": [texts_of(7, 8, 3)]}
    wanted = with_dedup(["a", "b"], buckets=3)
    deduplicated(tmp_path, texts, wanted)
    work = [kind(wanted, tmp_path, ("a", "b")) for kind in (dedup.Signatures, dedup.Bands, dedup.Dedup)]
    assert [do_all(each) for each in work] == [0, 0, 0]
    other = replace(wanted, valid_per_10000=0)
    assert [do_all(replace(each, recipe=other)) for each in work][:2] == [0, 1], (
        "signatures do not depend on it"
    )
    other = with_dedup(["a", "b"], buckets=3, n_grams=4)
    assert [do_all(replace(each, recipe=other)) for each in work] == [2, 1, 2]


def test_signatures_say_which_documents_any_share_holds_out(tmp_path):
    units = {"a": [texts_of(6, 300, 1)]}
    wanted = with_dedup(["a"], buckets=1)
    deduplicated(tmp_path, units, wanted)
    rows = dedup.read_sorted(
        dedup.Bands(wanted, tmp_path, ("a",)), "signatures", stage.Unit("a", 0), slice(0, 4096), dedup._BAND
    )
    lows = [xxhash.xxh3_128_intdigest(text.encode()) % 2**64 for text in units["a"][0]]
    for share in (0, 1, 777, 5000):
        expected = sum(low < shards.held_out_below(share) for low in lows)
        assert (rows["share"] < share).sum() == expected


def test_from_text_to_shards_without_copies_and_loops(tmp_path, recipe_path, run_prepare):
    words = texts_of(8, 40, 3)
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    (tmp_path / "notes/loop.txt").write_text("to begin " + "ha ha " * 100)
    switched = "[dedup]\nminhash = true\n[filter]\nrepeated_ngrams = true\n"
    recipe_path.write_text(recipe_path.read_text().replace("[sources.notes]", f"{switched}[sources.notes]"))
    run_prepare(recipe_path, out := tmp_path / "out")
    notes, sums = (shards.read_manifest(out / source) for source in ("notes", "sums"))
    assert (notes["dropped"]["near_duplicate"], notes["dropped"]["repeated_ngrams"]) == (12, 1), (
        "the exact copies"
    )
    assert notes["dropped"]["duplicate"] == sums["dropped"]["repeated_ngrams"] == 0
    assert 10 < sums["dropped"]["near_duplicate"] < len(words) - 30
    assert sums["read"] == len(words) == sums["kept"] + sum(sums["dropped"].values())


def test_numbers_are_words_unless_the_recipe_says_otherwise():
    sums = [" ".join(f"Add {i * n + 3} to {n} and then" for n in range(20)) for i in (1, 7)]
    for numbers in (True, False):
        one, other = (set(dedup.signer(recipe.Dedup(numbers=numbers))(text, 0)) for text in sums)
        assert (one == other) is not numbers


def test_settings_without_sense_are_refused(tmp_path):
    for name in ("n_grams", "buckets", "hashes_per_bucket"):
        (tmp_path / "recipe.toml").write_text(f"[dedup]\n{name} = 0")
        with pytest.raises(ValueError, match=f"dedup: {name} = 0 must be an integer from 1"):
            recipe_file.load(tmp_path / "recipe.toml")


@pytest.mark.job  # spacy takes seconds to be imported
def test_a_language_has_its_own_words():
    pytest.importorskip("spacy")
    sign = dedup.signer(recipe.Dedup(language="en"))
    assert sign("You cannot do all of that, can you? No.", 1) == sign(
        "you cannot do all of THAT can you no", 2
    )
    assert sign("No words", 7) == [7] * 14
