"""Tests of own files as a mixture with the shortest recipe, and of the errors for bad ones."""

from __future__ import annotations

import functools
import gzip
import itertools
import json
import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from data_mixtures import recipe_file, shards
from data_mixtures.mixture import Mixture
from data_mixtures.stages import plan, stage, stats
from tests.data_mixtures.conftest import ROOT, code_blocks, prepare_folder, run_shell
from tests.tokenizer_assets import byte_level, save

RECIPE = """
tokenizer = "tokenizer.json"        # or a sentencepiece tokenizer.model
seq_len = 4096
[sources.mine]
inputs = [{ kind = "jsonl", field = "content", paths = ["corpus/*.jsonl.gz"] }]
[sources.yours]
inputs = [{ kind = "parquet", field = "content", paths = ["s3://bucket/b/*.parquet"] }]
[phase1]
mine = 60
yours = 40
"""
JSONL = '{ kind = "jsonl", field = "content", paths = ["corpus/*.jsonl.gz"] }'
PARQUET = '{ kind = "parquet", field = "content", paths = ["b/*.parquet"] }'
WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by word"


@functools.cache
def write_text(seed: int, documents: int, words: int = 400) -> list[str]:
    draw = random.Random(seed)
    return [
        f"{seed}.{n} " + " ".join(draw.choices(WORDS.split(), k=words)) for n in range(documents)
    ]


