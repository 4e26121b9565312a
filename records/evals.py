"""evals.jsonl, one JSON object per evaluation, and the type of a command that appends to it."""

from __future__ import annotations

import functools
import inspect
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from records.command import Count, Natural, check_ranges, run_command
from records.files import JsonObject, append_line, code_version
from records.items import write_items
from records.job import option_value, read_sections

FIELDS = read_sections(Path(__file__).with_suffix(".toml"))  # by kind: fields and their meaning
PROVENANCE = FIELDS.pop("every")  # of every record
BEGAN = time.perf_counter()  # every evaluation is a process of its own
NO_MODEL = dict.fromkeys(("tokenizer_sha256", "model_sha256", "backend", "device", "dtype"))
# {field of an older record: its name today}
OLD_FIELDS = {"max_per_task": "limit"}
# by kind: records that differ in one of these asked other things, or in another way. They stand on other curves,
# on the dashboard as in a tracker, and their items are not compared
SETTINGS = {
    "core": ("not_core", "protocol", "limit"),
    "bits_per_byte": ("limit",),
    "code": (
        "dataset",
        "protocol",
        "prompt",
        "problems",
        "n",
        "temperature",
        "top_p",
        "max_new_tokens",
    ),
    "lm_eval": ("num_fewshot", "limit", "add_bos", "chat_template", "haystack"),
    "decode_speed": ("device", "dtype"),
}


