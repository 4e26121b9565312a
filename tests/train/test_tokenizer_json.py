"""Test from a recipe with tokenizer.json to a model: the same ids everywhere."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from data_mixtures import prepare, shards, tokenizer
from data_mixtures.stages.run import Options
from evals.bits_per_byte import main as bits_per_byte
from laneformer import Engine
from laneformer.hf.export import export
from tests.records.lines import write_lines
from tests.tokenizer_assets import byte_level, save
from tests.train.runs import train_toy
from tests.train.sft import chats

pytestmark = pytest.mark.rotate
TEXTS = ["def f(x):\n    return x\n\n\n", "東京 😀 é", "<|begin_of_text|> is text\n\n1234"]
FRESH = """
import json, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
encoder = AutoTokenizer.from_pretrained(sys.argv[1], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True, dtype="float32")
texts = json.loads(sys.argv[2])
ids = [encoder(text)["input_ids"] for text in texts]
import torch
new = model.generate(torch.tensor([ids[0]]), attention_mask=torch.ones(1, len(ids[0]), dtype=torch.int64),
                     max_new_tokens=8, do_sample=False)[0, len(ids[0]):].tolist()
special = [encoder.bos_token_id, encoder.eos_token_id, encoder.pad_token_id, model.generation_config.eos_token_id]
print(json.dumps({"ids": ids, "new": new, "special": special,
                  "decoded": [encoder.decode(each, skip_special_tokens=True) for each in ids]}))
"""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_from_a_recipe_to_a_model_that_others_load(tmp_path):
    stdlib = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text(encoding="utf-8") for path in sorted(stdlib.glob("[a-f]*.py"))]
    theirs = byte_level(
        texts[:20], ["<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"], 600, unused=65_536
    )
    path, data = save(theirs, tmp_path / "given"), tmp_path / "data"
    rows = [part for text in texts for part in text.split("\ndef ")]
    write_lines(tmp_path / "a.jsonl", ({"content": row} for row in rows))
    (tmp_path / "recipe.toml").write_text(
        f'tokenizer = "{path}"\nseq_len = 32\nvalid_per_10000 = 500\n[sources.mine]\n'
        'inputs = [{ kind = "jsonl", field = "content", paths = ["a.jsonl"] }]\n[phase1]\nmine = 1\n'
    )
    prepare.prepare(tmp_path / "recipe.toml", data, Options(1), Console(quiet=True))
    lock, encoder = data / "phase1.lock.json", tokenizer.load(data / "tokenizer.json")
    assert shards.read_manifest(data / "mine")["token_bytes"] == encoder.dtype.itemsize == 4

    size = ("--architecture.vocab_size", "66144", "--model.mask_documents", "--training.steps", "2")
    trained = train_toy(tmp_path / "run", lock, *size)
    assert abs(trained[0]["loss"] - np.log(66144)) < 0.1
    assert sorted(path.name for path in shards.tokenizer_files(tmp_path / "run")) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    folder = tmp_path / "hf"
    export(tmp_path / "run/checkpoint/step-2", folder, dtype="float32")

    code = [sys.executable, "-c", FRESH, str(folder), json.dumps(TEXTS[:2])]
    process = subprocess.run(code, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    answer = json.loads(process.stdout.splitlines()[-1])
    tokens, lengths = encoder.encode(TEXTS)
    documents = [document.tolist() for document in np.split(tokens, np.cumsum(lengths)[:-1])]
    # as in training, up to the end of the document
    assert answer["ids"] == [document[:-1] for document in documents[:2]]
    assert answer["decoded"] == TEXTS[:2]
    assert answer["special"] == [66136, 66137, 66138, 66137]
    with Engine.from_pretrained(folder, device="cpu") as engine:
        assert [engine.tokenizer.encode(text).ids for text in TEXTS[:2]] == answer["ids"]
        assert engine.eos_ids == (66137,)
        assert engine.generate(answer["ids"][0], max_new_tokens=8) == answer["new"]

    record = bits_per_byte(folder, data, limit=4)
    assert record["tokenizer_sha256"] == shards.read_manifest(data / "mine")["tokenizer_sha256"]
    assert abs(record["loss"] - np.log(66144)) < 0.2

    (tmp_path / "sft").mkdir()
    lock = chats.prepare(tmp_path / "sft", data / "tokenizer.json", 60)
    packed = shards.read_manifest(lock.parent / "identity")
    assert (packed["token_bytes"], packed["eos_id"]) == (4, 66137)
    assert (lock.parent / "tokenizer_config.json").is_file()