def write_json_lines(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = "".join(
        json.dumps({"id": n, "content": text}) + "\n" for n, text in enumerate(texts)
    ).encode()
    path.write_bytes(gzip.compress(lines, 1) if path.suffix == ".gz" else lines)


@pytest.fixture
def folder(tmp_path):
    """Write what RECIPE reads, the Parquet in b/ instead of a bucket."""
    # 300 ids in all, which four lanes divide
    save(byte_level(write_text(0, 5), ["<|endoftext|>"], 299), tmp_path)
    (tmp_path / "b").mkdir()
    for number in range(2):
        write_json_lines(tmp_path / f"corpus/{number}.jsonl.gz", write_text(1 + number, 40))
        urls = [f"https://x/{number}/{n}" for n in range(40)]
        table = pa.table({"content": write_text(3 + number, 40), "url": urls})
        pq.write_table(table, tmp_path / f"b/{number}.parquet")
    return tmp_path


def run(folder: Path, text: str, out: str = "out", mirror: str | None = None) -> str:
    (folder / "own.toml").write_text(text)
    return prepare_folder(folder / "own.toml", folder / out, mirror=mirror, replace=True)


def own(*inputs: str, more: str = "") -> str:
    tables = "".join(
        f"[sources.s{n}]\ninputs = [{text_input}]\n" for n, text_input in enumerate(inputs)
    )
    weights = "".join(f"s{n} = 1\n" for n in range(len(inputs)))
    return f'tokenizer = "tokenizer.json"\nseq_len = 64\n{more}\n{tables}[phase1]\n{weights}'


def list_planned(folder: Path, source: str) -> list[str]:
    units = stage.find_plan(folder / "out", source)["units"]
    names = [file[0] for unit in units for file in unit.get("files", [unit.get("file")])]
    return [name.removeprefix("file://") for name in names]


def origins_of(folder: Path, source: str, unit: int) -> list[dict]:
    path = folder / f"out/filter/{source}/unit-{unit:05d}/documents.parquet"
    return [json.loads(origin) for origin in pq.read_table(path)["origin"].to_pylist()]


def test_the_shortest_recipe_makes_a_mixture(folder):
    printed = run(folder, RECIPE.replace("s3://bucket", f"file://{folder}"))
    assert "mine 60.00 %, yours 40.00 %" in printed
    tokens, source = Mixture.open(folder / "out/phase1.lock.json").sequences(0, 10)
    assert tokens.shape == (10, 4097)
    assert sorted(source.tolist()) == [0] * 6 + [1] * 4
    manifest = shards.read_manifest(folder / "out/mine")
    assert (manifest["read"], manifest["kept"], manifest["category"]) == (80, 80, "other")
    # 80 documents, at 1 % held out, do not fill a window
    assert manifest["valid"]["windows"] == 0
    # a local Parquet file is linked, not copied
    raw = folder / "out/fetch/yours/unit-00000/raw.parquet"
    assert os.path.samefile(raw, list_planned(folder, "yours")[0])
    origins = origins_of(folder, "yours", 1)
    # which file comes first depends on hashes of names
    number = origins[0]["file"][-9]
    place = {"file": f"file://{folder}/b/{number}.parquet", "url": f"https://x/{number}/7"}
    assert origins[7] == {**place, "row": 7}
    origins = origins_of(folder, "mine", 0)
    assert origins[3] == {"file": origins[0]["file"], "row": 3, "id": 3}
    assert origins[0]["file"] in ("corpus/0.jsonl.gz", "corpus/1.jsonl.gz")


def write_awkward_lines(path: Path) -> None:
    """Write JSON lines with varied ends, each with the number of its line."""
    with path.open("wb") as lines:
        for number, text in enumerate(write_text(20, 60, 90) + write_text(20, 3, 90)):
            # CRLF, blank lines, and lines that are no JSON or no UTF-8 between documents
            end = (b"\n", b"\r\n", b"\n\n", b"\n  \n", b"\nno json\n", b"\n\xff\n")[number % 6]
            lines.write(json.dumps({"content": text, "url": f'"row":{number}'}).encode() + end)
        # no newline at its end
        lines.write(json.dumps({"content": write_text(21, 1, 90)[0]}).encode())


@pytest.mark.job
def test_large_files_are_split_into_units_and_nothing_else_changes(folder, monkeypatch):
    write_awkward_lines(folder / "corpus/all.jsonl")
    (folder / "corpus/small.jsonl").write_text(json.dumps({"content": write_text(22, 1)[0]}))
    columns = {
        "score": [1.0] * 100,
        "content": pa.array(write_text(23, 100, 90), pa.string_view()),
        "url": [f"u{n}" for n in range(100)],
    }
    pq.write_table(pa.table(columns), folder / "b/large.parquet", row_group_size=7)
    limits = "max_dropped_share = 0.5\nvalid_per_10000 = 500"
    recipe = own(JSONL.replace(".gz", ""), PARQUET, more=limits)
    results = {}
    units = {}
    # byte ranges of JSON lines, row groups of Parquet: shards and origins do not depend on the size
    # by UNIT_BYTES: one unit a file, then several, then many
    for size in (1 << 26, 3000, 700):
        monkeypatch.setattr(plan, "UNIT_BYTES", size)
        run(folder, recipe, f"out-{size}")
        out = folder / f"out-{size}"
        units[size] = [len(stage.list_units(out, name)) for name in ("s0", "s1")]
        manifests = [shards.read_manifest(out / name) for name in ("s0", "s1")]
        facts = [
            [row[key] for key in ("read", "kept", "dropped", "content_sha256")] for row in manifests
        ]
        origins = [
            shards.read_documents(path)[2].to_pylist() for path in sorted(out.glob("s?/*.docs.zst"))
        ]
        results[size] = facts, origins
    assert results[1 << 26] == results[3000] == results[700]
    assert units[1 << 26] == [1, 3]
    assert min(units[3000]) >= 10
    # an origin's row is the line of the whole file, not of its byte range
    origins = itertools.chain.from_iterable(results[700][1])
    rows = [json.loads(row) for row in origins if "corpus/all.jsonl" in row]
    lines = (folder / "corpus/all.jsonl").read_bytes().split(b"\n")
    assert len(rows) > 40
    assert all(json.loads(lines[row["row"]]).get("url") == row.get("url") for row in rows)


def test_parquet_of_other_writers_gives_the_text_of_json_lines(folder):
    texts = write_text(9, 30)
    write_json_lines(folder / "lines.jsonl", texts)
    # Polars, arrow-rs and DataFusion write string_view, pandas categories
    view = pa.array(texts, pa.string_view())
    categories = pa.array(texts).dictionary_encode()
    for number, column in enumerate((view, categories)):
        columns = [column, *(pa.array([url] * 30) for url in "uv")]
        table = pa.table(columns, names=["content", "url", "url"])
        pq.write_table(table, folder / f"b/{number}.parquet", row_group_size=7)
    inputs = [JSONL.replace("corpus/*.jsonl.gz", "lines.jsonl")]
    inputs += [PARQUET.replace("*", number) for number in "01"]
    run(folder, own(*inputs))
    manifests = [shards.read_manifest(folder / f"out/s{n}") for n in range(3)]
    assert len({manifest["content_sha256"] for manifest in manifests}) == 1
    assert manifests[0]["kept"] == 30
    # two columns may have one name
    pq.write_table(pa.table([view, view], names=["content"] * 2), folder / "b/0.parquet")
    with pytest.raises(ValueError, match="has 2 columns named content; give them other names"):
        run(folder, own(PARQUET))


def test_names_that_read_as_patterns_are_names_in_a_recipe(folder):
    place = folder / "a [b]*"
    place.mkdir()
    write_json_lines(place / "br[ack]et.JSONL", write_text(5, 30))
    # a benchmark file, found by its pattern below
    write_json_lines(place / "items.jsonl", ["nothing of it"])
    (folder / "tokenizer.json").rename(place / "tokenizer.json")
    line = JSONL.replace("corpus/*.jsonl.gz", "br[ack]et.JSONL")
    run(place, own(line, more='filter.benchmarks = { x = "it*s.jsonl" }'))
    assert shards.read_manifest(place / "out/s0")["kept"] == 30


def test_a_missing_field_or_column_is_named_before_anything_is_read(folder):
    wrong = [line.replace("content", "body") for line in (JSONL, PARQUET)]
    with pytest.raises(
        ValueError, match="2 sources are not as the recipe says; nothing was read"
    ) as caught:
        run(folder, own(*wrong, JSONL))
    for part in (
        ".jsonl.gz:1 has no 'body'; its fields: id, content. Set `field` of the input",
        "exactly one column of text or bytes named body; its columns: content (string), url (",
    ):
        assert part in str(caught.value)
    for paths, message in (
        ('"corpus/*"', r"s0: .*corpus/\d.jsonl.gz is jsonl, its input has kind = 'text'"),
        (
            '"none/*", "corpus/*", "corpus/nobody"',
            r"s0: no file matches .*/none/\*, .*/corpus/nobody",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(folder, own(f'{{ kind = "text", paths = [{paths}] }}'))


def test_too_much_that_cannot_be_read_stops_the_run(folder):
    (folder / "texts").mkdir()
    # every third file is UTF-16, which is not read
    for number in range(30):
        encoding = "utf-16" if number % 3 == 0 else "utf-8"
        (folder / f"texts/{number}.txt").write_bytes(write_text(number, 1)[0].encode(encoding))
    text = own('{ kind = "text", paths = ["texts/*"] }')
    third = r"\d\d.*% could not be read \(10 of 30 documents, .*: 10 not_utf8, such as .*/\d+\.txt\. Repair"
    with pytest.raises(ValueError, match=f"'s0': {third}"):
        run(folder, text)
    run(folder, text.replace("seq_len", "max_dropped_share = 0.6\nseq_len"))
    assert shards.read_manifest(folder / "out/s0")["dropped"]["not_utf8"] == 10
    # a third of the rows are not UTF-8, which only `filter` sees
    broken = [
        passage.encode() + b"\xfc" * (n % 3 == 0) for n, passage in enumerate(write_text(1, 30))
    ]
    pq.write_table(pa.table({"content": pa.array(broken, pa.binary())}), folder / "b/0.parquet")
    (folder / "b/1.parquet").unlink()
    with pytest.raises(
        ValueError, match=r"'s0': 33.3% could not be read .*10 not_utf8, such as b/0.parquet"
    ):
        run(folder, own(PARQUET))


def test_a_truncated_file_counts_whole(folder):
    for number in range(30):
        write_json_lines(folder / f"corpus/{number}.jsonl.gz", write_text(100 + number, 6))
    victim = folder / "corpus/7.jsonl.gz"
    # gzip's checksum and length are cut off: no document of the file is trusted
    victim.write_bytes(victim.read_bytes()[:-9])
    sizes = [path.stat().st_size for path in folder.glob("corpus/*.gz")]
    share = victim.stat().st_size / sum(sizes)
    printed = run(folder, own(JSONL))
    assert f"s0: 1 file lost ({share:.1%} of the bytes): corpus/7.jsonl.gz" in printed
    manifest = shards.read_manifest(folder / "out/s0")
    lost_files = {
        "files": {"corpus/7.jsonl.gz": victim.stat().st_size},
        "share": pytest.approx(share),
    }
    assert manifest["lost"] == lost_files
    assert manifest["kept"] == 29 * 6
    console = Console(record=True, width=200)
    written = stats.write(folder / "out", ("s0",), console, 1)
    assert written["sources"]["s0"]["lost"] == lost_files
    assert "s0: 1 file lost" in console.export_text()
    assert {reason: count for reason, count in manifest["dropped"].items() if count} == {
        "damaged": 1
    }
    # one file of 30, but a fourth of the bytes: the share by bytes is judged, too
    write_json_lines(victim, write_text(7, 60))
    victim.write_bytes(victim.read_bytes()[:-9])
    quarter = r"2\d\.\d% could not be read .*, [\d,]+ of [\d,]+ bytes of files\): .*7\.jsonl"
    with pytest.raises(ValueError, match=quarter):
        run(folder, own(JSONL))


def test_a_file_in_two_sources_is_reported(folder):
    printed = run(folder, own(JSONL, JSONL.replace("*", "1"), PARQUET))
    shared = f"note: 1 files are in s0 and s1, whose shares then hold the same text: {folder}/corpus/1.jsonl.gz"
    assert shared in printed


@pytest.mark.job  # a server that speaks S3 takes seconds to be imported
def test_parquet_in_a_bucket_is_split_as_on_a_disk(folder, s3, monkeypatch):
    table = pa.table({"content": write_text(23, 50, 90)})
    pq.write_table(table, folder / "b/large.parquet", row_group_size=7)
    s3.put(str(folder / "b/large.parquet"), "bucket/b/large.parquet")
    monkeypatch.setattr(plan, "UNIT_BYTES", 3000)
    # the bytes of shards do not say where the Parquet lay
    content = set()
    for name, place in (("disk", "b"), ("store", "s3://bucket/b")):
        run(folder, own(PARQUET.replace("b/*", f"{place}/large*")), name)
        assert len(stage.list_units(folder / name, "s0")) == 8
        content.add(shards.read_manifest(folder / name / "s0")["content_sha256"])
    assert len(content) == 1


NAMES = ("mine", "yours", "notes")


def blocks(language: str) -> list[str]:
    return [code for name, code in code_blocks("own-data.md") if name == language]


def test_the_page_shows_recipes_that_load(tmp_path):
    whole, inputs, hub, tokenizer = blocks("toml")
    # the page promises a recipe of a dozen lines
    assert len(whole.splitlines()) <= 12
    tables = [f"[sources.s{n}]\n{line}\n" for n, line in enumerate(inputs.splitlines())]
    names = [*(f"s{n}" for n in range(len(tables))), "web"]
    text = (
        tokenizer
        + "".join([*tables, hub])
        + "[phase1]\n"
        + "".join(f"{name} = 1\n" for name in names)
    )
    for path, content in ((tmp_path / "whole.toml", whole), (tmp_path / "parts.toml", text)):
        path.write_text(content)
        assert recipe_file.load(path).phases


@pytest.mark.rotate
def test_the_page_from_files_to_steps(folder):
    write_json_lines(folder / "corpus/more.jsonl.gz", write_text(50, 1500, 60))
    (folder / "notes/deep").mkdir(parents=True)
    for number in range(3):
        (folder / f"notes/deep/{number}.md").write_text(write_text(60 + number, 1, 200)[0])
    # the page's commands name job files of the repository
    (folder / "configs").symlink_to(ROOT / "configs")
    whole, *_ = blocks("toml")
    (folder / "own.toml").write_text(whole)
    prepare_line, train_lines, _ = blocks("")
    assert "mine 60.00 %, yours 30.00 %, notes 10.00 %" in run_shell(prepare_line, folder)
    printed = run_shell(train_lines, folder, OMP_NUM_THREADS="1")
    held_out = {
        name: shards.read_manifest(folder / f"data/own/{name}")["valid"]["windows"]
        for name in NAMES
    }
    without = ", ".join(name for name in NAMES if not held_out[name])
    assert (
        not without or f"no held-out windows, so not in the validation loss: {without}" in printed
    )
    rows = [
        json.loads(line) for line in (folder / "runs/own/metrics.jsonl").read_text().splitlines()
    ]
    assert rows[-1]["step"] == 5
    assert rows[-1]["tokens_by_source"] == {"mine": 24 * 256, "yours": 12 * 256, "notes": 4 * 256}
    assert list(rows[-1]["valid_loss_by_source"]) == [name for name in NAMES if held_out[name]]
