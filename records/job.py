"""The sections of a job file that are ours, and the light reader of job files, which needs no torch."""

# no `from __future__ import annotations`: TorchTitan looks at the types of the fields

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import tyro

Change = Literal[
    "rope_theta",
    "window_rope_theta",
    "rope_scaling",
    "nope_layers",
    "sliding_window",
    "swa_layers",
    "max_position_embeddings",
]


@dataclass
class Job:
    """TorchTitan's section."""

    dump_folder: str = "./outputs"
    """The run folder"""


@dataclass
class Training:
    """TorchTitan's section."""

    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks"""
    steps: int = 10_000
    """Optimizer steps of the whole job"""
    z_loss_weight: float = 0.0
    """Weight of the z-loss (squared log-sum-exp of the logits), in the gradients, not in the logged loss; 0: none"""


@dataclass
class LRScheduler:
    """TorchTitan's section: warmup, stable part, decay."""

    warmup_steps: int = 200
    """Steps of linear warmup"""
    total_steps: int | None = None
    """Length of the schedule in steps; default: training.steps"""
    decay_ratio: float | None = None
    """Fraction of total_steps, at their end, in which the learning rate decays; default: all after the warmup"""


@dataclass
class Mixture:
    """The training data: a lock file made by `python -m data_mixtures.prepare`."""

    lock: str = ""
    """Path of the mixture's lock file, e.g. data/demo/phase1.lock.json"""
    reader_threads: int = 2
    """Threads that read and cast batches ahead of the step"""
    begin_again: list[str] = field(default_factory=list)
    """Sources read from their beginning, since their text is not that of the same name in the parent run"""


@dataclass
class Phase:
    """The phase of the run that this job trains: a label only, weights come from [checkpoint]."""

    name: str = "phase1"
    """Label in every row of metrics.jsonl and in evaluation records"""


@dataclass
class Model:
    """TorchTitan's section; the tokenizer comes with the mixture, so TorchTitan's hf_assets_path is unused."""

    flavor: str = ""
    """Architecture: 2b, 300m or tiny; [architecture] overrides single fields"""
    hf_assets_path: str = "."
    """Unused: the tokenizer comes with [mixture], weights of a Hugging Face folder through tools.import_hf"""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """Attention kernel: sdpa, flex, or auto (flex if compiled for a GPU, else sdpa).
    A kernel that fails the check of one layer at the start of the job is replaced by sdpa, with a warning
    """
    join_norm: Literal["auto", "triton", "plain"] = "auto"
    """Joins of partial outputs and the norms after them: triton (fused kernels), plain, or auto.
    auto: triton on a GPU, else plain; checked on one layer at the start of the job
    """
    mask_documents: bool = False
    """Restrict attention to the token's own document within a packed sequence"""


@dataclass
class MTP:
    """Training of the multi-token prediction head, which architecture.num_nextn_predict_layers = 1 adds."""

    steps: int = 1
    """Tokens after the next one that the head is trained to predict, each from its output for the last"""
    loss_weight: float = 0.3
    """Weight of the sum of the steps' losses in the gradients, in the first part of the schedule"""
    final_loss_weight: float = 0.1
    """The same in its last part"""
    lower_at: float = 0.67
    """Fraction of lr_scheduler.total_steps after which final_loss_weight applies"""
    freeze_base: bool = False
    """Train the head alone: the model stays as initial_load_path has it, which need not have a head"""


@dataclass
class Parallelism:
    """TorchTitan's section."""

    data_parallel_shard_degree: int = -1
    """Ranks that share one copy of weights and optimizer (FSDP); -1: all of a replica"""


