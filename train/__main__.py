"""`torchrun --nproc_per_node=N -m train --job.config_file configs/phase1.toml [--section.key value ...]`"""

from __future__ import annotations

import os
import sys

from .supervise.signals import WORKER

WORKER.install()  # before the imports that take seconds

from .job_config import load_job, patch_torch_for_cpu  # noqa: E402

patch_torch_for_cpu()


def main() -> None:
    """Run one phase; TorchTitan parses the job file and the command line."""
    from torchtitan.train import main as titan_main

    from .trainer import LaneformerTrainer

    try:
        load_job(sys.argv[1:])
    except ValueError as problem:
        raise SystemExit(f"The job is refused: {problem}" if os.environ["RANK"] == "0" else 1) from None
    titan_main(LaneformerTrainer)


if __name__ == "__main__":
    main()
