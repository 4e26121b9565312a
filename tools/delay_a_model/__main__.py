"""`python -m tools.delay_a_model MODEL --config FILE --out DIR`: turn a dense model into one
whose lanes are late.

Text is prepared with the model's tokenizer (DIR/data), and the config's rule says which units share a lane
(DIR/layout.json). Then there are stages. `map`: held-out loss with a delay in layers >= k, for every k, without
training (DIR/damage.*). `recover`: the trainer makes the upper layers late step by step and distils them against the
same weights at delay 0 (the run folder DIR/run, DIR/recovery.*), on the text or on what the dense model itself writes
([delay.own_outputs], DIR/own). Instead of these `layouts`: what the damage is with
every rule (DIR/layouts.*).
In the end DIR/hf holds the late model, which `laneformer chat` and Transformers run. The same command goes on after
an interruption.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tomli
import tomli_w
import torch
import tyro
from rich.console import Console
from torch import Tensor

from data_mixtures.mixture import Mixture, valid_windows
from data_mixtures.prepare import prepare
from data_mixtures.stages.run import Options
from laneformer import Laneformer
from laneformer.engine.folder import Checkpoint
from laneformer.flops import flops_per_token
from laneformer.llama.config import config_of_llama
from laneformer.supports import refuse_unsupported
from records.files import write_atomically
from records.workers import usable_cpus
from train import own_outputs

from . import adapter
from .apply import apply, sha256_of
from .damage import damage_map, kept_rows, report
from .folder import bits_per_byte, card_of, write_folder
from .job_config import Late
from .lanes import cut
from .layout import Layout, Module, capture, laid_out
from .layouts import SEARCHED, compare, kept_layout, layout_of, table_of
from .recovery import (
    check,
    job_of,
    load_adapter,
    measure,
    train,
    trained_weights,
    write_dense,
    write_tokenizer,
)


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
    layout: str = "identity"  # of RULES in layout.py
    layout_windows: int = 4  # of training text, which the layout is searched on
    # of train.own_outputs: what the dense model writes after the beginnings of the text is trained on in its place
    own_outputs: dict[str, Any] = field(default_factory=dict)
    layouts_first: tuple[int, ...] = ()  # first late layers of the stage `layouts`; default: that of [late]
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
    stages: tuple[Literal["map", "recover", "layouts"], ...] = ("map", "recover"),
    steps: int = sys.maxsize,
    minutes: float = math.inf,
    lora_rank: int | None = None,
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
        lora_rank: train an adapter of this rank instead of the late layers' weights, and leave it in DIR/adapter
            (`python -m tools.delay_a_model.apply`); default: late.lora_rank of the config.
        plan: only print what the recovery would cost.
    """
    given = Plan.read(config)
    if lora_rank is not None:
        given = with_rank(given, lora_rank)
    if plan:
        print(cost(given))
        return
    work = prepared(given, model, out, recovers="recover" in stages)
    if "layouts" in stages:
        print(compared(work))
        return
    layout = lay_out(work)
    write_dense(work.model, given.late, out / "dense")
    work.model.to(given.device)
    if "map" in stages:
        rows = damage_map(work.model, work.parts, given.delays, out / "damage.jsonl", work.about)
        report(rows, ("first_late_layer", "delay"), out / "damage", "delay")
    if "recover" in stages:
        print(recovered(work, layout, steps, minutes))


@dataclass
class Work:
    """A cut model with its text; about: what results depend on."""

    plan: Plan
    path: Path
    out: Path
    model: Laneformer
    checkpoint: Checkpoint
    lock: Path
    windows: Tensor  # held out, (n, S + 1)
    about: dict[str, Any]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.windows.split(self.plan.batch_sequences)

    def captured(self) -> list[Module]:
        """Of the model with one lane, on training text."""
        ids = torch.from_numpy(
            Mixture.open(self.lock).sequences(0, self.plan.layout_windows)[0].astype(np.int64)
        )
        return capture(cut(self.path, 1)[0], ids[:, :-1].split(1), every=2)


def prepared(plan: Plan, path: Path, out: Path, recovers: bool) -> Work:
    """ValueError for a model, a plan or results of others that do not fit."""
    model, checkpoint = cut(path, plan.lanes)
    if checkpoint.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json")
    if recovers:
        check(plan.late, len(model.layers), plan.steps)
        refuse_unsupported(model.config, f"{path}: recovery (`--stages map` works)")
    about = {"model": path.name, "model_sha256": sha256_of(path), "lanes": plan.lanes}
    for name in ("damage.jsonl", "recovery.jsonl", "layouts.jsonl"):
        kept_rows(out / name, about)
    write_tokenizer(checkpoint, out / "dense")
    lock, windows = text(plan, out)
    about |= {"mixture": Mixture.open(lock).fingerprint, "windows": list(windows.shape)}
    return Work(plan, path, out, model, checkpoint, lock, windows, about)


