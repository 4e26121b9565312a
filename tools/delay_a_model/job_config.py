"""The trainer's job files with `[late]` (`job.custom_config_module = "tools.delay_a_model.job_config"`)."""

# no `from __future__ import annotations`: TorchTitan looks at the types of the fields

from dataclasses import dataclass, field

import train.job_config


@dataclass
class Late:
    dense: str = ""
    """Run folder of the model at delay 0, which is the teacher and where the student starts"""
    delay: int = 1
    first_late_layer: int = 1
    """At least `delay`"""
    end: str = "dropped"
    """What becomes of outputs in flight after the last layer: dropped or flushed (lanes.py)"""
    anneal_steps: int = 1
    """Steps in which the late share of a group of layers grows from 0 to 1"""
    layers_at_once: int = 1
    """Layers of a group; the last ones become late first"""
    lora_rank: int = 0
    """Of the adapter that is trained in place of the layers' weights (adapter.py); 0: the weights"""
    lora_first_layer: int = 0
    """The first layer with an adapter; 0: the first late one"""

    @property
    def first_adapted(self) -> int:
        return self.lora_first_layer or self.first_late_layer


@dataclass
class JobConfig(train.job_config.JobConfig):
    """What TorchTitan merges into its JobConfig."""

    late: Late = field(default_factory=Late)
