"""HumanEval+ and MBPP+ with EvalPlus: generate answers, select the function in each, test it in a sandbox, pass@k.

    python -m evals.code --setup  # installs EvalPlus into its own environment, once
    python -m evals.code runs/x/hf --dataset HumanEvalPlus.jsonl.gz --results runs/x/humaneval --out runs/x/evals.jsonl
    python -m evals.code --base-url http://127.0.0.1:8000/v1 --model NAME --dataset MbppPlus.jsonl.gz --results mbpp

The results folder keeps answers.jsonl (verbatim; an interrupted run resumes there), samples.jsonl (what was selected
from each answer and what was scored), EvalPlus's own result files and its log. Every run also scores the data set's
reference solutions: where they fail, the figures mean little. Measurements are in decision 0021.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import comb, fsum
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from evals.code.answers import Model, Sampling, collect, prompt_of, target_function
from evals.code.sandbox import find_sandbox
from evals.code.score import EVALPLUS, Dataset, EvalPlus, evalplus_environment, open_dataset, set_up
from evals.scorer import LOCAL, SourceFlags
from records.evals import NOWHERE, SERVER, AboutFlags, EvalCommand
from records.files import file_sha256

KS = (1, 10, 100)


Prompting = Literal["auto", "chat", "completion"]


def is_chat(prompt: Prompting, hf_dir: Path | None) -> bool:
    """Whether the prompts are user messages of a chat; auto: at a server, and for a folder with a chat template."""
    template = hf_dir is None or (hf_dir / "chat_template.jinja").exists()
    return prompt == "chat" or (prompt == "auto" and template)


@dataclass(frozen=True)
class Scoring:
    """How solutions are tested."""

    parallel: int = max(1, (os.cpu_count() or 1) // 2)
    """solutions tested concurrently"""
    unsafe_no_sandbox: bool = False
    """run the model's code with your own rights, without any sandbox"""
    cache: Path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer"
    """folder that keeps EvalPlus's expected outputs between runs"""
    setup: bool = False
    """install EvalPlus into its own environment and exit"""


def evaluate(dataset: Dataset, model: Model, sampling: Sampling, chat: bool, evalplus: EvalPlus) -> dict[str, Any]:
    """Score the reference solutions, collect the model's answers and score them."""
    console = Console(stderr=True)
    control = evalplus.control()
    console.print(f"reference solutions: {control['passed']} of {control['total']} pass")
    if control["unexpected_failures"]:
        console.print(f"[red]unexpected failures: {control['unexpected_failures']}; is the machine overloaded?")
    answers = collect(dataset, model, sampling, chat, evalplus.folder)
    rows = solutions(dataset, answers, chat, evalplus)
    return {
        "dataset": f"{dataset.name}+",
        "version": dataset.version,
        "evalplus": EVALPLUS,
        "protocol": "greedy" if sampling.temperature == 0 else "sampled",
        "prompt": "chat" if chat else "completion",
        **vars(sampling),
        "model": model.identity["model"],
        "problems": len(dataset.problems),
        **figures_of(evalplus.evaluate(rows, "samples"), sampling.n),
        "control": control,
        "answers_empty": sum(not row["answer"].strip() for row in answers),
        "answers_cut": sum(row["finish_reason"] == "length" for row in answers),
        "not_sanitized": sum(not row["sanitized"] for row in rows),
        "sandbox": evalplus.sandbox,
    }


def solutions(dataset: Dataset, answers: list[dict[str, Any]], chat: bool, evalplus: EvalPlus) -> list[dict[str, Any]]:
    """An EvalPlus row per answer: the code selected from it, and that code after EvalPlus's sanitize."""
    problems = {p["task_id"]: p for p in dataset.problems}
    selected = []
    for row in answers:
        problem, text = problems[row["task_id"]], row["answer"]
        code = target_function(text, problem["entry_point"]) if chat else prompt_of(problem, chat=False) + text
        selected.append({"text": code, "entry_point": problem["entry_point"]})
    return [
        {
            "task_id": row["task_id"],
            "sample": row["sample"],
            "selected": chosen["text"],
            "sanitized": code is not None,
            "solution": chosen["text"] if code is None else code,
        }
        for row, chosen, code in zip(answers, selected, evalplus.sanitize(selected), strict=True)
    ]


