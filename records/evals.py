"""evals.jsonl, one JSON object per evaluation, and the type of a command that appends to it.

A record carries what is needed to trust or repeat its figures. It is one line, written by one call and
flushed to disk, so that concurrent evaluations cannot mix their lines and a line that a crash cut short
spoils only itself. Its fields are written down here: PROVENANCE and FIELDS.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from records.files import append_line, code_version

# of every record; null: unknown, or there is none
PROVENANCE = {
    "kind": "the command: core, bits_per_byte, lm_eval, code, samples, decode_speed or contamination",
    "step": "training step of the checkpoint",
    "tokens_total": "training tokens up to the checkpoint, earlier phases included",
    "phase": "phase of the checkpoint",
    "time": "when the record was written, seconds since the epoch",
    "seconds": "wall time of the evaluation",
    "code_version": "commit of this repository when the evaluation began, -dirty with local changes",
    "tokenizer_sha256": "hash of the tokenizer that made the ids",
    "data_sha256": "hash of what was asked",
    "model_sha256": "hash of the model folder (records.files.model_sha256)",
    "backend": "what ran the model: engine, transformers or endpoint",
    "device": "where: cpu, cuda:0, cuda:0,cuda:1, or the address of an endpoint",
    "dtype": "data type of the weights as they ran",
}
NO_MODEL = dict.fromkeys(("tokenizer_sha256", "model_sha256", "backend", "device", "dtype"))
# the further fields of each kind, those of one meaning in one line; a/b: b within each entry of a
FIELDS = {
    "core": {
        "limit": "items asked per task at most; null: all",
        "protocol seed": "prompt format and few-shot examples, nanochat or dclm, and the seed of the latter",
        "core_v1 core_v2 core_v1_se core_v2_se": "CORE with DCLM's first and its corrected baselines, and standard "
        "errors; null unless all 22 tasks were scored",
        "gold_bits_per_byte": "mean over the tasks: bits of the right answers by their bytes, an early signal",
        "categories": "by category: tasks, centered_v1, centered_v2 and their standard errors (_se)",
        "tasks": "by task; tasks that were not scored are in `missing`",
        "tasks/accuracy": "share of right answers, 0 to 1",
        "tasks/interval tasks/standard_error": "Wilson's interval of 95 %, [low, high], and half its width by 1.96",
        "tasks/centered_v1 tasks/centered_v2": "0 at the baseline, 1 if every answer is right",
        "tasks/gold_bits_per_byte": "bits of the right answers by their bytes",
        "tasks/n tasks/n_total tasks/shots": "items asked, items in the file, examples before a question",
        "tasks/baseline_v1 tasks/baseline_v2": "accuracy of guessing, percent",
        "tasks/type tasks/category": "multiple_choice, schema or language_modeling; its category",
        "missing differs": "by task: why it was not scored; settings of the bundle's core.yaml that are not CORE's",
        "items": "file with the answer to each item, relative to evals.jsonl (evals/items.py); null without --out",
    },
    "bits_per_byte": {
        "limit": "windows per source at most; null: all",
        "bits_per_byte loss": "of all held-out text, sources by their bytes; nats per token, by their tokens",
        "sources": "by source: category, bits_per_byte, loss, tokens, bytes",
    },
    "lm_eval": {
        "limit": "documents per task (and length) at most; null: all",
        "protocol seed seeds": "version of lm-eval, shots and BOS; seed of Python's random; all of lm-eval's seeds",
        "num_fewshot": "examples before a question; null: the task's own number",
        "add_bos chat_template": "whether prompts begin with BOS; whether they are messages in the chat template",
        "haystack": "of RULER: upstream or offline (--data); null without RULER",
        "tasks ruler": "by task: lm-eval's metrics and standard errors; by length in tokens: score by RULER task",
        "prompts cut_prompts": "by task: documents, longest_tokens, cut (prompts without their head); sum of cut",
        "max_length items": "context in tokens; as in core",
    },
    "code": {
        "dataset version evalplus problems": "humaneval+ or mbpp+, its version, EvalPlus's, number of problems",
        "protocol prompt": "greedy or sampled; chat or completion",
        "n temperature top_p seed max_new_tokens": "answers per problem and how they are sampled",
        "model": "name of the model: the folder's or the server's",
        "pass@k": "by k: base and plus, means over problems of the probability that one of k samples passes",
        "pass@1_base pass@1_plus": "on the base tests; on base and plus tests together",
        "pass@1_base_interval pass@1_plus_interval": "Wilson's of 95 %, [low, high], the problems as sample",
        "control": "the reference solutions: passed, total, known_failures, unexpected_failures",
        "answers_empty answers_cut": "answers without text; answers that ended at max_new_tokens",
        "selection not_sanitized": "by rule: answers whose code it selected; answers that were not sanitized",
        "sandbox results": "what held the solutions; folder of answers and results",
        "items": "as in core; tasks are the data set's name (base tests) and its name with + (plus tests too)",
    },
    "samples": {
        "samples": "list of name, prompt, greedy and sampled text",
        "max_new_tokens temperature seed": "most tokens of a text; of the sampled texts",
    },
    "decode_speed": {
        "percent_of_probe tokens_per_s": "of `laneformer bench --json`, whose other fields follow"
    },
    "contamination": {
        "benchmarks manifests": "by benchmark: what was found in the data; by source: hash of its text"
    },
}
# {field of an older record: its name today}
OLD_FIELDS = {"max_per_task": "limit"}
# {flag of an older version: its name today}
RENAMED = {
    "--max-per-task": "--limit", "--windows": "--limit", "--kind": "--backend", "--model-name": "--model",
    "--num-concurrent": "--concurrency", "--request-timeout-s": "--timeout-s",
}  # fmt: skip


def optional(metavar: str, default: str) -> Any:
    """How --help shows an option that may be left out: its placeholder, and what holds without it."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


