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
    json: bool = False
    """Print nothing but the JSON line."""

    def run(self) -> None:
        from ..engine.bench import benchmark, measure_drafts

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
            drafts = measure_drafts(engine, depths[0]) if engine.draft_head else None
        others = {"depths": deeper, "draft_head": drafts}
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
        print(json.dumps(figures))

    def open_engine(self) -> Engine:
        if self.hf_dir is not None and self.random_weights is None:
            return self.model.load(self.hf_dir)
        if self.random_weights is not None and self.hf_dir is None:
            return self.model.random(self.random_weights)
        raise ValueError("give either a model folder or --random-weights")
