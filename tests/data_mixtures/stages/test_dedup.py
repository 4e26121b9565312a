"""Near copies: the clusters are datatrove's, one document of each stays, and no held-out text is trained on."""

import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from data_mixtures import recipe, recipe_file, shards
from data_mixtures.stages import dedup, stage
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
    for kind in (dedup.Signatures, dedup.Links, dedup.Clusters):
        do_all(kind(wanted, out, tuple(texts)))
    return {
        source: [
            [
                text
                for row, text in enumerate(unit)
                if row not in dedup.dropped_rows(wanted, out, stage.Unit(source, n))
            ]
            for n, unit in enumerate(units)
        ]
        for source, units in texts.items()
    }


def is_held_out(text: str, wanted: recipe.Recipe) -> bool:
    return xxhash.xxh3_128_intdigest(text.encode()) % 2**64 < shards.held_out_below(wanted.valid_per_10000)


def datatrove_clusters(folder: Path, texts: list[str], wanted: recipe.Dedup) -> list[set[int]]:
    """The clusters that datatrove's own steps find with the same words and hash function."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
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
    MinhashDedupCluster(str(folder / "buckets"), str(folder / "clusters"), config, save_cluster_id=True).run(
        None
    )
    pairs = np.fromfile(folder / "clusters/000000.clusters", "<u4").reshape(-1, 2)
    return [set(pairs[pairs[:, 1] == cluster, 0].tolist()) for cluster in np.unique(pairs[:, 1])]


def test_the_clusters_are_those_of_datatrove_and_one_document_of_each_stays(tmp_path):
    texts = list(dict.fromkeys(texts_of(1, 60, 6)))
    wanted = with_dedup(["a", "b"])
    third = len(texts) // 3
    units = {"a": [texts[:third], texts[third : 2 * third]], "b": [texts[2 * third :]]}
    stays = {
        text
        for each in deduplicated(tmp_path / "out", units, wanted).values()
        for unit in each
        for text in unit
    }
    clusters = datatrove_clusters(tmp_path / "datatrove", texts, wanted.dedup)
    assert len(clusters) > 20
    expected = set(texts)
    for cluster in clusters:
        members = [texts[i] for i in sorted(cluster)]
        keeper = next((text for text in members if is_held_out(text, wanted)), members[0])
        expected -= {text for text in members if text != keeper}
    assert stays == expected
    assert sum(is_held_out(text, wanted) for text in stays) > 3, (
        "and some of these clusters are decided by that"
    )


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
    counts = stage.receipt_of(tmp_path, dedup.DEDUP, dedup.ALL)["counts"]
    assert (counts["near_duplicate"], counts["clusters"], counts["clusters_held_out"]) == (1, 1, 1)


def test_parts_of_a_bucket_and_empty_units_change_nothing(tmp_path, monkeypatch):
    texts = texts_of(4, 30, 5)
    units = {"a": [texts[:20], [], texts[20:40]], "b": [[], texts[40:]]}
    wanted = with_dedup(["a", "b"], buckets=3)
    whole = deduplicated(tmp_path / "whole", units, wanted)
    monkeypatch.setattr(dedup, "DOCUMENTS_PER_PART", 25)
    assert deduplicated(tmp_path / "parts", units, wanted) == whole
    assert len(dedup.Links(wanted, tmp_path / "parts", ("a",)).units()) == 12
    assert sum(len(unit) for each in whole.values() for unit in each) < len(texts)


def test_what_is_done_stays_done_until_text_or_settings_change(tmp_path):
    texts = {"a": [texts_of(6, 8, 3)], "b": [texts_of(7, 8, 3)]}
    wanted = with_dedup(["a", "b"], buckets=3)
    deduplicated(tmp_path, texts, wanted)
    work = [kind(wanted, tmp_path, ("a", "b")) for kind in (dedup.Signatures, dedup.Links, dedup.Clusters)]
    assert [do_all(each) for each in work] == [0, 0, 0]
    other = replace(wanted, valid_per_10000=0)
    assert [do_all(replace(each, recipe=other)) for each in work] == [0, 0, 1], (
        "signatures do not depend on it"
    )
    other = with_dedup(["a", "b"], buckets=3, n_grams=4)
    assert [do_all(replace(each, recipe=other)) for each in work] == [2, 3, 1]


def test_clusters_are_connected_components():
    draw = np.random.default_rng(1)
    for count in (1, 2, 50):
        links = draw.integers(0, count, (2, count // 2))
        root = list(range(count))
        for _ in range(count):
            for one, other in links.T:
                root[one] = root[other] = min(root[one], root[other])
        assert dedup.roots(links, count).tolist() == root
    chain = np.stack([np.arange(1, 5000), np.arange(4999)])
    assert not dedup.roots(chain, 5000).any()


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


@pytest.mark.slow  # spacy takes seconds to be imported
def test_a_language_has_its_own_words():
    pytest.importorskip("spacy")
    sign = dedup.signer(recipe.Dedup(language="en"))
    assert sign("You cannot do all of that, can you? No.", 1) == sign(
        "you cannot do all of THAT can you no", 2
    )
    assert sign("No words", 7) == [7] * 14
