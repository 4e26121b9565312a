"""Extend the trainer's job files by `[late]` (`job.custom_config_module = "tools.delay_a_model.job_config"`)."""

# no `from __future__ import annotations`: TorchTitan looks at the types of the fields

from dataclasses import dataclass, field

import train.job_config


@dataclass
class Late:
    lanes: int = 1
    """Divides the dense model's heads, KV heads and intermediate columns"""
    recipe: str = ""
    """Of data_mixtures; the tokenizer is the dense model's, and the length of a window is training.seq_len"""
    dense: str = ""
    """Run folder of the model at delay 0, which is the teacher and where the student starts"""
    delay: int = 1
    """Layers by which the other lanes' outputs are late"""
    first_late_layer: int = 1
    """At least `delay`"""
    flush: bool = False
    """Whether outputs in flight after the last layer arrive before the final norm (lanes.py)"""
    anneal_steps: int = 1
    """Steps in which the late share of a layer grows from 0 to 1; the last layer becomes late first"""
    lora_rank: int = 0
    """Of the adapter that is trained in place of the layers' weights (adapter.py); 0: the weights"""


@dataclass
class JobConfig(train.job_config.JobConfig):
    """What TorchTitan merges into its JobConfig."""

    late: Late = field(default_factory=Late)
