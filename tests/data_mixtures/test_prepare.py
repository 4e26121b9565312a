"""Tests of preparation end to end: bytes that no machine changes, reuse and failure."""

import re
from pathlib import Path

import pytest
import sentencepiece
from rich.console import Console

from data_mixtures import recipe_file, shards, tokenizer
from data_mixtures.mixture import valid_windows
from data_mixtures.stages import stats, verify
from tests.data_mixtures.conftest import files_of, prepare_folder

EXPORTABLE = {
    "byte_fallback": True,
    "model_type": "bpe",
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}
HELD_OUT = 2**64 // 10  # valid_per_10000 = 1000


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.job
def test_a_source_can_hold_nothing_out(recipe_path, tmp_path):
    # imported here, as both import torch
    from evals.bits_per_byte import load_windows
    from train.validate import read_held_out

    data = tmp_path / "out"
    replace_text(recipe_path, 'category = "web"', "valid_per_10000 = 0")
    prepare_folder(recipe_path, data)
    manifest = shards.read_manifest(data / "notes")
    assert (manifest["valid_per_10000"], manifest["category"]) == (0, "other")
    assert manifest["valid"]["windows"] == 0
    assert shards.read_manifest(data / "sums")["valid_per_10000"] == 1000
    indexes = [shards.read_documents(path)[0] for path in (data / "notes").glob("*.docs.zst")]
    # documents that the recipe's default would hold out are in training
    assert any((ids < HELD_OUT).any() for ids in indexes)
    assert valid_windows(data, "notes").shape == (0, 33)
    assert not verify.verify(data, ("notes", "sums"), Console(quiet=True), workers=1)
    stats.write(data, ("notes", "sums"), Console(quiet=True), 1)
    windows, _ = load_windows(data, 2)
    assert list(windows) == list(read_held_out(data / "phase1.lock.json", 2)) == ["sums"]

    replace_text(recipe_path, "valid_per_10000 = 1000", "valid_per_10000 = 0")
    prepare_folder(recipe_path, data, replace=True)
    with pytest.raises(
        ValueError, match=r"no source of .*out holds text out; raise valid_per_10000"
    ):
        load_windows(data, 2)
    none = r"notes, sums of .* have no held-out windows .*validation.enable = false"
    with pytest.raises(ValueError, match=none):
        read_held_out(data / "phase1.lock.json", 2)


def test_other_data_does_not_replace_what_a_lock_pins_unasked(tiny_copy, tmp_path):
    # nor do units of the older plan stay when it is replaced: the result is a new folder's
    path = tiny_copy / "tiny.toml"
    data = tiny_copy / "out"
    text = path.read_text()
    path.write_text(text + "[phase3]\nnotes = 1\nsums = 1\n")
    # one more phase is not other data
    prepare_folder(path, data)
    before = files_of(data)
    units = len(list((data / "shuffle/sums").glob("unit-*")))
    for old, new, differs in [
        ("seq_len = 32", "seq_len = 16", "seq_len = 32, now 16"),
        ("vocab_size = 400", "vocab_size = 410", "tokenizer = .*400.* now .*410"),
        ("[phase1]", "[filter]\nmin_chars = 70\n[phase1]", "filter = .*64.*, now .*70"),
        ("seed = 11", "seed = 12", "seed = 11, now 12"),
        ("max_bytes = 60_000", "max_bytes = 30_000", "plan = "),
    ]:
        path.write_text(text.replace(old, new))
        refused = rf"is pinned by phase1.lock.json, .*was made with .*{differs}.*or give --replace"
        with pytest.raises(ValueError, match=refused):
            prepare_folder(path, data)
        assert {**files_of(data), "plan.json": before["plan.json"]} == before, "nothing was done"
    (tmp_path / "notes/more.txt").write_text("One more document, which grows the source. " * 9)
    prepare_folder(path, data, replace=True)
    # units of the older plan must not stay: a new folder has the same files
    prepare_folder(path, tmp_path / "fresh")
    after = files_of(data)
    fresh = files_of(tmp_path / "fresh")
    assert {name: after[name] for name in fresh} == fresh
    assert after.keys() - fresh.keys() == {"phase3.lock.json"}
    assert len(list((data / "shuffle/sums").glob("unit-*"))) < units


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({}, "has no byte pieces"),  # what spm_train does by default
        ({"byte_fallback": True, "model_type": "bpe"}, "Only BPE models with the identity"),
        ({**EXPORTABLE, "user_defined_symbols": ["<|im_end|>"]}, "no user_defined_symbols"),
        (EXPORTABLE, ""),
    ],
)
def test_what_export_demands_of_a_tokenizer_is_asked_before_anything_is_read(
    recipe_path, tmp_path, other, message
):
    text = (tmp_path / "notes/1.txt").read_text() + (tmp_path / "sums.jsonl").read_text()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.split("\n") * 9),
        model_prefix=str(tmp_path / "own"),
        vocab_size=400,
        hard_vocab_limit=False,
        minloglevel=2,
        **other,
    )
    recipe_path.write_text(
        re.sub(r"tokenizer = .*", 'tokenizer = "own.model"', recipe_path.read_text())
    )
    if not message:
        tokenizer.check_exportable(recipe_file.load(recipe_path).tokenizer)
        return
    refused = rf"tokenizer .*own\.model cannot be exported: .*{message}"
    with pytest.raises(ValueError, match=refused):
        prepare_folder(recipe_path, tmp_path / "out")
    assert not (tmp_path / "out/plan.json").exists()


def test_what_is_missing_is_named_before_anything_is_done(recipe_path, tmp_path):
    data = tmp_path / "out"
    text = recipe_path.read_text()
    tokenizer_line = next(line for line in text.splitlines() if line.startswith("tokenizer"))
    for old, new, message in [
        ("/notes/*.txt", "/nothing/*.txt", r"notes: no file matches .*nothing/\*\.txt"),
        (tokenizer_line, 'tokenizer = "none.model"', r"none.model does not exist"),
        ("[phase1]", '[filter.benchmarks]\nmbpp = "none.jsonl"\n[phase1]', r"none.jsonl"),
    ]:
        recipe_path.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=message):
            prepare_folder(recipe_path, data)
        assert not (data / "plan.json").exists()


def test_ids_come_from_the_model(tmp_path):
    # T5's convention: no <s>, and ids in another order
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["some words"] * 9),
        model_prefix=str(tmp_path / "t5"),
        vocab_size=20,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
        hard_vocab_limit=False,
    )
    encoder = tokenizer.load(tmp_path / "t5.model")
    assert (encoder.bos_id, encoder.eos_id) == (1, 1), "one separator in front of each document"
    tokens, lengths = encoder.encode(["some", "words"])
    assert (tokens == 1).nonzero()[0].tolist() == [0, lengths[0]]
    (tmp_path / "text.model").write_text("text")
    with pytest.raises(ValueError, match=r"text.model cannot be used as a sentencepiece model"):
        tokenizer.load(tmp_path / "text.model")
