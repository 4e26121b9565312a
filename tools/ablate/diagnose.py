"""`python -m tools.ablate.diagnose FOLDER --data data/demo`: what the delay does inside a checkpoint.

Of every layer: how alike the lanes' streams are, how much a lane has not yet heard of the others, and the
size of its own output. Then the loss when the delay is changed at inference alone. Watched by hooks; the
model runs as it is.
"""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from evals.bits_per_byte import load_windows, matching_token_bytes
from laneformer import Laneformer, LaneformerConfig
from laneformer.config import MODULES, Join
from laneformer.engine.folder import read_checkpoint
from laneformer.model import LaneformerLayer
from records.files import write_atomically
from tools.check.reference import plain_model, weights_of
from tools.markdown import table

from .figure import figure_style, finish, points, save
from .page import heading, image, put_section
from .report import interval

BATCH = 8


@dataclass
class Options:
    folder: tyro.conf.Positional[Path]
    """A Hugging Face folder, or one that tools.ablate --keep-weights has left."""
    data: Path
    """Prepared data whose held-out windows are read."""
    windows: int = 16
    """Windows of each source."""
    lanes: int | None = None
    """Of a dense model of the Llama family: the lanes into which it is cut."""
    out: Path | None = None
    """JSON file of all figures; the figure is FILE.svg, beside it."""
    page: Path | None = None
    """Markdown page whose section about this folder is to be written."""
    figure: Path | None = None
    """Where the figure goes; default: beside --out."""


