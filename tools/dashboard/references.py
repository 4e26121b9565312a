"""Figures that others have published, with their source: what the dashboard draws and prints
beside a run's own.

CORE has two versions of its baselines (DCLM corrected three of them in September 2025): a value without its
version says nothing. GPT-2: nanochat's leaderboard, v1 only. DCLM: its result files (its largest run of 1B
parameters, and DCLM-7B). Laneformer 2B: its model card (batch 1, FP16, its authors' endpoint).
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
# RULER-style tasks: 500 samples, greedy chat, string match; percent at RULER_LENGTHS
_RULER = {
    "niah_single_1": (100.00, 100.00), "niah_single_2": (100.00, 100.00), "niah_single_3": (99.80, 91.60),
    "niah_multikey_1": (99.20, 83.40), "niah_multikey_2": (97.80, 60.00), "niah_multikey_3": (91.80, 91.20),
    "niah_multiquery": (95.40, 69.70), "niah_multivalue": (94.60, 82.20), "ruler_vt": (77.92, 3.92),
    "ruler_cwe": (24.72, 78.14), "ruler_fwe": (78.80, 64.73),
}  # fmt: skip
RULER = {
    length: {task: scores[i] / 100 for task, scores in _RULER.items()}
    for i, length in enumerate(RULER_LENGTHS)
}  # length -> task -> share
