"""`python -m tools.roofline`: decode speed that bandwidth, link latency and the delay allow, as a projection.

It repeats the published ceilings, launch example and table of large models, says where its own
figures differ, and projects the 2B on 1 to 16 GPUs. Every input stands in tools/cards.toml with its
source; --set replaces one.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markdown import Markdown

from records.files import code_version, write_atomically
from tools.cards import Inputs, input_rows
from tools.markdown import records

from .projection import (
    PUBLISHED,
    VARIANTS,
    agent_loop,
    by_link,
    ceilings,
    fitted_layer_cost_s,
    large_models,
    launch_limits,
    nodes,
    scaling,
)

START = """# Projection: decode speed by bandwidth, link latency and delay

Nothing here was measured on a GPU: it is arithmetic on the inputs of the last table, each with its source. Weights
are read at the published share of the bandwidth, and every layer costs so much more that the published speed of eight
GPUs comes out, the same for every variant. A module's outputs reach the other lanes one link latency after it has
finished, and a join waits for what it adds (tools/timeline.py). It compares variants of that machine, and predicts
none.

![Tokens/s of the 2B against the number of GPUs, and against the link's latency](../images/roofline.svg)
"""
NOTES = {
    "ceilings, tokens/s": "The published ceilings divide the bandwidth by 4 GB; the config has 4.44 GB of weights a "
    "token reads (all but the embedding table), so the ceilings are a tenth lower and the published shares of them "
    "higher (0.30 and 0.40, not 0.27 and 0.36).",
    "large models, tokens/s at the published share of bandwidth": "All are mixtures of experts: a token reads "
    "the active parameters. The same rule with each model's nominal bits gives "
    "the published figures for the first model alone. The last column has the bits a weight that they imply: close to "
    "8 for GPT-OSS-120B (nominal 4.25 with MXFP4 experts) and Kimi-K2.6 (INT4) too, as if computed at FP8's width; "
    "fewer than 8 for DeepSeek-V4-Flash, as if part of it had 4 bits. The authors' own arithmetic is not known.",
    "tokens/s of the 2B": "One GPU has no link. Layers before the delay exchange at once (`use_early_comm`), which "
    "is why `delay_2` is behind `delay_1` where the link is slow, and `delay_2_no_early` ahead of both. 16 GPUs are "
    "two nodes and would need a model of 16 lanes. Ladder is a join that is awaited one module late.",
    "an agent's task": "Once decoding is fast, the tools are half the time: their inputs are assumed, replace them. "
    "The price is that of a node of eight GPUs which this one task holds.",
}


@dataclass
class Options:
    gpu: str = "h200"
    """Of the projection over numbers of GPUs: h200 or mi300x, whose speed is published."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An input to replace, as link.custom_s=2e-6; may be given several times."""
    out: Path | None = None
    """Folder for roofline.json and roofline.svg; default: print only."""
    page: Path | None = None
    """Markdown file to write, with the tables and what they say; the plot goes into
    ../images beside its folder.
    """


def main() -> None:
    options = tyro.cli(Options, prog="python -m tools.roofline", description=__doc__)
    try:
        result = project(options)
    except ValueError as error:
        raise SystemExit(f"tools.roofline: {error}") from None
    page, console = markdown(result), Console(width=None if sys.stdout.isatty() else 160)
    console.print(Markdown(page))
    if options.out:
        write(options.out / "roofline.json", json.dumps(result, indent=1) + "\n")
        plot(result, options.gpu, options.out / "roofline.svg")
        console.print(f"written: {options.out}/roofline.json, roofline.svg")
    if options.page:
        write(options.page, page)
        plot(result, options.gpu, options.page.absolute().parents[1] / "images/roofline.svg")
        console.print(f"written: {options.page}")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


def project(options: Options) -> dict[str, Any]:
    """All tables and inputs, as JSON values. ValueError for options that are wrong."""
    inputs = Inputs.read(dict(replacement(text) for text in options.set))
    card = inputs.card(options.gpu, *PUBLISHED)
    rows, cards = scaling(inputs, card), nodes(inputs)
    shown = {"published", "launch", "link", "agent", *(each.name.lower() for each in cards)}
    used = {name: row for name, row in inputs.rows.items() if name.split(".")[0] in shown}
    used[f"{card.name.lower()}.layer_cost_s"] = {
        "value": fitted_layer_cost_s(inputs, card), "unit": "s", "kind": "fitted",
        "source": "so that the published speed comes out",
    }  # fmt: skip
    (node,) = (row for row in rows if (row["gpus"], row["link"]) == (8, "custom"))
    speeds = {"an API today": 100.0}
    for name in ("tensor_parallel", "delay_2"):
        speeds[f"8 x {card.name}, {name.replace('_', ' ')}"] = node[name]
    for each in cards:
        if not math.isnan(each.published_tokens_per_s):
            speeds[f"published, 8 x {each.name}"] = each.published_tokens_per_s
    tables = {
        "ceilings, tokens/s": ceilings(inputs),
        "kernels launched for the operations of a layer": launch_limits(inputs),
        "large models, tokens/s at the published share of bandwidth": large_models(inputs),
        "tokens/s of the 2B": rows,
        "an agent's task": agent_loop(inputs, speeds),
    }
    return {"tables": tables, "by_link": by_link(inputs, card), "inputs": used}


def markdown(result: dict[str, Any]) -> str:
    """The page: every table with what it says, then the inputs."""
    command = shlex.join(["python", "-m", "tools.roofline", *sys.argv[1:]])
    commit = code_version(Path(__file__).resolve().parents[2])
    parts = [START, f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit}:\n\n    {command}\n"]
    for title, rows in {**result["tables"], "inputs": input_rows(result["inputs"])}.items():
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        parts.append(records([{name: number(value) for name, value in row.items()} for row in rows]) + "\n")
        parts += [NOTES[title] + "\n"] if title in NOTES else []
    return "\n".join(parts)


def number(value: Any) -> Any:
    return f"{value:,.0f}" if isinstance(value, (int, float)) and value >= 100 else value


def replacement(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--set {text!r} must be NAME=NUMBER") from None


def plot(result: dict[str, Any], gpu: str, path: Path) -> None:
    """Tokens/s against the number of GPUs (the custom link; two nodes: theirs), and on one node against the link."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "laneformer"  # the same file each time
    from matplotlib import pyplot

    rows, links = result["tables"]["tokens/s of the 2B"], result["by_link"]
    chosen = [row for row in rows if row["link"] in ("none", "custom", "between_nodes")]
    figure, (left, right) = pyplot.subplots(1, 2, sharey=True, figsize=(10, 4))
    for name in VARIANTS:
        left.plot(
            [r["gpus"] for r in chosen], [r[name] for r in chosen], marker="o", label=name.replace("_", " ")
        )
        right.plot([1e6 * r["link_s"] for r in links], [r[name] for r in links])
    left.set_xscale("log", base=2)
    left.set_xticks([r["gpus"] for r in chosen], [str(r["gpus"]) for r in chosen])
    left.set(xlabel=f"{gpu.upper()}s (16: two nodes)", ylabel="tokens/s, fitted", ylim=(0, None))
    left.legend(frameon=False)
    right.set_xscale("log")
    right.set(xlabel=f"latency of the link, us, on 8 x {gpu.upper()}")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
