"""Files of one's own become a mixture with the shortest recipe; what is wrong with them is said, and where."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from data_mixtures import prepare, recipe, recipe_file, shards
from data_mixtures.mixture import Mixture
from data_mixtures.stages import plan, stage
from data_mixtures.stages.run import Options
from tests.data_mixtures.stages.hub_assets import REPO, write_mirror

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
ROOT = Path(__file__).resolve().parents[2]
WORDS = "the of and to in is you that it he was for on are as with his they at be this have from or one had by word"


def write_text(seed: int, documents: int, words: int = 400) -> list[str]:
    draw = random.Random(seed)
    return [f"{seed}.{n} " + " ".join(draw.choices(WORDS.split(), k=words)) for n in range(documents)]


def write_tokenizer(path: Path) -> None:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=letters, show_progress=False
    )
    made.train_from_iterator(write_text(0, 5), trainer)
    made.save(str(path))


def write_json_lines(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"id": n, "content": text}) + "\n" for n, text in enumerate(texts)).encode()
    path.write_bytes(gzip.compress(lines, 1) if path.suffix == ".gz" else lines)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What RECIPE reads, the Parquet in b/ instead of a bucket."""
    write_tokenizer(tmp_path / "tokenizer.json")
    for number in range(2):
        write_json_lines(tmp_path / f"corpus/{number}.jsonl.gz", write_text(1 + number, 40))
        (tmp_path / "b").mkdir(exist_ok=True)
        texts = write_text(3 + number, 40)
        urls = [f"https://x/{number}/{n}" for n in range(40)]
        pq.write_table(pa.table({"content": texts, "url": urls}), tmp_path / f"b/{number}.parquet")
    return tmp_path


def run(folder: Path, text: str, out: str = "out", mirror: Path | None = None) -> str:
    (folder / "own.toml").write_text(text)
    console = Console(record=True, width=250)
    origin = str(mirror) if mirror else None
    prepare.prepare(folder / "own.toml", folder / out, Options(), console, origin, replace=True)
    return console.export_text()


def own(*inputs: str, more: str = "") -> str:
    """A recipe of short sequences with one source for each input."""
    tables = "".join(f"[sources.s{n}]\ninputs = [{each}]\n" for n, each in enumerate(inputs))
    weights = "".join(f"s{n} = 1\n" for n in range(len(inputs)))
    return f'tokenizer = "tokenizer.json"\nseq_len = 64\n{more}\n{tables}[phase1]\n{weights}'


JSONL = '{ kind = "jsonl", field = "content", paths = ["corpus/*.jsonl.gz"] }'
PARQUET = '{ kind = "parquet", field = "content", paths = ["b/*.parquet"] }'


def test_the_shortest_recipe_makes_a_mixture(folder: Path) -> None:
    printed = run(folder, RECIPE.replace("s3://bucket", f"file://{folder}"))
    assert "mine 60.00 %, yours 40.00 %" in printed
    mixture = Mixture.open(folder / "out/phase1.lock.json")
    tokens, source = mixture.sequences(0, 10)
    assert tokens.shape == (10, 4097)
    assert sorted(source.tolist()) == [0] * 6 + [1] * 4
    manifest = shards.read_manifest(folder / "out/mine")
    assert (manifest["read"], manifest["kept"], manifest["category"]) == (80, 80, "other")
    assert manifest["valid"]["windows"] == 0  # of 80 documents
    assert os.path.samefile(
        folder / "out/fetch/yours/unit-00000/raw.parquet", next(iter(planned(folder, "yours")))
    )
    kept = pq.read_table(folder / "out/filter/yours/unit-00001/documents.parquet")["origin"].to_pylist()
    number = json.loads(kept[0])["file"][-9]
    assert json.loads(kept[7]) == {
        "file": f"file://{folder}/b/{number}.parquet",
        "row": 7,
        "url": f"https://x/{number}/7",
    }
    kept = pq.read_table(folder / "out/filter/mine/unit-00000/documents.parquet")["origin"].to_pylist()
    assert json.loads(kept[3]) == {"file": json.loads(kept[0])["file"], "row": 3, "id": 3}
    assert json.loads(kept[0])["file"] in ("corpus/0.jsonl.gz", "corpus/1.jsonl.gz")


