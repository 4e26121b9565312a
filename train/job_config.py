"""The job config of a training job: TorchTitan's own, our sections of records.job, and [architecture].

TorchTitan merges the class JobConfig below into its own (`job.custom_config_module = "train.job_config"`): new sections
appear, fields of known sections replace its defaults, unknown keys are refused, and every field has its flag.

    python -m train.job_config --job.config_file X.toml [--section.key value ...]

prints the resolved job as TOML, defaults included: what a run would use. That output is a job file of the same job.
"""

import dataclasses
import importlib
import sys
import typing
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from laneformer.config import LaneformerConfig
from records.job import JobSections, job_file


def _architecture_section() -> type:
    """Every field of LaneformerConfig, None by default: `--architecture.broadcast_delay 0` changes the flavor."""
    hints = typing.get_type_hints(LaneformerConfig)
    names = [f.name for f in dataclasses.fields(LaneformerConfig) if f.name != "rope_scaling"]
    optional = [(name, typing.Optional[hints[name]], field(default=None)) for name in names]  # noqa: UP045
    return dataclasses.make_dataclass("Architecture", optional)


Architecture = _architecture_section()


@dataclass
class JobConfig(JobSections):
    """What TorchTitan merges into its JobConfig."""

    architecture: Architecture = field(default_factory=Architecture)  # type: ignore[valid-type]


def load_job(arguments: list[str]) -> Any:
    """TorchTitan's JobConfig for `--job.config_file X.toml [--section.key value ...]`; imports the model's module.

    Raises ValueError for a missing file or an unknown key; a flag that cannot be parsed ends the process.
    """
    import torch

    job_file(arguments)
    if not torch.accelerator.is_available():
        from train.cpu import patch_torch_for_cpu

        patch_torch_for_cpu()  # before torchtitan is imported
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
    sys.stdout.write(resolved_toml(load_job(sys.argv[1:])))
