"""Benchmarks against baselines in the same run: `python -m tools.bench NAME`."""
