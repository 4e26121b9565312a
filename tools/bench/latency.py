"""Tokens/s against the latency of the link between lanes: what a delay hides, beside the
model that predicts it.

    QUIET python -m tools.bench latency --out docs/benchmarks/DATE-latency.md --plot docs/images/latency.svg

The latency is injected: a thread sees what a thread of another lane gives it only so long after it
was given (csrc/exchange.h). The prediction is that of tools/roofline.py, with the time of
a layer measured here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from laneformer import LaneformerConfig
from records.files import append_line, read_lines
from tools.bench import harness
from tools.bench.harness import Result, alternate, check_at_least
from tools.markdown import table
from tools.roofline import split_layer, token_s

if TYPE_CHECKING:
    from laneformer import Engine

LANES = 2  # one a thread, as one a device
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # a flavor, and what differs from it
    "300m": ("300m", {}),
    "small": ("tiny", {
        "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 15, "vocab_size": 1024, "swa_layers": (),
    }),
    "tiny": ("tiny", {}),
}  # fmt: skip
MIN_TOKENS = 6  # of a trial
FILE_START = """# What the delay hides: tokens/s against the latency of the link

Each section is one run of its command. Two lanes on two threads, as on two devices; one request, greedy,
bf16 weights. **The latency is injected in software**: what a thread publishes becomes readable by the other
lane's thread that long after it was published, and the reader spins until then; nothing here is a network.
One more exchange a token, which nothing hides, agrees on the token. Variants and latencies alternate within
a round; a trial's figure is its median token, a row's the median over rounds. "Predicted": tokens/s at
latency 0 and what the recurrence of `tools/roofline.py` adds to it, with the time of a layer from this run
(that of a model with half as many layers, subtracted); nothing is fitted to the measured delays. Tokens
were equal at every latency, or the run would have failed."""


@dataclass(frozen=True)
class Variant:
    """An order of joins: what differs in the config, and by how many modules each sum is late."""

    overrides: Mapping[str, Any]
    modules_late: int = 0

    def config(self, shape: str, **overrides: Any) -> LaneformerConfig:
        flavor, own = SHAPES[shape]
        return LaneformerConfig.from_flavor(
            flavor, **{"num_lanes": LANES, **own, **self.overrides, **overrides}
        )

    def token_s(self, config: LaneformerConfig, module_s: tuple[float, float], link_s: float) -> float:
        return token_s(config, module_s, link_s, modules_late=self.modules_late)

    def knee_s(self, module_s: tuple[float, float]) -> float:
        """The latency up to which joins after the early layers wait for nothing."""
        return self.overrides["broadcast_delay"] * sum(module_s) + self.modules_late * min(module_s)


VARIANTS = {
    "tensor parallel": Variant({"broadcast_delay": 0}),
    "Ladder": Variant({"broadcast_delay": 0}, modules_late=1),
    "delay 1": Variant({"broadcast_delay": 1}),
    "delay 2": Variant({"broadcast_delay": 2}),
    "delay 2, no early sums": Variant({"broadcast_delay": 2, "use_early_comm": False}),
    "delay 4": Variant({"broadcast_delay": 4}),
}
HALF = "delay 2 with half the layers"


@dataclass(kw_only=True)
class Options(harness.Options):
    """Tokens/s against an injected latency for every order of joins; ends with JSON."""

    model: tuple[str, ...] = ("300m", "small")
    """Shapes with random weights: 300m, small (a layer takes about 20 us, as on a GPU), tiny (for tests)."""
    link_us: tuple[float, ...] = (0, 1, 3, 10, 30, 100, 300, 1000, 3000)
    """Latencies of the link in microseconds; 0 is needed."""
    rounds: int = 5
    """Rounds; in each, every variant runs once at every latency."""
    trial_s: float = 0.2
    """Seconds of decoding in a trial; at least 6 tokens."""
    kept: Path | None = None
    """JSON lines of models that are measured: those that are there are not measured again."""
    plot: Path | None = None
    """SVG of the curves."""

    def check(self) -> None:
        """ValueError for options that cannot be measured."""
        unknown = set(self.model) - SHAPES.keys()
        if unknown:
            raise ValueError(f"model = {sorted(unknown)} is unknown; choose from {', '.join(SHAPES)}")
        if 0 not in self.link_us or min(self.link_us) < 0 or max(self.link_us) > 1e6:
            raise ValueError(f"link_us = {self.link_us} must hold 0, and values up to 1,000,000")
        check_at_least(self, rounds=1)


def measure(options: Options, console: Any) -> Result:
    options.check()
    found = {row["model"]: row for row in read_lines(options.kept)} if options.kept else {}
    for shape in options.model:
        if shape not in found:
            found[shape] = measured(shape, options, console)
            if options.kept:
                append_line(options.kept, json.dumps(found[shape]))
    models = [found[shape] for shape in options.model]
    if options.plot:
        plot(models, options.plot)
    return {"models": models}


def measured(shape: str, options: Options, console: Any) -> Result:
    """One model: the time of its modules, and a row for each variant and latency."""
    configs = {name: variant.config(shape) for name, variant in VARIANTS.items()}
    layers = configs["delay 2"].num_hidden_layers
    configs[HALF] = VARIANTS["delay 2"].config(shape, num_hidden_layers=layers // 2, swa_layers=())
    with console.status(f"{shape}: random weights of {len(configs)} engines"):
        engines = {name: engine_of(name, config) for name, config in configs.items()}
    try:
        times = sweep(engines, options, console)
    finally:
        for engine in engines.values():
            engine.close()
    saved = np.median(times["delay 2", 0], axis=0) - np.median(times[HALF, 0], axis=0)
    modules = split_layer(configs["delay 2"], float(saved) / (layers - layers // 2))
    rows: list[Result] = [
        {"variant": name, "link_us": link_us, "tokens_per_s": 1 / float(np.median(seconds)),
         "low": 1 / max(seconds), "high": 1 / min(seconds)}
        for (name, link_us), seconds in times.items() if name != HALF
    ]  # fmt: skip
    found = {
        "model": shape, "layers": layers, "hidden": configs[HALF].hidden_size, "rounds": options.rounds,
        "module_s": modules, "rows": rows,
    }  # fmt: skip
    for row in rows:
        base = of_variant(found, row["variant"])[0]["tokens_per_s"]
        row["of_no_latency"] = row["tokens_per_s"] / base
        row["predicted"] = base * predicted_share(found, row["variant"], row["link_us"])
    return found


def engine_of(name: str, config: LaneformerConfig) -> Engine:
    from laneformer import Engine  # here: `--help` needs no engine

    engine: Any = Engine.random(config, "bf16", threads=LANES, device="cpu", pin=True)
    if name != HALF and VARIANTS[name].modules_late:
        engine._decoder.set_ladder()
    return engine


def sweep(
    engines: Mapping[str, Engine], options: Options, console: Any
) -> dict[tuple[str, float], list[float]]:
    """Median seconds a token of each trial, by variant and latency. RuntimeError where a
    latency changes a token.
    """
    times: dict[tuple[str, float], list[float]] = {}
    tokens: dict[str, list[int]] = {}
    for engine in engines.values():  # pages, clocks
        trial(engine, 0.0, options.trial_s, 1e-3)
    for number, order in enumerate(alternate(engines, options.rounds)):
        console.print(f"round {number + 1} of {options.rounds}")
        for link_us in sorted(options.link_us):
            for name in order if link_us == 0 else [name for name in order if name != HALF]:
                guess_s, link_s = times.get((name, 0), [1e-3])[-1], link_us / 1e6
                if link_us:
                    guess_s += VARIANTS[name].token_s(engines[name].config, (0.0, 0.0), link_s)
                seconds, ids = trial(engines[name], link_s, options.trial_s, guess_s)
                times.setdefault((name, link_us), []).append(seconds)
                known = tokens.setdefault(name, ids)
                if any(a != b for a, b in zip(ids, known, strict=False)):
                    raise RuntimeError(f"{name}: other tokens at a latency of {link_us} us")
    return times


def trial(engine: Any, link_s: float, trial_s: float, token_s: float) -> tuple[float, list[int]]:
    """The median token's seconds over about `trial_s`, and the ids; token_s: a guess."""
    from laneformer.engine.bench import after

    most = engine.config.max_position_embeddings // 2
    engine._decoder.set_latency(link_s)
    tokens = 1 + min(most, max(MIN_TOKENS, round(trial_s / token_s)))
    collected = after(engine, [5], tokens, reuse_prefix=False)
    return float(np.median(collected.whole.token_s)), collected.tokens


