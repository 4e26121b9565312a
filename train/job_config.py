"""The job config of a training job: TorchTitan's own, our sections of records.job, and [architecture].

TorchTitan merges the class JobConfig below into its own (`job.custom_config_module = "train.job_config"`):
new sections appear, fields of known sections replace its defaults, unknown keys are refused, and every
field has its flag.

    python -m train.job_config --job.config_file X.toml [--section.key value ...]

prints the resolved job as TOML, defaults included: what a run would use. That output is a job file
of the same job.
"""

import copy
import dataclasses
import importlib
import os
import resource
import sys
import typing
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tomli_w
import torch

from laneformer.config import LaneformerConfig
from records.files import without_none
from records.job import JobSections, job_file

# every field of LaneformerConfig, None by default: `--architecture.broadcast_delay 0` changes the flavor
Architecture = dataclasses.make_dataclass(
    "Architecture",
    [
        (name, typing.Optional[hint], field(default=None))  # noqa: UP045
        for name, hint in typing.get_type_hints(LaneformerConfig).items()
        if name in LaneformerConfig.__dataclass_fields__
    ],
)


@dataclass
class JobConfig(JobSections):
    """What TorchTitan merges into its JobConfig."""

    architecture: Architecture = field(default_factory=Architecture)  # type: ignore[valid-type]


def load_job(arguments: list[str], world_size: int | None = None) -> Any:
    """TorchTitan's JobConfig for `--job.config_file X.toml [--section.key value ...]`;
    imports the model's module.

    Raises ValueError for a missing file, an unknown key, or what `train.job_checks` refuses; a flag that
    cannot be parsed ends the process.
    """
    job_file(arguments)
    patch_torch_for_cpu()
    from torchtitan.config import ConfigManager

    job = ConfigManager().parse_args(arguments)
    check_with_model(job, world_size)
    return job


def check_with_model(job: Any, world_size: int | None = None) -> None:
    """Raise ValueError for what `train.job_checks` or the model's own arguments refuse; imports the model's module."""
    from .job_checks import check_job

    check_job(job, world_size)
    if job.experimental.custom_import:
        importlib.import_module(job.experimental.custom_import)
        from torchtitan.protocols.train_spec import get_train_spec

        copy.copy(get_train_spec(job.model.name).model_args[job.model.flavor]).update_from_config(
            job
        )


def patch_torch_for_cpu() -> None:
    """Without an accelerator, answer "cpu" in the few places where TorchTitan 0.2.2 asks for
    one; changes no result.

    Call it before torchtitan is imported.
    """
    if torch.accelerator.is_available():
        return

    def memory_stats(device: Any = None) -> dict[str, int]:
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak_bytes, "reserved_bytes.all.peak": peak_bytes}

    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    cpu.get_device_name = lambda device=None: "cpu"
    cpu.get_device_properties = lambda device=None: SimpleNamespace(
        name="cpu", total_memory=memory_bytes
    )
    cpu.memory_stats = memory_stats
    cpu.reset_peak_memory_stats = lambda device=None: None
    cpu.empty_cache = lambda: None
    profiler: Any = torch.profiler
    profile = profiler.profile
    profiler.profile = lambda activities=(), **options: (
        profile(  # it names the GPU's activity, which is None here
            activities=[activity for activity in activities if activity is not None], **options
        )
    )
    cpu.current_device = lambda: (
        0
    )  # torch.cpu's own returns "cpu", which barrier(device_ids=...) refuses


def resolved_toml(job: Any) -> str:
    """The job as TOML; fields that are None are left out, as TOML has no null."""
    return tomli_w.dumps(without_none(job.to_dict()))


if __name__ == "__main__":
    try:
        sys.stdout.write(resolved_toml(load_job(sys.argv[1:])))
    except ValueError as problem:
        raise SystemExit(f"the job is refused: {problem}") from None
