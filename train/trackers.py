"""Where wandb and trackio keep a run: for the job itself, and for its evaluations (evals.trackers).

Nothing heavy is imported here: a process that only watches a run has neither TorchTitan nor a GPU.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

PROJECT = "laneformer"


def name_wandb_run(run: Path) -> None:
    """Set the variables that wandb reads, where the user has not: a restarted run continues its own wandb run."""
    run = run.resolve()
    os.environ.setdefault("WANDB_PROJECT", PROJECT)
    os.environ.setdefault("WANDB_RUN_NAME", run.name)
    os.environ.setdefault("WANDB_RUN_GROUP", run.name)
    os.environ.setdefault("WANDB_RUN_ID", hashlib.sha256(str(run).encode()).hexdigest()[:16])
    os.environ.setdefault("WANDB_RESUME", "allow")


def open_trackio(run: Path) -> Any:
    """The run in trackio's database, RUN/trackio unless TRACKIO_DIR says otherwise; nothing leaves the machine.

    `TRACKIO_DIR=RUN/trackio trackio show` looks at it. Raises ValueError where trackio is not installed.
    """
    run = run.resolve()
    os.environ.setdefault("TRACKIO_DIR", str(run / "trackio"))  # read when trackio is imported
    try:
        import trackio
    except ModuleNotFoundError as problem:
        raise ValueError("metrics.enable_trackio needs the package trackio: pip install trackio") from problem
    # our values, and nothing of its own
    return trackio.init(PROJECT, name=run.name, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
