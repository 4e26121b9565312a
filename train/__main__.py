"""Train one phase as a rank of torchrun.

torchrun --nproc_per_node=N -m train --job.config_file configs/phase1.toml [--section.key value ...]
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

from records.events import REFUSED, SUPERVISED, next_attempt, refuse

from .supervise.signals import WORKER

# before the imports, which take seconds in which a stop request may arrive
WORKER.install()

# staging a checkpoint takes two descriptors for each of the 2B run's 552 tensors, above the usual soft
# limit of 1024
max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))

if "PYTORCH_ALLOC_CONF" not in os.environ:
    # read when torch is imported; streams of close to a gigabyte come and go beside small tensors,
    # and segments that grow leave no holes between them
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from .job_config import load_job, patch_torch_for_cpu  # noqa: E402

patch_torch_for_cpu()


def main() -> None:
    """Run one phase: TorchTitan's main, with the job that was checked here."""
    import torchtitan.train

    from .foreign_warnings import silence
    from .job_checks import check_local_ranks
    from .trainer import LaneformerTrainer

    silence()
    try:
        job = load_job(sys.argv[1:])
        check_local_ranks()
        if "WORLD_SIZE" not in os.environ:
            raise ValueError(
                "start it with `torchrun --nproc_per_node=N -m train ...`, or with `python -m train.supervise ...`"
            )
    except (Exception, SystemExit) as problem:
        # the parser of flags has printed its message and exits: status 0 is --help, any other a refusal
        if isinstance(problem, SystemExit):
            problem = ValueError("see the message above") if problem.code else sys.exit()
        if SUPERVISED in os.environ:
            run = Path(os.environ[SUPERVISED])
            refuse(run, next_attempt(run), problem)
        # without RANK the program was started without torchrun; other ranks would repeat the message
        elif os.environ.get("RANK", "0") == "0":
            refuse(None, 0, problem)
        raise SystemExit(REFUSED) from None
    # its own parser takes 0.2 s for the same arguments
    torchtitan.train.ConfigManager = lambda: SimpleNamespace(parse_args=lambda: job)
    torchtitan.train.main(LaneformerTrainer)


if __name__ == "__main__":
    main()