def compared(work: Work) -> str:
    """The table of all rules."""
    plan, out, origin = work.plan, work.out, {**work.about, "layout_windows": work.plan.layout_windows}
    firsts = plan.layouts_first or (plan.late.first_late_layer,)
    rows = compare(
        work.model, work.captured(), work.parts, plan.delays, firsts, out / "layouts.jsonl", origin
    )
    assert work.checkpoint.tokenizer is not None, "prepared() refuses a model without one"
    found = table_of(rows, bits_per_byte(work.checkpoint.tokenizer, work.windows))
    write_atomically(out / "layouts.md", found + "\n")
    return found


def lay_out(work: Work) -> Layout:
    """Give the cut model's units the places of the plan's rule."""
    plan = work.plan
    late = plan.late.delay, plan.late.first_late_layer

    def made() -> tuple[Layout, dict[str, Any]]:
        modules = work.captured() if plan.layout in SEARCHED else []
        return layout_of(plan.layout, work.model, modules, *late)

    origin = {**work.about, "layout": plan.layout, "late": list(late), "layout_windows": plan.layout_windows}
    layout = kept_layout(work.out / "layout.json", origin, made)
    work.model.load_state_dict(laid_out(work.model.state_dict(), layout), assign=True)
    work.about["layout"] = plan.layout
    return layout


def recovered(work: Work, layout: Layout, steps: int, minutes: float) -> str:
    """Train as far as allowed; what was left of it, in words or JSON."""
    plan, late, out, config = work.plan, work.plan.late, work.out, work.model.config
    measure(work.model, work.parts, late, out, work.about)
    reached = train(job_of(plan.job, out, trained_text(work)), out, steps, minutes)
    rows = measure(work.model, work.parts, late, out, work.about)
    report(rows, ("step", "late_layers", "kl", "seconds"), out / "recovery", None, [late.end])
    if reached < plan.steps:
        return "to be continued by the same command"
    card = card_of(late, work.path.stem, work.checkpoint, rows, work.windows)
    step = out / "run" / "checkpoint" / f"step-{reached}"
    if not late.lora_rank:
        trained = trained_weights(step, config, late)
        return json.dumps(write_folder(late, work.checkpoint, trained, out / "hf", card))
    adapter.write(out / "adapter", load_adapter(step, config, late), layout, late, work.about)
    (out / "adapter" / "README.md").write_text(card)
    return json.dumps(apply(out / "adapter", work.path, out / "hf"))


def trained_text(work: Work) -> Path:
    """The lock of the recipe's text, or of what the dense model writes itself (DIR/own), which is finished first."""
    plan = work.plan
    if not plan.own_outputs:
        return work.lock
    try:
        given = own_outputs.Arguments(
            work.path, work.lock, work.out / "own", seq_len=plan.seq_len, **plan.own_outputs
        )
    except TypeError as error:
        raise ValueError(f"[delay.own_outputs]: {error}") from None
    return own_outputs.run(given)


def with_rank(plan: Plan, rank: int) -> Plan:
    late = {**plan.job["late"], "lora_rank": rank}
    return replace(plan, late=Late(**late), job={**plan.job, "late": late})


def text(plan: Plan, out: Path) -> tuple[Path, Tensor]:
    """The lock of OUT/data, prepared if it is not there, and its held-out windows, token ids (n, S + 1)."""
    recipe, lock = out / "recipe.toml", out / "data" / "phase1.lock.json"
    if not lock.exists():
        base, tokenizer = Path(plan.recipe).resolve(), (out / "dense" / "tokenizer.json").resolve()
        changed = {"base": str(base), "tokenizer": str(tokenizer), "seq_len": plan.seq_len}
        write_atomically(recipe, tomli_w.dumps(changed))
        prepare(recipe, lock.parent, Options(usable_cpus()), Console(stderr=True))
    found = [
        valid_windows(lock.parent, name, plan.held_out_windows) for name in Mixture.open(lock).source_names
    ]
    return lock, torch.from_numpy(np.concatenate(found).astype(np.int64)).to(plan.device)


def cost(plan: Plan) -> str:
    """From counted operations a token to hours, with every step."""
    if wrong := {"shape", "peak_flops", "used_ratio"} ^ plan.price.keys():
        raise ValueError(f"--plan: [price] lacks {wrong}, or should not have it")
    config = config_of_llama(plan.price["shape"], plan.lanes)
    speed = plan.price["peak_flops"] * plan.price["used_ratio"]
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
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the trainer is to save, whoever ends this
    try:
        tyro.cli(delay_a_model, prog="python -m tools.delay_a_model", description=__doc__)
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.delay_a_model: {error}") from None
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
