"""DCP checkpoint -> HF folder -> strangers' processes on both major versions of Transformers -> checkpoint again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor

from laneformer import Laneformer
from laneformer.model import KVCache, rope_table, run_layers
from tests.laneformer.hf.hf_assets import (
    VOCAB_SIZE,
    random_model,
    sentencepiece_model,
    small_config,
    stdlib_sources,
)
from tools.export_hf import export, load_weights, staged_folder, verify
from tools.import_hf import import_folder

REPOSITORY = Path(__file__).parents[2]
TRANSFORMERS_4 = REPOSITORY / ".venv" / "transformers-4.57"
NEW_TOKENS = 24
# float32 logits of about 10 from six layers of sums; padded batches and caches choose other kernels for the same sums
FLOAT32_TOLERANCE = 10 * 50 * 2.0**-24
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


def write_run(folder: Path, model: Laneformer, step: int = 30) -> Path:
    """A run folder as training leaves it; the path of its checkpoint."""
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(model.config.to_dict()))
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    line = {"step": step, "phase": "phase2", "tokens_total": 123_456, "loss": 4.25}
    cut = '{"step": 7, "los'  # a crash in the middle of a line
    lines = [json.dumps({**line, "step": step - 1}), json.dumps(line), cut]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    state = {
        **model.state_dict(),
        "optimizer.state.norm.weight.exp_avg": torch.ones(3),
        "train_state": torch.tensor([step]),
    }
    checkpoint = folder / "checkpoint" / f"step-{step}"
    dcp.save(state, checkpoint_id=checkpoint, no_dist=True)
    return checkpoint


@pytest.fixture(scope="module")
def model() -> Laneformer:
    return random_model()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, model: Laneformer) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "demo", model)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("export") / "hf"
    return out, export(checkpoint, out, "float32")


@torch.no_grad()
def greedy(model: Laneformer, prompt: list[int]) -> list[int]:
    """The training model's own decoding, token by token, up to `</s>`."""
    cache, new, feed = KVCache(model.config.num_hidden_layers), [], prompt
    while len(new) < NEW_TOKENS and new[-1:] != [2]:
        new.append(int(model(torch.tensor([feed]), cache)[0, -1].argmax()))
        feed = new[-1:]
    return new


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory, model: Laneformer) -> Path:
    """What strangers are asked; prompts and their continuations cross the window of 16."""
    sp = SentencePieceProcessor(model_proto=sentencepiece_model())
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(3, VOCAB_SIZE, (2, 50), generator=generator)
    prompts = [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (5, 23, 16)]
    texts = ["", " ", "   x", "a  b", "\t\tif x:\n", "\n\n", "é 😀 日本", "3.14159 " * 3, *stdlib_sources()[:3]]
    with torch.no_grad():
        rope, at = rope_table(model.config, torch.arange(50)), torch.arange(50)
        streams = run_layers(model.layers, model.config, model.tok_embeddings(ids), rope, model.masks(at, at))
        asked = {
            "ids": ids, "logits": model(ids), "hidden": model.norm(streams).mean(2), "prompts": prompts,
            "new_tokens": NEW_TOKENS, "texts": [(text, [1, *sp.encode(text)]) for text in texts], "chat": CHAT,
            "config": model.config.to_dict(),
        }  # fmt: skip
    path = tmp_path_factory.mktemp("questions") / "questions.pt"
    torch.save(asked, path)
    return path


