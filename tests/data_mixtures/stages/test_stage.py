"""Tests of unit keys: a stage's format decides, not its code; hashes here fix its output."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from data_mixtures import shards
from data_mixtures.stages import sorted_runs, stage
from tests.data_mixtures.conftest import prepare_folder

RECIPE = """
tokenizer = { path = "tokenizer.json", bos = "<s>", eos = "</s>" }
seq_len = 16
seed = 3
windows_per_shard = 100
valid_per_10000 = 1500
max_document_chars = 700
[filter]
min_chars = 5
repeated_ngrams = true
[filter.benchmarks]
quiz = "quiz.jsonl"
[dedup]
minhash = true
contained_share = 0.5
[sources.web]
inputs = [{ kind = "jsonl", paths = ["a/*.jsonl"] }]
[sources.book]
inputs = [{ kind = "parquet", paths = ["b/*.parquet"] }]
[phase1]
web = 2
book = 1
"""
QUESTION = "Which river has its source in the Black Forest and its mouth in the Black Sea, after ten countries"
WORDS = [
    "one",
    "two",
    "drei",
    "vier",
    "пять",
    "шесть",
    "七",
    "八",
    "neun_9",
    "ten;",
    "ELEVEN",
    "'twelve",
]
NASTY = [
    "",
    "  \n ",
    "abc",
    "a\0b\0c d e",
    "lone \ud800 surrogate",
    "\ufeffmark",
    "e\u0301 \u00e9 \ufb01",
    "tab\tand\r\nlines",
    f"Now: {QUESTION}?",
    "<s> </s> spelled",
    "long " * 400,
    "line\n" * 300,
    "so so " * 60,
    "日本語の文章です。" * 5,
]
# by stage and format. A digest that differs: results are others than those of the format before, so
# raise it in stage.FORMATS, which makes units again, and replace the digest here
GOLDEN = {
    ("fetch", 1): "e81ea2312baab482",
    ("filter", 1): "1b3d5c1869a52e2f",
    ("signatures", 3): "3fa749191b5beade",
    ("bands", 2): "43097ccdcd0134fe",
    ("dedup", 2): "dc4e2cbd308c34a9",
    ("held_out", 1): "ab3c1019a592b83f",
    ("scan", 1): "f06f887ae1b7a223",
    ("contained", 1): "34e5adf8b52d7090",
    ("tokenize", 1): "5557f63c460db98d",
    ("runs", 1): "e51db90e7aa8ffb3",
    ("order", 1): "64af80c8dd3be761",
    ("shuffle", 1): "c1f0ff1244d8abb5",
}


def write(folder: Path) -> Path:
    plain = [f"{n} " + " ".join(WORDS[(n * k) % 12] for k in range(3 + n)) for n in range(26)]
    texts = (
        [text for pair in zip(NASTY, plain[:14], strict=True) for text in pair]
        + plain[14:]
        + plain[3:5]
    )
    (folder / "a").mkdir(parents=True)
    (folder / "b").mkdir()
    for number in range(2):
        rows = [{"text": text, "url": f"u{number}/{n}"} for n, text in enumerate(texts[number::2])]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"a/{number}.jsonl").write_text(lines + "no json\n")
        clean = [text.encode(errors="replace").decode() + f" {number}" for text in texts]
        pq.write_table(pa.table({"text": clean}), folder / f"b/{number}.parquet")
    (folder / "quiz.jsonl").write_text(json.dumps({"question": QUESTION}))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "recipe.toml").write_text(RECIPE)
    return folder / "recipe.toml"


def digest(out: Path, name: str) -> str:
    """Hash a stage's output by content."""
    whole = hashlib.sha256()
    # rows of Parquet, whose bytes vary with pyarrow; else bytes
    for path in sorted((out / name).rglob("unit-*/*")):
        if path.name == stage.RECEIPT:
            counts = json.loads(path.read_text())["counts"]
            facts = {
                key: counts[key]
                for key in ("documents", "read", "cut", "kept", "dropped")
                if key in counts
            }
            whole.update(json.dumps(facts, sort_keys=True).encode())
        elif path.suffix == ".parquet":
            whole.update(json.dumps(pq.read_table(path).to_pydict(), default=bytes.hex).encode())
        elif path.suffix == ".zst":
            ids, lengths, origins = shards.read_documents(path)
            whole.update(
                ids.tobytes() + lengths.tobytes() + json.dumps(origins.to_pylist()).encode()
            )
        else:
            whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def units_done(folder: Path) -> dict[str, int]:
    """Prepare folder/in in folder/out; count the units that each stage made."""
    with pytest.MonkeyPatch.context() as patch:
        # merge both units of a source, so that the stage `runs` has work
        patch.setattr(sorted_runs, "RUNS", 1)
        printed = prepare_folder(folder / "in/recipe.toml", folder / "out", replace=True)
    return {
        name: int(count) for name, count in re.findall(r"^(\w+) +(\d+) units done", printed, re.M)
    }


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("golden")
    write(folder / "in")
    units_done(folder)
    return folder / "out"


