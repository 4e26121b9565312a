"""Preparation, end to end on tiny text: the bytes on disk, their independence of the
machine, reuse and failure.
"""

import fcntl
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import xxhash
from rich.console import Console

from data_mixtures import prepare, recipe, recipe_file, shards, tokenizer
from data_mixtures.mixture import Mixture, valid_windows
from data_mixtures.stages import plan, stats, verify
from evals.bits_per_byte import load_windows
from records.files import file_sha256
from train.validate import held_out

HELD_OUT = 2**64 // 10  # valid_per_10000 = 1000


def documents(data: Path, source: str):
    """(id, tokens) of every training document that is whole, read back through the shards and their indexes."""
    manifest = shards.read_manifest(data / source)
    pieces, starts, ids, lengths = [], [], [], []
    for shard in manifest["shards"]:
        tokens = np.fromfile(data / source / shard["name"], "<u2")
        doc_ids, doc_lengths, _ = shards.read_documents(data / source / shard["docs"]["name"])
        assert len(doc_ids) == shard["docs"]["documents"]
        pieces.append(tokens[:-1] if shard is not manifest["shards"][-1] else tokens)
        ids += doc_ids.tolist()
        lengths += doc_lengths.tolist()
    stream = np.concatenate(pieces)
    starts = np.cumsum([0, *lengths])
    return [
        (ids[i], stream[starts[i] : starts[i + 1]]) for i in range(len(ids)) if starts[i + 1] <= len(stream)
    ]


def test_documents_come_back_in_order_with_their_ids(recipe_path, run_prepare, tmp_path):
    data = tmp_path / "out"
    run_prepare(recipe_path, data)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(data / "tokenizer.model"))
    for source in ("notes", "sums"):
        found = documents(data, source)
        assert len(found) > 20
        for identity, tokens in found:
            assert tokens[0] == 1
            assert tokens[-1] == 2
            assert not np.isin(tokens[1:-1], (0, 1, 2)).any()
            text = processor.decode(tokens[1:-1].tolist())
            assert xxhash.xxh3_128_intdigest(text.encode()) % 2**64 == identity  # nothing was lost or changed
            assert identity >= HELD_OUT
        keys = [xxhash.xxh3_64_intdigest(identity.to_bytes(8, "little"), seed=11) for identity, _ in found]
        assert keys == sorted(keys)
    assert any("</s>" in processor.decode(tokens.tolist()) for _, tokens in documents(data, "notes"))


def test_manifest_counts_and_hashes(recipe_path, run_prepare, tmp_path):
    data = tmp_path / "out"
    run_prepare(recipe_path, data)
    manifest = shards.read_manifest(data / "notes")
    assert manifest["documents"] == 48
    assert {reason: count for reason, count in manifest["dropped"].items() if count} == {
        "duplicate": 12,
        "not_utf8": 1,
    }
    assert manifest["read"] == 61 == manifest["kept"] + sum(manifest["dropped"].values())
    assert len(manifest["shards"]) > 1
    for entry in (*manifest["shards"], manifest["valid"]):
        raw = (data / "notes" / entry["name"]).read_bytes()
        assert len(raw) == entry["bytes"] == 2 * (entry["windows"] * 32 + 1) == 2 * entry["tokens"]
        assert hashlib.sha256(raw).hexdigest() == entry["sha256"]
        assert [xxhash.xxh3_64_hexdigest(raw)] == entry["xxh3_blocks"]  # one block: smaller than 16 MiB
    left_over = manifest["tokens"] - 32 * (manifest["windows"] + manifest["valid"]["windows"])
    assert 0 < left_over <= 2 * 32  # less than a window at the end of training and of held-out tokens


def test_held_out_documents_are_a_range_of_ids(recipe_path, run_prepare, tmp_path):
    run_prepare(recipe_path, tmp_path / "out")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "out/tokenizer.model"))
    held_out, checked = valid_windows(tmp_path / "out", "sums"), 0
    stream = [*held_out[:, :-1].ravel().tolist(), int(held_out[-1, -1])]
    for part in "".join(f" {t}" for t in stream).split(" 1 ")[1:-1]:  # the whole documents
        text = processor.decode([int(t) for t in part.split()][:-1])
        assert xxhash.xxh3_128_intdigest(text.encode()) % 2**64 < HELD_OUT
        checked += 1
    assert checked >= 2