@pytest.fixture(scope="module", params=["this environment", "transformers 4.57"])
def stranger(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, exported, questions: Path
) -> dict:
    """The answers of a fresh process, elsewhere, that cannot import anything of ours."""
    older = request.param == "transformers 4.57"
    if older and not TRANSFORMERS_4.is_dir():
        pytest.skip(f"no {TRANSFORMERS_4}; `make test` installs it")
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    answers = elsewhere / "answers.json"
    script = Path(__file__).with_name("stranger.py")
    command = [sys.executable, "-I", script, exported[0], questions, answers, *([TRANSFORMERS_4] if older else [])]
    keep = {name: os.environ[name] for name in ("PATH", "OMP_NUM_THREADS", "LD_LIBRARY_PATH") if name in os.environ}
    env = {**keep, "HF_HOME": str(elsewhere / "hf_home"), "HF_HUB_OFFLINE": "1", "HOME": str(elsewhere)}
    done = subprocess.run(list(map(str, command)), cwd=elsewhere, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    out = json.loads(answers.read_text())
    assert out["transformers"].startswith("4.57" if older else "5.")
    assert out["ours"] == []
    return out


def test_strangers_logits_are_the_training_models(stranger: dict, model: Laneformer) -> None:
    assert stranger["logits_off"] <= FLOAT32_TOLERANCE
    assert stranger["hidden_off"] <= FLOAT32_TOLERANCE
    assert stranger["padded_logits_off"] <= FLOAT32_TOLERANCE
    assert stranger["saved_logits_off"] <= FLOAT32_TOLERANCE
    assert stranger["config"] == model.config.to_dict()
    assert (stranger["class"], stranger["stored_dtype"]) == ("LaneformerForCausalLM", "torch.float32")


def test_strangers_generate_what_the_training_model_does(stranger: dict, model: Laneformer, questions: Path) -> None:
    expected = [greedy(model, prompt) for prompt in torch.load(questions)["prompts"]]
    assert max(map(len, expected)) == NEW_TOKENS  # past the window
    for way in ("greedy", "greedy_padded_batch", "greedy_without_cache", "greedy_static_cache"):
        assert stranger[way] == expected, way
    assert stranger["sampling_repeats"]
    assert stranger["sampling_without_cache"]
    assert stranger["sampling_differs_from_greedy"]


def test_strangers_tokenizer_is_sentencepiece(stranger: dict) -> None:
    assert stranger["texts_off"] == []
    assert stranger["decoded_off"] == []
    assert stranger["special_ids"] == [0, 1, 2, 0]
    assert stranger["chat_without_prompt"] == RENDERED
    assert stranger["chat"] == RENDERED + HEADER.format("assistant", "")


def test_report_and_files(exported: tuple[Path, dict], model: Laneformer) -> None:
    out, report = exported
    assert report["hf_max_logit_diff"] <= FLOAT32_TOLERANCE
    assert report["parameters"] == model.config.parameter_count()["total"]
    assert (report["step"], report["dtype"], report["out"]) == (30, "float32", str(out))
    files = {
        "README.md", "chat_template.jinja", "config.json", "config.py", "configuration_laneformer.py",
        "generation_config.json", "model.py", "model.safetensors", "modeling_laneformer.py", "tokenizer.json",
        "tokenizer.model", "tokenizer_config.json",
    }  # fmt: skip
    assert {path.name for path in out.iterdir()} == files
    card = (out / "README.md").read_text()
    assert all(f"{real:,}" in card for real in (report["parameters"], 123_456))
    assert "from .." not in "".join(path.read_text() for path in out.glob("*.py"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_import_and_export_give_the_same_bits(tmp_path: Path, checkpoint: Path, dtype: str) -> None:
    export(checkpoint, tmp_path / "hf", dtype, max_shard_bytes=1_000_000)
    assert len(list((tmp_path / "hf").glob("model-*-of-*.safetensors"))) > 2
    report = import_folder(tmp_path / "hf", tmp_path / "run")
    assert (report["dtype"], report["tokenizer"]) == (dtype, True)
    export(Path(report["checkpoint"]), tmp_path / "again", dtype, max_shard_bytes=1_000_000)
    for file in (tmp_path / "hf").iterdir():
        if file.name != "README.md":  # it tells the step
            assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_rounding_is_all_that_happens(tmp_path: Path, checkpoint: Path, model: Laneformer) -> None:
    export(checkpoint, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert stored.keys() == {n if n.startswith("lm_head") else f"model.{n}" for n in model.state_dict()}
    for name, weight in model.state_dict().items():
        assert torch.equal(stored[name if name.startswith("lm_head") else f"model.{name}"], weight.bfloat16()), name


def test_verification_notices_one_wrong_lane(exported: tuple[Path, dict], checkpoint: Path, model: Laneformer) -> None:
    weights = load_weights(checkpoint, model.config)
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    name = "layers.5.feed_forward.w2.weight"
    weights[name] = weights[name][[1, 0, 2, 3]]
    with pytest.raises(ValueError, match="off the training model's"):
        verify(exported[0], model.config, weights)


def test_incomplete_checkpoints_are_refused(tmp_path: Path, checkpoint: Path, model: Laneformer) -> None:
    with pytest.raises(ValueError, match=r"no complete torch DCP checkpoint \(no .metadata\)"):
        load_weights(tmp_path, model.config)
    with pytest.raises(ValueError, match=r"lacks 9 of 66 model tensors, first 'layers.6"):
        load_weights(checkpoint, small_config(num_hidden_layers=7))
    with pytest.raises(ValueError, match=r"holds 'layers.5.\S+', which a model of this config lacks"):
        load_weights(checkpoint, small_config(num_hidden_layers=5))
    with pytest.raises(ValueError, match=r"w1.weight is \(4, 128, 128\), but the config says \(4, 64, 128\)"):
        load_weights(checkpoint, small_config(intermediate_size=256))
    broken = random_model()
    broken.state_dict()["norm.weight"][7] = float("nan")
    with pytest.raises(ValueError, match=r"norm.weight holds NaN or infinity"):
        export(write_run(tmp_path / "nan", broken), tmp_path / "hf")
    broken.state_dict()["norm.weight"][7] = 1e5
    with pytest.raises(ValueError, match=r"norm.weight holds 1e\+05, too large for float16"):
        export(write_run(tmp_path / "large", broken), tmp_path / "hf", "float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "nan"]  # nothing half-written is left


def test_missing_parts_are_named(tmp_path: Path, checkpoint: Path) -> None:
    lonely = tmp_path / "step-30"
    lonely.symlink_to(checkpoint)
    export(lonely, tmp_path / "hf")  # the run folder is that of the real checkpoint
    copied = write_run(tmp_path / "run", random_model(), step=1)
    (tmp_path / "run" / "tokenizer.model").unlink()
    with pytest.raises(ValueError, match=r"tokenizer.model does not exist; say where it is with --tokenizer"):
        export(copied, tmp_path / "hf2")


def test_staged_folder_keeps_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "old").touch()
    with pytest.raises(ValueError, match="is not an empty folder; choose another --out, or pass"), staged_folder(out):
        pass
    with pytest.raises(IsADirectoryError), staged_folder(out, overwrite=True) as folder:
        folder.write_text("a failure half-way")
    assert [path.name for path in out.iterdir()] == ["old"]
    with staged_folder(out, overwrite=True) as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.glob("**/*")] == ["out", "new"]


def test_import_refuses_what_is_not_a_laneformer(tmp_path: Path, exported: tuple[Path, dict]) -> None:
    hf = tmp_path / "hf"
    hf.mkdir()
    config = json.loads((exported[0] / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type is 'llama', not 'laneformer'"):
        import_folder(hf, tmp_path / "run")
    (hf / "config.json").write_text(json.dumps({**config, "vocab_size": 2048}))
    with pytest.raises(ValueError, match=r"holds no model\*.safetensors"):
        import_folder(hf, tmp_path / "run")
    (hf / "model.safetensors").symlink_to(exported[0] / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head.weight is \(4, 256, 128\), but its config.json says \(4, 512, 128\)"
    ):
        import_folder(hf, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_command_line(tmp_path: Path, checkpoint: Path) -> None:
    out = tmp_path / "hf"
    command = [sys.executable, "-m", "tools.export_hf", "--checkpoint", checkpoint, "--out", out]
    paths = {"PYTHONPATH": str(REPOSITORY / "models"), "HF_HOME": str(tmp_path / "hf_home")}
    done = subprocess.run(
        list(map(str, command)), cwd=REPOSITORY, env={**os.environ, **paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["dtype"] == "bfloat16"
    assert report["hf_max_logit_diff"] <= FLOAT32_TOLERANCE
