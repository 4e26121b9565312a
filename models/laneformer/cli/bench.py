"""laneformer bench: decode speed beside read bandwidth, prompts beside matrix products."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from ..engine import Engine
from .options import ModelOptions


@dataclass
class Bench:
    """Measure decode speed beside memory bandwidth, and prefill beside matrix products from the caches.

    The last line of stdout is JSON.
    """

    model: ModelOptions
    hf_dir: tyro.conf.Positional[Path | None] = None
    """Model folder, GGUF file or name; or use --random-weights."""
    random_weights: Literal["2b", "300m", "tiny"] | None = None
    """Random weights of this flavor instead of a model folder."""
    depth: tuple[int, ...] = (0,)
    """Cached positions before the measured tokens; with several, the JSON has all but the first in "depths"."""
    draft_head: int | None = None
    """Add a multi-token prediction head to random weights, which drafts this many ids; 0: all."""
    synthetic_acceptance: str | None = None
    """Also measure the speed at given acceptance rates by draft position, such as 0.85,0.7,0.6.
    A draft costs what the model's own head takes, or nothing if it has none.
    """
    link_us: tuple[float, ...] = ()
    """Also measure with these latencies, in microseconds, injected between lanes of different threads."""
    json: bool = False
    """Print nothing but the JSON line."""

    def run(self) -> None:
        from ..engine.bench import benchmark, measure_drafts, slower_link, synthetic

        acceptance = [float(odds) for odds in (self.synthetic_acceptance or "").split(",") if odds]
        depths = self.depth or (0,)
        console = Console(stderr=True, quiet=self.json)
        with console.status("loading weights"):
            engine = self.open_engine()
        with engine, console.status("measuring"):
            # One engine for all depths: the weights load once
            figures, *deeper = [
                benchmark(engine, depth, lambda line: console.print(line, style="dim"))
                for depth in depths
            ]
            first = depths[0]
            drafts = synthetic(engine, acceptance, first) if acceptance else None
            figures |= {"draft_head": measure_drafts(engine, first)} if engine.draft_head else {}
            links = [slower_link(engine, link_us) for link_us in self.link_us]
        others = {"depths": deeper, "links": links, "synthetic_drafts": drafts}
        figures |= {name: value for name, value in others.items() if value}
        figures["model"] = self.random_weights or str(self.hf_dir)
        if not self.json:
            share = ""
            if (percent := figures.get("percent_of_product_probe")) is not None:
                share = f" = [bold]{percent:.0f}%[/] of their matrix products from the caches"
            reader = f"{figures['threads']} threads" if "threads" in figures else figures["device"]
            console.print(
                f"{figures['dtype']}: [bold]{figures['tokens_per_s']:.1f}[/] tokens/s = "
                f"[bold]{figures['percent_of_probe']:.0f}%[/] of the {figures['probe_bytes_per_s'] / 1e9:.1f} GB/s "
                f"that {reader} read just then; "
                f"prefill {figures['prefill_tokens_per_s']:.0f} tokens/s{share}, first token after "
                f"{figures['ttft_s']:.3f} s"
            )
            if drafts:
                cost = "are made by the model's head" if "draft_head" in figures else "cost nothing"
                console.print(
                    f"drafts that are right with odds {self.synthetic_acceptance} and {cost}: "
                    f"[bold]{drafts['speed_up']:.2f}[/] times as fast, {drafts['tokens_a_pass']:.2f} tokens a pass"
                )
            for link in links:
                console.print(
                    "over a link of {us:g} us: [bold]{tokens_per_s:.1f}[/] of "
                    "{tokens_per_s_without:.1f} tokens/s".format_map(link)
                )
        print(json.dumps(figures))

    def open_engine(self) -> Engine:
        if self.draft_head is not None and self.random_weights is None:
            raise ValueError(
                f"--draft-head {self.draft_head} is of --random-weights; a folder has its own, or none"
            )
        if self.hf_dir is not None and self.random_weights is None:
            return self.model.load(self.hf_dir)
        if self.random_weights is not None and self.hf_dir is None:
            return self.model.random(self.random_weights, self.draft_head)
        raise ValueError("give either a model folder or --random-weights")