def test_a_source_can_hold_nothing_out(recipe_path, run_prepare, tmp_path, monkeypatch):
    data = tmp_path / "out"
    recipe_path.write_text(recipe_path.read_text().replace('category = "web"', "valid_per_10000 = 0", 1))
    run_prepare(recipe_path, data)
    manifest = shards.read_manifest(data / "notes")
    assert (manifest["valid_per_10000"], manifest["category"], manifest["valid"]["windows"]) == (
        0,
        "other",
        0,
    )
    assert shards.read_manifest(data / "sums")["valid_per_10000"] == 1000
    assert any(identity < HELD_OUT for identity, _ in documents(data, "notes"))
    assert valid_windows(data, "notes").shape == (0, 33)
    assert not verify.verify(data, ("notes", "sums"), Console(quiet=True), workers=1)
    stats.write(data, ("notes", "sums"), Console(quiet=True), workers=1)
    windows, _ = load_windows(data, 2)
    assert list(windows) == list(held_out(data / "phase1.lock.json", 2)) == ["sums"]

    recipe_path.write_text(
        recipe_path.read_text().replace("valid_per_10000 = 1000", "valid_per_10000 = 0", 1)
    )
    run_prepare(recipe_path, data, replace=True)
    with pytest.raises(ValueError, match=r"no source of .*out holds text out; raise valid_per_10000"):
        load_windows(data, 2)
    with pytest.raises(
        ValueError, match=r"notes, sums of .* have no held-out windows .*validation.enable = false"
    ):
        held_out(data / "phase1.lock.json", 2)