def section(options: Options, result: Result) -> tuple[str, str]:
    parts = []
    for model in result["models"]:
        attention_us, mlp_us = (1e6 * seconds for seconds in model["module_s"])
        token_us = 1e6 / float(
            np.median([row["tokens_per_s"] for row in model["rows"] if not row["link_us"]])
        )
        parts.append(
            f"### `{model['model']}`: {model['layers']} layers, hidden size {model['hidden']}\n\n"
            f"A layer takes {attention_us + mlp_us:.3g} us (attention {attention_us:.3g}, MLP {mlp_us:.3g}, by their "
            f"weights), a token {token_us / model['layers']:.3g} us for each, its head included. Tokens/s, and "
            f"in brackets what is predicted; {model['rounds']} rounds. By fit: what is hidden if a layer takes as "
            "long as fits best."
        )
        parts += [speeds(model), difference(model)]
    return "tokens/s against the latency of the link", "\n\n".join(parts)


def speeds(model: Result) -> str:
    links = [f"{row['link_us']:g}" for row in of_variant(model, "delay 2")]
    lines = []
    for name, variant in VARIANTS.items():
        cells = [f"{row['tokens_per_s']:.4g} ({row['predicted']:.4g})" for row in of_variant(model, name)]
        knee_us, farthest_us = 1e6 * variant.knee_s(model["module_s"]), float(links[-1])
        found = f"{knee_us * fitted(model, name):.3g}" if 0 < knee_us < farthest_us else ""
        lines.append([name, f"{knee_us:.3g}", found, *cells])
    return table(["link, us", "hides, us", "by fit", *links], lines)


