"""What our TOML files hold beyond TorchTitan's own sections (`job.custom_config_module = "train.job_config"`).

TorchTitan merges this class into its JobConfig: new sections appear, fields of known sections replace its defaults,
unknown keys are refused, and every field has its command-line flag.
"""

import dataclasses
import typing
from dataclasses import dataclass, field

from laneformer.config import LaneformerConfig


@dataclass
class Mixture:
    """The training data: a lock file made by `python -m data_mixtures.prepare`."""

    lock: str = ""
    """Path of the mixture's lock file, e.g. data/demo/phase1.lock.json"""

    reader_threads: int = 2
    """Threads that read and cast batches ahead of the step"""


@dataclass
class Phase:
    """Where this job stands in the pipeline; only for labels, the weights come through [checkpoint]."""

    name: str = "phase1"
    """Written to every line of metrics.jsonl"""


@dataclass
class Model:
    """TorchTitan's section; the tokenizer comes with the mixture, so no Hugging Face assets are looked for."""

    hf_assets_path: str = "."
    """Unused: see [mixture] for the tokenizer, tools.import_hf for weights"""


@dataclass
class Checkpoint:
    """TorchTitan's section with two changes: what the start may do, and a last checkpoint that can be continued."""

    initial_load_path: str | None = None
    """Checkpoint folder (.../checkpoint/step-N) to start from when this run has none of its own: the phase switch.
    Learning-rate schedule, optimizer settings and data order are this job's; with initial_load_model_only = false the
    optimizer's moments come along."""

    last_save_model_only: bool = False
    """The last checkpoint keeps the optimizer, so that a later phase can continue from it"""

    allow_fresh_start: bool = False
    """Whether random weights are a valid start (phase 1); without it a missing checkpoint stops the job"""


@dataclass
class Validation:
    """TorchTitan's section; the data are the mixture's own held-out windows, so that its dataset fields are unused."""

    windows_per_source: int = 16
    """Held-out windows of each source, the first ones; all there are when a source has fewer"""


def _architecture_section() -> type:
    """Every field of LaneformerConfig, None by default: `--architecture.broadcast_delay 0` changes the flavor."""
    hints = typing.get_type_hints(LaneformerConfig)
    names = [f.name for f in dataclasses.fields(LaneformerConfig) if f.name != "rope_scaling"]
    optional = [(name, typing.Optional[hints[name]], field(default=None)) for name in names]  # noqa: UP045
    return dataclasses.make_dataclass("Architecture", optional)


Architecture = _architecture_section()


@dataclass
class JobConfig:
    """Merged by TorchTitan into its own JobConfig."""

    mixture: Mixture = field(default_factory=Mixture)
    phase: Phase = field(default_factory=Phase)
    model: Model = field(default_factory=Model)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    validation: Validation = field(default_factory=Validation)
    architecture: Architecture = field(default_factory=Architecture)  # type: ignore[valid-type]