def test_a_long_document_stays_whole_unless_the_recipe_limits_it(folder: Path) -> None:
    """Before, every document was cut at 100,000 characters by default, and nothing said so."""
    long = " ".join(write_text(9, 600, 400))
    assert len(long) > 800_000
    write_json_lines(folder / "corpus/long.jsonl", [long, *write_text(10, 20)])
    recipe = own(
        '{ kind = "jsonl", field = "content", paths = ["corpus/long.jsonl"] }', more="valid_per_10000 = 0"
    )
    printed = run(folder, recipe)
    made = shards.read_manifest(folder / "out/s0")
    encoder = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = encoder.encode(long, add_special_tokens=False).ids
    assert (made["documents"], made["cut"], made["longest"]) == (21, 0, len(ids) + 1)
    assert f"{len(ids) + 1:,}" in printed
    document = np.array([made["bos_id"], *ids], "<u2").tobytes()
    assert document in (folder / "out/s0/shard-00000.bin").read_bytes()
    run(folder, recipe.replace("seq_len", "max_document_chars = 100_000\nseq_len"))
    made = shards.read_manifest(folder / "out/s0")
    assert made["cut"] == len(long) // 100_000
    assert made["documents"] == 21 + made["cut"]


@pytest.mark.job
def test_large_files_are_split_into_units_and_nothing_else_changes(folder: Path, monkeypatch) -> None:
    """Byte ranges of JSON lines, row groups of Parquet: whatever the size of a unit, the same shards and origins."""
    lines = (folder / "corpus/all.jsonl").open("wb")
    for number, text in enumerate(write_text(20, 60, 90) + write_text(20, 3, 90)):
        end = (b"\n", b"\r\n", b"\n\n", b"\n  \n", b"\nno json\n", b"\n\xff\n")[number % 6]
        lines.write(json.dumps({"content": text, "url": f'"row":{number}'}).encode() + end)
    lines.write(json.dumps({"content": write_text(21, 1, 90)[0]}).encode())  # no newline at its end
    lines.close()
    (folder / "corpus/small.jsonl").write_text(json.dumps({"content": write_text(22, 1)[0]}))
    texts = write_text(23, 100, 90)
    table = pa.table({"score": [1.0] * 100, "content": texts, "url": [f"u{n}" for n in range(100)]})
    pq.write_table(table, folder / "b/large.parquet", row_group_size=7)
    recipe = own(
        '{ kind = "jsonl", field = "content", paths = ["corpus/*.jsonl"] }', PARQUET,
        more="max_dropped_share = 0.5\nvalid_per_10000 = 500",
    )  # fmt: skip
    made, units = {}, {}
    for size in (1 << 26, 20_000, 3000, 100):
        monkeypatch.setattr(plan, "UNIT_BYTES", size)
        run(folder, recipe, f"out-{size}")
        out = folder / f"out-{size}"
        units[size] = [len(stage.planned_units(out, name)) for name in ("s0", "s1")]
        read = [shards.read_manifest(out / name) for name in ("s0", "s1")]
        counts = [[each[key] for key in ("read", "kept", "dropped")] for each in read]
        content = [each["content_sha256"] for each in read]
        origins = [shards.read_documents(path)[2].to_pylist() for path in sorted(out.glob("s?/*.docs.zst"))]
        made[size] = counts, content, origins
    assert made[1 << 26] == made[20_000] == made[3000] == made[100]
    assert units[1 << 26] == [1, 3]
    assert min(units[3000]) >= 10
    rows = [json.loads(each) for group in made[100][2] for each in group if "corpus/all.jsonl" in each]
    written = (folder / "corpus/all.jsonl").read_bytes().split(b"\n")
    assert len(rows) > 40
    assert [json.loads(written[each["row"]]).get("url") for each in rows] == [
        each.get("url") for each in rows
    ]


def test_an_out_that_cannot_be_written_is_one_sentence(folder: Path, monkeypatch) -> None:
    """Before, a local folder named `gs:` was made."""
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    (folder / "own.toml").write_text(own(JSONL))
    with pytest.raises(ValueError, match=r"gs://bucket/x needs a package .*laneformer\[gcs\]"):
        prepare.prepare(folder / "own.toml", Path("gs://bucket/x"), Options(), Console(quiet=True))
    assert not (folder / "gs:").exists()


