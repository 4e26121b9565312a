"""HumanEval+ and MBPP+ by EvalPlus's rules: generate answers, select the function in each, test it, pass@k.

    python -m evals.code runs/x/hf --dataset HumanEvalPlus.jsonl.gz --results runs/x/humaneval --out runs/x/evals.jsonl
    python -m evals.code --base-url http://127.0.0.1:8000/v1 --model NAME --dataset MbppPlus.jsonl.gz --results mbpp

The results folder keeps answers.jsonl (verbatim; an interrupted run resumes there) and samples.jsonl (what was selected
from each answer, and how it scored). Measurements are in docs/decisions/evaluation.md.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb, fsum
from pathlib import Path
from typing import Annotated, Literal

import tyro

from evals.code.answers import Sampling, collect, make_prompt
from evals.code.sandbox import find_sandbox
from evals.code.score import EVALPLUS, Dataset, Judge, Verdict, open_dataset
from evals.code.selection import cut_beginning, select_function
from evals.intervals import wilson
from evals.items import Partial
from evals.scorer import LOCAL, AnswererFlags, identify_model, load_tokenizer, open_scorer
from evals.tables import console
from records.command import Count, check_ranges
from records.evals import NOWHERE, SETTINGS, AboutFlags, EvalCommand, optional
from records.files import JsonObject, file_sha256
from records.items import FOLDER as ITEMS
from records.job import option_value
from records.workers import usable_cpus

KS = (1, 10, 100)


Prompting = Literal["auto", "chat", "completion"]


def is_chat(prompt: Prompting, hf_dir: Path | None) -> bool:
    """Tell whether prompts are user messages of a chat.

    Raises:
        ValueError: a folder without a chat template is to chat.
    """
    # a server has a template of its own
    template = hf_dir is None or (
        (hf_dir / "tokenizer.json").is_file() and load_tokenizer(hf_dir).chat_template
    )
    if prompt == "chat" and not template:
        raise ValueError(f"{hf_dir} has no chat template; use --prompt completion")
    return prompt != "completion" and bool(template)


@dataclass(frozen=True)
class Scoring:
    """How solutions are tested."""

    # on too few cores (--cpus, Slurm) right ones time out
    parallel: Count = max(1, usable_cpus() // 2)  # noqa: RUF009
    """solutions tested concurrently"""
    unsafe_no_sandbox: bool = False
    """run the model's code with your own rights, without any sandbox"""
    cache: Path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer"
    """folder that keeps the expected outputs between runs"""

    def __post_init__(self) -> None:
        check_ranges(Scoring, vars(self))


# by problem, of each sample
Scored = dict[str, list[Verdict]]


def solutions(answers: list[JsonObject], chat: bool, dataset: Dataset) -> list[JsonObject]:
    """Return a row per answer: the code selected from it, and by which rule."""
    rows = []
    for row in answers:
        problem = dataset.by_task[row["task_id"]]
        if chat:
            code, rule = select_function(row["answer"], problem["entry_point"])
        else:
            program = make_prompt(problem, chat=False) + row["answer"]
            rule = "completion"
            code = cut_beginning(program.split("\n")) or program
        rows.append(
            {"task_id": row["task_id"], "sample": row["sample"], "rule": rule, "solution": code}
        )
    return rows


