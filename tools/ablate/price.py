"""What the runs of a plan would take on one H100: a calculation from FLOPs and an assumed
utilisation, not a timing.
"""

from __future__ import annotations

from pathlib import Path

from data_mixtures.mixture import read_lock
from laneformer import LaneformerConfig
from laneformer.config import flops_per_token
from tools.cards import INPUTS
from tools.markdown import table

from .plan import Plan


def price_section(plan: Plan, mfu_percent: float, gpu_hour_price: float) -> str:
    """Runs, tokens, FLOPs, hours and USD of each size, as Markdown; validation and compiling are not counted."""
    lock, training = Path(plan.training.lock), plan.training
    vocabulary = read_lock(lock)["vocab_size"] if lock.exists() else LaneformerConfig().vocab_size
    peak_flops = INPUTS.card("h100").peak_flops
    each, rows, hours_in_all = len(plan.learning_rates) * len(plan.seeds), [], 0.0
    for size in plan.sizes:
        models = [plan.job(size, variant, 0, 0.0).model for variant in plan.variants]
        configs = [LaneformerConfig(vocab_size=vocabulary, **model) for model in models]
        flops = each * training.tokens * sum(flops_per_token(config, training.seq_len) for config in configs)
        hours = flops / (mfu_percent / 100 * peak_flops) / 3600
        hours_in_all += hours
        parameters = f"{configs[0].parameter_count()['total'] / 1e6:.0f}M"
        rows.append((size, parameters, each * len(configs), f"{hours:.2f}", f"{hours * gpu_hour_price:.2f}"))
    return (
        f"{table(('size', 'parameters', 'runs', 'H100 hours', 'USD'), rows)}\n\n"
        f"Together {hours_in_all:.1f} hours, {hours_in_all * gpu_hour_price:.0f} USD. Calculated, not measured: each "
        f"run trains on {training.tokens / 1e6:.4g}M tokens of windows of {training.seq_len}, at an assumed "
        f"{mfu_percent:g}% of {peak_flops / 1e12:.0f} TFLOP/s and {gpu_hour_price:g} USD an hour. "
        f"The vocabulary has {vocabulary} entries"
        + ("." if lock.exists() else f", since {lock} does not exist yet.")
    )
