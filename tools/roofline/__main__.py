"""`python -m tools.roofline`: decode speed that bandwidth, link latency and the delay allow, as a projection.

It repeats the published ceilings, launch example and table of large models, says where its own figures differ, and
projects the 2B on 1 to 16 GPUs. Every input stands in inputs.toml with its source; --set replaces one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from .projection import GPUS, VARIANTS, Inputs, agent_loop, ceilings, large_models, launch_limit, layer_cost_s, scaling


@dataclass
class Options:
    gpu: str = "h200"
    """Of the projection over numbers of GPUs: h200 or mi300x."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An input to replace, as link.custom_s=2e-6; may be given several times."""
    out: Path | None = None
    """Folder for roofline.json and roofline.svg; default: print only."""


def main() -> None:
    options = tyro.cli(Options, prog="python -m tools.roofline", description=__doc__)
    try:
        result = project(options)
    except ValueError as error:
        raise SystemExit(f"tools.roofline: {error}") from None
    console = Console()
    for title, rows in result["tables"].items():
        console.print(table_of(title, rows))
    console.print(table_of("inputs", [{"input": name, **row} for name, row in result["inputs"].items()]))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "roofline.json").write_text(json.dumps(result, indent=1) + "\n")
        plot(result["tables"]["tokens/s of the 2B"], options.gpu, options.out / "roofline.svg")
        console.print(f"written: {options.out}/roofline.json, roofline.svg")


def project(options: Options) -> dict[str, Any]:
    """All tables and inputs, as JSON values. ValueError for options that are wrong."""
    if options.gpu not in GPUS:
        raise ValueError(f"--gpu {options.gpu} is unknown; choose from {', '.join(GPUS)}")
    inputs = Inputs.read(dict(replacement(text) for text in options.set))
    rows = scaling(inputs, options.gpu)
    node = next(row for row in rows if (row["gpus"], row["link"]) == (8, "custom"))
    speeds = {"an API today": 100.0, "tensor parallel": node["tensor_parallel"], "delay 2": node["delay_2"]}
    speeds |= {f"published, 8 x {gpu}": inputs[f"{gpu}.published_tokens_per_s"] for gpu in GPUS}
    tables = {
        "ceilings, tokens/s": ceilings(inputs),
        "a kernel launched for every operation": [{"tokens_per_s": launch_limit(inputs)}],
        "large models, tokens/s at the published share of bandwidth": large_models(inputs),
        "tokens/s of the 2B": rows,
        "an agent's task": agent_loop(inputs, speeds),
    }
    fitted = {
        "value": layer_cost_s(inputs, options.gpu),
        "kind": "fitted",
        "source": "so that the published speed comes out",
    }
    return {"tables": tables, "inputs": {**inputs.rows(), f"{options.gpu}.layer_cost_s": fitted}}


def replacement(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--set {text!r} must be NAME=NUMBER") from None


def table_of(title: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(*rows[0], title=title, title_justify="left")
    for row in rows:
        table.add_row(
            *(f"{value:,.4g}" if isinstance(value, float) and value < 100 else shown(value) for value in row.values())
        )
    return table


def shown(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def plot(rows: list[dict[str, Any]], gpu: str, path: Path) -> None:
    """Tokens/s against the number of GPUs, for the custom link and, beyond one node, that between nodes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "laneformer"  # the same file each time
    from matplotlib import pyplot

    chosen = [row for row in rows if row["link"] in ("custom", "between_nodes")]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for name in VARIANTS:
        axes.plot([r["gpus"] for r in chosen], [r[name] for r in chosen], marker="o", label=name.replace("_", " "))
    axes.set_xscale("log", base=2)
    axes.set_xticks([r["gpus"] for r in chosen], [str(r["gpus"]) for r in chosen])
    axes.set(xlabel=f"{gpu.upper()}s (16: two nodes)", ylabel="tokens/s, projected", ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