def planned(folder: Path, source: str) -> list[str]:
    """The files of a source in the order of its units."""
    units = stage.planned(folder / "out", source)["units"]
    names = [file[0] for unit in units for file in unit.get("files", [unit.get("file")])]
    return [name.removeprefix("file://") for name in names]


def test_a_text_folder_and_the_hub_beside_it(folder: Path) -> None:
    """A mirror is for the sources of the hub alone."""
    write_mirror(folder / "mirror")
    for number in range(6):
        (folder / f"texts/{number}").mkdir(parents=True)
        (folder / f"texts/{number}/a.md").write_text(write_text(9 + number, 1)[0])
    text = own('{ kind = "text", paths = ["texts/**/*.md"], files = 4 }', PARQUET)
    hub = f'[sources.hub]\nrepo = "{REPO}"\nconfigs = ["4plus"]\nfiles = 2\n[phase1]\nhub = 1\n'
    run(folder, text.replace("[phase1]\n", hub), mirror=folder / "mirror")
    counts = {name: shards.read_manifest(folder / f"out/{name}")["read"] for name in ("s0", "s1", "hub")}
    assert counts == {"s0": 4, "s1": 80, "hub": 80}
    before, receipts = planned_paths(folder, "hub"), [receipt(folder, name) for name in ("s0", "s1", "hub")]
    run(folder, text.replace("[phase1]\n", hub.replace("files = 2", "files = 3")), mirror=folder / "mirror")
    assert planned_paths(folder, "hub")[:2] == before
    assert len(planned_paths(folder, "hub")) == 3
    more = text.replace("b/*.parquet", 'b/1.parquet", "b/*.parquet').replace(
        "files = 4", 'files = 4, exclude = ["none"]'
    )
    run(folder, more.replace("[phase1]\n", hub.replace("files = 2", "files = 4")), mirror=folder / "mirror")
    assert [receipt(folder, name) for name in ("s0", "s1", "hub")] == receipts  # nothing was fetched again


def receipt(folder: Path, source: str) -> int:
    return (folder / f"out/fetch/{source}/unit-00000/receipt.json").stat().st_mtime_ns


def planned_paths(folder: Path, source: str) -> list[str]:
    return [unit["path"] for unit in stage.planned(folder / "out", source)["units"]]


def test_a_missing_field_or_column_is_named_before_anything_is_read(folder: Path) -> None:
    wrong = [each.replace("content", "body") for each in (JSONL, PARQUET)]
    with pytest.raises(ValueError, match="2 sources are not as the recipe says; nothing was read") as caught:
        run(folder, own(*wrong, JSONL))
    assert ".jsonl.gz:1 has no 'body'; its fields: id, content. Set `field` of the input" in str(caught.value)
    assert "exactly one column of text or bytes named body; its columns: content (string), url (" in str(
        caught.value
    )
    with pytest.raises(ValueError, match=r"s0: .*corpus/\d.jsonl.gz is jsonl, its input has kind = 'text'"):
        run(folder, own('{ kind = "text", paths = ["corpus/*"] }'))
    with pytest.raises(ValueError, match=r"s0: no file matches .*/none/\*, .*/corpus/nobody"):
        run(folder, own('{ kind = "text", paths = ["none/*", "corpus/*", "corpus/nobody"] }'))


def test_too_much_that_cannot_be_read_stops_the_run(folder: Path) -> None:
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / f"texts/{number}.txt").write_bytes(
            write_text(number, 1)[0].encode("utf-16" if number % 3 == 0 else "utf-8")
        )
    text = own('{ kind = "text", paths = ["texts/*"] }')
    with pytest.raises(
        ValueError,
        match=r"'s0': \d\d.*% could not be read \(10 of 30 documents, .*: 10 not_utf8, such as .*/\d+\.txt\. Repair",
    ):
        run(folder, text)
    run(folder, text.replace("seq_len", "max_dropped_share = 0.6\nseq_len"))
    assert shards.read_manifest(folder / "out/s0")["dropped"]["not_utf8"] == 10
    raw = [
        text.encode("latin-1") + (b"\xfc" if number % 3 == 0 else b"")
        for number, text in enumerate(write_text(1, 30))
    ]
    pq.write_table(pa.table({"content": pa.array(raw, pa.binary())}), folder / "b/0.parquet")
    (folder / "b/1.parquet").unlink()
    with pytest.raises(ValueError, match=r"'s0': 33.3% could not be read .*10 not_utf8, such as b/0.parquet"):
        run(folder, own(PARQUET))


