"""From a model and a data set to the figures of a `code` record."""

from __future__ import annotations

from collections.abc import Iterable
from math import comb, fsum
from typing import Any

from rich.console import Console

from evals.code.answers import Model, Sampling, collect, prompt_of, target_function
from evals.code.score import EVALPLUS, Dataset, EvalPlus

KS = (1, 10, 100)


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
        **model.identity,
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