@dataclass
class Checkpoint:
    """TorchTitan's section with two changes: what a job may start from, and a last checkpoint
    that can be continued.
    """

    folder: str = "checkpoint"
    """Folder of the checkpoints inside the run folder"""
    load_step: int = -1
    """Step of the checkpoint to load; -1: the newest complete one"""
    initial_load_path: str | None = None
    """Checkpoint folder (.../checkpoint/step-N) to start from if this run has none of its own: the phase switch.
    Learning-rate schedule, optimizer settings and data order are this job's.
    With initial_load_model_only = false the optimizer's moments are loaded too
    """
    initial_load_all_states: bool = False
    """Load everything from initial_load_path (step, data position, moments), for a decay from the stable phase.
    The learning-rate schedule is this job's
    """
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Who writes a checkpoint: each rank while training waits (disabled), or its thread (async).
    async_with_pinned_mem: a process of each rank, which gets the state through /dev/shm
    """
    last_save_model_only: bool = False
    """Whether the last checkpoint omits the optimizer, so that no later phase can continue from its moments"""
    allow_fresh_start: bool = False
    """Whether the job may start from random weights (phase 1); otherwise a missing checkpoint is an error"""
    allow_changes: list[Change] = field(default_factory=list)
    """Fields of the architecture that may differ from initial_load_path's, for a phase with longer sequences.
    Other differences are refused, and any difference from a run's own checkpoints
    """


@dataclass
class Resilience:
    """How failures are handled: read by the workers and by `python -m train.supervise`."""

    keep_every_steps: int = 0
    """Keep checkpoints at multiples of this step, besides the newest checkpoint.keep_latest_k; 0: none"""
    max_failed_saves: int = 3
    """Consecutive failed saves after which the job ends; those on a full disk do not count"""
    spike_window: int = 128
    """Number of recent steps that a loss or gradient norm is compared with"""
    max_loss_z: float = 0.0
    """Robust z-score of the loss above which a step is refused; 0: only a non-finite loss is"""
    max_grad_norm_z: float = 0.0
    """Robust z-score of the gradient norm before clipping above which a step is refused; 0: only if not finite"""
    on_bad_step: Literal["stop", "rollback", "rollback_and_skip", "skip"] = "stop"
    """After a refused step: stop, roll back to the newest checkpoint, roll back and skip the batch, or skip.
    skip: continue with the next batch, since the weights are unchanged; roll back after more than max_skips.
    Rolling back takes `python -m train.supervise`; without it the job ends
    """
    max_skips: int = 3
    """Refused steps within spike_window steps that on_bad_step = "skip" skips before it rolls back"""
    skip_steps: int = 1
    """Steps of data that a rollback skips, the refused one last; never data that the checkpoint has seen"""
    skip_sequences: list[tuple[int, int]] = field(default_factory=list)
    """Ranges [first, last) of sequence numbers of the mixture that training skips"""
    hang_timeout_s: float = 600.0
    """Seconds without a finished step on any rank after which stacks are dumped and the job is restarted.
    Must exceed a step, a synchronous save and a validation together, or an evaluation with evals.in_loop
    """
    start_timeout_s: float = 1800.0
    """Like hang_timeout_s, until the first step of an attempt is done: imports, loading, compilation"""
    stop_deadline_s: float = 300.0
    """Seconds that a signalled job has to save a checkpoint before it is killed"""
    backoff_s: float = 10.0
    """Seconds before the second attempt without progress; doubles up to max_backoff_s"""
    max_backoff_s: float = 300.0
    """Longest pause between two attempts, in seconds"""
    max_fruitless_starts: int = 3
    """Consecutive attempts without a newer checkpoint after which the supervisor gives up"""
    max_same_reason: int = 3
    """Consecutive attempts that failed for the same reason after which the supervisor gives up; 0: no limit.
    Newer checkpoints do not reset the count; numbers and paths in the reason are ignored
    """
    same_reason_hours: float = 24.0
    """An attempt that lasted longer does not count as ended by the same reason as the one before"""
    numa_binding: bool = True
    """Pin ranks to the NUMA node of their GPUs; tested before each attempt, and left out if it fails"""

    def __post_init__(self) -> None:
        # TOML has lists
        self.skip_sequences = [(int(first), int(last)) for first, last in self.skip_sequences]


@dataclass
class Validation:
    """TorchTitan's section; the data are held-out windows of the mixture, so its dataset fields are unused."""

    windows_per_source: int = 16
    """Held-out windows per source; all of them if a source has fewer"""


@dataclass
class Metrics:
    """TorchTitan's section: where figures go besides metrics.jsonl and evals.jsonl."""

    enable_tensorboard: bool = False
    """Whether to write TensorBoard event files"""
    save_tb_folder: str = "tb"
    """Folder of the event files inside the run folder"""
    enable_wandb: bool = False
    """Whether to log to Weights & Biases"""
    gpu_hour_price: float = 0.0
    """Price of one GPU-hour, for the cost in log, metrics.jsonl, dashboard and tools.plan; 0: no cost"""
    currency: str = ""
    """Written behind the cost, such as EUR"""