def test_a_truncated_file_counts_whole(folder: Path) -> None:
    for number in range(30):
        write_json_lines(folder / f"corpus/{number}.jsonl.gz", write_text(100 + number, 6))
    victim = folder / "corpus/7.jsonl.gz"
    victim.write_bytes(victim.read_bytes()[:-9])
    run(folder, own(JSONL))
    manifest = shards.read_manifest(folder / "out/s0")
    assert manifest["kept"] == 29 * 6
    assert {reason: count for reason, count in manifest["dropped"].items() if count} == {"damaged": 1}
    write_json_lines(victim, write_text(7, 60))  # one file of 30, but a fourth of the bytes
    victim.write_bytes(victim.read_bytes()[:-9])
    with pytest.raises(
        ValueError, match=r"2\d\.\d% could not be read .*, [\d,]+ of [\d,]+ bytes of files\): .*7\.jsonl"
    ):
        run(folder, own(JSONL))


def test_a_file_in_two_sources_is_reported(folder: Path) -> None:
    printed = run(folder, own(JSONL, JSONL.replace("*", "1"), PARQUET))
    assert (
        f"note: 1 files are in s0 and s1, whose shares then hold the same text: {folder}/corpus/1.jsonl.gz"
        in printed
    )


@pytest.mark.parametrize("name", ["corpus/1.jsonl.gz", "b/1.parquet"])
def test_a_file_that_changes_after_the_plan_is_found_and_mends_itself(folder: Path, name: str) -> None:
    text = own(JSONL, PARQUET)
    (folder / "own.toml").write_text(text)
    loaded = recipe_file.load(folder / "own.toml")
    plan.make(loaded, folder / "out", ["s0", "s1"])
    source = "s0" if "json" in name else "s1"
    work = plan_work(loaded, folder)
    unit = next(
        unit
        for unit in work.units()
        if unit.source == source and name in str(stage.planned_unit(folder / "out", unit))
    )
    stage.do(work, unit)
    status = (folder / name).stat()
    os.utime(folder / name, ns=(1, status.st_mtime_ns + 1))
    with pytest.raises(
        ValueError, match=rf"{name} has changed since it was planned \(same size, .*start again with `plan`"
    ):
        stage.do(work, unit)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=rf"{name} is planned and no longer there; start again"):
        stage.do(work, unit)
    run(folder, text)
    assert shards.read_manifest(folder / f"out/{source}")["read"] == 40


def plan_work(loaded: recipe.Recipe, folder: Path) -> stage.Stage:
    from data_mixtures.stages.fetch import Fetch

    return Fetch(loaded, folder / "out", ("s0", "s1"))


@pytest.fixture
def bucket(folder: Path, s3: fsspec.AbstractFileSystem) -> None:
    """The Parquet in s3://bucket/b/."""
    s3.put(f"{folder}/b/", "bucket/b/", recursive=True)


def test_parquet_in_a_bucket_is_split_as_on_a_disk(folder: Path, bucket: None, s3, monkeypatch) -> None:
    table = pa.table({"content": write_text(23, 100, 90)})
    pq.write_table(table, folder / "b/large.parquet", row_group_size=7)
    s3.put(str(folder / "b/large.parquet"), "bucket/b/large.parquet")
    monkeypatch.setattr(plan, "UNIT_BYTES", 3000)
    content = {}
    for name, place in (("disk", "b"), ("store", "s3://bucket/b")):
        run(folder, own(PARQUET.replace("b/*", f"{place}/large*")), name)
        assert len(stage.planned_units(folder / name, "s0")) == 15
        content[name] = shards.read_manifest(folder / name / "s0")["content_sha256"]
    assert content["disk"] == content["store"]