SERVER = ("--base-url", "--model", "--concurrency", "--timeout-s")  # of no use for a checkpoint's own files
FRAME = re.compile(r"[╭╮╰╯│─]+|-{9,}")  # around tyro's messages


@dataclass(frozen=True)
class About:
    """Options of every evaluation: where its record goes and which checkpoint it is about."""

    out: Annotated[Path | None, optional("FILE", "only printed")] = None
    """file to append the record to, such as runs/demo/evals.jsonl"""
    step: Annotated[int | None, optional("INT", "not recorded")] = None
    """training step of the checkpoint, for the record"""
    tokens_total: Annotated[int | None, optional("INT", "not recorded")] = None
    """training tokens of the checkpoint, earlier phases included, for the record"""
    phase: Annotated[str | None, optional("NAME", "not recorded")] = None
    """training phase of the checkpoint, for the record"""

    def append(
        self, kind: str, figures: dict[str, Any], started: float, **provenance: str | None
    ) -> dict[str, Any]:
        """Append an evaluation to `out`, if there is one, and return the record.

        figures: results of this kind of evaluation, by the names of FIELDS. started: time.perf_counter() when
        it began. The others: PROVENANCE. Raises ValueError if a figure has a name of PROVENANCE, and for NaN
        or infinity: a figure that could not be measured is left out or null.
        """
        if taken := sorted(set(figures) & set(PROVENANCE)):
            raise ValueError(f"figures of {kind!r} use the provenance names {taken}; rename these figures")
        seconds = round(time.perf_counter() - started, 3)
        known = {"kind": kind, "time": time.time(), "seconds": seconds, "code_version": code_at_start()}
        known |= vars(self) | provenance
        record = {name: known[name] for name in PROVENANCE} | figures
        try:
            line = json.dumps(record, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                f"the record of {kind!r} holds NaN or infinity, which JSON cannot represent: {record}"
            ) from error
        if self.out is not None:
            append_line(self.out, line)
        return record

    def flags(self) -> list[str]:
        """These options as command-line arguments."""
        given = {flag(f.name): getattr(self, f.name) for f in dataclasses.fields(self)}
        return [part for name, value in given.items() if value is not None for part in (name, str(value))]


NOWHERE = About()
AboutFlags = Annotated[  # --out, --step, ... as flags of the command itself
    About, tyro.conf.OmitArgPrefixes,
    tyro.conf.arg(name="record", help="where the record goes, and which checkpoint it is about"),
]  # fmt: skip
ModelFolder = Annotated[
    Path,
    tyro.conf.Positional,
    tyro.conf.arg(metavar="HF_DIR", help="Hugging Face model folder, such as runs/demo/hf"),
]


