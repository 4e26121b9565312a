"""The fine-tuning examples, run as a user runs them on an exported folder, and what
their folders hold afterwards.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from laneformer import Engine
from laneformer.hf.export import export
from laneformer.hf.load_folder import import_folder, read_weights
from tests.laneformer.hf.hf_assets import FLOAT32_TOLERANCE, random_model, small_config, write_run
from tests.records.lines import write_lines
from tests.tokenizer_assets import encode_chat

pytestmark = [
    pytest.mark.rotate,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
ROOT = Path(__file__).resolve().parents[2]
STEPS, BATCH = 8, 12
LOGGED = 6e-4  # half the last of four digits that TRL logs, and float32 sums of a batch and of single rows
RANK = 4  # the default of the example
CONVERSATIONS = [
    [
        {"role": "user", "content": f"What is {i} plus {i}?"},
        {"role": "assistant", "content": f"It is {2 * i}."},
        {"role": "user", "content": "import sys" * (i % 3 + 1)},
        {"role": "assistant", "content": "You are welcome." * (i % 2 + 1)},
    ]
    for i in range(BATCH)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An exported folder of a small model, untrained."""
    base = tmp_path_factory.mktemp("base")
    export(write_run(base / "run", random_model(initializer_range=0.1)), base / "hf", "float32")
    return base / "hf"


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("chat") / "conversations.jsonl"
    return write_lines(path, ({"messages": one} for one in CONVERSATIONS))


def fine_tuned(
    example: str, folder: Path, conversations: Path, out: Path, lr: float
) -> list[float]:
    """Run an example; the loss of each step, the first one before any update. Every
    batch is all conversations.
    """
    command = [sys.executable, "-m", f"examples.{example}", folder, conversations, "--out", out]
    command += ["--steps", STEPS, "--batch", BATCH, "--lr", lr]
    outcome = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    logged = [ast.literal_eval(line) for line in re.findall(r"\{'loss'.*?\}", outcome.stdout)]
    return [float(row["loss"]) for row in logged]


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32
    ).eval()


@torch.no_grad()
def loss(folder: Path) -> float:
    """The mean loss of the trained tokens of all conversations, each one alone."""
    model = load(folder)
    losses = []
    for one in CONVERSATIONS:
        ids, trained = map(torch.tensor, encode_chat(folder, one))
        each = F.cross_entropy(model(ids[None]).logits[0, :-1], ids[1:], reduction="none")
        losses.append(each[trained[1:]])
    return float(torch.cat(losses).mean())


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model.eval()(torch.arange(3, 43)[None]).logits


def check_folder(out: Path, base: Path, tmp_path: Path) -> None:
    """The folder works in the engine as in Transformers, and goes back into training;
    its tokenizer is unchanged.
    """
    with Engine.from_pretrained(out, device="cpu") as engine:
        off = torch.from_numpy(engine.logits(list(range(3, 43)))) - logits(load(out))[0]
    assert float(off.abs().max()) <= FLOAT32_TOLERANCE
    assert import_folder(out, tmp_path / "run")["tokenizer"]
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()


def test_trl(folder, conversations, tmp_path):
    losses = fine_tuned("sft_trl", folder, conversations, tmp_path / "out", 3e-3)
    # TRL's first loss is ours: the same ids, the same mask, one mean over all trained tokens
    assert losses[0] == pytest.approx(loss(folder), abs=LOGGED)
    assert loss(tmp_path / "out") < 0.8 * losses[0]
    check_folder(tmp_path / "out", folder, tmp_path)


def test_a_folder_without_a_sentencepiece_model_is_saved(folder, tmp_path):
    from examples.sft_trl import save

    base, out = shutil.copytree(folder, tmp_path / "base"), tmp_path / "out"
    (base / "tokenizer.model").unlink()
    save(load(base), base, out)
    assert (out / "chat_template.jinja").is_file()
    assert not (out / "tokenizer.model").exists()


def test_lora(folder, conversations, tmp_path):
    from peft import PeftModel

    out = tmp_path / "out"
    losses = fine_tuned("sft_lora", folder, conversations, out, 2e-2)
    assert losses[0] == pytest.approx(loss(folder), abs=LOGGED)
    assert loss(out) < 0.8 * losses[0]
    check_folder(out, folder, tmp_path)
    adapted = PeftModel.from_pretrained(load(folder), out / "adapter")
    assert float((logits(adapted) - logits(load(out))).abs().max()) <= FLOAT32_TOLERANCE
    check_changes(folder, out)


def check_changes(folder: Path, out: Path) -> None:
    """Every lane of every matrix has changed, by its own matrix of the rank; the other tensors
    are as they were.
    """
    from examples.sft_lora import MATRICES

    config = small_config(initializer_range=0.1)
    before, after = read_weights(folder, config), read_weights(out, config)
    for name, weight in before.items():
        if name.split(".")[-2] not in MATRICES:
            assert torch.equal(after[name], weight), name
            continue
        singular = torch.linalg.svdvals(after[name].double() - weight.double())  # of each lane
        assert (singular[:, RANK - 1] > 1e-3 * singular[:, 0]).all(), name
        assert (singular[:, RANK] < 1e-3 * singular[:, RANK - 1]).all(), name