@dataclass
class Evals:
    """What `python -m evals.watch` does with the checkpoints of the run, beside the job or from within it."""

    every_steps: int = 0
    """Evaluate checkpoints of multiples of this step, and the last one; 0: none"""
    commands: list[str] = field(default_factory=list)
    """Evaluation commands with their options, such as "bits_per_byte --data data/demo --limit 8".
    {step} in an option becomes the step.
    The watcher adds the model folder, --out, --step, --tokens-total, --phase and --device
    """
    device: str = "auto"
    """Device of the evaluations: cpu, cuda, or auto.
    auto: a visible GPU for evaluations through Transformers, the CPU for those through the decode engine
    """
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Data type that the weights are rounded to before evaluation"""
    in_loop: bool = False
    """Whether the job itself runs the watcher after saving such a checkpoint and waits, for small runs.
    An evaluation is ended after 0.9 times resilience.hang_timeout_s
    """
    newest_first: bool = False
    """Whether a watcher that has fallen behind evaluates the newest checkpoint before older ones"""


@dataclass
class Alerts:
    """Where alerts go when a run needs attention."""

    webhook_env: str = ""
    """Name of the environment variable that holds the URL of a webhook (Slack, Mattermost), which is a secret"""
    command: str = ""
    """Shell command that gets the text on stdin, such as "mail -s laneformer me@example.org" """
    min_interval_s: float = 600.0
    """Minimum seconds between two alerts of the same kind"""
    timeout_s: float = 10.0
    """Timeout of sending an alert, in seconds"""


@dataclass
class JobSections:
    """The sections above, as one job."""

    job: Job = field(default_factory=Job)
    training: Training = field(default_factory=Training)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    mixture: Mixture = field(default_factory=Mixture)
    phase: Phase = field(default_factory=Phase)
    model: Model = field(default_factory=Model)
    mtp: MTP = field(default_factory=MTP)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    resilience: Resilience = field(default_factory=Resilience)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    evals: Evals = field(default_factory=Evals)
    alerts: Alerts = field(default_factory=Alerts)

    @property
    def run(self) -> Path:
        return Path(self.job.dump_folder)

    @property
    def checkpoints(self) -> Path:
        return self.run / self.checkpoint.folder


def stable_range(schedule: LRScheduler, training_steps: int) -> tuple[int, int]:
    """Return the first and last step whose checkpoint is after warmup and before decay."""
    # with TorchTitan's caps: a warmup that is longer than all, a decay that would begin within it
    total = schedule.total_steps or training_steps
    warmup = min(schedule.warmup_steps, total)
    ratio = 1 if schedule.decay_ratio is None else schedule.decay_ratio
    decay = min(round(total * ratio), total - warmup)
    return warmup + 1, min(total, total + 1 - decay)


def read_job(arguments: list[str]) -> JobSections:
    """Read `--job.config_file X.toml [--section.key value ...]`; keys of other sections are ignored.

    Raises:
        ValueError: a missing or malformed file, a wrong type, or checkpoint.load_step.
    """
    values = read_sections(job_file(arguments))
    sections = {}
    for section in fields(JobSections):
        kind: Any = section.type
        names = {f.name for f in fields(kind)}
        sections[section.name] = kind(
            **{k: v for k, v in values.get(section.name, {}).items() if k in names}
        )
    job, _ = tyro.cli(
        JobSections, args=arguments, default=JobSections(**sections), return_unknown_args=True
    )
    if job.checkpoint.load_step != -1:
        raise ValueError(
            f"checkpoint.load_step = {job.checkpoint.load_step} would go back to that step at every restart; run "
            "`torchrun -m train` with it once, or move the newer checkpoints away"
        )
    return job


def job_flags(settings: Mapping[str, Any]) -> list[str]:
    """Write {"section.key": value} as flags of `python -m train`."""
    flags = []
    for name, value in settings.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, tuple) else (value,))]
    return flags


def read_sections(path: Path) -> dict[str, dict[str, Any]]:
    """Read {section: {key: value}} of a job file; ValueError if it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None


def job_file(arguments: list[str]) -> Path:
    """Return the value of --job.config_file; ValueError if it is missing or no file."""
    value = option_value("--job.config_file", arguments) or option_value(
        "--job.config-file", arguments
    )
    if value is None:
        raise ValueError(
            "--job.config_file is missing, for example --job.config_file configs/phase1.toml"
        )
    if not Path(value).is_file():
        raise ValueError(f"--job.config_file {value} does not exist, or is a folder")
    return Path(value)


def option_value(name: str, words: Sequence[str]) -> str | None:
    parts = [part for word in words for part in word.split("=", 1)]
    return next((value for word, value in itertools.pairwise(parts) if word == name), None)
