"""DCP checkpoint -> HF folder -> fresh processes without our packages, on both major versions of Transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer

from laneformer import Laneformer
from laneformer.chat import ChatTokenizer, render, token_ids
from laneformer.config import hf_name
from laneformer.hf.export import export, load_weights, staged_folder, verify
from laneformer.model import KVCache, run_layers
from laneformer.positions import rope_table
from tests.laneformer.hf.hf_assets import (
    FLOAT32_TOLERANCE,
    VOCAB_SIZE,
    random_model,
    sentencepiece_model,
    small_config,
    stdlib_sources,
    write_run,
)

REPOSITORY = Path(__file__).parents[3]
TRANSFORMERS_4 = REPOSITORY / ".venv" / "transformers-4.57"
NEW_TOKENS = 24
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is\n2 + 2? "},
    {"role": "assistant", "content": "4\n"},
    {"role": "user", "content": "Thanks"},
]
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n{}"
TURNS = [("user", "What is\n2 + 2?</s>"), ("assistant", "4</s>"), ("user", "Thanks</s>")]
RENDERED = "".join(HEADER.format(*turn) for turn in TURNS)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@torch.no_grad()
def greedy(model: Laneformer, prompt: list[int]) -> list[int]:
    """The training model's own decoding, token by token, up to `</s>`."""
    cache, new, feed = KVCache(model.config.num_hidden_layers), [], prompt
    while len(new) < NEW_TOKENS and new[-1:] != [2]:
        new.append(int(model(torch.tensor([feed]), cache)[0, -1].argmax()))
        feed = new[-1:]
    return new


def conversations(folder: Path) -> list[tuple[list[dict], list[int], list[int]]]:
    """Without and with a system message: with its ids and what of them is trained (0 or 1)."""
    tokenizer, asked = ChatTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), 2), []
    for messages in (CHAT, [*CHAT[1:], {"role": "assistant", "content": " é😀日 <|▁\n"}]):
        segments = render(messages, tokenizer)
        mask = [int(segment.trained) for segment in segments for _ in segment.ids]
        asked.append((messages, token_ids(segments), mask))
    return asked


