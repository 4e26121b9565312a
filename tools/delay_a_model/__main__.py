"""`python -m tools.delay_a_model MODEL --config FILE --out DIR`: turn a dense model into one
whose lanes are late.

Text is prepared with the model's tokenizer (DIR/data), then there are two stages. `map`: held-out loss with a
delay in layers >= k, for every k, without training (DIR/damage.*). `recover`: the trainer makes the upper layers
late step by step and distils them against the same weights at delay 0 (the run folder DIR/run, DIR/recovery.*).
In the end DIR/hf holds the late model, which `laneformer chat` and Transformers run. The same command goes on after
an interruption.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli
import tomli_w
import torch
import tyro
from rich.console import Console

from data_mixtures.mixture import Mixture, valid_windows
from data_mixtures.prepare import prepare
from data_mixtures.stages.run import Options
from laneformer.flops import flops_per_token
from laneformer.llama.config import config_of_llama
from laneformer.supports import refuse_unsupported
from records.files import file_sha256, model_sha256, write_atomically
from records.workers import usable_cpus

from .damage import damage_map, kept_rows, report
from .folder import card_of, write_folder
from .job_config import Late
from .lanes import cut
from .recovery import check, job_of, measure, train, write_dense


@dataclass(frozen=True)
class Plan:
    """The config: [delay], [price], and the tables of the trainer's job.

    price: shape (a model's config.json), peak_flops of one device, and the ratio of it that is used.
    """

    job: dict[str, Any]
    late: Late  # of the job, like the next two
    steps: int
    seq_len: int
    price: dict[str, Any]
    lanes: int
    recipe: str  # of data_mixtures; its tokenizer and seq_len are those of the model and of the job
    held_out_windows: int  # of each source
    delays: tuple[int, ...] = (1, 2)  # of the map
    batch_sequences: int = 2  # of held-out losses
    device: str = "cpu"  # of held-out losses; the trainer takes a GPU where there is one

    @classmethod
    def read(cls, path: Path) -> Plan:
        """ValueError for what is missing or unknown."""
        tables = tomli.loads(path.read_text(encoding="utf-8"))
        try:
            own, late, training = tables.pop("delay"), Late(**tables["late"]), tables["training"]
            price, steps, seq_len = tables.pop("price", {}), training["steps"], training["seq_len"]
            return cls(**own, job=tables, late=late, steps=steps, seq_len=seq_len, price=price)
        except (TypeError, KeyError) as error:
            raise ValueError(f"{path}: {error}") from None


def delay_a_model(
    config: Path,
    model: tyro.conf.Positional[Path] = Path("model"),
    out: Path = Path("runs/delay"),
    stages: tuple[Literal["map", "recover"], ...] = ("map", "recover"),
    steps: int = sys.maxsize,
    minutes: float = math.inf,
    plan: bool = False,
) -> None:
    """Cut a model into lanes and make its upper layers late.

    Args:
        config: lanes, text and training (TOML), such as configs/delay_smollm2.toml.
        model: folder or GGUF file of the Llama family.
        out: folder of the results.
        stages: what to do.
        steps: stop the recovery at this step; the same command without it goes on.
        minutes: stop the recovery after this time.
        plan: only print what the recovery would cost.
    """
    given = Plan.read(config)
    if plan:
        print(cost(given))
        return
    cut_model, checkpoint = cut(model, given.lanes)
    if checkpoint.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json")
    if "recover" in stages:
        check(given.late, len(cut_model.layers), given.steps)
        refuse_unsupported(cut_model.config, f"{model}: recovery (`--stages map` works)")
    content = model_sha256(model) if model.is_dir() else file_sha256(model)
    about = {"model": model.name, "model_sha256": content, "lanes": given.lanes}
    for name in ("damage.jsonl", "recovery.jsonl"):
        kept_rows(out / name, about)
    write_dense(cut_model, checkpoint, out / "dense")
    lock, windows = text(given, out)
    about |= {"mixture": Mixture.open(lock).fingerprint, "windows": list(windows.shape)}
    cut_model.to(given.device)
    parts = windows.split(given.batch_sequences)
    if "map" in stages:
        rows = damage_map(cut_model, parts, given.delays, out / "damage.jsonl", about)
        report(rows, ("first_late_layer", "delay"), out / "damage", "delay")
    if "recover" in stages:
        measure(cut_model, parts, given.late, out, about)
        reached = train(job_of(given.job, out, lock), out, steps, minutes)
        rows = measure(cut_model, parts, given.late, out, about)
        report(rows, ("step", "late_layers", "kl", "seconds"), out / "recovery", None)
        if reached < given.steps:
            print("to be continued by the same command")
            return
        card = card_of(given.late, model.stem, checkpoint, rows, windows)
        step = out / "run" / "checkpoint" / f"step-{reached}"
        print(json.dumps(write_folder(given.late, checkpoint, step, out / "hf", card)))


def text(plan: Plan, out: Path) -> tuple[Path, torch.Tensor]:
    """The lock of OUT/data, prepared if it is not there, and its held-out windows, token ids (n, S + 1)."""
    recipe, lock = out / "recipe.toml", out / "data" / "phase1.lock.json"
    if not lock.exists():
        base, tokenizer = Path(plan.recipe).resolve(), (out / "dense" / "tokenizer.json").resolve()
        changed = {"base": str(base), "tokenizer": str(tokenizer), "seq_len": plan.seq_len}
        write_atomically(recipe, tomli_w.dumps(changed))
        prepare(recipe, lock.parent, Options(usable_cpus()), Console(stderr=True))
    names = Mixture.open(lock).source_names
    found = [valid_windows(lock.parent, name, plan.held_out_windows) for name in names]
    return lock, torch.from_numpy(np.concatenate(found).astype(np.int64)).to(plan.device)


def cost(plan: Plan) -> str:
    """From counted operations a token to hours, with every step."""
    if wrong := {"shape", "peak_flops", "used_ratio"} ^ plan.price.keys():
        raise ValueError(f"--plan: [price] lacks {wrong}, or should not have it")
    config, speed = (
        config_of_llama(plan.price["shape"], plan.lanes),
        plan.price["peak_flops"] * plan.price["used_ratio"],
    )
    check(plan.late, config.num_hidden_layers, plan.steps)
    late, counts = config.num_hidden_layers - plan.late.first_late_layer, config.parameter_count()
    upper, head = late / config.num_hidden_layers, 2 * math.prod(config.head_shape)
    layers = flops_per_token(config, plan.seq_len) / 3 - head
    # lower layers once; upper ones by the teacher, and forward and backward by the student; the head's
    # weight is frozen
    flops = layers * (1 - upper) + (layers * upper + head) + (3 * layers * upper + 2 * head)
    batch = plan.job["training"]["global_batch_size"]
    tokens = plan.steps * batch * plan.seq_len
    return f"""calculated, not measured:
forward, a token: layers {layers / 1e9:.3f} + head {head / 1e9:.3f} GFLOP
with the teacher, and the student's backward in {upper:.0%} of the layers: {flops / 1e9:.3f} GFLOP a token
{plan.steps:,} steps x {batch} x {plan.seq_len} = {tokens:,} tokens: {tokens * flops:.3g} FLOP
at {plan.price["used_ratio"]:.0%} of {plan.price["peak_flops"]:.3g} FLOP/s: {tokens * flops / speed / 3600:.3g} hours
weights, gradients and moments in float32: {(4 * counts["total"] + 16 * late * counts["layer"]) / 1e9:.1f} GB"""


def main() -> None:
    try:
        tyro.cli(delay_a_model, prog="python -m tools.delay_a_model", description=__doc__)
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.delay_a_model: {error}") from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
