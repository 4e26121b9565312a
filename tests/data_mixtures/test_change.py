"""Mixtures that change under a run: nothing is read again or left out, or the change is refused."""

import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import change, shards
from data_mixtures.mixture import Mixture, pin, read_lock

pytestmark = pytest.mark.rotate  # `change` goes: other weights are a new phase
AT = 37  # sequences before the change, in the middle of a block of 10


def changed(lock: Path, at: int = AT, **options) -> tuple[Path, str]:
    console = Console(record=True, width=200)
    return change.run(change.Change(lock, 1, global_batch=at, **options), console), console.export_text()


def windows_of(mixture: Mixture, first: int, count: int) -> list[int]:
    """Source and window in one number, as counting_data writes them."""
    return mixture.sequences(first, count)[0][:, 0].tolist()


def test_three_changes_repeat_nothing_and_leave_nothing_out(counting_data):
    data = counting_data(windows=(100, 100, 100), weights=(6, 3, 1), cap=1)
    rewrite(data, "s3", 40, begins_at=3000)
    lock = data / "phase1.lock.json"
    one, printed = changed(lock, weight=("s0=2", "s1=7"))
    assert "0 windows are read again because of the change" in printed
    two, _ = changed(one, 61, add=("s3=5",), drop=("s1",))
    three, printed = changed(two, 75, weight=("s3=1",))
    mixtures = [Mixture.open(each) for each in (lock, one, two, three)]
    for earlier, later, at in zip(mixtures, mixtures[1:], (AT, 61, 75), strict=False):
        assert windows_of(earlier, 0, at) == windows_of(later, 0, at)
        assert windows_of(earlier, at, 10) != windows_of(later, at, 10)
        assert earlier.rule(at) == later.rule(at)
        assert earlier.rule(at + 1) != later.rule(at + 1)
    last = mixtures[-1]
    read = windows_of(last, 0, 120)
    assert len(set(read)) == 120, "no window twice"
    assert Counter(start // 1000 for start in read) == {
        int(name[1]): count for name, count in last.windows_per_source(120).items()
    }
    shares = Counter(start // 1000 for start in read[61:75])
    assert (shares[1], shares[3]) == (0, 9)  # of 14 sequences with weights 2, 0, 1 and 5
    every = [last.windows_per_source(number) for number in range(121)]
    assert all(sum(after.values()) == sum(before.values()) + 1 for before, after in pairwise(every))
    # what a source reads is, in the same order, what it would have read without a change
    straight = windows_of(Mixture.open(lock), 0, 150)
    for source in (0, 1, 2):
        found = [start for start in read if start // 1000 == source]
        without = [start for start in straight if start // 1000 == source]
        shorter = min(len(found), len(without))
        assert found[:shorter] == without[:shorter]
    assert any(row.split()[:1] == ["s3"] for row in printed.splitlines())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": ("s9=1",)}, r"unknown source in --weight or --drop: 's9'"),
        ({"drop": ("s9",)}, r"unknown source in --weight or --drop: 's9'"),
        ({"add": ("s0=1",)}, r"--add: \['s0'\] are in .* already; change their --weight"),
        ({"add": ("s7=1",)}, r"s7/source.json is missing"),
        ({"weight": ("s0",)}, r"--weight 's0' needs a number, as in --weight s0=60"),
        ({"drop": ("s0", "s1", "s2")}, r"the weights sum to 0"),
        ({"out": Path("/tmp/elsewhere.lock.json")}, r"must lie in .*, beside the sources"),
    ],
)
def test_wrong_changes_are_refused(counting_data, options, message):
    data = counting_data()
    with pytest.raises(ValueError, match=message):
        changed(data / "phase1.lock.json", **options)
    assert len(list(data.glob("*.lock.json"))) == 2


def test_a_change_lies_behind_the_one_before_and_replaces_no_file(counting_data):
    lock = counting_data() / "phase1.lock.json"
    one, _ = changed(lock, weight=("s0=1",))
    with pytest.raises(
        ValueError, match=f"already changes at sequence {AT}; a change at {AT} must lie behind"
    ):
        changed(one, weight=("s0=2",))
    with pytest.raises(ValueError, match="exists, and a run may be pinned to it; give --out"):
        changed(lock, weight=("s0=2",))
    with pytest.raises(ValueError, match="give --global-batch"):
        change.run(change.Change(lock, 1), Console(quiet=True))
    assert read_lock(lock)["order"] != read_lock(one)["order"], "code of before refuses what it would misread"


def rewrite(data: Path, source: str, count: int, begins_at: int = 0, per_shard: int = 8) -> None:
    """Let a source have so many windows of consecutive tokens, or a new one."""
    model = shards.read_manifest(data / "s0")
    shutil.rmtree(data / source, ignore_errors=True)
    (data / source).mkdir()
    tokens = (begins_at + np.arange(count * 4 + 1)).astype(np.uint16)
    written = [
        shards.write_windows(
            data / source / f"shard-{number:05d}.bin", tokens[first : first + per_shard * 4 + 1], 4
        )
        for number, first in enumerate(range(0, count * 4, per_shard * 4))
    ]
    valid = shards.write_windows(data / source / shards.VALID, tokens, 4)
    facts = {key: value for key, value in model.items() if key not in ("format", "content_sha256")}
    shards.write_manifest(data / source, {**facts, "windows": count, "shards": written, "valid": valid})


@pytest.mark.parametrize(
    ("windows", "read", "now", "continues"),
    [
        (50, 48, 90, True),  # six whole shards of 8, the last one of 2 is not begun
        (50, 5, 51, True),
        (50, 49, 90, False),  # its last shard has other windows now, in another order
        (50, 50, 50, True),
        (50, 60, 50, True),  # a second epoch of the same data
        (48, 50, 90, False),  # a second epoch draws from the whole source
        (50, 40, 39, False),
    ],
)
def test_more_of_a_source_continues_only_where_nothing_that_was_read_changed(
    counting_data, windows, read, now, continues
):
    data = counting_data(windows=(windows, 23, 9))
    before = Mixture.open(data / "phase1.lock.json")
    files = before.read_files("s0", read)
    rewrite(data, "s0", now)
    pin(data, "more", {"s0": 6, "s1": 3, "s2": 1}, 5, 4, 3)
    after = Mixture.open(data / "more.lock.json")
    if continues:
        after.check_continues("s0", read, files)
        if read <= now:
            starts = windows_of(before.starting_at({}), 0, 50)
            of_source = [start for start in starts if start < 1000]
            assert (
                of_source == [start for start in windows_of(after, 0, 50) if start < 1000][: len(of_source)]
            )
    else:
        with pytest.raises(
            ValueError, match=rf"source 's0' is not the one of which {read} windows were read"
        ):
            after.check_continues("s0", read, files)


def test_what_would_repeat_is_said(counting_data):
    data = counting_data(windows=(50, 23, 9))
    files = Mixture.open(data / "phase1.lock.json").read_files("s0", 49)
    rewrite(data, "s0", 90)
    pin(data, "more", {"s0": 6, "s1": 3, "s2": 1}, 5, 4, 3)
    with pytest.raises(
        ValueError, match=r"48 of these lie in files that are unchanged, 1 in others.* up to 1 windows twice"
    ):
        Mixture.open(data / "more.lock.json").check_continues("s0", 49, files)
    pin(data, "seed", {"s0": 6, "s1": 3, "s2": 1}, 6, 4, 3)
    with pytest.raises(ValueError, match=r"0 of these lie in files that are unchanged, 49 in others"):
        Mixture.open(data / "seed.lock.json").check_continues("s0", 49, files)
    with pytest.raises(ValueError, match=r"0 of these lie in files that are unchanged, 49 in others"):
        Mixture.open(data / "more.lock.json").check_continues("s0", 49, None)


def test_a_changed_lock_is_one_of_the_ordinary_locks(counting_data):
    one, _ = changed(counting_data() / "phase1.lock.json", weight=("s0=1",))
    lock = json.loads(one.read_text())
    assert lock["changes"] == [{"from_sequence": AT, "weights": {"s0": 1, "s1": 3, "s2": 1}}]
    lock["changes"][0]["weights"]["s0"] = 2
    one.write_text(json.dumps(lock))
    with pytest.raises(ValueError, match="it was edited"):
        read_lock(one)
