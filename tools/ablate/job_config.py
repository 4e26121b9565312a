"""The trainer's job files with `[variant]` (`job.custom_config_module = "tools.ablate.job_config"`)."""

# no `from __future__ import annotations`: TorchTitan looks at the types of the fields

from dataclasses import dataclass, field

import train.job_config


@dataclass
class Variant:
    joins: str = ""
    """ladder, parallel, desync_<k> or lost_<k> (tools/ablate/variants.py); empty: as [architecture] says"""


@dataclass
class JobConfig(train.job_config.JobConfig):
    """What TorchTitan merges into its JobConfig."""

    variant: Variant = field(default_factory=Variant)