class LaneWatch:
    """Sums of what the lanes hold after each layer; `rows` gives the means. Close it to remove hooks."""

    def __init__(self, model: Laneformer):
        config, self.positions = model.config, 0
        self.sums = torch.zeros(len(model.layers), 3, dtype=torch.float64)
        # (may reach other lanes, output) of the newest modules, as many as can be on their way
        self.outputs: deque[tuple[bool, Tensor]] = deque(maxlen=2 * max(1, config.broadcast_delay))
        self.hooks: list[Any] = [model.layers[0].register_forward_pre_hook(lambda *_: self.outputs.clear())]
        for i, layer in enumerate(cast("list[LaneformerLayer]", list(model.layers))):
            for name, module in zip(MODULES, (layer.attention, layer.feed_forward), strict=True):
                travels = config.join(i, name) == Join.PAST or config.broadcasts(i, name)
                self.hooks.append(module.register_forward_hook(partial(self.keep, travels)))
            self.hooks.append(layer.register_forward_hook(partial(self.measure, i)))

    def keep(self, travels: bool, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.outputs.append((travels, output))

    def measure(self, layer: int, module: nn.Module, inputs: Any, outputs: tuple[Tensor, Any]) -> None:
        h = outputs[0].double()
        (_, attention), (_, mlp) = list(self.outputs)[-2:]
        own = attention.double() + mlp
        lanes, length = h.shape[2], h.norm(dim=-1)
        # |sum of unit vectors|^2 = L + all pairs' cosines
        towards = (h / length[..., None]).sum(2).square().sum(-1)
        pairs = lanes * (lanes - 1)
        cosine = (towards - lanes) / pairs if pairs else torch.ones_like(towards)
        stale = self.stale().double().norm(dim=-1) / length
        share = own.norm(dim=-1) / own.sum(2, keepdim=True).norm(dim=-1)
        self.sums[layer] += torch.stack([each.sum() for each in (cosine, stale.mean(2), share.mean(2))])
        self.positions += cosine.numel() if layer == 0 else 0

    def stale(self) -> Tensor:
        """What each lane lacks after a layer, (B, S, L, D): the others' outputs that are on their
        way or never come.

        A lane's own outputs have joined. Outputs of layers that do not reduce at all are not late.
        """
        late = torch.stack([mine * travels for travels, mine in self.outputs]).sum(0)
        return late.sum(2, keepdim=True) - late

    def rows(self) -> list[dict[str, float]]:
        means = (self.sums / self.positions).tolist()
        return [{"layer": i, "cosine": c, "stale": s, "own_share": o} for i, (c, s, o) in enumerate(means)]

    def close(self) -> None:
        for hook in self.hooks:
            hook.remove()


@torch.no_grad()
def losses(model: Laneformer, windows: np.ndarray) -> list[float]:
    """Mean loss of each window (n, S + 1), nats a token."""
    found: list[float] = []
    for ids in torch.from_numpy(windows.astype(np.int64)).split(BATCH):
        each = F.cross_entropy(model(ids[:, :-1]).mT, ids[:, 1:], reduction="none")
        found += each.mean(1).tolist()
    return found


def settings(config: LaneformerConfig) -> list[LaneformerConfig]:
    """Delays 0 to 4 with early joins and without."""
    wanted = [(0, True), *((delay, early) for early in (True, False) for delay in (1, 2, 3, 4))]
    return [dataclasses.replace(config, broadcast_delay=d, use_early_comm=e) for d, e in wanted]


def diagnose(options: Options) -> dict[str, Any]:
    """Layers and losses. ValueError for a folder, lanes or data that do not fit."""
    checkpoint = read_checkpoint(options.folder, lanes=options.lanes)
    config, weights = checkpoint.config, weights_of(checkpoint.tensors)
    by_source, _ = load_windows(options.data, options.windows)
    if checkpoint.tokenizer is not None:
        matching_token_bytes(options.folder, options.data)
    windows = np.concatenate(list(by_source.values()))[:, : config.max_position_embeddings + 1]
    if windows.max() >= config.vocab_size:
        raise ValueError(
            f"{options.data} has token {windows.max()}, {options.folder} only {config.vocab_size} of them"
        )
    model = plain_model(config, weights, torch.float32)
    watch = LaneWatch(model)
    own = losses(model, windows)
    watch.close()
    rows: list[dict[str, Any]] = []
    for other in track(settings(config), "losses", console=Console(stderr=True)):
        found = losses(plain_model(other, model.state_dict(), torch.float32), windows)
        mean, half, _ = interval(np.subtract(found, own))
        rows.append(
            {
                "delay": other.broadcast_delay, "early_joins": other.use_early_comm, "as_trained": other == config,
                "loss": fmean(found), "difference": mean, "half_width_95": half,
            }
        )  # fmt: skip
    return {
        "folder": options.folder.name, "lanes": config.num_lanes, "windows": len(windows),
        "tokens": len(windows) * (windows.shape[1] - 1), "layers": watch.rows(), "losses": rows,
        "own": {"delay": config.broadcast_delay, "early_joins": config.use_early_comm, "loss": fmean(own)},
    }  # fmt: skip


def section_of(result: dict[str, Any], figure: Path | None, page: Path | None) -> str:
    layers = [
        (r["layer"], *(f"{r[key]:.4f}" for key in ("cosine", "stale", "own_share"))) for r in result["layers"]
    ]
    changed = [
        (r["delay"], "yes" if r["early_joins"] else "no", f"{r['loss']:.4f}", f"{r['difference']:+.4f}",
         f"{r['half_width_95']:.4f}", "as trained" if r["as_trained"] else "")
        for r in result["losses"]
    ]  # fmt: skip
    own = result["own"]
    blocks = [
        heading(f"Inside a checkpoint: {result['folder']}", "python -m tools.ablate.diagnose"),
        f"{result['lanes']} lanes, trained with delay {own['delay']}; {result['windows']} held-out windows, "
        f"{result['tokens']:,} tokens; loss {own['loss']:.4f} nats a token.",
        "After each layer, means over positions and lanes. cosine: of two lanes' streams; stale: norm of what a lane "
        "has not yet heard of the others (or never will), over its stream's; own: norm of its output in this layer "
        "over that of the lanes' sum.",
        table(("layer", "cosine", "stale", "own"), layers),
        "The same weights with the delay changed at inference alone; ±: half of the 95% t interval over windows, "
        "paired. This is one checkpoint: it says how far its weights rely on their joins, not what another delay costs "
        "a model that is trained with it.",
        table(("delay", "early joins", "loss", "difference", "±", ""), changed),
    ]
    return "\n\n".join(
        [*blocks, *([image(figure, page, "Lanes by layer, and loss by delay")] if figure else [])]
    )


def draw_diagnosis(result: dict[str, Any], path: Path) -> None:
    """Left: the layers; right: the loss against the delay at inference."""
    figure, (by_layer, by_delay) = figure_style().subplots(1, 2, figsize=(7.6, 3), layout="constrained")
    names = {
        "cosine": "cosine of two lanes' streams",
        "stale": "stale part / stream",
        "own_share": "own output / sum",
    }
    for key, name in names.items():
        by_layer.plot([row[key] for row in result["layers"]], "o-", label=name)
    by_layer.set(xlabel="layer", ylim=(0, None))
    by_layer.legend()
    for early, name in ((True, "early joins"), (False, "no early joins")):
        own = [row for row in result["losses"] if row["early_joins"] == early]
        points(by_delay, own, "delay", "o-", f"C{int(not early)}", name)
    finish(by_delay, "delay at inference, layers", "nats a token above as trained", xticks=range(5))
    save(figure, path)


def main() -> None:
    options = tyro.cli(Options, prog="python -m tools.ablate.diagnose", description=__doc__)
    try:
        for path in filter(
            None, (options.out, options.figure, options.page)
        ):  # before the work, which takes minutes
            path.parent.mkdir(parents=True, exist_ok=True)
        result = diagnose(options)
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.ablate.diagnose: {error}") from None
    figure = options.figure or (options.out and options.out.with_suffix(".svg"))
    section = section_of(result, figure, options.page)
    Console().print(Markdown(section))
    if figure:
        draw_diagnosis(result, figure)
    if options.out:
        write_atomically(options.out, json.dumps(result, indent=1) + "\n")
    if options.page:
        put_section(options.page, section)


if __name__ == "__main__":
    main()
