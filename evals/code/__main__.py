"""HumanEval+ and MBPP+ with EvalPlus: answers, the function in each, its tests in a sandbox, pass@k.

    python -m evals.code --setup  # EvalPlus's own environment, once
    python -m evals.code runs/x/hf --dataset HumanEvalPlus.jsonl.gz --results runs/x/humaneval --out runs/x/evals.jsonl
    python -m evals.code --base-url http://127.0.0.1:8000/v1 --model NAME --dataset MbppPlus.jsonl.gz --results mbpp

The results folder keeps answers.jsonl (as they came; a run that is started again continues there), samples.jsonl (what
was selected from each and what was scored), EvalPlus's own result files and log. The data set's reference solutions
are scored at every run: a figure means little where they fail. Decision 0021 says what was measured.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from evals.code.answers import (
    GREEDY,
    EndpointModel,
    EngineModel,
    Model,
    Sampling,
    SamplingFlags,
    collect,
    prompt_of,
    target_function,
)
from evals.code.sandbox import find_sandbox
from evals.code.score import EVALPLUS, Dataset, EvalPlus, evalplus_environment, open_dataset, pass_at_k, set_up
from records.evals import NOWHERE, AboutFlags, EvalCommand
from records.files import file_sha256

KS = (1, 10, 100)
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer"


def solutions(dataset: Dataset, answers: list[dict[str, Any]], chat: bool, evalplus: EvalPlus) -> list[dict[str, Any]]:
    """A row for EvalPlus of every answer: what was selected from it, and what sanitize made of that."""
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
    """pass@1 and pass@k (k up to n) on the base tests, and on base and plus tests together."""

    def value(tests: int, k: int) -> float:
        return pass_at_k([(len(s), sum(passed[tests] for passed in s)) for s in scored.values()], k)

    at_k = {str(k): {"base": value(0, k), "plus": value(1, k)} for k in KS if k <= n}
    return {"pass@1_base": at_k["1"]["base"], "pass@1_plus": at_k["1"]["plus"], "pass@k": at_k}


def evaluate(dataset: Dataset, model: Model, sampling: Sampling, chat: bool, evalplus: EvalPlus) -> dict[str, Any]:
    """The figures of a record of kind "code"."""
    console = Console(stderr=True)
    control = evalplus.control()
    console.print(f"reference solutions: {control['passed']} of {control['total']} pass")
    if control["unexpected_failures"]:
        console.print(f"[red]these fail here without a known reason: {control['unexpected_failures']}; slow machine?")
    answers = collect(dataset, model, sampling, chat, evalplus.folder)
    rows = solutions(dataset, answers, chat, evalplus)
    figures = figures_of(evalplus.evaluate(rows, "samples"), sampling.n)
    return {
        "dataset": f"{dataset.name}+",
        "version": dataset.version,
        "evalplus": EVALPLUS,
        "protocol": "greedy" if sampling.temperature == 0 else "sampled",
        "prompt": "chat" if chat else "completion",
        **vars(sampling),
        **model.identity,
        "problems": len(dataset.problems),
        **figures,
        "control": control,
        "answers_empty": sum(not row["answer"].strip() for row in answers),
        "answers_cut": sum(row["finish_reason"] == "length" for row in answers),
        "not_sanitized": sum(not row["sanitized"] for row in rows),
        "sandbox": evalplus.sandbox,
    }


def open_evalplus(data: Dataset, results: Path, cache: Path, parallel: int, unsafe: bool) -> EvalPlus:
    """EvalPlus on a data set, in the best sandbox of this machine. ValueError without one, unless `unsafe`."""
    sandbox = find_sandbox(unsafe)
    results.mkdir(parents=True, exist_ok=True)
    return EvalPlus(data, evalplus_environment(), sandbox, results.resolve(), cache, parallel)


def open_model(
    hf_dir: Path | None,
    base_url: str | None,
    name: str,
    chat: bool,
    sampling: Sampling,
    concurrency: int,
    timeout_s: float,
    device: str,
) -> Model:
    """A folder through the engine, or without one an endpoint."""
    if hf_dir is not None:
        return EngineModel(hf_dir, chat, sampling, device)
    assert base_url is not None, "main asks for one of the two"
    return EndpointModel(base_url, name, chat, sampling, concurrency, timeout_s)


def main(
    hf_dir: Annotated[Path | None, tyro.conf.Positional] = None,
    dataset: Path | None = None,
    results: Path | None = None,
    base_url: str | None = None,
    model: str = "laneformer",
    prompt: Literal["auto", "chat", "completion"] = "auto",
    sampling: SamplingFlags = GREEDY,
    concurrency: int = 4,
    request_timeout_s: float = 600.0,
    parallel: int = max(1, (os.cpu_count() or 1) // 2),
    unsafe_no_sandbox: bool = False,
    cache: Path = CACHE,
    about: AboutFlags = NOWHERE,
    device: str = "auto",
    setup: bool = False,
) -> None:
    """HumanEval+ or MBPP+ of a model. The last line on stdout is the record, JSON.

    Args:
        hf_dir: folder of the exported model
        dataset: HumanEvalPlus.jsonl or MbppPlus.jsonl, also packed (.gz), or a subset of one
        results: folder for answers and results; a run that was interrupted continues there
        base_url: ask this OpenAI-compatible endpoint instead of a folder, such as http://127.0.0.1:8000/v1
        model: the model's name at the endpoint
        prompt: a user's turn of a chat, or the beginning of a function (base models); auto is chat at an endpoint, and
            in a folder that has a chat template
        sampling: how answers are drawn
        concurrency: questions at a time at an endpoint
        request_timeout_s: of one question at an endpoint
        parallel: solutions tested at a time
        unsafe_no_sandbox: run the model's code with your rights, without any sandbox
        cache: where EvalPlus's expected outputs stay between runs
        about: where the record goes, and what it is about
        device: where the engine runs: auto, cpu or cuda
        setup: make EvalPlus's own environment and end
    """
    if setup:
        set_up(evalplus_environment())
        print(evalplus_environment())
        return
    if dataset is None or results is None or (hf_dir is None) == (base_url is None):
        raise ValueError("give --dataset, --results, and either a model folder or --base-url")
    started = time.perf_counter()
    data = open_dataset(dataset)
    evalplus = open_evalplus(data, results, cache, parallel, unsafe_no_sandbox)
    chat = prompt == "chat" or (prompt == "auto" and (hf_dir is None or (hf_dir / "chat_template.jinja").exists()))
    answering = open_model(hf_dir, base_url, model, chat, sampling, concurrency, request_timeout_s, device)
    figures = evaluate(data, answering, sampling, chat, evalplus)
    record = about.append(
        "code",
        figures,
        seconds=time.perf_counter() - started,
        tokenizer_sha256=file_sha256(hf_dir / "tokenizer.json") if hf_dir is not None else None,
        data_sha256=file_sha256(dataset),
    )
    print(json.dumps(record))


COMMAND = EvalCommand("code", main, needs=("--dataset", "--results"), excludes=("--setup", "--base-url"))


if __name__ == "__main__":
    COMMAND.run()
