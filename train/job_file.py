"""Reads a job file as the workers will: TorchTitan's parser, our sections, the command line on top.

`python -m train.job_file --job.config_file X.toml [--section.key value ...]` prints the whole resolved job as TOML:
what a run would use, defaults included. Feeding the output back in gives the same job.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import tomli_w
import torch

if not torch.accelerator.is_available():
    from .cpu import patch_torch_for_cpu

    patch_torch_for_cpu()


def load_job(arguments: list[str]) -> Any:
    """TorchTitan's JobConfig for these arguments, its own modules imported. Raises ValueError for an unknown key."""
    from torchtitan.config import ConfigManager

    job = ConfigManager().parse_args(arguments)
    if job.experimental.custom_import:
        importlib.import_module(job.experimental.custom_import)
    return job


def resolved_toml(job: Any) -> str:
    """The job as TOML; fields that are None are left out, as TOML has no null."""
    return tomli_w.dumps(_without_none(job.to_dict()))


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    text = resolved_toml(load_job(sys.argv[1:]))
    sys.stdout.write(text)