def figures_of(scored: dict[str, list[tuple[bool, bool]]], n: int) -> dict[str, Any]:
    """pass@1 and pass@k (k up to n) on the base tests, and on the base and plus tests together."""

    def value(tests: int, k: int) -> float:
        return pass_at_k([(len(s), sum(passed[tests] for passed in s)) for s in scored.values()], k)

    at_k = {str(k): {"base": value(0, k), "plus": value(1, k)} for k in KS if k <= n}
    return {"pass@1_base": at_k["1"]["base"], "pass@1_plus": at_k["1"]["plus"], "pass@k": at_k}


def pass_at_k(counts: Iterable[tuple[int, int]], k: int) -> float:
    """Mean over problems of the probability that k of n samples include a passing one: 1 - C(n - c, k) / C(n, k).

    counts: (n, c) per problem, c of n samples pass. The estimator of Chen et al., arXiv 2107.03374, in exact integers.
    """
    chances = [1 - comb(n - c, k) / comb(n, k) for n, c in counts]
    return fsum(chances) / len(chances)


GREEDY = Sampling()


def main(
    hf_dir: Annotated[Path | None, tyro.conf.Positional] = None,
    dataset: Path | None = None,
    results: Path | None = None,
    prompt: Prompting = "auto",
    source: SourceFlags = LOCAL,
    sampling: Annotated[Sampling, tyro.conf.OmitArgPrefixes] = GREEDY,
    scoring: Annotated[Scoring, tyro.conf.OmitArgPrefixes] = Scoring(),
    about: AboutFlags = NOWHERE,
) -> dict[str, Any] | None:
    """HumanEval+ or MBPP+ of a model. The last line on stdout is the record, JSON.

    Args:
        hf_dir: folder of the exported model
        dataset: HumanEvalPlus.jsonl or MbppPlus.jsonl, optionally gzipped, or a subset of one
        results: folder for answers and results; an interrupted run resumes there
        prompt: a user message (chat), or the beginning of a function (completion, for base models); auto: chat at a
            server and for a folder that has a chat template
        source: what answers
        sampling: how answers are sampled
        scoring: how solutions are tested
        about: options of the record
    """
    if scoring.setup:
        set_up(evalplus_environment())
        print(evalplus_environment())
        return None
    if dataset is None or results is None or (hf_dir is None) == (source.base_url is None):
        raise ValueError("--dataset, --results, and either a model folder or --base-url are required")
    started = time.perf_counter()
    data = open_dataset(dataset)
    sandbox = find_sandbox(scoring.unsafe_no_sandbox)
    results.mkdir(parents=True, exist_ok=True)
    evalplus = EvalPlus(data, evalplus_environment(), sandbox, results.resolve(), scoring.cache, scoring.parallel)
    chat = is_chat(prompt, hf_dir)
    model = Model(hf_dir, source, chat, sampling)
    figures = evaluate(data, model, sampling, chat, evalplus)
    model.scorer.close()
    return about.append(
        "code",
        figures,
        seconds=time.perf_counter() - started,
        data_sha256=file_sha256(dataset),
        **model.origin,
    )


def check_here(options: Sequence[str]) -> None:
    """Raise ValueError if this machine cannot test solutions: no sandbox, or no EvalPlus."""
    find_sandbox("--unsafe-no-sandbox" in options)
    if not evalplus_environment().exists():
        raise ValueError(f"{evalplus_environment()} does not exist: python -m evals.code --setup installs EvalPlus")


COMMAND = EvalCommand(
    "code", main, needs=("--dataset", "--results"), excludes=("--setup", *SERVER), per_step=("--results",),
    reads=("--dataset",), ready=check_here,
)  # fmt: skip


if __name__ == "__main__":
    COMMAND.run()