def fitted(model: Result, name: str) -> float:
    """What to multiply the modules' times by for the best prediction, by least squares of logarithms."""

    def error(scale: float) -> float:
        rows = of_variant(model, name)
        shares = [predicted_share(model, name, row["link_us"], scale) for row in rows]
        return sum(
            math.log(row["of_no_latency"] / share) ** 2 for row, share in zip(rows, shares, strict=True)
        )

    return min(np.linspace(0.3, 2, 171).tolist(), key=error)


def predicted_share(model: Result, name: str, link_us: float, scale: float = 1.0) -> float:
    """Of the speed without latency; scale: of the modules' times."""
    variant, base_s = VARIANTS[name], 1 / of_variant(model, name)[0]["tokens_per_s"]
    config = variant.config(model["model"])
    modules: Any = [scale * seconds for seconds in model["module_s"]]
    added_s = variant.token_s(config, modules, link_us / 1e6) - variant.token_s(config, modules, 0.0)
    return base_s / (base_s + added_s)


def of_variant(model: Result, name: str) -> list[Result]:
    """Its rows, by latency."""
    return [row for row in model["rows"] if row["variant"] == name]


def difference(model: Result) -> str:
    """Where measured and predicted speed are farthest apart, by variant."""
    lines = []
    for name in VARIANTS:
        apart = {
            row["link_us"]: row["tokens_per_s"] / row["predicted"] - 1 for row in of_variant(model, name)
        }
        link_us = max(apart, key=lambda link: abs(apart[link]))
        lines.append(f"{name} {apart[link_us]:+.0%} at {link_us:g} us")
    return f"Measured over predicted, the farthest apart: {'; '.join(lines)}."


def plot(models: list[Result], path: Path) -> None:
    """Speed over that without latency against latency, a panel for each model; thin
    lines: predicted; dots: knees.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "laneformer", "font.size": 9})  # the same file each time
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(models), figsize=(4.6 * len(models), 3.4), sharey=True, squeeze=False
    )
    for axes, model in zip(panels[0], models, strict=True):
        longest = model["rows"][-1]["link_us"]
        fine = np.geomspace(1, max(longest, 10), 200)
        for index, (name, variant) in enumerate(VARIANTS.items()):
            rows, color = of_variant(model, name), f"C{index}"
            axes.plot(fine, [predicted_share(model, name, link) for link in fine], color=color, linewidth=0.7)
            known = {row["link_us"]: row["of_no_latency"] for row in rows if row["link_us"] >= 1}
            axes.plot([*known], [*known.values()], "o", ms=3.5, color=color, label=name)
            knee_us = 1e6 * variant.knee_s(model["module_s"])
            if 1 <= knee_us <= longest:
                axes.plot(
                    [knee_us], [predicted_share(model, name, knee_us)], "|", ms=16, mew=1.5, color=color
                )
        layer_us = 1e6 * sum(model["module_s"])
        axes.set(xscale="log", xlabel="latency of the link, us", ylim=(0, 1.12))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_title(f"{model['model']}: {model['layers']} layers of {layer_us:.3g} us", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("tokens/s over those without latency")
    handles, labels = panels[0][0].get_legend_handles_labels()
    title = "dots: measured; lines: predicted; bars: up to where the delay hides the link"
    figure.legend(
        handles, labels, frameon=False, ncol=3, loc="upper center", bbox_to_anchor=(0.5, -0.01), title=title
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