def write_questions(path: Path, folder: Path, model: Laneformer) -> Path:
    """What a fresh process is asked, into a file; prompts and their continuations cross the window of 16."""
    sp = SentencePieceProcessor(model_proto=sentencepiece_model())
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB_SIZE, (2, 50), generator=generator)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 23, 16)]
    texts = [
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
    at = torch.arange(50)
    with torch.no_grad():
        rope, masks = rope_table(model.config, at), model.masks(at, at)
        streams, _ = run_layers(model.layers, model.config, model.tok_embeddings(ids), rope, masks)
        asked = {
            "ids": ids, "logits": model(ids), "hidden": model.norm(streams).mean(2), "prompts": prompts,
            "new_tokens": NEW_TOKENS, "texts": [(text, [1, *sp.encode(text)]) for text in texts], "chat": CHAT,
            "conversations": conversations(folder), "config": model.config.to_dict(),
        }  # fmt: skip
    torch.save(asked, path)
    return path


@pytest.fixture(scope="module")
def models(model: Laneformer) -> dict[str, Laneformer]:
    """converted: with a tied head, which 4.57 would tie in another shape; late upper layers and the flush."""
    how = {"tie_word_embeddings": True, "broadcast_delay": 1, "first_late_layer": 3, "flush": True}
    return {"trained": model, "converted": random_model(**how)}


@pytest.fixture(scope="module")
def questions(
    tmp_path_factory: pytest.TempPathFactory, exported: tuple[Path, dict], models: dict[str, Laneformer]
) -> dict[str, tuple[Path, Path]]:
    """The folder and the questions of each model."""
    root = tmp_path_factory.mktemp("questions")
    export(write_run(root / "run", models["converted"]), root / "hf", "float32")
    folders = {"trained": exported[0], "converted": root / "hf"}
    return {n: (path, write_questions(root / n, path, models[n])) for n, path in folders.items()}


@pytest.fixture(
    scope="module",
    params=[pytest.param("5", marks=pytest.mark.job), pytest.param("4.57", marks=pytest.mark.rotate)],
)
def answers(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    questions: dict[str, tuple[Path, Path]],
) -> dict[str, dict]:
    """Of a fresh process elsewhere, that cannot import anything of ours, to the questions of each model."""
    version, elsewhere = request.param, tmp_path_factory.mktemp("elsewhere")
    if version == "4.57" and not TRANSFORMERS_4.is_dir():
        pytest.skip(f"no {TRANSFORMERS_4}; `make test` installs it")
    written, script = elsewhere / "answers.json", Path(__file__).with_name("fresh_process.py")
    asked = [part for pair in questions.values() for part in pair]
    package = TRANSFORMERS_4 if version == "4.57" else ""
    command = [sys.executable, "-I", *map(str, (script, package, written, *asked))]
    kept = ("PATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
    env = {name: os.environ[name] for name in kept if name in os.environ}
    env |= {"HF_HOME": str(elsewhere / "hf_home"), "HF_HUB_OFFLINE": "1", "HOME": str(elsewhere)}
    done = subprocess.run(command, cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    by_folder = json.loads(written.read_text())
    for answer in by_folder.values():
        assert answer["transformers"].startswith(version)
        assert answer["ours"] == []
    return {name: by_folder[str(path)] for name, (path, _) in questions.items()}


@pytest.mark.parametrize("name", ["trained", "converted"])
def test_a_fresh_process_computes_what_the_training_model_does(
    answers: dict, models: dict[str, Laneformer], questions: dict[str, tuple[Path, Path]], name: str
) -> None:
    answer, model = answers[name], models[name]
    for part in ("logits", "hidden", "padded_logits", "saved_logits"):
        assert answer[f"{part}_off"] <= FLOAT32_TOLERANCE, part
    assert answer["config"] == model.config.to_dict()
    assert (answer["class"], answer["stored_dtype"]) == ("LaneformerForCausalLM", "torch.float32")
    expected = [greedy(model, prompt) for prompt in torch.load(questions[name][1])["prompts"]]
    assert max(map(len, expected)) == NEW_TOKENS  # past the window
    for way in ("greedy", "greedy_padded_batch", "greedy_without_cache", "greedy_static_cache"):
        assert answer[way] == expected, way


def test_fresh_process_tokenizer_is_sentencepiece(answers: dict) -> None:
    answer = answers["trained"]
    assert answer["texts_off"] == answer["decoded_off"] == answer["conversations_off"] == []
    assert answer["special_ids"] == [0, 1, 2, 0]
    assert answer["chat_without_prompt"] == RENDERED
    assert answer["chat"] == RENDERED + HEADER.format("assistant", "")


def test_report_and_files(exported: tuple[Path, dict], model: Laneformer) -> None:
    out, report = exported
    assert report["hf_max_logit_diff"] <= FLOAT32_TOLERANCE
    assert report["parameters"] == model.config.parameter_count()["total"]
    assert (report["step"], report["dtype"], report["out"]) == (30, "float32", str(out))
    files = {
        "README.md", "cache.py", "chat_template.jinja", "config.json", "config.py", "configuration_laneformer.py",
        "generation_config.json", "initialization.py", "lanes.py", "model.py", "model.safetensors",
        "modeling_laneformer.py", "mtp.py", "positions.py", "ropes.py", "tokenizer.json", "tokenizer.model",
        "tokenizer_config.json",
    }  # fmt: skip
    assert {path.name for path in out.iterdir()} == files
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2  # what ends a turn
    card = (out / "README.md").read_text()
    assert all(f"{real:,}" in card for real in (report["parameters"], 123_456))
    assert "from .." not in "".join(path.read_text() for path in out.glob("*.py"))


def test_rounding_is_all_that_happens(tmp_path: Path, checkpoint: Path, model: Laneformer) -> None:
    export(checkpoint, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    weights = {hf_name(name): weight for name, weight in model.state_dict().items()}
    assert stored.keys() == weights.keys()
    assert all(torch.equal(stored[name], weight.bfloat16()) for name, weight in weights.items())


def test_verification_notices_one_wrong_lane(
    exported: tuple[Path, dict], checkpoint: Path, model: Laneformer
) -> None:
    weights = load_weights(checkpoint, model.config)
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    name = "layers.5.feed_forward.w2.weight"
    weights[name] = weights[name][[1, 0, 2, 3]]
    with pytest.raises(ValueError, match="differ from the training model's"):
        verify(exported[0], model.config, weights)


def test_incomplete_checkpoints_are_refused(tmp_path: Path, checkpoint: Path, model: Laneformer) -> None:
    with pytest.raises(ValueError, match=r"no complete torch DCP checkpoint \(no .metadata\)"):
        load_weights(tmp_path, model.config)
    with pytest.raises(ValueError, match=r"lacks 9 tensors, such as layers.6"):
        load_weights(checkpoint, small_config(num_hidden_layers=7))
    with pytest.raises(ValueError, match=r"holds 9 tensors this architecture has not, such as layers.5"):
        load_weights(checkpoint, small_config(num_hidden_layers=5))
    with pytest.raises(ValueError, match=r"has shape \(4, 128, 128\), the config says \(4, 64, 128\)"):
        load_weights(checkpoint, small_config(intermediate_size=256))
    broken = random_model()
    broken.state_dict()["norm.weight"][7] = float("nan")
    with pytest.raises(ValueError, match=r"norm.weight holds NaN or infinity"):
        export(write_run(tmp_path / "nan", broken), tmp_path / "hf")
    broken.state_dict()["norm.weight"][7] = 1e5
    with pytest.raises(ValueError, match=r"norm.weight holds 1e\+05, too large for float16"):
        export(write_run(tmp_path / "large", broken), tmp_path / "hf", "float16")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["large", "nan"], "nothing half-written is left"


def test_missing_parts_are_named(tmp_path: Path, checkpoint: Path) -> None:
    lonely = tmp_path / "step-30"
    lonely.symlink_to(checkpoint)
    export(lonely, tmp_path / "hf")  # the run folder is that of the real checkpoint
    copied = write_run(tmp_path / "run", random_model(), step=1)
    (tmp_path / "run" / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.model does not exist; pass its path with --tokenizer"):
        export(copied, tmp_path / "hf2")


def test_staged_folder_keeps_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(ValueError, match="is not an empty folder; choose another --out, or pass"):
        staged_folder(out).__enter__()
    with pytest.raises(IsADirectoryError), staged_folder(out, overwrite=True) as folder:
        folder.write_text("a failure half-way")
    assert [path.name for path in out.iterdir()] == ["old"]
    with staged_folder(out, overwrite=True) as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.glob("**/*")] == ["out", "new"]
