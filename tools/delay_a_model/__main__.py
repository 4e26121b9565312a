"""`python -m tools.delay_a_model MODEL --config FILE --out DIR`: turn a dense model into one
whose lanes are late.

Two stages. `map`: held-out loss with a delay in layers >= k, for every k, without training
(DIR/damage.*). `recover`: the upper layers become late step by step and are distilled against the same
weights at delay 0 (DIR/recovery.*). Both append a line of JSON for everything they finish, and the same
command goes on after an interruption.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tomli
import tyro

from laneformer.config import flops_per_token
from laneformer.llama.config import config_of_llama
from records.files import file_sha256, model_sha256

from .damage import damage_map, report
from .lanes import cut
from .recovery import Recovery, Student, export, recover
from .text import Text


@dataclass(frozen=True)
class Plan:
    """The config. price: shape (a model's config.json), peak_flops of one device, and the ratio of
    it that is used.
    """

    lanes: int
    held_out_text: list[str]
    train_text: list[str]
    held_out_windows: int
    seq_len: int
    recover: dict[str, Any]
    price: dict[str, Any] = field(default_factory=dict)
    delays: tuple[int, ...] = (1, 2)  # of the map
    batch_sequences: int = 2  # of the map
    device: str = "cpu"


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
    try:
        given = Plan(**tomli.loads(config.read_text(encoding="utf-8")))
        settings = Recovery(**given.recover)
    except TypeError as error:
        raise ValueError(f"{config}: {error}") from None
    if plan:
        print(cost(given, settings))
        return
    cut_model, checkpoint = cut(model, given.lanes)
    if checkpoint.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json")
    held_out, train = (
        Text(patterns, checkpoint.tokenizer) for patterns in (given.held_out_text, given.train_text)
    )
    if shared := set(held_out.files) & set(train.files):
        raise ValueError(f"{min(shared)} is in held_out_text and in train_text")
    windows = held_out.spread(given.held_out_windows, given.seq_len).to(given.device)
    content = model_sha256(model) if model.is_dir() else file_sha256(model)
    about = {
        "model": model.name,
        "model_sha256": content,
        "lanes": given.lanes,
        "windows": list(windows.shape),
    }
    about["held_out_sha256"] = held_out.sha256
    cut_model.to(given.device)
    if "map" in stages:
        path = out / "damage.jsonl"
        rows = damage_map(cut_model, windows, given.delays, given.batch_sequences, path, about)
        report(rows, ("first_late_layer", "delay"), out / "damage", "delay")
    if "recover" in stages:
        student = Student(cut_model, settings, windows)
        rows = recover(student, train, out, about, steps, minutes)
        report(rows, ("step", "late_layers", "kl", "seconds"), out / "recovery", None)
        finished = student.step == settings.steps
        print(export(student, checkpoint, out) if finished else "to be continued by the same command")


def cost(plan: Plan, settings: Recovery) -> str:
    """From counted operations a token to hours, with every step."""
    if wrong := {"shape", "peak_flops", "used_ratio"} ^ plan.price.keys():
        raise ValueError(f"--plan: [price] lacks {wrong}, or should not have it")
    config, speed = (
        config_of_llama(plan.price["shape"], plan.lanes),
        plan.price["peak_flops"] * plan.price["used_ratio"],
    )
    settings.check(config.num_hidden_layers)
    late, counts = config.num_hidden_layers - settings.first_late_layer, config.parameter_count()
    upper, head = late / config.num_hidden_layers, 2 * math.prod(config.head_shape)
    layers = flops_per_token(config, plan.seq_len) / 3 - head
    # lower layers once; upper ones by the teacher, and forward and backward by the student; the head's
    # weight is frozen
    flops = layers * (1 - upper) + (layers * upper + head) + (3 * layers * upper + 2 * head)
    tokens = settings.steps * settings.batch_sequences * plan.seq_len
    return f"""calculated, not measured:
forward, a token: layers {layers / 1e9:.3f} + head {head / 1e9:.3f} GFLOP
with the teacher, and the student's backward in {upper:.0%} of the layers: {flops / 1e9:.3f} GFLOP a token
{settings.steps:,} steps x {settings.batch_sequences} x {plan.seq_len} = {tokens:,} tokens: {tokens * flops:.3g} FLOP
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
