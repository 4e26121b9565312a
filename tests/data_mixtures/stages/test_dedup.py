"""Tests of near copies: bands as datatrove's, no two kept documents share one, no held-out text."""

import itertools
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xxhash

from data_mixtures import document_ids, recipe
from data_mixtures.stages import dedup, documents, stage
from tests.data_mixtures.stages.filtered import do_all, make_recipe, run_filter

WORDS = ["".join(letters) for letters in itertools.product("abcdefghijklmn", repeat=3)]
STAGES = (dedup.Signatures, dedup.Bands, dedup.Dedup)
Texts = dict[str, list[list[str]]]


def texts_of(seed: int, families: int, copies: int) -> list[str]:
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
    return replace(make_recipe(sources), dedup=recipe.Dedup(minhash=True, **settings))


def flat(texts: Texts) -> list[str]:
    units = itertools.chain.from_iterable(texts.values())
    return list(itertools.chain.from_iterable(units))


def deduplicate(out: Path, texts: Texts, plan: recipe.Recipe) -> Texts:
    run_filter(out, texts, plan)
    for kind in STAGES:
        do_all(kind(plan, out, tuple(texts)))

    def stays(source: str, number: int) -> list[str]:
        gone = documents.near_copies(plan, out, stage.Unit(source, number))
        return [text for row, text in enumerate(texts[source][number]) if row not in gone]

    return {
        source: [stays(source, n) for n in range(len(units))] for source, units in texts.items()
    }


def low_half(text: str) -> int:
    return xxhash.xxh3_128_intdigest(text.encode()) % 2**64


def is_held_out(text: str, plan: recipe.Recipe) -> bool:
    return document_ids.is_held_out(low_half(text), plan.valid_per_10000)


def bands_of(text: str, plan: recipe.Recipe) -> set[int]:
    return set(dedup.signer(plan.dedup)(text, low_half(text)))


def find_remaining(texts: Texts, plan: recipe.Recipe) -> list[str]:
    """Return the texts that come first in each of their bands, held-out ones before others."""
    passages = flat(texts)
    bands = [bands_of(text, plan) for text in passages]
    firsts: dict[int, int] = {}
    for i in sorted(range(len(passages)), key=lambda i: (not is_held_out(passages[i], plan), i)):
        for band in bands[i]:
            firsts.setdefault(band, i)
    return [text for i, text in enumerate(passages) if all(firsts[band] == i for band in bands[i])]


def datatrove_pairs(folder: Path, texts: list[str], settings: recipe.Dedup) -> set[tuple[int, int]]:
    """Return the pairs of datatrove's own steps, with the same words and hash function."""
    from datatrove.data import Document
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import MinhashConfig
    from datatrove.utils.word_tokenizers import WhitespaceTokenizer

    config = MinhashConfig(settings.n_grams, settings.buckets, settings.hashes_per_bucket)
    config.norm_config.norm_numbers = False
    tokenizer = WhitespaceTokenizer()
    # the words of our `signer`, so that only the rest is compared
    tokenizer.word_tokenize = str.split
    signature = MinhashDedupSignature(str(folder / "signatures"), config, tokenizer)
    signature._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())
    signature.run([Document(text, str(i)) for i, text in enumerate(texts)], 0, 1)
    for bucket in range(settings.buckets):
        buckets = MinhashDedupBuckets(
            str(folder / "signatures"), str(folder / "buckets"), config=config
        )
        buckets.run(None, bucket, settings.buckets)
    rows = [np.fromfile(path, "<u4").reshape(-1, 4) for path in (folder / "buckets").glob("*.dups")]
    return {(int(row[1]), int(row[3])) for row in np.concatenate(rows)}


def test_bands_are_those_of_datatrove(tmp_path):
    texts = list(dict.fromkeys(texts_of(1, 60, 6)))
    plan = with_dedup(["a"])
    of_band = defaultdict(list)
    for i, text in enumerate(texts):
        for band in bands_of(text, plan):
            of_band[band].append(i)
    # datatrove lists a chain of pairs a band, whose ends are the documents that share it
    ours = {pair for members in of_band.values() for pair in itertools.pairwise(members)}
    assert len(ours) > 50
    assert ours == {tuple(sorted(pair)) for pair in datatrove_pairs(tmp_path, texts, plan.dedup)}


@pytest.mark.parametrize("seed", range(2))
def test_who_stays_is_the_plain_rule_whatever_the_units_ranges_and_groups(
    tmp_path, monkeypatch, seed
):
    texts = texts_of(seed, 30, 5)
    cuts = sorted(random.Random(seed).sample(range(len(texts)), 3))
    parts = [texts[a:b] for a, b in itertools.pairwise([0, *cuts, len(texts)])]
    plan = with_dedup(["a", "b"], buckets=4)
    units = {"a": [*parts[:2], []], "b": [[], *parts[2:]]}
    stays = deduplicate(tmp_path / "whole", units, plan)
    assert flat(stays) == find_remaining(units, plan)
    assert 30 <= len(flat(stays)) < len(texts)
    bands = [bands_of(text, plan) for text in flat(stays)]
    assert len(set().union(*bands)) == sum(map(len, bands)), "no two of them share a band"
    # many ranges of hashes and one group for each source
    monkeypatch.setattr(dedup, "ROWS_PER_RANGE", 80)
    monkeypatch.setattr(documents, "GROUPS", 1)
    assert deduplicate(tmp_path / "parts", units, plan) == stays
    assert len(dedup.Bands(plan, tmp_path / "parts", ("a",)).units()) >= 4
    assert [len(list((tmp_path / f"parts/signatures/{name}").iterdir())) for name in units] == [
        1,
        1,
    ]


def test_numbers_are_words_unless_the_recipe_says_otherwise():
    sums = [" ".join(f"Add {i * n + 3} to {n} and then" for n in range(20)) for i in (1, 7)]
    for numbers in (True, False):
        one, other = (set(dedup.signer(recipe.Dedup(numbers=numbers))(text, 0)) for text in sums)
        assert (one == other) is not numbers


@pytest.mark.job  # spacy takes seconds to be imported
def test_a_language_has_its_own_words():
    pytest.importorskip("spacy")
    sign = dedup.signer(recipe.Dedup(language="en"))
    words = "You cannot do all of that, can you? No.", "you cannot do all of THAT can you no"
    assert sign(words[0], 1) == sign(words[1], 2)
    assert sign("No words", 7) == [7] * 14
