"""`python -m tools.roofline`: decode speed that bandwidth, link latency and the delay allow, as a projection.

It repeats the published ceilings, launch example and table of large models, says where its own
figures differ, and projects the 2B on 1 to 16 GPUs. Every input stands in inputs.toml with its
source; --set replaces one.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from records.files import write_atomically
from tools.markdown import table

from .projection import (
    GPUS,
    VARIANTS,
    Inputs,
    agent_loop,
    by_link,
    ceilings,
    large_models,
    launch_limit,
    layer_cost_s,
    scaling,
)  # fmt: skip

START = """# Projection: decode speed by bandwidth, link latency and delay

Nothing here was measured on a GPU: it is arithmetic on the inputs of the last table, each with its source. A module's
outputs reach the other lanes one link latency after it has finished, and a join waits for what it adds; what a layer
costs beside reading its weights is fitted so that the published speed comes out, and is the same for every variant. So
the figures compare variants of one machine; they do not predict a machine that nobody has fitted.

![Tokens/s of the 2B against the number of GPUs, and against the link's latency](../images/roofline.svg)
"""
NOTES = {
    "ceilings, tokens/s": "The published ceilings divide the bandwidth by 4 GB; the config has 4.44 GB of weights a "
    "token reads (all but the embedding table), so the ceilings are a tenth lower and the published shares of them "
    "higher (0.30 and 0.40, not 0.27 and 0.36).",
    "large models, tokens/s at the published share of bandwidth": "The same rule with each model's nominal bits gives "
    "the published figures for the first model alone. The last column has the bits a weight that they imply: close to "
    "8 for GPT-OSS-120B (nominal 4.25 with MXFP4 experts) and Kimi-K2.6 (INT4) too, as if computed at FP8's width; "
    "fewer than 8 for DeepSeek-V4-Flash, as if part of it had 4 bits. The authors' own arithmetic is not known.",
    "tokens/s of the 2B": "One GPU has no link. Layers before the delay exchange at once (`use_early_comm`), which "
    "is why `delay_2` is behind `delay_1` where the link is slow, and `delay_2_no_early` ahead of both. 16 GPUs are "
    "two nodes and would need a model of 16 lanes. Ladder is a join that is awaited one module late.",
    "an agent's task": "Once decoding is fast, the tools are half the time: their inputs are assumed, replace them.",
}


@dataclass
class Options:
    gpu: str = "h200"
    """Of the projection over numbers of GPUs: h200 or mi300x."""
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
    console = Console()
    for title, rows in result["tables"].items():
        console.print(table_of(title, rows))
    console.print(table_of("inputs", [{"input": name, **row} for name, row in result["inputs"].items()]))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "roofline.json").write_text(json.dumps(result, indent=1) + "\n")
        plot(
            result["tables"]["tokens/s of the 2B"],
            result["by_link"],
            options.gpu,
            options.out / "roofline.svg",
        )
        console.print(f"written: {options.out}/roofline.json, roofline.svg")
    if options.page:
        picture = options.page.absolute().parents[1] / "images/roofline.svg"
        for folder in (options.page.parent, picture.parent):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(options.page, markdown(result))
        plot(result["tables"]["tokens/s of the 2B"], result["by_link"], options.gpu, picture)
        console.print(f"written: {options.page}")


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
    inputs_used = {**inputs.rows(), f"{options.gpu}.layer_cost_s": fitted}
    return {"tables": tables, "by_link": by_link(inputs, options.gpu), "inputs": inputs_used}


def markdown(result: dict[str, Any]) -> str:
    """The page: every table with what it says, then the inputs."""
    command = shlex.join(["python", "-m", "tools.roofline", *sys.argv[1:]])
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    parts = [START, f"{time.strftime('%Y-%m-%d', time.gmtime())}, commit {commit}:\n\n    {command}\n"]
    inputs = [{"input": name, **row} for name, row in result["inputs"].items()]
    for title, rows in {**result["tables"], "inputs": inputs}.items():
        parts.append(f"## {title[0].upper()}{title[1:]}\n")
        parts.append(
            table(
                [name.replace("_", " ") for name in rows[0]],
                [[number(v) for v in row.values()] for row in rows],
            )
            + "\n"
        )
        parts += [NOTES[title] + "\n"] if title in NOTES else []
    return "\n".join(parts)


def number(value: Any) -> Any:
    return shown(value) if isinstance(value, (int, float)) and value >= 100 else value


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
            *(
                f"{value:,.4g}" if isinstance(value, float) and value < 100 else shown(value)
                for value in row.values()
            )
        )
    return table


def shown(value: Any) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else str(value)


def plot(rows: list[dict[str, Any]], links: list[dict[str, float]], gpu: str, path: Path) -> None:
    """Tokens/s against the number of GPUs (the custom link; two nodes: theirs), and on one
    node against the link.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "laneformer"  # the same file each time
    from matplotlib import pyplot

    chosen = [row for row in rows if row["link"] in ("custom", "between_nodes")]
    figure, (left, right) = pyplot.subplots(1, 2, sharey=True, figsize=(10, 4))
    for name in VARIANTS:
        left.plot(
            [r["gpus"] for r in chosen], [r[name] for r in chosen], marker="o", label=name.replace("_", " ")
        )
        right.plot([1e6 * r["link_s"] for r in links], [r[name] for r in links])
    left.set_xscale("log", base=2)
    left.set_xticks([r["gpus"] for r in chosen], [str(r["gpus"]) for r in chosen])
    left.set(xlabel=f"{gpu.upper()}s (16: two nodes)", ylabel="tokens/s, projected", ylim=(0, None))
    left.legend(frameon=False)
    right.set_xscale("log")
    right.set(xlabel=f"latency of the link, us, on 8 x {gpu.upper()}")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


if __name__ == "__main__":
    main()