@pytest.mark.parametrize("name", [name for name, _ in GOLDEN])
def test_results_of_a_stage_are_those_of_its_format(out, name):
    key = (name, stage.FORMATS[name])
    assert key in GOLDEN, f"add the hash of format {key[1]} of {name!r}: {digest(out, name)}"
    assert digest(out, name) == GOLDEN[key], (
        f"{name!r} gives other results than its format {key[1]}: raise it in data_mixtures.stages.stage.FORMATS"
    )


@pytest.mark.parametrize(
    ("old", "new", "again"),
    [
        ("min_chars = 5", "min_chars = 4", "filter"),
        ("quiz.jsonl", "other.jsonl", "filter"),
        ("seq_len = 16", "seq_len = 17", "shuffle"),
        ('eos = "</s>"', 'eos = "<s>"', "tokenize runs order shuffle"),
        (
            "valid_per_10000 = 1500",
            "valid_per_10000 = 1400",
            "signatures bands dedup held_out scan contained tokenize runs order shuffle",
        ),
        (
            "minhash = true",
            "minhash = true\nn_grams = 4",
            "signatures bands dedup held_out scan contained tokenize runs order shuffle",
        ),
    ],
)
def test_a_changed_recipe_makes_the_units_again_that_depend_on_it(out, tmp_path, old, new, again):
    shutil.copytree(out.parent, tmp_path / "copy")
    (tmp_path / "copy/in/other.jsonl").write_text(json.dumps({"question": f"{QUESTION} and seas"}))
    (tmp_path / "copy/in/recipe.toml").write_text(RECIPE.replace(old, new))
    units = units_done(tmp_path / "copy")
    # fetch runs again because the copy's input files have other paths
    del units["fetch"]
    assert [name for name, count in units.items() if count] == again.split()


def test_a_higher_format_makes_units_again_and_other_code_does_not(out, monkeypatch):
    receipts = [path.stat().st_mtime_ns for path in sorted(out.rglob(stage.RECEIPT))]
    assert stage.receipt_of(out, "filter", stage.Unit("web", 0))["code"] == stage.code_sha256()
    # receipts say which code made a unit, and keys do not depend on it
    monkeypatch.setattr(stage, "code_sha256", lambda: "other code")
    assert not any(units_done(out.parent).values())
    assert receipts == [path.stat().st_mtime_ns for path in sorted(out.rglob(stage.RECEIPT))]
    monkeypatch.setitem(stage.FORMATS, "filter", stage.FORMATS["filter"] + 1)
    units = units_done(out.parent)
    assert units["fetch"] == units["tokenize"] == 0, (
        "the same results are read by the stages behind"
    )
    assert units["filter"] > 0
