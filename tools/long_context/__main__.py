"""`python -m tools.long_context configs/long_context.toml --out DIR`: what delay, layout and rope cost at long context.

For each delay, layout of the full layers and seed a small model is trained on short windows; from it each rope branches
and is trained on longer and longer windows. Every run is a job of the shipped trainer in DIR/runs, and a line of
DIR/results.jsonl when it is over; after an interruption the same command goes on. Then a table of the loss by position
and of the questions that each run answers. --report makes only that.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.markdown import Markdown

from records.files import hold_lock, read_lines, write_atomically
from tools.ablate.page import put_section
from tools.ablate.trainer import runs_side_by_side

from .data import prepared, read_text
from .figure import draw
from .plan import Plan
from .report import section
from .run import Place, run_group


@dataclass
class Options:
    config: tyro.conf.Positional[Path]
    """Shape, delays, layouts, ropes and stages (TOML)."""
    out: Path
    """Folder of results.jsonl, data and runs."""
    text: Path | None = None
    """JSON lines of text; default: what examples.wheels_corpus downloads."""
    workers: int = 1
    """Trunks, with their branches, side by side, one thread each."""
    report: bool = False
    """Train nothing; report what there is."""
    page: Path | None = None
    """Markdown page whose section about these results is written, and beside it its .jsonl and .svg."""


def main(options: Options) -> None:
    plan, path = Plan.read(options.config), options.out / "results.jsonl"
    if not options.report:
        with hold_lock(options.out / ".lock", f"another tools.long_context trains into {options.out}"):
            train(plan, options)
    results = read_lines(path)
    if not results:
        raise ValueError(f"{path} holds no results yet")
    text = section(results, plan)
    Console().print(Markdown(text))
    write_atomically(options.out / "report.md", text + "\n")
    if options.page:
        put_section(options.page, text)
        draw(results, plan, options.page.with_suffix(".svg"))
        write_atomically(options.page.with_suffix(".jsonl"), path.read_text(encoding="utf-8"))


def train(plan: Plan, options: Options) -> None:
    torch.set_num_threads(1)
    text = read_text(options.text, options.out)
    lengths = [stage.seq_len for stage in plan.stages]
    tokens = [stage.tokens for stage in plan.stages]
    tokens[0] *= len(plan.seeds)
    locks = prepared(options.out, text, lengths, tokens, plan.task_percent, plan.shape["vocab_size"])
    place = Place(options.out, text, locks)
    with runs_side_by_side(options.workers) as pool:
        for _ in pool.map(lambda group: run_group(group, plan, place), plan.groups()):
            pass


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs are to save, whoever ends this
    given = tyro.cli(Options, prog="python -m tools.long_context", description=__doc__)
    try:
        main(given)
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.long_context: {error}") from None
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {given.out}/results.jsonl", file=sys.stderr)
        raise SystemExit(130) from None
