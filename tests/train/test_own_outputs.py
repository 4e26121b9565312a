"""What a model writes itself, as data: prompts, continuation, resumption; the whole way to a head."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from data_mixtures.mixture import TRAINED, Mixture
from laneformer import Engine
from laneformer.config import DRAFT_IDS, hf_name
from laneformer.hf.export import export
from laneformer.hf.load_folder import import_folder
from laneformer.prompts import PromptEncoder
from records.files import read_lines
from tests.train import production
from tests.train.logged import STEPS
from tests.train.runs import metrics
from train.own_outputs import Arguments, run

pytestmark = pytest.mark.rotate
PROMPTS, PROMPT, NEW, SEQ_LEN = 40, 6, 10, 32


@pytest.fixture(scope="module")
def model(logged_run: Path, prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model") / "hf"
    export(logged_run / f"checkpoint/step-{STEPS}", out, tokenizer=prepared_data / "tokenizer.model")
    return out


def arguments(model: Path, lock: Path, out: Path, **changes: object) -> Arguments:
    given = {"prompts": PROMPTS, "prompt_tokens": PROMPT, "new_tokens": NEW, "holdout": 0.2, **changes}
    return Arguments(model, lock, out, **given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(model: Path, prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(arguments(model, prepared_data / "phase1.lock.json", tmp_path_factory.mktemp("own")))


def test_texts_are_the_models(made: Path, model: Path, prepared_data: Path) -> None:
    """Beginnings of the mixture's windows, and what the engine answers to each alone."""
    rows, given = read_lines(made.parent / "outputs.jsonl"), Mixture.open(prepared_data / "phase1.lock.json")
    assert [row["number"] for row in rows] == list(range(PROMPTS))
    with Engine.from_pretrained(model, device="cpu") as engine:
        for row in rows[::13]:
            prompt = given.sequences(row["number"], 1)[0][0, :PROMPT].tolist()
            assert row["ids"] == prompt + engine.generate(prompt, max_new_tokens=NEW, temperature=0.0)


def test_only_continuations_are_trained(made: Path) -> None:
    mixture, rows = Mixture.open(made), read_lines(made.parent / "outputs.jsonl")
    count = json.loads((made.parent / "own_outputs/source.json").read_text())["windows"]
    tokens, flags = mixture.sequences(0, count)[0], mixture.flags(0, count)
    written = {tuple(row["ids"][PROMPT:]) for row in rows}
    found = 0
    for ids, marks in zip(tokens, flags & TRAINED > 0, strict=True):
        places = np.flatnonzero(marks)
        pieces = np.split(ids[places], np.flatnonzero(np.diff(places) > 1) + 1)
        assert all(tuple(piece.tolist()) in written for piece in pieces)
        found += len(pieces)
    manifest = json.loads((made.parent / "own_outputs/source.json").read_text())
    assert 0 < found < manifest["documents"] <= PROMPTS, "the rest is held out"


def test_conversations_are_begun_in_the_models_own_template(
    model: Path, prepared_data: Path, tmp_path: Path
) -> None:
    """In turn with texts; a row is passed over that has no question, or whose question is too long."""
    said = [["2 + 3?", "5"], ["one" * 99, "!"], ["a b", "c"], ["who?", "me"]]
    lines = [
        {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in said
    ]
    lines[2]["messages"].pop(0)
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"text": "nobody asks"}]))
    wide, lock = shutil.copytree(model, tmp_path / "wide"), prepared_data / "phase1.lock.json"
    config = json.loads((wide / "config.json").read_text())
    (wide / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    options = {"conversations": (str(asked),), "prompt_tokens": 90, "seq_len": 128, "holdout": 0.5}
    run(arguments(wide, lock, tmp_path / "own", **options))
    rows, given = read_lines(tmp_path / "own/outputs.jsonl"), Mixture.open(lock)
    prompts = [row["ids"][: row["prompt_tokens"]] for row in rows]
    with Engine.from_pretrained(wide, device="cpu") as engine:
        encoder = PromptEncoder(engine.tokenizer, engine.tokenizer_config)
    expected = [encoder.conversation([{"role": "user", "content": text}]) for text in ("2 + 3?", "who?")]
    assert prompts[1::2] == expected
    assert prompts[0::2] == [given.sequences(i, 1)[0][0, :-1].tolist() for i in range(2)]
    with pytest.raises(ValueError, match="outputs made with another conversations"):
        run(arguments(wide, lock, tmp_path / "own", **options | {"conversations": ()}))


def test_it_goes_on_where_it_was_killed(made: Path, model: Path, prepared_data: Path, tmp_path: Path) -> None:
    shutil.copytree(made.parent, tmp_path / "own")
    outputs = tmp_path / "own/outputs.jsonl"
    lines = outputs.read_text().splitlines(keepends=True)
    outputs.write_text("".join(lines[:17]) + lines[17][:9])
    again = run(arguments(model, prepared_data / "phase1.lock.json", tmp_path / "own"))
    assert outputs.read_text().splitlines(keepends=True) == lines
    assert json.loads(again.read_text()) == json.loads(made.read_text())


def test_another_model_is_refused(made: Path, model: Path, prepared_data: Path) -> None:
    with pytest.raises(ValueError, match="outputs made with another new_tokens; give another --out"):
        run(arguments(model, prepared_data / "phase1.lock.json", made.parent, new_tokens=NEW + 1))


LOADED = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert model.model.mtp.draft_ids.tolist() == sorted(model.model.mtp.draft_ids.tolist())
made = model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=4, do_sample=False)
print(made.shape, *model.model.mtp.draft_ids.shape)
"""


def test_shipped_job(shipped_run: Path, made: Path, prepared_data: Path, tmp_path: Path) -> None:
    """configs/mtp.toml on two ranks with shapes shrunk, without the head before; then exported."""
    start = shipped_run / f"checkpoint/step-{production.STEPS}"
    changes = {"checkpoint.initial_load_path": start, "training.seq_len": SEQ_LEN}
    folder = production.train(production.torchrun(2), "mtp", tmp_path / "mtp", made, changes)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, production.STEPS + 1))
    assert all(len(row["draft_loss"]) == 3 and row["grad_norm"] > 0 for row in rows)
    assert all(len(row["valid_acceptance"]) == 3 for row in rows)
    production.assert_nothing_else_deviates("mtp", folder)
    checkpoint, out = folder / f"checkpoint/step-{production.STEPS}", tmp_path / "hf"
    command = ["tools.export_hf", "--checkpoint", checkpoint, "--out", out, "--draft-vocab-size", "64"]
    tokenizer = ["--tokenizer", prepared_data / "tokenizer.model"]
    subprocess.run([sys.executable, "-m", *map(str, [*command, *tokenizer])], check=True)
    stored = load_file(out / "model.safetensors")
    ids = stored[hf_name(DRAFT_IDS)]
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == len(ids) == 64
    loaded = subprocess.run(
        [sys.executable, "-c", LOADED, str(out)], capture_output=True, text=True, cwd=tmp_path
    )
    assert loaded.stdout.split() == ["torch.Size([1,", "7])", "64"], loaded.stderr
    import_folder(out, tmp_path / "imported")
    assert json.loads((tmp_path / "imported/model.json").read_text())["draft_vocab_size"] == 0
