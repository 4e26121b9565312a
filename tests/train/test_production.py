"""configs/phase1.toml as shipped, on two CPU ranks: only shapes, lengths and places differ from the 2B run.

The 2B flavor's 15 layers, 8 lanes, windows and delay, compiled layers and loss, bfloat16 compute, selective
checkpointing, validation and asynchronous checkpoints all meet here and nowhere else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from laneformer import LaneformerConfig
from records.checkpoints import check_complete

ROOT = Path(__file__).resolve().parents[2]
STEPS, EVERY = 4, 2
SHAPES = {  # widths and lengths; layers, lanes, window pattern and delay stay those of the 2B flavor
    "architecture.hidden_size": 32,
    "architecture.intermediate_size": 64,
    "architecture.num_attention_heads": 8,
    "architecture.num_key_value_heads": 8,
    "architecture.sliding_window": 8,
    "architecture.max_position_embeddings": 32,
    "architecture.vocab_size": 512,  # the pieces of the test's tokenizer
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    "training.global_batch_size": 8,  # two micro-batches on each rank, as in the 2B run
    "training.steps": STEPS,
    "validation.freq": EVERY,
    "validation.local_batch_size": 4,
    "validation.windows_per_source": 4,
    "checkpoint.interval": EVERY,
    "metrics.log_freq": 1,
}
DEVIATIONS = {  # everything else that a machine with two CPU ranks forces
    "parallelism.data_parallel_replicate_degree": 1,  # 24 x 8 GPUs
    "parallelism.data_parallel_shard_degree": 2,
    "checkpoint.async_mode": "async",  # pinned memory needs a GPU; the background thread is the same
    "compile.backend": "eager",  # traces, guards and recompiles as inductor does, without generating code
    "experimental.custom_import": "tests.train.production_facts",  # train.spec, and what it saw of the model
}


@pytest.fixture(scope="module")
def run(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder after the last step."""
    folder = tmp_path_factory.mktemp("production") / "run"
    settings = {"job.dump_folder": folder, "mixture.lock": prepared_data / "phase1.lock.json", **SHAPES, **DEVIATIONS}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "train",
        "--job.config_file", "configs/phase1.toml",
        *(part for name, value in settings.items() for part in (f"--{name}", str(value))),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}
    job = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    outcome = folder / "outcome.json"
    assert job.returncode == 0, outcome.read_text() if outcome.is_file() else job.stdout[-2000:] + job.stderr[-4000:]
    return folder


def test_every_step_is_logged_and_validated_on_time(run: Path) -> None:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["loss"] is not None and row["grad_norm"] > 0 for row in rows)
    assert [row["step"] for row in rows if row.get("valid_loss")] == [EVERY, STEPS]


def test_checkpoints_are_complete(run: Path) -> None:
    folders = sorted((run / "checkpoint").glob("step-*"))
    assert [int(folder.name.removeprefix("step-")) for folder in folders] == [EVERY, STEPS]
    for folder in folders:
        check_complete(folder)


def test_the_model_is_prepared_as_the_job_file_says(run: Path) -> None:
    facts = json.loads((run / "facts.json").read_text())
    layers = LaneformerConfig.from_flavor("2b").num_hidden_layers
    assert facts["layers"] == facts["checkpointed"] == facts["compiled"] == layers
    assert facts["norm_compiled"]
    assert facts["loss_graphs"] == 2
    assert facts["graphs"] > 8, "fewer variants than the default recompile limit would prove nothing"
    assert facts["streams"] == ["torch.bfloat16"], "what reaches the head"
    assert facts["policies"] == [["torch.bfloat16", "torch.float32"]], "computed in, reduced in"
    assert facts["weights"] == ["torch.float32"]
    assert facts["async_mode"] == "ASYNC"


def test_nothing_else_deviates(run: Path) -> None:
    """The resolved config is the shipped file but for the settings above."""
    shipped = tomllib.loads((ROOT / "configs/phase1.toml").read_text())
    resolved = tomllib.loads((run / "config.toml").read_text())
    different = {
        f"{section}.{key}"
        for section, values in shipped.items()
        for key, value in values.items()
        if resolved[section].get(key) != value
    }
    assert different <= {"job.dump_folder", "mixture.lock", *SHAPES, *DEVIATIONS}
    model = json.loads((run / "model.json").read_text())
    flavor = LaneformerConfig.from_flavor("2b").to_dict()
    changed = {key for key in flavor if model[key] != flavor[key]}
    assert changed == {name.removeprefix("architecture.") for name in SHAPES if name.startswith("architecture.")}
