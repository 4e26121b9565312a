"""Tests of `[evals]`: every evaluation with its options, only what runs on a checkpoint."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from evals import bits_per_byte, samples
from evals.code.__main__ import Scoring
from evals.code.answers import Sampling
from evals.commands import check, read_command
from evals.core.evaluate import Settings
from evals.lm_eval.__main__ import Questions
from evals.scorer import Answerer
from records.evals import FIELDS, About
from records.job import Evals, Job, JobSections, read_job

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    "decode_speed",
    "bits_per_byte --data x --limit 8",
    "core --bundle b --protocol dclm --limit=5 --device cpu",
    "code --dataset d.jsonl --results r/{step} --n 3 --temperature 0.8",
    "code --dataset d.jsonl",
    "lm_eval --tasks ruler --lengths 2048,4096 --no-add-bos",
    "samples --prompts p.jsonl --max-new-tokens 64",
]


def job_of(run: Path, **section) -> JobSections:
    return JobSections(
        Job(str(run)), evals=Evals(**{"every_steps": 10, "commands": COMMANDS, **section})
    )


def test_every_evaluation_is_a_command():
    assert {command.split()[0] for command in COMMANDS} == set(FIELDS) - {"contamination"}
    for name in FIELDS:
        assert read_command(name)[0] == f"evals.{name}"
        assert read_command(name)[1].kind == name
    # every module that declares a command must have its fields
    sources = [path.read_text() for path in (ROOT / "evals").rglob("*.py")]
    declared = sum("COMMAND = EvalCommand(" in source for source in sources)
    # a command without its fields in records/evals.toml
    assert declared == len(FIELDS)


def test_shipped_job_files_ask_for_what_can_run():
    jobs_with_evals = 0
    for path in sorted((ROOT / "configs").glob("*.toml")):
        if "[job]" not in path.read_text():
            # the file of an experiment, which names a job file
            continue
        job = read_job(["--job.config_file", str(path)])
        if job.evals.every_steps:
            check(job)
            jobs_with_evals += 1
    assert jobs_with_evals >= 4


def test_checking_needs_neither_torch_nor_the_engine():
    program = (
        "import sys, evals.watch; from evals.commands import *; [read_command(name) for name in FIELDS];"
        "print(*sorted({*sys.modules} & {'torch', 'transformers', 'lm_eval', 'laneformer', 'train', 'tools'}))"
    )
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True) == "\n"


TITLES = {"task options", "model options", "record options", "sampling options", "scoring options"}
FLAGS = {  # of every evaluation of a model, and of its record
    "--backend",
    "--device",
    "--max-length",
    "--base-url",
    "--model",
    "--concurrency",
    "--timeout-s",
    "--out",
    "--step",
    "--tokens-total",
    "--phase",
}


def test_help_is_whole_sentences_of_the_same_flags(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    for name in FIELDS:
        with pytest.raises(SystemExit):
            read_command(name)[1].run()
        text = capsys.readouterr().out
        assert "None" not in text, (
            f"{name}: no default and no placeholder that a reader has to guess"
        )
        # what it is about, not a parameter's name
        assert {*re.findall(r"\b\w+ options\b", text)} <= TITLES
        flags = {*re.findall(r"^\W*?(--[a-z-]+)", text, re.MULTILINE)}
        if name not in ("contamination", "decode_speed"):
            assert flags >= FLAGS
        if name in ("bits_per_byte", "core", "lm_eval"):
            assert "--limit" in flags
            assert ("--tasks" in flags) == (name != "bits_per_byte")


def test_arguments_of_a_checkpoint():
    module, kind, options = read_command("code --dataset d --results 'r s/{step}'")
    words = kind.arguments(Path("hf"), options, About(Path("o"), 20, None, "phase1"), "auto")
    assert module == "evals.code"
    options_with_step = ["--dataset", "d", "--results", "r s/20"]
    about = ["--out", "o", "--step", "20"]
    assert words == ["hf", *options_with_step, *about, "--phase", "phase1"]
    assert kind.arguments(Path("hf"), [], About(), "cuda") == ["hf", "--device", "cuda"]
    # the command's own
    for own in (["--device", "cpu"], ["--device=cpu"]):
        assert kind.arguments(Path("hf"), own, About(), "cuda") == ["hf", *own]


REFUSED = {  # a command: why
    "bits_per_bite": "'bits_per_bite' begins with no evaluation, .*did you mean 'bits_per_byte'",
    "xyz": "'xyz' begins with no evaluation, choose from .'bits_per_byte', 'code', 'contamination",
    "watch": "begins with no evaluation",
    "contamination --data d": "'contamination --data d': it does not evaluate a model",
    "code --n 1": "'code --n 1': Required options Missing from code: --dataset PATH",
    "code --dataset d --results r": "--results .* must contain {step}, such as --results r/{step}",
    "bits_per_byte": "Required options Missing from bits_per_byte: --data PATH",
    "core --bundle b --protocl dclm": "Unrecognized .* --protocl, .* --protocol {nanochat",
    "core --bundel b": "Missing from core: --bundle PATH .* Unrecognized options: --bundel b$",
    "decode_speed --step 3": "--step is set by the watcher",
    "core --bundle b --limit all": "Error parsing --limit: .*: 'all'$",
    "lm_eval --tasks arc_easy --model m": "--model is not an option of it on a checkpoint",
    "core --bundle b --tasks mmlu": r"--tasks: \['mmlu'\] are not in CORE",
    "bits_per_byte runs/demo/hf --data d": "Unrecognized options: runs/demo/hf$",
}


def test_sections_that_ask_for_nothing_are_refused(tmp_path):
    check(job_of(tmp_path))
    sections = [
        ({"commands": ["decode_speed", command]}, reason) for command, reason in REFUSED.items()
    ]
    for section, reason in (
        ({"every_steps": 0}, "selects no checkpoint"),
        ({"commands": []}, "is empty"),
        *sections,
    ):
        with pytest.raises(ValueError, match=reason):
            check(job_of(tmp_path, **section))


HF, DATA, NAN = {"hf_dir": Path("hf")}, {"data": Path("data")}, math.nan
RANGES = [  # what takes numbers, with what else, and numbers that it refuses
    (Answerer, {}, {"max_length": [0], "concurrency": [0], "timeout_s": [0.0, NAN, math.inf]}),
    (About, {}, {"step": [-1], "tokens_total": [-1]}),
    (Settings, {}, {"limit": [0, -1]}),
    (Questions, {"tasks": "arc_easy"}, {"limit": [0], "num_fewshot": [-1]}),
    (
        Sampling,
        {},
        {"n": [0], "temperature": [-1.0, NAN], "top_p": [0.0, 1.1], "max_new_tokens": [0]},
    ),
    (Scoring, {}, {"parallel": [0]}),
    (samples.main, HF, {"max_new_tokens": [0], "temperature": [0.0, NAN], "seed": [-1, 2**32]}),
    (bits_per_byte.main, HF | DATA, {"limit": [0]}),
]


def test_every_number_has_its_range():
    for taker, others, wrong in RANGES:
        for name, value in ((name, value) for name, values in wrong.items() for value in values):
            reason = f"^--{name.replace('_', '-')} {value}: it should be "
            with pytest.raises(ValueError, match=reason):
                taker(**others, **{name: value})
