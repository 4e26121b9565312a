"""How fast the CUDA kernel should be: a model of its rings and stalls, not a
measurement; needs no GPU.

    python -m tools.bench cuda-model --out docs/benchmarks/DATE-cuda-model.md

tools/timeline.py and tools/fluid.py are the model; every input stands in tools/cards.toml with its source, to be
replaced by measurements.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from laneformer import LaneformerConfig
from laneformer.engine.cuda.bandwidth import shares
from tools.bench import harness
from tools.bench.harness import Result
from tools.cards import CASES, INPUTS, Inputs, input_rows, tables
from tools.markdown import records
from tools.timeline import GEOMETRY, Kernel

STALLS = ("attention_us", "round_us", "stream_us", "activation_us", "tail_us")
FLAVORS = ("2b", "300m")
SHARES = (0.92, 0.90, 0.88, 0.85, 0.80)
DEPTHS = (0, 1024, 2048, 4096)
FILE_START = """# A model of the CUDA engine's speed

**Nothing here was measured: every figure is the output of a model** (tools/timeline.py, tools/fluid.py), whose inputs
are the last table of each section. Percent of datasheet and of probe: bytes of weights, keys and values a second over
the vendor's bandwidth, and over the part of it that reads are assumed to reach. Exposed: microseconds a layer,
(time per token - bytes / reachable bandwidth) / layers; 0 says that the rings hide all stalls that were assumed, and
no more: what is missing from the inputs (a cold instruction cache, the host, weights that stay in an L2) is missing
from it. The three cases are an interval of what is assumed."""


def modelled(
    case: str,
    flavor: str = "2b",
    card: str = "H200",
    replaced: dict[str, float] | None = None,
    **options: Any,
) -> Result:
    """Tokens/s and what follows from it; `replaced` inputs of [decode] instead of the file's.

    options: fields of timeline.Kernel.
    """
    inputs = Inputs.read({f"decode.{name}": value for name, value in (replaced or {}).items()})
    config = LaneformerConfig.from_flavor(flavor)
    kernel = Kernel(config, inputs.card(card, *GEOMETRY), case, inputs=inputs, **options)
    speed, stated = 1 / kernel.device_s(), kernel.card.bandwidth_bytes_per_s
    part = shares(speed, kernel.bytes_per_token, kernel.reach, stated, 1, config.num_hidden_layers)
    return {"tokens_per_s": speed, **{name: round(value or 0.0, 6) + 0.0 for name, value in part.items()}}


@dataclass(kw_only=True)
class Options(harness.Options):
    """Model the speed of the CUDA engine's kernel from its stalls and rings; nothing is measured."""


def measure(options: Options, console: Any) -> Result:
    """{"model": true, "tables": {title: rows}, "inputs": {name: row}}."""
    changes: dict[str, dict[str, Any]] = {
        "nothing": {}, "every exchange waits for all lanes": {"wide": True}, "top-p": {"filters": True},
        "prefetch_chunks = 4": {"prefetch_chunks": 4}, "no jitter": {"replaced": {"stall_jitter": 0.0}},
        "stalls of an idle memory": {"replaced": {"saturated_latency": 1.0}},
        **{f"{name} = 0": {"replaced": {name: 0.0}} for name in STALLS},
    }  # fmt: skip
    cards = [  # NVIDIA's: the others say how many threads their warps have
        name
        for name, rows in tables()["cards"].items()
        if rows.keys() >= set(GEOMETRY) and "warp_threads" not in rows
    ]

    def rows(name: str, points: dict[Any, dict[str, Any]]) -> list[Result]:
        return [
            {name: point, "inputs": case, **modelled(case, **change)}
            for point, change in points.items()
            for case in CASES
        ]

    return {
        "model": True,
        "tables": {
            "2b on an H200, by the share of the bandwidth that reads can reach": rows(
                "share", {s: {"replaced": {"memory_share": s}} for s in SHARES}
            ),
            "2b on an H200, by depth of the context": rows("depth", {d: {"depth": d} for d in DEPTHS}),
            "2b on an H200, one thing changed": rows("changed", changes),
            **{
                f"{flavor} by card": rows("card", {c: {"flavor": flavor, "card": c} for c in cards})
                for flavor in FLAVORS
            },
        },
        "inputs": dict(INPUTS.rows),
    }


def section(options: Options, result: Result) -> tuple[str, str]:
    parts = ["**The output of a model, not a measurement.**"]
    for title, rows in result["tables"].items():
        parts += [f"### {title}", records(rows)]
    used = [name for name in result["inputs"] if name.startswith("decode.") or name.split(".")[1] in GEOMETRY]
    parts += ["### Inputs", records(input_rows({name: result["inputs"][name] for name in used}))]
    return "a model of the CUDA kernel", "\n\n".join(parts)
