"""Slurm jobs from isolated snapshots: `python -m tools.launch`."""
