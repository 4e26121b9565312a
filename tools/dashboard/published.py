"""Figures that others have published, with their source: what the dashboard draws and prints beside a run's own.

CORE has two versions of its baselines (DCLM corrected three of them in September 2025): a value without its version
says nothing. GPT-2: nanochat's leaderboard, v1 only. DCLM: its result files (its largest run of 1B parameters, and
DCLM-7B). Laneformer 2B: its authors' own figures; of RULER they give no scores by task.
"""

from __future__ import annotations

from typing import NamedTuple


class Reference(NamedTuple):
    """A model's CORE in one version."""

    name: str
    version: str  # v1 or v2
    value: float


CORE_REFERENCES = (  # ascending
    Reference("GPT-2 124M", "v1", 0.113891),
    Reference("GPT-2 medium", "v1", 0.1849),
    Reference("GPT-2 large", "v1", 0.2146),
    Reference("GPT-2 XL", "v1", 0.256525),
    Reference("DCLM 1B", "v2", 0.40537),
    Reference("DCLM 1B", "v1", 0.42330),
    Reference("DCLM-7B", "v2", 0.55961),
    Reference("DCLM-7B", "v1", 0.57136),
)
MODEL = "Laneformer 2B"
# (set, version) -> pass@1 on the extended tests, greedy
CODE = {("humaneval+", "v0.1.10"): 0.451, ("mbpp+", "v0.2.0"): 0.516}
# lm-eval task -> (metric, value); 0-shot
LM_EVAL = {"arc_challenge": ("acc_norm", 0.3106), "arc_easy": ("acc_norm", 0.4790)}
RULER_LENGTHS = ("2048", "4096")