def files_of(folder: Path) -> dict[str, bytes]:
    """All files but the executors' logs: what is published, and how it was made."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".logs" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.job
def test_any_number_of_workers_gives_the_same_bytes(recipe_path, run_prepare, tmp_path):
    run_prepare(recipe_path, tmp_path / "one", workers=1)
    run_prepare(recipe_path, tmp_path / "four", workers=4)
    one, four = files_of(tmp_path / "one"), files_of(tmp_path / "four")
    assert "notes/shard-00000.bin" in one
    assert one == four


def test_a_finished_source_is_reused_and_a_changed_or_damaged_one_rebuilt(recipe_path, run_prepare, tmp_path):
    data = tmp_path / "out"
    assert "built" in run_prepare(recipe_path, data)
    before = files_of(data)
    printed = run_prepare(recipe_path, data)
    assert "reused" in printed
    assert "built" not in printed
    assert files_of(data) == before

    shard = data / "notes/shard-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    printed = run_prepare(recipe_path, data)
    assert "built" in printed
    assert "reused" in printed
    assert files_of(data) == before

    (tmp_path / "notes/0.txt").write_text("something else entirely, " * 20)
    assert "reused" not in run_prepare(
        recipe_path, data, replace=True
    )  # the tokenizer was trained on that file as well
    assert files_of(data)["notes/source.json"] != before["notes/source.json"]


def test_a_failure_leaves_the_old_data_and_no_debris(recipe_path, run_prepare, tmp_path, monkeypatch):
    data = tmp_path / "out"
    run_prepare(recipe_path, data)
    before = files_of(data)
    (data / "shuffle/notes/unit-00000/receipt.json").unlink()

    def full_disk(*args):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(shards, "write_documents", full_disk)
        with pytest.raises(ValueError, match="shuffle notes/unit-00000: no space left"):
            run_prepare(recipe_path, data)
    without = {
        name: content for name, content in before.items() if name != "shuffle/notes/unit-00000/receipt.json"
    }
    assert files_of(data) == without
    (data / "shuffle/notes/.unit-00000.0.partial").mkdir()  # what a killed process leaves
    (data / ".notes.partial").mkdir()
    run_prepare(recipe_path, data)
    assert not list(data.rglob(".*.partial"))
    assert files_of(data) == before


def test_units_of_an_older_plan_are_removed(recipe_path, run_prepare, tmp_path):
    run_prepare(recipe_path, tmp_path / "out")
    units = len(list((tmp_path / "out/shuffle/sums").glob("unit-*")))
    recipe_path.write_text(recipe_path.read_text().replace("max_bytes = 60_000", "max_bytes = 30_000"))
    run_prepare(recipe_path, tmp_path / "out", replace=True)
    run_prepare(recipe_path, tmp_path / "fresh")
    assert files_of(tmp_path / "out") == files_of(tmp_path / "fresh")
    assert len(list((tmp_path / "out/shuffle/sums").glob("unit-*"))) < units


OTHER_DATA = [
    ("seq_len = 32", "seq_len = 16", "seq_len = 32, now 16"),
    ("vocab_size = 400", "vocab_size = 410", "tokenizer = .*400.* now .*410"),
    ("[phase1]", "[filter]\nmin_chars = 70\n[phase1]", "filter = .*64.*, now .*70"),
    ("seed = 11", "seed = 12", "seed = 11, now 12"),
    ("max_bytes = 60_000", "max_bytes = 30_000", "plan = "),
]


@pytest.mark.job
def test_other_data_does_not_replace_what_a_lock_pins_unasked(recipe_path, run_prepare, tmp_path):
    data, text = tmp_path / "out", recipe_path.read_text()
    run_prepare(recipe_path, data)
    recipe_path.write_text(text + "[phase3]\nnotes = 1\nsums = 1\n")
    run_prepare(recipe_path, data)  # one phase more is no other data
    before, refused = (
        files_of(data),
        r"is pinned by phase1.lock.json, .*was made with .*{}.*or give --replace",
    )
    for old, new, differ in OTHER_DATA:
        recipe_path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=refused.format(differ)):
            run_prepare(recipe_path, data)
        assert {**files_of(data), "plan.json": before["plan.json"]} == before, "nothing was done"
    recipe_path.write_text(text)
    (tmp_path / "notes/more.txt").write_text("One more document, which grows the source. " * 9)
    with pytest.raises(ValueError, match=refused.format("plan = ")):
        run_prepare(recipe_path, data)
    assert {**files_of(data), "plan.json": before["plan.json"]} == before
    run_prepare(recipe_path, data, replace=True)
    run_prepare(recipe_path, tmp_path / "fresh")
    fresh = files_of(tmp_path / "fresh")
    assert {name: content for name, content in files_of(data).items() if name in fresh} == fresh


def test_two_preparations_of_one_folder_are_refused(recipe_path, run_prepare, tmp_path):
    data = tmp_path / "out"
    data.mkdir()
    with (data / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is preparing"):
            run_prepare(recipe_path, data)


def test_missing_text_names_the_source(recipe_path, run_prepare, tmp_path):
    recipe_path.write_text(recipe_path.read_text().replace("/notes/*.txt", "/nothing/*.txt"))
    with pytest.raises(ValueError, match=r"notes: no file matches .*nothing/\*\.txt"):
        run_prepare(recipe_path, tmp_path / "out")
    assert not (tmp_path / "out/phase1.lock.json").exists()


@pytest.mark.job
def test_a_given_tokenizer_is_copied_not_trained(recipe_path, run_prepare, tmp_path):
    run_prepare(recipe_path, tmp_path / "first")
    text = recipe_path.read_text()
    line = next(line for line in text.splitlines() if line.startswith("tokenizer"))
    recipe_path.write_text(
        text.replace(line, 'tokenizer = "first/tokenizer.model"')
    )  # relative to the recipe
    run_prepare(recipe_path, tmp_path / "second")
    first, second = files_of(tmp_path / "first"), files_of(tmp_path / "second")
    assert first["tokenizer.model"] == second["tokenizer.model"]
    assert first["phase1.lock.json"] == second["phase1.lock.json"]
    sha = Mixture.open(tmp_path / "second/phase1.lock.json").tokenizer_sha256
    assert sha == file_sha256(tmp_path / "first/tokenizer.model")


def test_ids_come_from_the_model(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        tokenizer.load(tmp_path / "tokenizer.model")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words"] * 9), model_prefix=str(tmp_path / "t5"), vocab_size=20,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    made = tokenizer.load(tmp_path / "t5.model")
    assert (made.bos_id, made.eos_id) == (1, 1), "one separator in front of each document"
    tokens, lengths = made.encode(["some", "words"])
    assert (tokens == 1).nonzero()[0].tolist() == [0, lengths[0]]
    (tmp_path / "text.model").write_text("text")
    with pytest.raises(ValueError, match=r"text.model cannot be used as a sentencepiece model"):
        tokenizer.load(tmp_path / "text.model")


def test_what_the_last_stages_need_is_missed_before_the_first(recipe_path, run_prepare, tmp_path):
    text = recipe_path.read_text()
    line = next(line for line in text.splitlines() if line.startswith("tokenizer"))
    recipe_path.write_text(text.replace(line, 'tokenizer = "none.model"'))
    with pytest.raises(ValueError, match=r"none.model does not exist"):
        run_prepare(recipe_path, tmp_path / "out")
    recipe_path.write_text(text + '[filter.benchmarks]\nmbpp = "none.jsonl"\n')
    with pytest.raises(ValueError, match=r"none.jsonl"):
        run_prepare(recipe_path, tmp_path / "out")
    assert not (tmp_path / "out/plan.json").exists()


@pytest.mark.parametrize("name", ["nemotron.toml", "nemotron-code.toml"])
def test_the_recipes_of_the_2b_run_are_planned_and_all_refusals_named(name, tmp_path):
    read = recipe_file.load(Path(prepare.__file__).parent / name)
    (tmp_path / "mirror").mkdir()
    with pytest.raises(ValueError, match=r"9 repositories refuse to be read") as caught:
        plan.make(read, tmp_path / "out", [source.name for source in read.sources], str(tmp_path / "mirror"))
    on_hub = [source.name for source in read.sources if isinstance(source, recipe.HubSource)]
    named = [
        name for line in str(caught.value).splitlines()[1:] for name in line.split(":")[0].strip().split(", ")
    ]
    assert sorted(named) == sorted(on_hub)


def test_lock_pins_what_it_should(recipe_path, run_prepare, tmp_path):
    run_prepare(recipe_path, tmp_path / "out")
    lock = json.loads((tmp_path / "out/phase2.lock.json").read_text())
    assert [(s["name"], s["category"], s["weight"], s["epoch_cap"]) for s in lock["sources"]] == [
        ("notes", "web", 1, 3),
        ("sums", "math", 5, 3),
    ]
    manifest = shards.read_manifest(tmp_path / "out/sums")
    assert (
        lock["sources"][1]["content_sha256"] == manifest["content_sha256"] == shards.content_sha256(manifest)
    )
    assert (lock["seed"], lock["seq_len"], lock["packing"]) == (11, 32, "concat")
    tokens, sources = Mixture.open(tmp_path / "out/phase2.lock.json").sequences(0, 12)
    assert tokens.shape == (12, 33)
    assert np.bincount(sources).tolist() == [2, 10]
