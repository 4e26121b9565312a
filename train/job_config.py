"""Load and check the config of a training job: TorchTitan's, our sections of records.job, and [architecture].

    python -m train.job_config --job.config_file X.toml [--section.key value ...]

prints the resolved job as TOML, defaults included, which is a job file of the same job.
"""

import copy
import dataclasses
import difflib
import importlib
import os
import resource
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import tomli_w
import torch

from laneformer.config import LaneformerConfig
from records.evals import flags_in
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
    """Our sections, which TorchTitan merges into its JobConfig."""

    architecture: Architecture = field(default_factory=Architecture)  # type: ignore[valid-type]


def load_job(arguments: list[str], world_size: int | None = None) -> Any:
    """Read `--job.config_file X.toml [--section.key value ...]` as TorchTitan does, and check it.

    Raises:
        ValueError: a missing file, an unknown key, or what `train.job_checks` refuses.
    """
    job_file(arguments)
    patch_torch_for_cpu()
    from torchtitan.config import ConfigManager

    class CheckedConfigManager(ConfigManager):
        # called before TorchTitan looks at any key, of which its own refusal names the merged class alone
        def _maybe_add_custom_config(self, args: list[str], toml_values: Any) -> Any:
            merged = super()._maybe_add_custom_config(args, toml_values)
            check_keys(merged, toml_values, args)
            return merged

    job = CheckedConfigManager().parse_args(arguments)
    check_with_model(job, world_size)
    return job


def check_keys(job_class: type, values: dict[str, Any], arguments: list[str]) -> None:
    """Raise ValueError for a key of a job file, or a flag, that no section has, with the nearest one.

    Args:
        job_class: the merged dataclass of all sections.
        values: the job file, {section: {key: value}}.
        arguments: the command line.
    """
    # {dotted name: whether it is a section}
    keys = {**dict(list_keys(job_class)), "help": False}
    flags = [flag.removeprefix("--").replace("-", "_") for flag in flags_in(arguments)]
    for name in [*list_written(values, keys), *flags]:
        section, _, key = name.rpartition(".")
        # --validation.no-enable, and --architecture.rope_scaling.factor, which is inside of a value
        if name in keys or False in map(keys.get, (section, name.replace(".no_", "."))):
            continue
        # the right key in the wrong section comes first
        near = [other for other in keys if other.endswith(f".{key}")]
        near = near or difflib.get_close_matches(name, keys, n=1)
        near = near or [other for other, is_section in keys.items() if is_section]
        kind = "key" if section else "section"
        raise ValueError(f"{name} is no {kind}; nearest: {', '.join(near)}")


def list_keys(section: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """List (dotted name, whether it is a section) of a dataclass, nested ones included."""
    for entry in dataclasses.fields(section):
        yield prefix + entry.name, dataclasses.is_dataclass(entry.type)
        if dataclasses.is_dataclass(entry.type):
            yield from list_keys(entry.type, f"{prefix}{entry.name}.")


def list_written(table: dict[str, Any], keys: dict[str, bool], prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if keys.get(prefix + key) and isinstance(value, dict):
            yield from list_written(value, keys, f"{prefix}{key}.")


def check_with_model(job: Any, world_size: int | None = None) -> None:
    """Raise ValueError for what `train.job_checks` or the model's arguments refuse."""
    from .job_checks import check_job

    check_job(job, world_size)
    if job.experimental.custom_import:
        importlib.import_module(job.experimental.custom_import)
        read_model_args(job)


def read_model_args(job: Any) -> Any:
    """Return the arguments of a job's model, which is registered; ValueError for what they refuse."""
    from torchtitan.protocols.train_spec import get_train_spec

    # a copy: those of the registered spec are shared
    model_args: Any = copy.copy(get_train_spec(job.model.name).model_args[job.model.flavor])
    model_args.update_from_config(job)
    return model_args


def patch_torch_for_cpu() -> None:
    """Without an accelerator, answer "cpu" where TorchTitan 0.2.2 asks for one."""
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
    # TorchTitan names the GPU's activity, which is None here
    profiler.profile = lambda activities=(), **options: profile(
        activities=[activity for activity in activities if activity is not None], **options
    )
    # torch.cpu's own returns "cpu", which barrier(device_ids=...) refuses
    cpu.current_device = lambda: 0


def format_job(job: Any) -> str:
    """Write the job as TOML, which has no null."""
    return tomli_w.dumps(without_none(job.to_dict()))


if __name__ == "__main__":
    try:
        sys.stdout.write(format_job(load_job(sys.argv[1:])))
    except ValueError as problem:
        raise SystemExit(f"the job is refused: {problem}") from None
