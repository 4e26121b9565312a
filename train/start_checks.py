"""Refuse, before a job is queued, what every rank would refuse when it starts.

    WORLD_SIZE=192 python -m train.start_checks --job.config_file X.toml [--section.key value ...]

prints the resolved job, as `python -m train.job_config` does.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from records.checkpoints import newest_saved_step

from .job_config import format_job, load_job, patch_torch_for_cpu, read_model_args

# before torchtitan is imported, which asks for the device then
patch_torch_for_cpu()

from torchtitan.protocols.train_spec import get_train_spec  # noqa: E402

from .checkpoint import require_fresh_start  # noqa: E402
from .trainer import check_vocabulary  # noqa: E402


def check_start(job: Any, world_size: int) -> None:
    """Raise ValueError where the data or the run folder do not fit a job that `check_job` allows."""
    # ranks that share the lanes of a sequence read the same data
    groups = world_size // job.parallelism.tensor_parallel_degree
    loader: Any = get_train_spec(job.model.name).build_dataloader_fn(
        dp_world_size=groups, dp_rank=0, tokenizer=None, job_config=job
    )
    loader.check_epochs(job.training.steps * job.training.global_batch_size)
    check_vocabulary(loader, read_model_args(job).config.vocab_size)
    folder = Path(job.job.dump_folder) / job.checkpoint.folder
    if newest_saved_step(folder) < 0 and not job.checkpoint.initial_load_path:
        require_fresh_start(
            job.checkpoint.allow_fresh_start,
            f"no complete checkpoint in {folder} and no checkpoint.initial_load_path",
        )


if __name__ == "__main__":
    ranks = int(os.environ["WORLD_SIZE"])
    try:
        loaded = load_job(sys.argv[1:], ranks)
        check_start(loaded, ranks)
    except ValueError as problem:
        raise SystemExit(f"the job is refused: {problem}") from None
    sys.stdout.write(format_job(loaded))
