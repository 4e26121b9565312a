"""DCP checkpoint -> HF folder -> fresh processes without our packages, on both
major versions of Transformers.
"""

from __future__ import annotations

import json
import os
import random
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
CHAT_CHARACTERS = "abc   \n\t.é😀日▁\u3000\xa0\x00<|>/_"
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


def conversations(folder: Path, count: int = 300) -> list[tuple[list[dict], list[int], list[int]]]:
    """Random conversations, some opened by a system message, with their ids and what of them is
    trained (0 or 1).
    """
    tokenizer = ChatTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")), 2)
    draw, found = random.Random(3), []
    for _ in range(count):
        messages = [{"role": "system", "content": "Be brief."}] * draw.randint(0, 1)
        for turn in range(draw.randint(1, 6)):
            text = draw.choice("a1é日😀▁<") + "".join(
                draw.choices(CHAT_CHARACTERS, k=draw.choice([0, 1, 3, 40]))
            )
            messages.append(
                {"role": ("user", "assistant")[turn % 2], "content": draw.choice(["", " \n"]) + text}
            )
        segments = render(messages, tokenizer)
        mask = [int(segment.trained) for segment in segments for _ in segment.ids]
        found.append((messages, token_ids(segments), mask))
    return found


def ask(path: Path, folder: Path, model: Laneformer, count: int = 300) -> Path:
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
    with torch.no_grad():
        rope, at = rope_table(model.config, torch.arange(50)), torch.arange(50)
        streams, _ = run_layers(
            model.layers, model.config, model.tok_embeddings(ids), rope, model.masks(at, at)
        )
        asked = {
            "ids": ids, "logits": model(ids), "hidden": model.norm(streams).mean(2), "prompts": prompts,
            "new_tokens": NEW_TOKENS, "texts": [(text, [1, *sp.encode(text)]) for text in texts], "chat": CHAT,
            "conversations": conversations(folder, count), "config": model.config.to_dict(),
        }  # fmt: skip
    torch.save(asked, path)
    return path


@pytest.fixture(scope="module")
def questions(
    tmp_path_factory: pytest.TempPathFactory, exported: tuple[Path, dict], model: Laneformer
) -> Path:
    return ask(tmp_path_factory.mktemp("questions") / "questions.pt", exported[0], model)


OLDER = pytest.param("transformers 4.57", marks=pytest.mark.rotate)
VERSIONS = [pytest.param("this environment", marks=pytest.mark.job), OLDER]


@pytest.fixture(scope="module", params=VERSIONS)
def answers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, exported, questions: Path
) -> dict:
    return answers_of(exported[0], questions, tmp_path_factory.mktemp("elsewhere"), request.param)