def figures_of(scored: Scored, n: int) -> JsonObject:
    """Compute pass@1 and pass@k (k up to n) on the base tests, and on base and plus tests together."""
    figures: JsonObject = {"pass@k": {str(k): {} for k in KS if k <= n}}
    for name in Verdict._fields:
        counts = [sum(getattr(v, name) for v in verdicts) for verdicts in scored.values()]
        for k, at_k in figures["pass@k"].items():
            at_k[name] = fsum(pass_at_k(n, passed, int(k)) for passed in counts) / len(counts)
        share = figures[f"pass@1_{name}"] = figures["pass@k"]["1"][name]
        # the sample is the problems: several answers to each make Wilson's interval wide
        center, half = wilson(share * len(counts), len(counts))
        figures[f"pass@1_{name}_interval"] = [center - half, center + half]
    return figures


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Estimate the probability that k of n samples include a passing one (Chen et al., arXiv 2107.03374)."""
    # exact integers
    return 1 - comb(n - passed, k) / comb(n, k)


GREEDY = Sampling()


def main(
    hf_dir: Annotated[
        Path | None, tyro.conf.Positional, optional("HF_DIR", "the server of --base-url")
    ] = None,
    *,
    dataset: Path,
    results: Annotated[
        Path | None, optional("DIR", "a folder of its own in items/ beside --out")
    ] = None,
    prompt: Prompting = "auto",
    answerer: AnswererFlags = LOCAL,
    sampling: Annotated[Sampling, tyro.conf.arg(help="how answers are generated")] = GREEDY,
    scoring: Annotated[Scoring, tyro.conf.arg(help="how answers are tested")] = Scoring(),
    about: AboutFlags = NOWHERE,
) -> JsonObject:
    """HumanEval+ or MBPP+ of a model. The last line on stdout is the record, JSON.

    Args:
        hf_dir: Hugging Face model folder, such as runs/demo/hf
        dataset: HumanEvalPlus.jsonl or MbppPlus.jsonl, optionally gzipped, or a subset of one
        results: folder for answers and results, where an interrupted run resumes
        prompt: a user message (chat), or a function's beginning (completion); auto is chat where there is a template
    """
    if (results or about.out) is None or (hf_dir is None) == (answerer.base_url is None):
        raise ValueError("--results or --out, and either a model folder or --base-url are required")
    data = open_dataset(dataset)
    sandbox = find_sandbox(scoring.unsafe_no_sandbox)
    chat = is_chat(prompt, hf_dir)
    scorer = open_scorer(hf_dir, answerer)
    who = identify_model(hf_dir, scorer) | {"data_sha256": file_sha256(dataset)}
    settings = {
        "model": hf_dir.resolve().name if hf_dir else answerer.model or "laneformer",
        "protocol": "greedy" if sampling.temperature == 0 else "sampled",
        "prompt": "chat" if chat else "completion",
        **asdict(sampling),
    }
    # answers are reused only for the same model, context, prompts and sampling
    digest = hashlib.sha256(repr((who, scorer.max_length, settings)).encode())
    settings_key = digest.hexdigest()[:12]
    # each checkpoint and setting has a folder of its own beside the records
    beside = (about.out or Path()).parent / ITEMS / f"code-{about.step or 0}-{settings_key}"
    folder = results or beside
    folder.mkdir(parents=True, exist_ok=True)
    judge = Judge(data, sandbox, folder.resolve(), scoring.cache, scoring.parallel)
    control = score_references(judge)
    answers = collect(data, scorer, sampling, chat, Partial(folder / "answers.jsonl"), settings_key)
    scorer.close()
    scores, lines = score_answers(judge, answers, chat, sampling.n)
    about_data = {"dataset": f"{data.name}+", "version": data.version, "evalplus": EVALPLUS}
    figures = {**about_data, **settings, **scores, "control": control, "sandbox": sandbox}
    compared = {name: figures[name] for name in SETTINGS["code"]}
    figures["results"] = f"{folder.parent.name}/{folder.name}" if results is None else str(results)
    return about.append_with_items("code", figures, compared, lines, **who)


def score_answers(
    judge: Judge, answers: list[JsonObject], chat: bool, n: int
) -> tuple[JsonObject, list[JsonObject]]:
    """Test the code in the answers; return figures and the lines of the file of items."""
    data = judge.dataset
    rows = solutions(answers, chat, data)
    scored = judge.evaluate(rows, "samples")
    rules = Counter(row["rule"] for row in rows)
    figures = {
        "problems": len(data.problems),
        **figures_of(scored, n),
        "answers_empty": sum(not row["answer"].strip() for row in answers),
        "answers_cut": sum(row["finish_reason"] == "length" for row in answers),
        "selection": dict(sorted(rules.items())),
    }
    return figures, make_item_lines(data, scored)


def score_references(judge: Judge) -> JsonObject:
    """Score the reference solutions: where they fail, the figures mean little."""
    control = judge.control()
    console.print(f"reference solutions: {control['passed']} of {control['total']} pass")
    if failures := control["unexpected_failures"]:
        console.print(f"[red]unexpected failures: {failures}; is the machine overloaded?")
    return control


def make_item_lines(dataset: Dataset, scored: Scored) -> list[JsonObject]:
    """Return a line per problem: the share of samples that pass the base tests, then both."""
    lines = []
    for tests, task in (("base", dataset.name), ("plus", f"{dataset.name}+")):
        for number, problem in enumerate(dataset.problems):
            passed = [getattr(verdict, tests) for verdict in scored[problem["task_id"]]]
            lines.append(
                {"task": task, "item": number, "right": sum(passed) / len(passed), "losses": []}
            )
    return lines


def check_options(options: Sequence[str]) -> None:
    """Raise ValueError for options that put all checkpoints into one folder."""
    results = option_value("--results", options)
    if results and "{step}" not in results:
        raise ValueError(
            f"--results {results} must contain {{step}}, such as --results {results}/{{step}}"
        )


def check_here(options: Sequence[str]) -> None:
    """Raise ValueError if this machine has no sandbox."""
    find_sandbox("--unsafe-no-sandbox" in options)


COMMAND = EvalCommand("code", main, reads=("--dataset",), refuse=check_options, ready=check_here)


if __name__ == "__main__":
    COMMAND.run()
