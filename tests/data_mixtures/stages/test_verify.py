"""Verify: every planted damage is named by file and block, and the commands that it prints restore the bytes."""

from __future__ import annotations

import io
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import shards
from data_mixtures.mixture import Mixture
from data_mixtures.stages import manifest, shuffle, stage, verify
from tests.data_mixtures.stages.shuffle_assets import plan_of, run

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
    assert any("shard-00002.docs.zst: its documents do not begin where" in line for line in damage_of(data))
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


REMADE = {
    "notes/shard-00003.bin": ["shuffle/notes/unit-00003", "notes/shard-00003.bin"],
    "sums/shard-00001.docs.zst": ["shuffle/sums/unit-00001", "sums/shard-00001.docs.zst"],
    "notes/valid.bin": ["shuffle/notes/unit-{last:05d}", "notes/valid.bin"],
    "sums/shard-00099.bin": ["shuffle/sums/unit-00099", "sums/shard-00099.bin"],
    "tokenizer.model": [],
    "phase1.lock.json": [],
}


@pytest.mark.parametrize("path", REMADE)
def test_every_damage_has_its_remedy(data, path):
    last = len(shards.read_manifest(data / "notes")["shards"])
    commands = verify.remedy(Path("a recipe.toml"), data, [verify.Damage(data / path, "is damaged")])
    gone = [str(data / each.format(last=last)) for each in REMADE[path]]
    assert commands[:-1] == ([f"rm -rf {' '.join(gone)}"] if gone else [])
    assert commands[-1] == f"python -m data_mixtures.prepare 'a recipe.toml' --out {data}"


def test_a_shard_is_made_again_with_the_same_bytes_and_fingerprint(data):
    lock, original = (data / "phase1.lock.json").read_bytes(), (data / "notes/source.json").read_bytes()
    flip(data / "notes/shard-00003.bin", 140)
    (removal, _) = verify.remedy(Path("r.toml"), data, report(data))
    subprocess.run(["bash", "-euc", removal], check=True)
    plan = plan_of(SOURCES, windows_per_shard=20)
    work = shuffle.WriteShards(plan, data, SOURCES)
    todo = [unit for unit in work.units() if not stage.is_done(work, unit)]
    assert [str(unit) for unit in todo] == ["notes/unit-00003"]
    run(work)
    assert manifest.write(plan, data, SOURCES, Console(quiet=True))["notes"] == "built"
    assert not report(data)
    assert (data / "phase1.lock.json").read_bytes() == lock
    assert (data / "notes/source.json").read_bytes() == original


def test_a_folder_with_parity_and_quarantined_shards_of_an_older_version_is_read(data):
    content = shards.read_manifest(data / "notes")
    entries = [
        {**e, "parity": {"name": e["name"].replace(".bin", ".parity"), "xxh3": "0"}}
        for e in content["shards"]
    ]
    for entry in entries:
        (data / "notes" / entry["parity"]["name"]).write_bytes(b"parity")
    edited(data, "notes", shards=entries, quarantined=[])
    Mixture.open(data / "phase1.lock.json").sequences(0, 20)
    assert not report(data)
