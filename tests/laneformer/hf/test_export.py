"""Tests of export: DCP checkpoint -> HF folder -> fresh processes without our packages, both majors of Transformers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor

from laneformer.hf.export import export, load_weights, stage_folder, verify
from laneformer.model import KVCache, run_layers
from tests.laneformer.hf.hf_assets import (
    FLOAT32_TOLERANCE,
    VOCAB_SIZE,
    random_model,
    sentencepiece_model,
    small_config,
    stdlib_sources,
    write_run,
)
from tests.tokenizer_assets import encode_chat

REPOSITORY = Path(__file__).parents[3]
TRANSFORMERS_4 = REPOSITORY / ".venv" / "transformers-4.57"
NEW_TOKENS = 24
CHATS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  What is\n2 + 2? "},
        {"role": "assistant", "content": "4\n"},
        {"role": "user", "content": "Thanks"},
    ],
    [{"role": "user", "content": "a</ b"}, {"role": "assistant", "content": " é😀日 <|▁\n"}],
]
TEXTS = [
    "",
    " ",
    "   x",
    "a  b",
    "\t\tif x:\n",
    "\n\n",
    "é 😀 日本",
    "3.14159 " * 3,
    *stdlib_sources()[:3],
]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def draw_ids(*shape) -> torch.Tensor:
    return torch.randint(3, VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(5))


# beyond the window of 16
IDS, PROMPTS = draw_ids(2, 50), [draw_ids(n).tolist() for n in (5, 23, 16)]


@torch.no_grad()
def compute_outputs(model) -> dict[str, torch.Tensor]:
    positions = torch.arange(IDS.shape[1])
    masks, embedding = model.masks(positions, positions), model.tok_embeddings(IDS)
    h, _ = run_layers(model.layers, model.config, embedding, model.rope(positions), masks)
    logits = model(IDS)
    return {
        "logits": logits,
        "padded_logits": logits,
        "saved_logits": logits,
        "hidden": model.norm(h).mean(2),
    }


@torch.no_grad()
def greedy(model, prompt) -> list[int]:
    """Decode greedily with the training model, token by token, up to `</s>`."""
    cache, new, feed = KVCache(model.config.num_hidden_layers), [], prompt
    while len(new) < NEW_TOKENS and new[-1:] != [2]:
        new.append(int(model(torch.tensor([feed]), cache)[0, -1].argmax()))
        feed = new[-1:]
    return new


@pytest.fixture(scope="module")
def models(model, export_folder, tmp_path_factory):
    # converted: a tied head, which 4.57 would tie in another shape; late upper layers and the flush
    overrides = {
        "tie_word_embeddings": True,
        "broadcast_delay": 1,
        "first_late_layer": 3,
        "flush": True,
    }
    converted, root = random_model(**overrides), tmp_path_factory.mktemp("converted")
    export(write_run(root / "run", converted), root / "hf", "float32")
    return {"trained": (model, export_folder[0]), "converted": (converted, root / "hf")}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("5", marks=pytest.mark.job),
        pytest.param("4.57", marks=pytest.mark.rotate),
    ],
)
def answers(
    request,
    tmp_path_factory,
    models,
):
    """Return a fresh process' answers to the same questions of each model."""
    # it runs elsewhere and cannot import any of our packages
    version, elsewhere = request.param, tmp_path_factory.mktemp("elsewhere")
    if version == "4.57" and not TRANSFORMERS_4.is_dir():
        pytest.skip(f"no {TRANSFORMERS_4}; `make test` installs it")
    config = {name for model, _ in models.values() for name in model.config.to_dict()}
    questions = {
        "ids": IDS,
        "prompts": PROMPTS,
        "new_tokens": NEW_TOKENS,
        "texts": TEXTS,
        "chats": CHATS,
        "config": config,
    }
    torch.save(questions, elsewhere / "questions.pt")
    script, package = (
        Path(__file__).with_name("fresh_process.py"),
        TRANSFORMERS_4 if version == "4.57" else "",
    )
    paths = script, package, elsewhere / "questions.pt", elsewhere / "answers.pt"
    command = [
        sys.executable,
        "-I",
        *map(str, paths),
        *(str(folder) for _, folder in models.values()),
    ]
    env = {
        name: os.environ[name]
        for name in ("PATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    # an empty cache and no downloads
    env |= {"HF_HOME": str(elsewhere / "hf_home"), "HF_HUB_OFFLINE": "1", "HOME": str(elsewhere)}
    process = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    by_folder = torch.load(elsewhere / "answers.pt")
    for answer in by_folder.values():
        assert answer["transformers"].startswith(version)
        assert answer["ours"] == []
    return {name: by_folder[str(folder)] for name, (_, folder) in models.items()}


@pytest.mark.parametrize("name", ["trained", "converted"])
def test_a_fresh_process_computes_what_the_training_model_does(answers, models, name):
    answer, (model, _) = answers[name], models[name]
    for part, expected in compute_outputs(model).items():
        assert (answer[part] - expected).abs().max() <= FLOAT32_TOLERANCE, part
    assert all(answer["config"][name] == value for name, value in model.config.to_dict().items())
    assert answer["dtype"] == torch.float32
    tokens = [greedy(model, prompt) for prompt in PROMPTS]
    # not all prompts end early
    assert max(map(len, tokens)) == NEW_TOKENS  # past the window
    for way in ("greedy", "greedy_padded_batch", "greedy_without_cache", "greedy_static_cache"):
        assert answer[way] == tokens, way


def test_fresh_process_tokenizer_is_sentencepiece(answers, export_folder):
    answer, sp = answers["trained"], SentencePieceProcessor(model_proto=sentencepiece_model())
    assert answer["ids"] == [[1, *sp.encode(text)] for text in TEXTS]
    assert answer["decoded"] == TEXTS
    assert answer["special_ids"] == [0, 1, 2, 0]
    for messages, (ids, mask) in zip(CHATS, answer["chats"], strict=True):
        assert encode_chat(export_folder[0], messages) == (ids, mask)


def test_report_and_files(export_folder, model):
    out, report = export_folder
    assert report["hf_max_logit_diff"] <= FLOAT32_TOLERANCE
    assert report["parameters"] == model.config.parameter_count()["total"]
    assert (report["step"], report["dtype"], report["out"]) == (30, "float32", str(out))
    files = {
        "README.md",
        "cache.py",
        "chat_template.jinja",
        "config.json",
        "config.py",
        "configuration_laneformer.py",
        "generation_config.json",
        "initialization.py",
        "joins.py",
        "lanes.py",
        "model.py",
        "model.safetensors",
        "modeling_laneformer.py",
        "mtp.py",
        "positions.py",
        "ropes.py",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
    }
    assert {path.name for path in out.iterdir()} == files
    assert (
        json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2
    )  # what ends a turn
    card = (out / "README.md").read_text()
    assert all(f"{real:,}" in card for real in (report["parameters"], 123_456))
    # exported code must not import from our package
    assert "from .." not in "".join(path.read_text() for path in out.glob("*.py"))


def test_verification_notices_one_wrong_lane(export_folder, checkpoint, model):
    weights = load_weights(checkpoint, model.config)
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    name = "layers.5.feed_forward.w2.weight"
    # exchange two lanes
    weights[name] = weights[name][[1, 0, 2, 3]]
    with pytest.raises(ValueError, match="differ from the training model's"):
        verify(export_folder[0], model.config, weights)


def test_incomplete_checkpoints_are_refused(tmp_path, checkpoint, model):
    with pytest.raises(ValueError, match=r"no complete torch DCP checkpoint \(no .metadata\)"):
        load_weights(tmp_path, model.config)
    for size, value, message in (
        ("num_hidden_layers", 7, r"lacks 9 tensors, such as layers.6"),
        ("num_hidden_layers", 5, r"holds 9 tensors this architecture has not, such as layers.5"),
        ("intermediate_size", 256, r"has shape \(4, 128, 128\), the config says \(4, 64, 128\)"),
    ):
        with pytest.raises(ValueError, match=message):
            load_weights(checkpoint, small_config(**{size: value}))
    broken = random_model()
    for value, message in (
        (float("nan"), "NaN or infinity"),
        (1e5, r"1e\+05, too large for float16"),
    ):
        broken.state_dict()["norm.weight"][7] = value
        run = write_run(tmp_path / f"run-{value}", broken)
        with pytest.raises(ValueError, match=f"norm.weight holds {message}"):
            export(run, tmp_path / "hf", "float16")
    assert {path.name for path in tmp_path.iterdir()} == {"run-nan", "run-100000.0"}, (
        "nothing else is left"
    )


def test_missing_parts_are_named(tmp_path, checkpoint):
    lonely = tmp_path / "step-30"
    lonely.symlink_to(checkpoint)
    export(lonely, tmp_path / "hf")  # the run folder is that of the real checkpoint
    run = checkpoint.parent.parent
    moved = tmp_path / "moved"
    shutil.copytree(run, moved, ignore=shutil.ignore_patterns("checkpoint"))
    (moved / "checkpoint").symlink_to(checkpoint.parent)
    assert export(moved / "checkpoint/step-30", tmp_path / "hf-moved")["step"] == 30
    (moved / "checkpoint").unlink()
    (moved / "checkpoint").mkdir()
    (moved / "checkpoint/step-31").symlink_to(checkpoint)
    assert export(moved / "checkpoint/step-31", tmp_path / "hf-step")["step"] == 31, (
        "by the name as it is given"
    )
    copied = write_run(tmp_path / "run", random_model(), step=1)
    (tmp_path / "run" / "tokenizer.model").unlink()
    with pytest.raises(
        ValueError, match=r"tokenizer.model does not exist; pass its path with --tokenizer"
    ):
        export(copied, tmp_path / "hf2")


def test_staged_folder_keeps_what_was_there(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(ValueError, match="is not an empty folder; choose another --out, or pass"):
        stage_folder(out).__enter__()
    with pytest.raises(IsADirectoryError), stage_folder(out, overwrite=True) as folder:
        folder.write_text("a failure half-way")
    assert [path.name for path in out.iterdir()] == ["old"]
    with stage_folder(out, overwrite=True) as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.glob("**/*")] == ["out", "new"]
