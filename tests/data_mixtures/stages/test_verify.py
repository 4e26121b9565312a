"""Verify and quarantine: every planted damage is named by file and block; what is left is
pinned anew, or mended.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import shards
from data_mixtures.mixture import Mixture
from data_mixtures.stages import manifest, shuffle, stage, verify
from data_mixtures.stages.verify import quarantine
from tests.data_mixtures.stages.shuffle_assets import plan_of, read_json, run

SOURCES = ("notes", "sums")


def report(data: Path, printed: io.StringIO | None = None) -> list[verify.Damage]:
    return verify.verify(data, SOURCES, Console(file=printed or io.StringIO(), width=200), workers=3)


def damage_of(data: Path) -> list[str]:
    return [str(damage).replace(f"{data}/", "") for damage in report(data)]


def change(path: Path, edit: Callable[[bytes], bytes]) -> None:
    path.write_bytes(edit(path.read_bytes()))


def flip(path: Path, byte: int) -> None:
    change(path, lambda raw: raw[:byte] + bytes([raw[byte] ^ 1]) + raw[byte + 1 :])


def test_whole_data_is_whole(data):
    printed = io.StringIO()
    assert not report(data, printed)
    files = [path for source in SOURCES for path in (data / source).iterdir() if path.name != shards.MANIFEST]
    size = sum(path.stat().st_size for path in files if path.suffix == ".bin")
    assert len(files) > 15
    assert f"{len(files)} files, {size:,} bytes: 0 damaged" in printed.getvalue()


@pytest.mark.parametrize(("byte", "block"), [(0, 0), (127, 0), (128, 1), (321, 2)])
def test_a_flipped_bit_is_found_with_its_block(data, byte, block):
    flip(data / "notes/shard-00003.bin", byte)
    (found,) = damage_of(data)
    assert found.startswith(f"notes/shard-00003.bin: block {block} does not have its hash ")


def test_every_damage_is_named_not_only_the_first(data):
    flip(data / "notes/shard-00003.bin", 5)
    flip(data / "notes/shard-00003.bin", 300)
    flip(data / "sums/valid.bin", 9)
    assert [line.split(" does")[0] for line in damage_of(data)] == [
        "notes/shard-00003.bin: block 0",
        "notes/shard-00003.bin: block 2",
        "sums/valid.bin: block 0",
    ]


def write_documents(path: Path, ids: np.ndarray, lengths: np.ndarray) -> dict:
    return shards.write_documents(path, (ids, lengths, np.zeros(len(ids))), ())


def other_docs(data: Path) -> None:
    """An index that unpacks, of other documents."""
    ids, lengths, _ = shards.read_documents(data / "notes/shard-00002.docs.zst")
    write_documents(data / "notes/shard-00002.docs.zst", ids + np.uint64(1), lengths)


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda d: change(d / "notes/shard-00001.bin", lambda raw: raw[:200]),
         ["notes/shard-00001.bin: block 1 does not", "notes/shard-00001.bin: 200 bytes, 322 in the manifest"]),
        (lambda d: change(d / "notes/shard-00001.bin", lambda raw: raw + b"x" * 80),
         ["notes/shard-00001.bin: block 2 does not", "notes/shard-00001.bin: block 3 lies behind the end",
          "notes/shard-00001.bin: 402 bytes"]),
        (lambda d: (d / "sums/shard-00000.bin").unlink(), ["sums/shard-00000.bin: missing; 322 bytes"]),
        (lambda d: (d / "sums/shard-00002.docs.zst").unlink(), ["sums/shard-00002.docs.zst: missing"]),
        (lambda d: flip(d / "sums/shard-00002.docs.zst", 1), ["sums/shard-00002.docs.zst: cannot be unpacked"]),
        (other_docs, ["notes/shard-00002.docs.zst: unpacked sha256"]),
        (lambda d: (d / "sums/shard-00099.bin").write_bytes(b"x"), ["sums/shard-00099.bin: not in the manifest"]),
        (lambda d: (d / "tokenizer.model").write_bytes(b"x"), ["tokenizer.model: is not the tokenizer of notes"]),
        (lambda d: (d / "phase1.lock.json").write_text("{}"), ["phase1.lock.json: "]),
    ],
)  # fmt: skip
def test_damage_is_named(data, damage, names):
    damage(data)
    found = damage_of(data)
    for line, name in zip(found[: len(names)], names, strict=True):
        assert line.startswith(name)


def edited(data: Path, source: str, **fields) -> None:
    content = shards.read_manifest(data / source)
    shards.write_manifest(data / source, {**content, **fields})


def test_a_foreign_shard_with_a_fitting_manifest_is_seen_by_its_documents(data):
    """Hashes say only that file and manifest fit each other; an index must fit the
    tokens, and its neighbours.
    """
    content = shards.read_manifest(data / "notes")
    path = data / "notes/shard-00002.docs.zst"
    ids, lengths, _ = shards.read_documents(path)
    docs = write_documents(path, ids[:-1], lengths[:-1])
    entries = [{**e, "docs": docs} if e["name"] == "shard-00002.bin" else e for e in content["shards"]]
    edited(data, "notes", shards=entries)
    assert any(
        "shard-00002.docs.zst: its documents do not begin at the token 1 in" in line
        for line in damage_of(data)
    )
    held_out = ids.copy()
    held_out[0] = 5
    entries = [
        {**e, "docs": write_documents(path, held_out, lengths)} if e["name"] == "shard-00002.bin" else e
        for e in entries
    ]
    edited(data, "notes", shards=entries)
    assert any("shard-00002.docs.zst: lists documents that are held out" in line for line in damage_of(data))
    lengths = [*lengths[:-1], lengths[-1] + 1]  # one token more than the next shard agrees with
    docs = write_documents(path, ids, np.array(lengths))
    entries = [{**e, "docs": docs} if e["name"] == "shard-00002.bin" else e for e in entries]
    edited(data, "notes", shards=entries, read=0)
    found = damage_of(data)
    assert any(
        re.match(r"notes/source\.json: shard 2 lists documents up to token \d+, shard 3 from", line)
        for line in found
    )
    assert any("notes/source.json: 0 documents read are not those kept and dropped" in line for line in found)


def test_a_quarantined_shard_is_gone_and_the_old_lock_does_not_fit(data):
    lock, old = data / "phase1.lock.json", (data / "phase1.lock.json").read_bytes()
    before = Mixture.open(lock)
    original = read_json(data / "notes/source.json")
    flip(data / "notes/shard-00003.bin", 140)
    (data / "sums/shard-00001.docs.zst").unlink()
    console = Console(record=True, width=300, file=io.StringIO())
    quarantine(data, report(data), console)

    after = Mixture.open(lock)
    assert after.fingerprint != before.fingerprint
    printed = console.export_text()
    assert "shard-00003.bin: shard-00003.bin: block 1 does not have its hash" in printed
    assert "shard-00001.docs.zst: missing" in printed
    assert f"fingerprint {before.fingerprint} is now {after.fingerprint}" in printed
    assert "the new lock does not fit its checkpoints" in printed
    content = read_json(data / "notes/source.json")
    assert [entry["name"] for entry in content["quarantined"]] == ["shard-00003.bin"]
    assert (
        content["windows"] == original["windows"] - 20 == sum(entry["windows"] for entry in content["shards"])
    )
    assert (data / "notes/shard-00003.bin").is_file()
    assert not report(data)  # what is left is whole, and the files in quarantine are known
    served = {place["shard"] for place in after.locate(np.arange(40)) if place["source"] == "notes"}
    assert served
    assert "shard-00003.bin" not in served

    lock.write_bytes(old)
    with pytest.raises(ValueError, match=r"notes/source\.json is not of the data that .* pins"):
        Mixture.open(lock)


def test_an_interrupted_quarantine_is_finished_by_the_next(data, monkeypatch):
    flip(data / "notes/shard-00003.bin", 140)
    lock = data / "phase1.lock.json"
    with monkeypatch.context() as patch:
        write_json = shards.write_json
        patch.setattr(
            shards, "write_json", lambda path, value: 1 / 0 if path == lock else write_json(path, value)
        )
        with pytest.raises(ZeroDivisionError):
            quarantine(data, report(data), Console(quiet=True))
    with pytest.raises(ValueError, match="is not of the data"):
        Mixture.open(lock)
    quarantine(data, report(data), Console(quiet=True))
    Mixture.open(lock)
    assert not report(data)


def test_preparing_again_mends_and_gives_the_fingerprint_back(data):
    lock, original = (data / "phase1.lock.json").read_bytes(), (data / "notes/source.json").read_bytes()
    flip(data / "notes/shard-00003.bin", 140)
    quarantine(data, report(data), Console(quiet=True))
    plan = plan_of(SOURCES, windows_per_shard=20)
    work = shuffle.WriteShards(plan, data, SOURCES)
    todo = [unit for unit in work.units() if not stage.is_done(work, unit)]
    assert [str(unit) for unit in todo] == ["notes/unit-00003"]
    with pytest.raises(ValueError, match=r"notes/unit-00003 has not been through 'shuffle' yet"):
        manifest.write(plan, data, SOURCES, Console(quiet=True))
    run(work)
    assert manifest.write(plan, data, SOURCES, Console(quiet=True))["notes"] == "built"
    assert not report(data)
    assert (data / "phase1.lock.json").read_bytes() == lock
    assert (data / "notes/source.json").read_bytes() == original


@pytest.mark.parametrize("path", ["notes/valid.bin", "tokenizer.model"])
def test_what_is_no_shard_cannot_be_left_out(data, path):
    flip(data / path, 20)
    flip(data / "notes/shard-00003.bin", 140)
    before = (data / "notes/source.json").read_bytes()
    with pytest.raises(ValueError, match=rf"{path} is damaged and is no shard.*nothing was changed"):
        quarantine(data, report(data), Console(quiet=True))
    assert (data / "notes/source.json").read_bytes() == before


def test_a_source_of_damaged_shards_only_is_refused(data):
    for path in (data / "sums").glob("shard-*.bin"):
        flip(path, 3)
    with pytest.raises(ValueError, match=r"all shards of .*sums are damaged"):
        quarantine(data, report(data), Console(quiet=True))
