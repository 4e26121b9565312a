"""What our TOML files hold beyond TorchTitan's own sections (`job.custom_config_module = "train.job_config"`).

TorchTitan merges this class into its JobConfig: new sections appear, fields of known sections replace its defaults,
unknown keys are refused, and every field has its command-line flag.
"""

import dataclasses
import typing
from dataclasses import dataclass, field
from typing import Literal

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

    attention: str = "auto"
    """auto (flex where it is compiled for a GPU, else sdpa), sdpa, or flex"""

    mask_documents: bool = False
    """Whether a token sees its own document only; the published recipe says nothing of it"""


@dataclass
class Checkpoint:
    """TorchTitan's section with two changes: what the start may do, and a last checkpoint that can be continued."""

    initial_load_path: str | None = None
    """Checkpoint folder (.../checkpoint/step-N) to start from when this run has none of its own: the phase switch.
    Learning-rate schedule, optimizer settings and data order are this job's; with initial_load_model_only = false the
    optimizer's moments come along."""

    initial_load_all_states: bool = False
    """initial_load_path is a checkpoint of this same job, to go on from with everything it holds (step, data position,
    moments): a decay branched from the stable part of a run. Its learning-rate schedule is this job's"""

    last_save_model_only: bool = False
    """The last checkpoint keeps the optimizer, so that a later phase can continue from it"""

    allow_fresh_start: bool = False
    """Whether random weights are a valid start (phase 1); without it a missing checkpoint stops the job"""


@dataclass
class Resilience:
    """What happens when something goes wrong: read by the workers and by `python -m train.supervise`."""

    keep_every_steps: int = 0
    """Checkpoints of these steps are never deleted, beside the newest checkpoint.keep_latest_k; 0: none"""

    max_failed_saves: int = 3
    """Saves in a row that may fail (a full disk) before the job gives up"""

    spike_window: int = 128
    """Steps that a loss or gradient norm is compared with"""

    max_loss_z: float = 0.0
    """Robust deviations above the window at which a step is refused; 0: only a non-finite loss is"""

    max_grad_norm_z: float = 0.0
    """The same for the gradient norm before clipping"""

    unclean_policy: Literal["stop", "rollback", "rollback_and_skip"] = "stop"
    """After a refused step: end the job, start again from the newest checkpoint, or do so and leave the batch out"""

    skip_steps: int = 1
    """Steps of data that rollback_and_skip leaves out, the refused one last; never data that the checkpoint has seen"""

    skip_sequences: list[tuple[int, int]] = field(default_factory=list)
    """Windows [first, last) of sequence numbers of the mixture that training leaves out"""

    hang_timeout_s: float = 600.0
    """No rank finished a step for so long: dump stacks, kill, start again. More than a step, a
    synchronous save and a validation together, or than an evaluation with evals.in_loop"""

    start_timeout_s: float = 1800.0
    """The same until the first step of a start is done: imports, loading, compiling"""

    stop_deadline_s: float = 300.0
    """How long a signalled job may take to save before it is ended"""

    backoff_s: float = 10.0
    """Pause before the second start without progress; doubles up to max_backoff_s"""

    max_backoff_s: float = 300.0

    max_fruitless_starts: int = 3
    """Starts in a row without a newer checkpoint after which the supervisor gives up"""

    def __post_init__(self) -> None:
        self.skip_sequences = [(int(first), int(last)) for first, last in self.skip_sequences]  # TOML has lists


@dataclass
class Validation:
    """TorchTitan's section; the data are the mixture's own held-out windows, so that its dataset fields are unused."""

    windows_per_source: int = 16
    """Held-out windows of each source, the first ones; all there are when a source has fewer"""


@dataclass
class Metrics:
    """TorchTitan's section."""

    enable_trackio: bool = False
    """Whether the values that TensorBoard and wandb get also go to trackio's local database"""


@dataclass
class Evals:
    """What `python -m evals.watch` does with the checkpoints of the run, beside the job or from within it."""

    every_steps: int = 0
    """Checkpoints of these steps are evaluated, and the last one; 0: none"""

    commands: list[str] = field(default_factory=list)
    """Modules of evals/ with their options, such as "bits_per_byte --data data/demo --windows 8"; the watcher adds
    the model's folder, --out, --step, --tokens-total and --phase"""

    device: str = "auto"
    """Where they run: auto, cpu or cuda; anything but auto is handed on as --device"""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """What the weights are rounded to before they are evaluated"""

    in_loop: bool = False
    """Whether the job runs the watcher itself after saving such a checkpoint, and stands still meanwhile: for small
    runs. An evaluation is ended at 0.9 times resilience.hang_timeout_s"""

    newest_first: bool = False
    """Whether a watcher that is late takes the newest checkpoint before the older ones"""


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
    resilience: Resilience = field(default_factory=Resilience)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    evals: Evals = field(default_factory=Evals)
    architecture: Architecture = field(default_factory=Architecture)  # type: ignore[valid-type]
