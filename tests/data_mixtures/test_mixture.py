"""Tests of a mixture's sequences: the same list however cut, and clear errors for wrong data."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from data_mixtures import order, shards
from data_mixtures.mixture import Mixture, pin
from records.files import write_json
from tests.data_mixtures.conftest import write_counting


def reference(mix, g, weights, windows, offsets, seed=5, per_shard=8):
    """Return source and window of global sequence g, straight from the definition."""
    places, _ = order.pattern(weights)
    # a block has as many places as the weights sum to
    total = sum(weights)
    source = int(places[g % total])
    rank = int((places[: g % total] == source).sum())
    item = offsets[source] + (g // total) * weights[source] + rank
    epoch, window = divmod(item, windows[source])
    name = mix.source_names[source]
    # from the second epoch on the whole source is permuted, not shard by shard
    if epoch:
        return source, order.permute(window, windows[source], order.round_keys(seed, name, epoch))
    shard, place = divmod(window, per_shard)
    count = min(windows[source] - shard * per_shard, per_shard)
    begin = order.begin(seed, name, f"shard-{shard:05d}.bin", count)
    return source, shard * per_shard + (begin + place * order.stride(count)) % count


@pytest.mark.parametrize("offsets", [(0, 0, 0), (13, 40, 9)])
def test_sequences_follow_the_definition(counting_data, offsets):
    windows = (50, 23, 9)
    weights = (6, 3, 1)
    mix = Mixture.open(
        counting_data() / "phase1.lock.json", dict(zip(("s0", "s1", "s2"), offsets, strict=True))
    )
    tokens, sources = mix.sequences(0, 60)
    assert tokens.shape == (60, 5)
    assert tokens.dtype == np.int64
    assert sources.dtype == np.int64
    expected = [reference(mix, g, weights, windows, offsets) for g in range(60)]
    assert sources.tolist() == [source for source, _ in expected]
    starts = [source * 1000 + window * 4 for source, window in expected]
    assert np.array_equal(tokens, np.array(starts)[:, None] + np.arange(5))
    # guards the test itself: offsets that changed nothing would prove nothing
    plain = [reference(mix, g, weights, windows, (0, 0, 0)) for g in range(60)]
    assert any(offsets) == (expected != plain), "the offsets are seen"


def test_epoch_cap_is_an_error_that_names_the_source(counting_data):
    # s1: 23 windows at weight 3 of 10 is the first to end
    mix = Mixture.open(counting_data(cap=2) / "phase1.lock.json")
    # 2 epochs are 46 windows, 3 of them in every block of 10
    last = 10 * (46 // 3)
    mix.check_epochs(last)
    mix.sequences(last - 1, 1)
    with pytest.raises(ValueError, match=r"'s1'.*epoch_cap is 2"):
        mix.check_epochs(last + 10)
    with pytest.raises(ValueError, match="'s1'"):
        mix.sequences(last + 9, 1)


@pytest.mark.parametrize("offsets", [{"s7": 1}, {"s0": -1}])
def test_wrong_offsets_are_refused(counting_data, offsets):
    with pytest.raises(ValueError, match=next(iter(offsets))):
        Mixture.open(counting_data() / "phase1.lock.json", offsets)


def edit(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def edit_weight(data: Path) -> None:
    edit(data / "phase1.lock.json", lambda lock: lock["sources"][0].update(weight=7))


def edit_manifest(data: Path) -> None:
    edit(data / "s1/source.json", lambda manifest: manifest.update(windows=22))


def other_text(data: Path) -> None:
    valid = shards.write_windows(data / "s1/valid.bin", np.zeros(9, np.uint16), 4)
    shards.write_manifest(data / "s1", {**shards.read_manifest(data / "s1"), "valid": valid})


def older_format(data: Path) -> None:
    write_json(data / "s1/source.json", {**shards.read_manifest(data / "s1"), "format": 1})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_weight, r"phase1\.lock\.json does not match its own fingerprint"),
        (edit_manifest, r"s1/source\.json says content_sha256 .* damaged or edited"),
        (other_text, r"s1/source\.json is not of the data that .*phase1\.lock\.json pins"),
        (older_format, r"s1/source\.json has format 1, this code reads 2; prepare the data again"),
        (
            lambda data: os.truncate(data / "s0/shard-00002.bin", 64),
            r"s0/shard-00002\.bin has 64 bytes, its manifest says 66",
        ),
        (lambda data: (data / "s2/shard-00001.bin").unlink(), r"s2/shard-00001\.bin is missing"),
        (
            lambda data: (data / "phase1.lock.json").write_text("{"),
            r"phase1\.lock\.json is not valid JSON",
        ),
    ],
)
def test_wrong_data_is_a_clear_error(counting_data, damage, message):
    data = counting_data()
    # undamaged data opens, so the error below is the damage's
    Mixture.open(data / "phase1.lock.json")
    damage(data)
    with pytest.raises(ValueError, match=message):
        Mixture.open(data / "phase1.lock.json")


def test_sources_of_two_tokenizers_are_not_mixed(counting_data):
    data = counting_data()
    manifest = shards.read_manifest(data / "s1")
    for name in shards.TOKENIZER_FACTS:
        shards.write_manifest(data / "s1", {**manifest, name: 4})
        differs = rf"s1 was tokenized with another tokenizer or length than .*: {name} differ"
        with pytest.raises(ValueError, match=differs):
            pin(data, "phase1", {"s0": 1, "s1": 1}, seed=5, seq_len=4, epoch_cap=1)


@pytest.mark.parametrize(
    ("windows", "read", "now", "unchanged"),
    [
        (50, 48, 90, 48),  # six whole shards of 8, the last one of 2 is not begun
        (50, 49, 90, 48),  # its last shard has other windows now, in another order
        (50, 50, 50, 50),
        (50, 60, 50, 60),  # a second epoch of the same data
        (48, 50, 90, 48),  # a second epoch draws from the whole source
        (50, 40, 39, 32),
    ],
)
def test_more_of_a_source_continues_only_where_nothing_that_was_read_changed(
    counting_data, windows, read, now, unchanged
):
    data = counting_data(windows=(windows, 23, 9))
    files = Mixture.open(data / "phase1.lock.json").identify_files_read("s0", read)
    # the same tokens in the same shards, as far as they reach
    write_counting(data, "s0", now, 0)
    after = Mixture.open(pin(data, "more", {"s0": 6, "s1": 3, "s2": 1}, 5, 4, 3))
    if unchanged == read:
        after.check_continues("s0", read, files)
        return
    more = read - unchanged
    repeated = rf"of which {read} windows were read: {unchanged} of these lie .* up to {more} windows twice"
    with pytest.raises(ValueError, match=repeated):
        after.check_continues("s0", read, files)
    with pytest.raises(
        ValueError, match=rf"0 of these lie in files that are unchanged, {read} in others"
    ):
        after.check_continues("s0", read, None)
    # another seed reads the same files in another order: nothing continues
    seed = Mixture.open(pin(data, "seed", {"s0": 6, "s1": 3, "s2": 1}, 6, 4, 3))
    with pytest.raises(ValueError, match="0 of these lie in files that are unchanged"):
        seed.check_continues("s0", read, files)
