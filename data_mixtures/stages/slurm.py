"""datatrove's Slurm executor, adapted. Only the executors' child process imports it: datatrove takes a second."""

from __future__ import annotations

from datatrove.executor import SlurmPipelineExecutor


class Slurm(SlurmPipelineExecutor):
    """Without options that are not given, and without a second job for statistics."""

    def get_sbatch_args(self, max_array: int = 1) -> dict:
        return {name: value for name, value in super().get_sbatch_args(max_array).items() if value is not None}

    def launch_merge_stats(self) -> None:
        """Nothing: the receipts hold the counts, and after a failure the job would stay in the queue."""