def optional(metavar: str, default: str) -> Any:
    """Show in --help what an option that is left out means."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


Limit = Annotated[Count | None, optional("INT", "all")]
# of no use for a checkpoint's own files
SERVER = ("--base-url", "--model", "--concurrency", "--timeout-s")
FRAME = re.compile(r"[╭╮╰╯│─]+|-{9,}")  # around tyro's messages


@dataclass(frozen=True)
class About:
    """Options of every evaluation: where its record goes and which checkpoint it is about."""

    out: Annotated[Path | None, optional("FILE", "only printed")] = None
    """file to append the record to, such as runs/demo/evals.jsonl"""
    step: Annotated[Natural | None, optional("INT", "not recorded")] = None
    """training step of the checkpoint, for the record"""
    tokens_total: Annotated[Natural | None, optional("INT", "not recorded")] = None
    """training tokens of the checkpoint, earlier phases included, for the record"""
    phase: Annotated[str | None, optional("NAME", "not recorded")] = None
    """training phase of the checkpoint, for the record"""

    def __post_init__(self) -> None:
        check_ranges(About, vars(self))
        if self.out is not None:
            check_writable(self.out)

    def append_with_items(
        self,
        kind: str,
        figures: JsonObject,
        settings: JsonObject,
        lines: Iterable[JsonObject],
        **provenance: Any,
    ) -> JsonObject:
        """Do as `append`, and write the lines of a file of items, whose path the record names.

        Args:
            settings: what two files must share beside the provenance.
        """
        head = {"kind": kind, "step": self.step, **settings, **provenance}
        items = write_items(self.out, head, lines)
        return self.append(kind, figures | {"items": items}, **provenance)

    def append(self, kind: str, figures: JsonObject, **provenance: Any) -> JsonObject:
        """Append an evaluation to `out`, if there is one, and return the record.

        Args:
            figures: results by the names of FIELDS.
            provenance: values of PROVENANCE.

        Raises:
            ValueError: a figure has a name of PROVENANCE, or is NaN or infinite.
        """
        if clashes := sorted(set(figures) & set(PROVENANCE)):
            raise ValueError(
                f"figures of {kind!r} use the provenance names {clashes}; rename these figures"
            )
        seconds = round(time.perf_counter() - BEGAN, 3)
        values = {
            "kind": kind,
            "time": time.time(),
            "seconds": seconds,
            "code_version": code_at_start(),
        }
        values |= vars(self) | provenance
        record = {name: values[name] for name in PROVENANCE} | figures
        try:
            line = json.dumps(record, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"the record of {kind!r} holds NaN or infinity, which JSON cannot represent: {record}"
            ) from error
        if self.out is not None:
            # one line by one call: concurrent evaluations cannot mix theirs, and a cut one spoils only itself
            append_line(self.out, line)
        return record

    def flags(self) -> list[str]:
        """Return these options as command-line arguments."""
        words = []
        for name, value in vars(self).items():
            words += [flag(name), str(value)] if value is not None else []
        return words


def check_writable(out: Path) -> None:
    """Raise ValueError unless a file can be appended to, before anything is computed for it."""
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    if place.is_dir() == (place == out) or not os.access(place, os.W_OK):
        what = "is a folder" if place == out and out.is_dir() else f"cannot be written ({place})"
        raise ValueError(
            f"--out {out} {what}; name a file to append to, such as runs/demo/evals.jsonl"
        )


NOWHERE = About()
PLAIN = (tyro.conf.OmitArgPrefixes,)  # --limit, not --settings.limit
AboutFlags = Annotated[  # --out, --step, ... as flags of the command itself
    About,
    tyro.conf.arg(name="record", help="where the record goes, and which checkpoint it is about"),
]
ModelFolder = Annotated[
    Path,
    tyro.conf.Positional,
    tyro.conf.arg(metavar="HF_DIR", help="Hugging Face model folder, such as runs/demo/hf"),
]


@dataclass(frozen=True)
class EvalCommand:
    """A module of evals/ that runs as `python -m evals.NAME` and declares `COMMAND = EvalCommand(...)`.

    Attributes:
        kind: of the records that it appends.
        main: its signature is the command line; one that evaluates a model takes `hf_dir`.
        reads: options that name a file or folder which must exist before.
        refuse: raises ValueError for options that cannot evaluate checkpoints.
        ready: raises ValueError, with the remedy, if this machine lacks something.
    """

    kind: str
    main: Callable[..., JsonObject | None]
    reads: tuple[str, ...] = ()
    refuse: Callable[[Sequence[str]], object] = lambda options: None
    ready: Callable[[Sequence[str]], object] = lambda options: None

    def run(self) -> None:
        """Run the command line: print the record as one JSON line, an error as one sentence."""
        code_at_start()
        run_command(self.kind, self._print_record)

    def _print_record(self) -> None:
        record = tyro.cli(self.main, prog=f"python -m evals.{self.kind}", config=PLAIN)
        if record is not None:
            print(json.dumps(record))

    def arguments(
        self, folder: Path, options: Sequence[str], about: About, device: str
    ) -> list[str]:
        """Arguments that evaluate a model folder. `{step}` in an option is replaced; device
        "auto" is left out, and so is any where the options name one.
        """
        own_device = option_value("--device", options) is not None
        chosen = [option.replace("{step}", str(about.step)) for option in options]
        return [
            str(folder),
            *chosen,
            *about.flags(),
            *([] if own_device or device == "auto" else ["--device", device]),
        ]

    def check(self, options: Sequence[str]) -> None:
        """Raise ValueError if the command cannot evaluate a checkpoint with these options."""
        if "hf_dir" not in inspect.signature(self.main).parameters:
            raise ValueError(
                "it does not evaluate a model, so run it once, not at every checkpoint"
            )
        for name in flags_in(options):
            if name in map(flag, vars(NOWHERE)):
                raise ValueError(f"{name} is set by the watcher; remove it")
            if name in SERVER:
                raise ValueError(f"{name} is not an option of it on a checkpoint; remove it")
        self.refuse(options)
        arguments = self.arguments(Path("model"), options, About(None, 1, 1, "phase"), "cpu")
        # it has main's signature and does nothing: tyro checks names, types and numbers
        parse_only = functools.wraps(self.main)(lambda *_, **__: None)
        try:
            with redirect_stderr(io.StringIO()) as messages:
                tyro.cli(parse_only, prog=self.kind, args=arguments, config=PLAIN)
        except SystemExit:
            reason = re.split("For full help|Argument help", FRAME.sub(" ", messages.getvalue()))[0]
            raise ValueError(" ".join(reason.split())) from None


def with_current_names(record: JsonObject) -> JsonObject:
    """Rename the fields of an older record to those of today."""
    return {OLD_FIELDS.get(name, name): value for name, value in record.items()}


def settings_words(record: JsonObject) -> list[str]:
    """Describe the SETTINGS of a record: text as it is, another value as NAME-VALUE, null not at all."""
    current = with_current_names(record)
    pairs = [(name, current.get(name)) for name in SETTINGS.get(str(current.get("kind")), ())]
    return [v if isinstance(v, str) else f"{name}-{v}" for name, v in pairs if v is not None]


def flags_in(words: Sequence[str]) -> list[str]:
    """List the flags of a command line, as --help names them."""
    return [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def is_selected(step: int, every_steps: int, last_step: int) -> bool:
    """Whether a checkpoint is evaluated: every so many steps, the last one, and that of step 1, where curves begin
    (checkpoint.enable_first_step_checkpoint).
    """
    return step in (1, last_step) or (step > 0 and step % every_steps == 0)


@functools.cache
def code_at_start() -> str:
    """Return the code version of this process, however the checkout changes meanwhile."""
    return code_version(Path(__file__).parent)
