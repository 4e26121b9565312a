"""Run the shipped 2B job files with only shapes, lengths and places changed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from laneformer import LaneformerConfig
from records.checkpoints import check_complete
from records.files import read_json
from records.job import job_flags
from tests.train.runs import ROOT, limit_open_files, metrics, run_forked

STEPS, EVERY = 2, 1
# widths and lengths; layers, lanes, window pattern and delay stay those of the 2B flavor
SHAPES = {
    "architecture.hidden_size": 32,
    "architecture.intermediate_size": 64,
    "architecture.num_attention_heads": 8,
    "architecture.num_key_value_heads": 8,
    "architecture.sliding_window": 8,
    # as long as the windows of conversations
    "architecture.max_position_embeddings": 512,
    # the pieces of the test's tokenizer
    "architecture.vocab_size": 512,
    "training.seq_len": 32,
    "training.local_batch_size": 2,
    # two micro-batches on each rank, as in the 2B run
    "training.global_batch_size": 8,
    "training.steps": STEPS,
    "lr_scheduler.warmup_steps": 1,
    "validation.freq": EVERY,
    "validation.local_batch_size": 4,
    "validation.windows_per_source": 4,
    "checkpoint.interval": EVERY,
    "metrics.log_freq": 1,
}
PLACES = ("job.dump_folder", "mixture.lock", "checkpoint.initial_load_path")
# everything else that a machine with two CPU ranks forces
DEVIATIONS = {
    # in place of 24 x 8 GPUs
    "parallelism.data_parallel_replicate_degree": 1,
    "parallelism.data_parallel_shard_degree": 2,
    # traces, guards and recompiles as inductor does, without generating code
    "compile.backend": "eager",
    # train.spec, and what it saw of the model
    "experimental.custom_import": "tests.train.production_facts",
}
# four ranks: two replicas of two shards, as the 2B run has 24 of 8
HYBRID = {"parallelism.data_parallel_replicate_degree": 2, "training.global_batch_size": 16}


def train(
    launcher: list[str],
    config: str,
    folder: Path,
    lock: Path,
    changes: dict[str, Any],
    warm: bool = True,
    **env: str,
) -> Path:
    """Run configs/`config`.toml with the settings above and `changes`, `warm` by the fork server."""
    settings = {"job.dump_folder": folder, "mixture.lock": lock, **SHAPES, **DEVIATIONS, **changes}
    program = [*launcher, "--job.config_file", f"configs/{config}.toml", *job_flags(settings)]
    env = {"WANDB_MODE": "offline", **env}
    if warm:
        status, output = run_forked(folder.parent, *program, name=folder.name, **env)
    else:
        env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        process = subprocess.run(
            [sys.executable, "-m", *program],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1100,
            preexec_fn=limit_open_files,
        )
        status, output = process.returncode, process.stdout
    outcome = folder / "outcome.json"
    assert status == 0, output[-6000:] + (outcome.read_text() if outcome.is_file() else "")
    return folder


def torchrun(ranks: int) -> list[str]:
    return ["torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "train"]


def assert_trained(
    config: str, run: Path, *more: str, validated: Sequence[int] = (EVERY, STEPS)
) -> None:
    """Assert that the job ran to its end as its file states, but for `more`."""
    rows = metrics(run)
    assert sorted({row["step"] for row in rows}) == [EVERY, STEPS]
    assert all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert [row["step"] for row in rows if row.get("valid_loss")] == list(validated)
    folders = sorted((run / "checkpoint").glob("step-*"))
    assert [folder.name for folder in folders] == [f"step-{EVERY}", f"step-{STEPS}"]
    for folder in folders:
        check_complete(folder)
    assert_prepared_as_the_job_file_says(run)
    assert_nothing_else_deviates(config, run, *more)


def assert_nothing_else_deviates(config: str, folder: Path, *more: str) -> None:
    shipped = tomllib.loads((ROOT / f"configs/{config}.toml").read_text())
    resolved = tomllib.loads((folder / "config.toml").read_text())
    different = set()
    for section, values in shipped.items():
        changed = [key for key in values if resolved[section].get(key) != values[key]]
        different |= {f"{section}.{key}" for key in changed}
    assert different <= {*PLACES, *SHAPES, *DEVIATIONS, *more}
    model = read_json(folder / "model.json")
    flavor = LaneformerConfig.from_flavor("2b", **shipped.get("architecture", {})).to_dict()
    assert model.keys() == flavor.keys()
    changed = {key for key in flavor if model[key] != flavor[key]}
    assert changed == {
        name.removeprefix("architecture.") for name in SHAPES if name.startswith("architecture.")
    }


def assert_prepared_as_the_job_file_says(folder: Path) -> None:
    """Assert compilation, checkpointing, casts and saves as in the 2B run, and the steps' order."""
    facts = read_json(folder / "facts.json")
    layers = LaneformerConfig.from_flavor("2b").num_hidden_layers
    assert facts["layers"] == facts["checkpointed"] == facts["compiled"] == layers
    assert facts["norm_compiled"]
    assert facts["loss_graphs"] == 2
    # fewer variants than the default recompile limit would prove nothing
    assert facts["graphs"] > 8
    # what reaches the head
    assert facts["streams"] == ["torch.bfloat16"]
    # computed in, reduced in
    assert facts["policies"] == [["torch.bfloat16", "torch.float32"]]
    assert facts["weights"] == ["torch.float32"]
    assert facts["async_mode"] == "ASYNC_WITH_PINNED_MEM"
    assert facts["order"] == ["staging is over", "optimizer"] * (len(facts["order"]) // 2) != []
    replicas = tomllib.loads((folder / "config.toml").read_text())["parallelism"][
        "data_parallel_replicate_degree"
    ]
    # the embedding, each layer, norm with head
    units = layers + 2 if replicas > 1 else 0
    # one a step, though it has two micro-batches
    assert facts["reductions"] == [units] * len(facts["reductions"]) != []
    assert facts["allocator"] == "expandable_segments:True"
    # comm.train_timeout_seconds, once, also where no step is the first
    assert facts["timeouts_s"] == [300.0]
