"""Loads job files as `python -m train` does, and builds their models on the meta device.

    python -m tests.train.load_jobs JOB.toml ...

prints {path: {"refused": why} or {"parameters": how many}} as one line of JSON. A process of its own, since TorchTitan
is taught about CPUs before it is imported, and keeps global state.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch

from tests.train.runs import forked
from train.job_config import load_job, patch_torch_for_cpu


def answers(paths: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """What this program says of the files; its log goes to `folder`."""
    status, said = forked(folder, "tests.train.load_jobs", *paths)
    assert status == 0, said[-3000:]
    return json.loads(said.splitlines()[-1])


def load(path: str) -> dict[str, Any]:
    from train.spec import SPEC, register

    register(SPEC)  # in place of that of an experiment before
    try:
        job = load_job(["--job.config_file", path])
    except ValueError as problem:
        return {"refused": str(problem)}
    arguments = copy.copy(SPEC.model_args[job.model.flavor])
    arguments.update_from_config(job)
    with torch.device("meta"):
        model = SPEC.model_cls(arguments)
    return {"parameters": arguments.get_nparams_and_flops(model, job.training.seq_len)[0]}


if __name__ == "__main__":
    patch_torch_for_cpu()
    print(json.dumps({path: load(path) for path in sys.argv[1:]}))
