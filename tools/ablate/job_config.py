"""The trainer's job files with `[variant]`, and branches with other joins than their trunk's
(`job.custom_config_module = "tools.ablate.job_config"`).
"""

# no `from __future__ import annotations`: TorchTitan looks at the types of the fields

import typing
from dataclasses import dataclass, field

import records.job
import train.job_config

Joins = typing.Literal[
    "broadcast_delay", "use_early_comm", "use_attention_comm", "use_mlp_comm", "first_late_layer",
    "early_layers", "flush",
]  # fmt: skip
JOINS: tuple[str, ...] = typing.get_args(Joins)
Change = typing.Literal[records.job.Change, Joins]


@dataclass
class Variant:
    joins: str = ""
    """ladder, parallel, desync_<k> or lost_<k> (tools/ablate/variants.py); empty: as [architecture] says"""


@dataclass
class Checkpoint(records.job.Checkpoint):
    allow_changes: list[Change] = field(default_factory=list)  # type: ignore[assignment]
    """Fields of the architecture that may differ from initial_load_path's"""


@dataclass
class JobConfig(train.job_config.JobConfig):
    """What TorchTitan merges into its JobConfig."""

    variant: Variant = field(default_factory=Variant)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
