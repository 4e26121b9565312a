"""`python -m tools.delay_a_model MODEL --config FILE --out DIR`: turn a dense model into one whose lanes are late.

1. The model is cut into lanes without loss (DIR/dense), the recipe's text prepared with its tokenizer (DIR/data).
2. The shipped trainer makes the upper layers late step by step and distils them against the same weights at
   delay 0 (the run folder DIR/run).
3. DIR/hf is the late model, which `laneformer chat` and Transformers run; DIR/adapter holds what was trained, if
   that was an adapter.

The same command goes on after an interruption.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli
import tyro

from laneformer.engine.folder import read_checkpoint
from laneformer.hf.export import load_weights
from records.checkpoints import newest_saved_step
from records.command import run_command
from records.files import write_json
from records.job import job_flags

from . import adapter
from .apply import apply, sha256_of
from .export import late_architecture, model_card, write_folder
from .job_config import Late
from .lanes import cut
from .recovery import check, load_adapter, prepare_text, train, write_dense

ORIGIN = "origin.json"


def delay_a_model(
    model: tyro.conf.Positional[Path], config: Path, out: Path = Path("runs/delay")
) -> dict[str, Any]:
    """Cut a model into lanes, make its upper layers late, and export it.

    Args:
        model: folder or GGUF file of the Llama family.
        config: a job file of the trainer with [late], such as configs/delay_smollm2.toml.
        out: folder of the results.
    """
    late, steps, flags = begin(model, config, out)
    if newest_saved_step(out / "run" / "checkpoint") < steps:
        train(flags)
    return finish(model, late, steps, out)


def begin(path: Path, config: Path, out: Path) -> tuple[Late, int, list[str]]:
    """Cut the model and prepare its text, if not done; ValueError for what does not fit.

    Returns [late], the job's steps, and the arguments of `python -m train`.
    """
    tables = tomli.loads(config.read_text(encoding="utf-8"))
    try:
        late, training = Late(**tables["late"]), tables["training"]
        steps, seq_len = training["steps"], training["seq_len"]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{config}: {error}") from None
    model, checkpoint = cut(path, late.lanes)
    check(late, len(model.layers), steps)
    origin = {
        "model": path.name,
        "model_sha256": sha256_of(path),
        "lanes": late.lanes,
        "config": tables,
    }
    refuse_other_origin(out / ORIGIN, origin)
    write_dense(model, late, out / "dense")
    lock = prepare_text(late, seq_len, checkpoint, out)
    # the run starts from the cut model, and distils it against itself
    flags = {
        "job.config_file": config,
        "job.dump_folder": out / "run",
        "mixture.lock": lock,
        "late.dense": out / "dense",
        "checkpoint.initial_load_path": out / "dense" / "checkpoint" / "step-0",
    }
    return late, steps, job_flags(flags)


def refuse_other_origin(path: Path, origin: dict[str, Any]) -> None:
    """Raise ValueError where a folder was begun with another model or config."""
    # its results would be taken for those of this model and config
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) != origin:
        raise ValueError(
            f"{path.parent} was begun with another model or config; choose another --out"
        )
    write_json(path, origin)


def finish(path: Path, late: Late, steps: int, out: Path) -> dict[str, Any]:
    """Export the last checkpoint; returns what `write_folder` does."""
    step = out / "run" / "checkpoint" / f"step-{steps}"
    checkpoint = read_checkpoint(path, lanes=late.lanes)
    card = model_card(late, checkpoint.config.num_hidden_layers, path.stem, steps)
    architecture = late_architecture(late)
    if not late.lora_rank:
        weights = load_weights(step, checkpoint.config)
        return write_folder(architecture, checkpoint, weights, out / "hf", card)
    about = json.loads((out / ORIGIN).read_text(encoding="utf-8")) | {"architecture": architecture}
    adapter.write(out / "adapter", load_adapter(step, checkpoint.config, late), about)
    (out / "adapter" / "README.md").write_text(card)
    return apply(out / "adapter", path, out / "hf")


def main() -> None:
    result = tyro.cli(delay_a_model, prog="python -m tools.delay_a_model", description=__doc__)
    print(json.dumps(result))


if __name__ == "__main__":
    run_command("tools.delay_a_model", main, interrupted="interrupted; the same command goes on")