@dataclass(frozen=True)
class EvalCommand:
    """A module of evals/ that runs as `python -m evals.NAME`; it declares `COMMAND = EvalCommand(...)`.

    kind: kind of the records that it appends. main: its signature is the command line (tyro), it returns
    the appended record or None. If it evaluates a model, it takes the folder as positional argument `hf_dir`,
    AboutFlags and `device`. needs: options that a checkpoint's evaluation requires, though main has
    defaults for them. excludes: options that it cannot have, besides those of a server. per_step: options
    whose value must contain {step}, such as a folder of one checkpoint's answers. reads: options that name a
    file or folder which must exist before. ready: gets the options and raises ValueError, with the remedy, if
    this machine lacks something that the command needs.
    """

    kind: str
    main: Callable[..., dict[str, Any] | None]
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    per_step: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    ready: Callable[[Sequence[str]], object] = lambda options: None

    def run(self) -> None:
        """The module's command line: prints the record as one JSON line, and a ValueError as one line."""
        code_at_start()
        try:
            refuse_renamed(sys.argv[1:])
            record = tyro.cli(self.main, prog=f"python -m evals.{self.kind}")
        except ValueError as error:
            raise SystemExit(f"{self.kind}: {error}") from None
        if record is not None:
            print(json.dumps(record))

    def arguments(self, folder: Path, options: Sequence[str], about: About, device: str) -> list[str]:
        """Arguments that evaluate a model folder. `{step}` in an option is replaced; device
        "auto" is left out.
        """
        chosen = [option.replace("{step}", str(about.step)) for option in options]
        return [str(folder), *chosen, *about.flags(), *(["--device", device] if device != "auto" else [])]

    def check(self, options: Sequence[str]) -> None:
        """Raise ValueError if the command cannot evaluate a checkpoint with these options."""
        if "hf_dir" not in inspect.signature(self.main).parameters:
            raise ValueError("it does not evaluate a model, so run it once, not at every checkpoint")
        refuse_renamed(options)
        given = flags_in(options)
        for name in given:
            if name in {flag(f.name) for f in dataclasses.fields(About)}:
                raise ValueError(f"{name} is set by the watcher; remove it")
            if name in (*SERVER, *self.excludes):
                raise ValueError(f"{name} is not an option of it on a checkpoint; remove it")
        for name in self.needs:
            if name not in given:
                raise ValueError(f"{name} is missing")
        for name in self.per_step:
            value = option_value(name, options)
            if value and "{step}" not in value:
                raise ValueError(f"{name} {value} must contain {{step}}, such as {name} {value}/{{step}}")
        arguments = self.arguments(Path("model"), options, About(Path("out"), 1, 1, "phase"), "cpu")
        parse_only = functools.wraps(self.main)(lambda *_, **__: None)
        try:
            with redirect_stderr(io.StringIO()) as said:
                tyro.cli(parse_only, prog=self.kind, args=arguments)
        except SystemExit:
            reason = re.split("For full help|Argument help", FRAME.sub(" ", said.getvalue()))[0]
            raise ValueError(" ".join(reason.split())) from None


def with_current_names(record: dict[str, Any]) -> dict[str, Any]:
    """A record of any age with the field names of today."""
    return {OLD_FIELDS.get(name, name): value for name, value in record.items()}


def flags_in(words: Sequence[str]) -> list[str]:
    """The flags among the words of a command line, as --help names them."""
    return [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


def option_value(name: str, words: Sequence[str]) -> str | None:
    """The value of `--name value` or `--name=value`."""
    parts = [part for word in words for part in word.split("=", 1)]
    return next((value for word, value in itertools.pairwise(parts) if word == name), None)


def refuse_renamed(words: Sequence[str]) -> None:
    """Raise ValueError for a flag that has another name today."""
    for word in flags_in(words):
        if word in RENAMED:
            raise ValueError(f"{word} is now {RENAMED[word]}, as in every evaluation")


def flag(name: str) -> str:
    """The command-line flag of a parameter."""
    return f"--{name.replace('_', '-')}"


@functools.cache
def code_at_start() -> str:
    """The code version of this process, the same however long it runs: the checkout may change meanwhile."""
    return code_version(Path(__file__).parent)