def answers_of(folder: Path, questions: Path, elsewhere: Path, version: str) -> dict:
    """The answers of a fresh process, in the folder `elsewhere`, that cannot import anything of ours."""
    older = version == "transformers 4.57"
    if older and not TRANSFORMERS_4.is_dir():
        pytest.skip(f"no {TRANSFORMERS_4}; `make test` installs it")
    written = elsewhere / "answers.json"
    script = Path(__file__).with_name("fresh_process.py")
    command = [
        sys.executable,
        "-I",
        script,
        folder,
        questions,
        written,
        *([TRANSFORMERS_4] if older else []),
    ]
    keep = {
        name: os.environ[name]
        for name in ("PATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH")
        if name in os.environ
    }
    env = {**keep, "HF_HOME": str(elsewhere / "hf_home"), "HF_HUB_OFFLINE": "1", "HOME": str(elsewhere)}
    done = subprocess.run(list(map(str, command)), cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads(written.read_text())
    assert out["transformers"].startswith("4.57" if older else "5.")
    assert out["ours"] == []
    return out


def test_fresh_process_logits_are_the_training_models(answers: dict, model: Laneformer) -> None:
    assert answers["logits_off"] <= FLOAT32_TOLERANCE
    assert answers["hidden_off"] <= FLOAT32_TOLERANCE
    assert answers["padded_logits_off"] <= FLOAT32_TOLERANCE
    assert answers["saved_logits_off"] <= FLOAT32_TOLERANCE
    assert answers["config"] == model.config.to_dict()
    assert (answers["class"], answers["stored_dtype"]) == ("LaneformerForCausalLM", "torch.float32")


def test_fresh_process_generates_like_the_training_model(
    answers: dict, model: Laneformer, questions: Path
) -> None:
    expected = [greedy(model, prompt) for prompt in torch.load(questions)["prompts"]]
    assert max(map(len, expected)) == NEW_TOKENS  # past the window
    for way in ("greedy", "greedy_padded_batch", "greedy_without_cache", "greedy_static_cache"):
        assert answers[way] == expected, way
    assert answers["sampling_repeats"]
    assert answers["sampling_without_cache"]
    assert answers["sampling_differs_from_greedy"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_converted_model_is_the_training_models(tmp_path: Path, version: str) -> None:
    """A tied head, which 4.57 would tie in another shape; late upper layers and the flush."""
    model = random_model(tie_word_embeddings=True, broadcast_delay=1, first_late_layer=3, flush=True)
    export(write_run(tmp_path / "run", model), folder := tmp_path / "hf", "float32")
    questions = ask(tmp_path / "questions.pt", folder, model, count=5)
    (tmp_path / "elsewhere").mkdir()
    found = answers_of(folder, questions, tmp_path / "elsewhere", version)
    test_fresh_process_logits_are_the_training_models(found, model)
    test_fresh_process_generates_like_the_training_model(found, model, questions)


def test_fresh_process_tokenizer_is_sentencepiece(answers: dict) -> None:
    assert answers["texts_off"] == []
    assert answers["decoded_off"] == []
    assert answers["special_ids"] == [0, 1, 2, 0]
    assert answers["chat_without_prompt"] == RENDERED
    assert answers["chat"] == RENDERED + HEADER.format("assistant", "")
    assert answers["conversations_off"] == []


def test_report_and_files(exported: tuple[Path, dict], model: Laneformer) -> None:
    out, report = exported
    assert report["hf_max_logit_diff"] <= FLOAT32_TOLERANCE
    assert report["parameters"] == model.config.parameter_count()["total"]
    assert (report["step"], report["dtype"], report["out"]) == (30, "float32", str(out))
    files = {
        "README.md", "chat_template.jinja", "config.json", "config.py", "configuration_laneformer.py",
        "experts.py", "generation_config.json", "initialization.py", "linear.py", "model.py", "model.safetensors",
        "modeling_laneformer.py", "norms.py", "positions.py", "ropes.py",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "variant.py",
    }  # fmt: skip
    assert {path.name for path in out.iterdir()} == files
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2  # what ends a turn
    card = (out / "README.md").read_text()
    assert all(f"{real:,}" in card for real in (report["parameters"], 123_456))
    assert "from .." not in "".join(path.read_text() for path in out.glob("*.py"))


def test_rounding_is_all_that_happens(tmp_path: Path, checkpoint: Path, model: Laneformer) -> None:
    export(checkpoint, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert stored.keys() == {n if n.startswith("lm_head") else f"model.{n}" for n in model.state_dict()}
    for name, weight in model.state_dict().items():
        assert torch.equal(
            stored[name if name.startswith("lm_head") else f"model.{name}"], weight.bfloat16()
        ), name


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
    with pytest.raises(
        ValueError, match=r"w1.weight has shape \(4, 128, 128\), the config says \(4, 64, 128\)"
    ):
        load_weights(checkpoint, small_config(intermediate_size=256))
    broken = random_model()
    broken.state_dict()["norm.weight"][7] = float("nan")
    with pytest.raises(ValueError, match=r"norm.weight holds NaN or infinity"):
        export(write_run(tmp_path / "nan", broken), tmp_path / "hf")
    broken.state_dict()["norm.weight"][7] = 1e5
    with pytest.raises(ValueError, match=r"norm.weight holds 1e\+05, too large for float16"):
        export(write_run(tmp_path / "large", broken), tmp_path / "hf", "float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "large",
        "nan",
    ]  # nothing half-written is left


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
    with (
        pytest.raises(ValueError, match="is not an empty folder; choose another --out, or pass"),
        staged_folder(out),
    ):
        pass
    with pytest.raises(IsADirectoryError), staged_folder(out, overwrite=True) as folder:
        folder.write_text("a failure half-way")
    assert [path.name for path in out.iterdir()] == ["old"]
    with staged_folder(out, overwrite=True) as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.glob("**/*")] == ["out", "new"]
