"""Test of configs/mtp.toml: a multi-token prediction head after the model, exported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from safetensors.torch import load_file

from laneformer.config import DRAFT_IDS, hf_name
from laneformer.hf.load_folder import import_folder
from records.files import read_json
from tests.train import production
from tests.train.runs import metrics
from tests.train.sft import chats

LOADED = """
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert model.model.mtp.draft_ids.tolist() == sorted(model.model.mtp.draft_ids.tolist())
tokens = model.generate(torch.tensor([[1, 5, 9]]), max_new_tokens=4, do_sample=False)
print(tokens.shape, *model.model.mtp.draft_ids.shape)
"""


@pytest.mark.rotate
def test_shipped_job(production_run, lock, data_folder, tmp_path):
    # two ranks with shapes shrunk, from a checkpoint without the head
    start = production_run / f"checkpoint/step-{production.STEPS}"
    changes = {"checkpoint.initial_load_path": start, "training.seq_len": chats.SEQ_LEN}
    folder = production.train(production.torchrun(2), "mtp", tmp_path / "mtp", lock, changes)
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(1, production.STEPS + 1))
    assert all(len(row["draft_loss"]) == 3 and row["grad_norm"] > 0 for row in rows)
    assert all(len(row["valid_acceptance"]) == 3 for row in rows)
    production.assert_nothing_else_deviates("mtp", folder)
    checkpoint, out = folder / f"checkpoint/step-{production.STEPS}", tmp_path / "hf"
    command = [
        "tools.export_hf",
        "--checkpoint",
        checkpoint,
        "--out",
        out,
        "--draft-vocab-size",
        "64",
    ]
    tokenizer = ["--tokenizer", data_folder / "tokenizer.model"]
    subprocess.run([sys.executable, "-m", *map(str, [*command, *tokenizer])], check=True)
    ids = load_file(out / "model.safetensors")[hf_name(DRAFT_IDS)]
    assert ids.tolist() == sorted(set(ids.tolist()))
    assert read_json(out / "config.json")["draft_vocab_size"] == len(ids) == 64
    outcome = subprocess.run(
        [sys.executable, "-c", LOADED, str(out)], capture_output=True, text=True, cwd=tmp_path
    )
    assert outcome.stdout.split() == ["torch.Size([1,", "7])", "64"], outcome.stderr
    import_folder(out, tmp_path / "imported")
    assert read_json(tmp_path / "imported/model.json")["draft_vocab_size"] == 0
