"""Tokens/s against the latency of the link between lanes, beside the model that predicts it.

    python -m tools.bench latency --out docs/benchmarks/latency.md

The latency is injected, as by `laneformer serve --link-us`: a thread sees the data of another
lane's thread only so long after it was sent (csrc/exchange.h). The prediction is that of
tools/roofline.py, with the time of a layer measured here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from laneformer import Engine, LaneformerConfig
from laneformer.engine.bench import link_speeds
from records.command import Count, Positive
from tools.bench import harness
from tools.bench.harness import Result, alternate
from tools.markdown import table
from tools.roofline import split_layer, token_s

LANES = 2  # one a thread, as one a device
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # a flavor, and what differs from it
    "300m": ("300m", {}),
    "small": (
        "tiny",
        {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_hidden_layers": 15,
            "vocab_size": 1024,
            "swa_layers": (),
        },
    ),
    "tiny": ("tiny", {}),
}
LADDER = "Ladder"  # adds each module's outputs one module late
VARIANTS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"broadcast_delay": 0},
    LADDER: {"broadcast_delay": 0},
    "delay 1": {"broadcast_delay": 1},
    "delay 2": {"broadcast_delay": 2},
    "delay 2, no early sums": {"broadcast_delay": 2, "use_early_comm": False},
    "delay 4": {"broadcast_delay": 4},
}
HALF = "delay 2 with half the layers"
FILE_START = """# What the delay hides: tokens/s against the latency of the link

Each section is one run of its command. Two lanes on two threads, as on two devices; one request, greedy,
bf16 weights. **The latency is injected in software**: what a thread publishes becomes readable by the other
lane's thread that long after it was published, and the reader spins until then; nothing here is a network.
One more exchange a token, which nothing hides, agrees on the token. Variants alternate within a round, and
each runs at every latency in turn; a trial's figure is its median token, a row's the median over rounds.
In brackets what is predicted: tokens/s at latency 0 and what the recurrence of `tools/roofline.py` adds to
it, with the time of a layer from this run (that of a model with half as many layers, subtracted); nothing is
fitted to the measured delays. "hides": the latency up to which joins after the early layers wait for nothing.
Tokens were equal at every latency, or the run would have failed."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Tokens/s against an injected latency for every order of joins; ends with JSON."""

    model: tuple[Literal["300m", "small", "tiny"], ...] = ("300m", "small")
    """Shapes with random weights: 300m, small (a layer takes about 20 us, as on a GPU), tiny (for tests)."""
    link_us: tuple[Positive, ...] = (1, 3, 10, 30, 100, 300, 1000, 3000)
    """Latencies of the link in microseconds; without latency is measured in any case."""
    rounds: Count = 5
    """Rounds; in each, every variant runs once at every latency."""


def measure(options: Options, console: Any) -> Result:
    return {"models": [measure_shape(shape, options, console) for shape in options.model]}


def measure_shape(shape: str, options: Options, console: Any) -> Result:
    """Return its modules' times, and for each variant tokens/s and predictions by latency."""
    links_us = [0.0, *options.link_us]
    configs = {name: config_of(shape, name) for name in VARIANTS}
    whole = configs["delay 2"]
    few = whole.num_hidden_layers // 2
    configs[HALF] = config_of(shape, "delay 2", num_hidden_layers=few, swa_layers=())
    speeds: dict[str, list[list[float]]] = {name: [] for name in configs}
    engines: dict[str, Engine] = {}
    try:
        for name, config in configs.items():
            engines[name] = Engine.random(config, "bf16", threads=LANES, device="cpu", pin=True)
        decoder: Any = engines[LADDER]._open()
        decoder.set_ladder()
        for number, order in enumerate(
            alternate(configs, 1 + options.rounds)
        ):  # the first one warms
            console.print(f"{shape}: round {number} of {options.rounds}")
            for name in order:
                speeds[name].append(link_speeds(engines[name], [0.0] if name == HALF else links_us))
    finally:
        for engine in engines.values():
            engine.close()
    medians = {name: np.median(rounds[1:], axis=0).tolist() for name, rounds in speeds.items()}
    layer_s = (1 / medians["delay 2"][0] - 1 / medians.pop(HALF)[0]) / (
        whole.num_hidden_layers - few
    )
    module_s = split_layer(whole, layer_s)
    return {
        "model": shape,
        "layers": whole.num_hidden_layers,
        "module_s": module_s,
        "link_us": links_us,
        "tokens_per_s": medians,
        "predicted": {
            name: predict(name, configs[name], module_s, links_us, measured[0])
            for name, measured in medians.items()
        },
    }


def config_of(shape: str, name: str, **overrides: Any) -> LaneformerConfig:
    flavor, own = SHAPES[shape]
    values = {"num_lanes": LANES, **own, **VARIANTS[name], **overrides}
    return LaneformerConfig.from_flavor(flavor, **values)


def predict(
    name: str,
    config: LaneformerConfig,
    module_s: tuple[float, float],
    links_us: list[float],
    speed: float,
) -> list[float]:
    """Tokens/s behind each link; speed: without one."""
    late = int(name == LADDER)
    tokens_s = [
        token_s(config, module_s, 1e-6 * link_us, modules_late=late) for link_us in links_us
    ]
    return [1 / (1 / speed + each_s - tokens_s[0]) for each_s in tokens_s]


def section(options: Options, result: Result) -> tuple[str, str]:
    parts = []
    for model in result["models"]:
        module_s = model["module_s"]
        attention_us, mlp_us = (1e6 * seconds for seconds in module_s)
        parts.append(
            f"### `{model['model']}`: {model['layers']} layers\n\nA layer takes {attention_us + mlp_us:.3g} us "
            f"(attention {attention_us:.3g}, MLP {mlp_us:.3g}, by their weights). {options.rounds} rounds."
        )
        rows = []
        for name, speeds in model["tokens_per_s"].items():
            pairs = zip(speeds, model["predicted"][name], strict=True)
            cells = [f"{speed:.4g} ({predicted:.4g})" for speed, predicted in pairs]
            # the latency up to which joins after the early layers wait for nothing
            hidden_s = VARIANTS[name]["broadcast_delay"] * sum(module_s)
            hidden_s += min(module_s) if name == LADDER else 0.0
            rows.append([name, 1e6 * hidden_s, *cells])
        parts.append(
            table(["link, us", "hides, us", *(f"{link:g}" for link in model["link_us"])], rows)
        )
    return "tokens/s against the latency of the link", "\n\n".join(parts)