def command(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    line = [
        sys.executable,
        "-m",
        "data_mixtures.prepare",
        str(folder / "own.toml"),
        "--out",
        str(folder / "out"),
        *more,
    ]
    return subprocess.run(line, capture_output=True, text=True, timeout=900)


@pytest.mark.job
def test_the_recipe_with_a_bucket_and_what_a_bucket_may_refuse(
    folder: Path, bucket: None, monkeypatch
) -> None:
    (folder / "own.toml").write_text(RECIPE)
    done = command(folder, "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert len(Mixture.open(folder / "out/phase1.lock.json").sequences(0, 10)[0]) == 10
    assert shards.read_manifest(folder / "out/yours")["read"] == 80
    assert "reused" in command(folder, "--workers", "2").stdout

    (folder / "own.toml").write_text(RECIPE.replace("s3://bucket", "s3://nobody"))
    done = command(folder)
    assert (done.returncode, done.stderr.count("\n")) == (1, 2)
    assert "yours: no file matches s3://nobody/b/*.parquet" in done.stderr
    (folder / "own.toml").write_text(RECIPE)
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
        monkeypatch.delenv(f"AWS_{name}")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    done = command(folder)
    assert (done.returncode, done.stderr.count("\n")) == (1, 2)
    assert (
        "s3://bucket/b/*.parquet cannot be read: NoCredentialsError: Unable to locate credentials"
        in done.stderr
    )


PAGE = ROOT / "docs/own-data.md"
NAMES = ("mine", "yours", "notes")


def blocks(language: str) -> list[str]:
    """The code of the page that stands between fences of this language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


def test_the_page_shows_recipes_that_load(tmp_path: Path) -> None:
    whole, inputs, hub, tokenizer = blocks("toml")
    assert len(whole.splitlines()) <= 12
    tables = [f"[sources.s{n}]\n{line}\n" for n, line in enumerate(inputs.splitlines())] + [hub]
    names = [f"s{n}" for n in range(len(tables) - 1)] + ["web"]
    text = tokenizer + "".join(tables) + "[phase1]\n" + "".join(f"{name} = 1\n" for name in names)
    for path, content in ((tmp_path / "whole.toml", whole), (tmp_path / "parts.toml", text)):
        path.write_text(content)
        assert recipe_file.load(path).phases


@pytest.mark.rotate
def test_the_page_from_files_to_steps(folder: Path, bucket: None) -> None:
    """All commands of the page as they stand; then its input of a bucket in place of the folder b/."""
    write_json_lines(folder / "corpus/more.jsonl.gz", write_text(50, 1500, 60))
    (folder / "notes/deep").mkdir(parents=True)
    for number in range(3):
        (folder / f"notes/deep/{number}.md").write_text(write_text(60 + number, 1, 200)[0])
    (folder / "configs").symlink_to(ROOT / "configs")
    whole, inputs, *_ = blocks("toml")
    (folder / "own.toml").write_text(whole)
    prepare_line, train_lines, change_line = blocks("")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path, "OMP_NUM_THREADS": "1"}

    def shell(command: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout + done.stderr

    assert "mine 60.00 %, yours 30.00 %, notes 10.00 %" in shell(prepare_line)
    said = shell(train_lines)
    held_out = {name: shards.read_manifest(folder / f"data/own/{name}")["valid"]["windows"] for name in NAMES}
    without = ", ".join(name for name in NAMES if not held_out[name])
    assert not without or f"no held-out windows, so not in the validation loss: {without}" in said
    rows = [json.loads(line) for line in (folder / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 5
    assert rows[-1]["tokens_by_source"] == {"mine": 24 * 256, "yours": 12 * 256, "notes": 4 * 256}
    assert list(rows[-1]["valid_loss_by_source"]) == [name for name in NAMES if held_out[name]]
    changed = shell(
        change_line.replace("40000", "5").replace(" --add books=5", "")
    )  # there are no books here
    assert "0 windows are read again" in changed
    windows = {name: shards.read_manifest(folder / f"data/own/{name}")["shards"] for name in NAMES}
    of_bucket = next(line for line in inputs.splitlines() if "s3://" in line)
    (folder / "own.toml").write_text(
        whole.replace(next(line for line in whole.splitlines() if "parquet" in line), of_bucket)
    )
    shell(f"{prepare_line.strip()} --replace")
    assert windows["mine"] == shards.read_manifest(folder / "data/own/mine")["shards"]
    assert shards.read_manifest(folder / "data/own/yours")["read"] == 80
