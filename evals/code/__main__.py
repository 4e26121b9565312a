"""HumanEval+ and MBPP+ by EvalPlus's rules: generate answers, select the function in each, test it
in a sandbox, pass@k.

    python -m evals.code runs/x/hf --dataset HumanEvalPlus.jsonl.gz --results runs/x/humaneval --out runs/x/evals.jsonl
    python -m evals.code --base-url http://127.0.0.1:8000/v1 --model NAME --dataset MbppPlus.jsonl.gz --results mbpp

The results folder (--results; default: one beside --out for each checkpoint) keeps answers.jsonl (verbatim;
an interrupted run resumes there) and samples.jsonl (what was selected from each answer, and how it scored).
Every run also scores the data set's reference solutions: where they fail, the figures mean little.
Measurements are in docs/decisions/evaluation.md.
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

from evals.code.answers import Sampling, collect, prompt_of
from evals.code.sandbox import find_sandbox
from evals.code.score import EVALPLUS, Dataset, Judge, open_dataset
from evals.code.selection import longest_beginning, target_function
from evals.intervals import wilson
from evals.items import Partial
from evals.scorer import LOCAL, SourceFlags, fast_tokenizer, open_scorer, origin
from evals.tables import console
from records.evals import NOWHERE, About, AboutFlags, EvalCommand, check_range, optional
from records.files import JsonObject, file_sha256
from records.items import FOLDER as ITEMS
from records.items import write_items
from records.job import option_value
from records.workers import usable_cpus

KS = (1, 10, 100)


Prompting = Literal["auto", "chat", "completion"]


def is_chat(prompt: Prompting, hf_dir: Path | None) -> bool:
    """Whether the prompts are user messages of a chat; auto: at a server, and for a folder
    with a chat template. Raises ValueError for a folder without one that is to chat.
    """
    template = hf_dir is None or (
        (hf_dir / "tokenizer.json").is_file() and fast_tokenizer(hf_dir).chat_template
    )
    if prompt == "chat" and not template:
        raise ValueError(f"{hf_dir} has no chat template; use --prompt completion")
    return prompt != "completion" and bool(template)


@dataclass(frozen=True)
class Scoring:
    """How solutions are tested."""

    parallel: int = max(
        1, usable_cpus() // 2
    )  # on too few cores (--cpus, Slurm) right ones time out
    """solutions tested concurrently"""
    unsafe_no_sandbox: bool = False
    """run the model's code with your own rights, without any sandbox"""
    cache: Path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer"
    """folder that keeps the expected outputs between runs"""

    def __post_init__(self) -> None:
        check_range(1, parallel=self.parallel)


# by problem, of each sample: whether (base, base and plus) tests pass
Scored = dict[str, list[tuple[bool, bool]]]


def solutions(answers: list[JsonObject], chat: bool, dataset: Dataset) -> list[JsonObject]:
    """A row per answer: the code selected from it, and by which rule."""
    problems, rows = {p["task_id"]: p for p in dataset.problems}, []
    for row in answers:
        problem = problems[row["task_id"]]
        if chat:
            code, rule = target_function(row["answer"], problem["entry_point"])
        else:
            whole, rule = prompt_of(problem, chat=False) + row["answer"], "completion"
            code = longest_beginning(whole.split("\n")) or whole
        rows.append(
            {"task_id": row["task_id"], "sample": row["sample"], "rule": rule, "solution": code}
        )
    return rows


def figures_of(scored: Scored, n: int) -> JsonObject:
    """pass@1 and pass@k (k up to n) on the base tests, and on the base and plus tests together.

    The intervals of pass@1 are Wilson's of 95 %, with the problems as sample: several answers to
    each make them wide.
    """
    figures: JsonObject = {"pass@k": {str(k): {} for k in KS if k <= n}}
    for tests, name in enumerate(("base", "plus")):
        counts = [sum(sample[tests] for sample in samples) for samples in scored.values()]
        for k, at_k in figures["pass@k"].items():
            at_k[name] = fsum(pass_at_k(n, passed, int(k)) for passed in counts) / len(counts)
        share = figures[f"pass@1_{name}"] = figures["pass@k"]["1"][name]
        center, half = wilson(share * len(counts), len(counts))
        figures[f"pass@1_{name}_interval"] = [center - half, center + half]
    return figures


def pass_at_k(n: int, passed: int, k: int) -> float:
    """Probability that k of n samples, of which some passed, include a passing one: 1 - C(n - passed, k) / C(n, k).

    The estimator of Chen et al., arXiv 2107.03374, in exact integers.
    """
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
    source: SourceFlags = LOCAL,
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
    if (results or about.out) is None or (hf_dir is None) == (source.base_url is None):
        raise ValueError("--results or --out, and either a model folder or --base-url are required")
    data, sandbox = open_dataset(dataset), find_sandbox(scoring.unsafe_no_sandbox)
    chat, scorer = is_chat(prompt, hf_dir), open_scorer(hf_dir, source)
    who = origin(hf_dir, scorer) | {"data_sha256": file_sha256(dataset)}
    asked = {
        "model": hf_dir.resolve().name if hf_dir else source.model or "laneformer",
        "protocol": "greedy" if sampling.temperature == 0 else "sampled",
        "prompt": "chat" if chat else "completion",
        **asdict(sampling),
    }
    settings_key = hashlib.sha256(repr((who, scorer.max_length, asked)).encode()).hexdigest()[:12]
    folder = results or results_of(about, settings_key)
    folder.mkdir(parents=True, exist_ok=True)
    judge = Judge(data, sandbox, folder.resolve(), scoring.cache, scoring.parallel)
    control = score_references(judge)
    answers = collect(data, scorer, sampling, chat, Partial(folder / "answers.jsonl"), settings_key)
    scorer.close()
    rows = solutions(answers, chat, data)
    scored, rules = judge.evaluate(rows, "samples"), Counter(row["rule"] for row in rows)
    figures = {
        "dataset": f"{data.name}+",
        "version": data.version,
        "evalplus": EVALPLUS,
        **asked,
        "problems": len(data.problems),
        **figures_of(scored, sampling.n),
        "control": control,
        "answers_empty": sum(not row["answer"].strip() for row in answers),
        "answers_cut": sum(row["finish_reason"] == "length" for row in answers),
        "selection": dict(sorted(rules.items())),
        "sandbox": sandbox,
    }
    same = ("dataset", "protocol", "prompt", "n", "temperature", "top_p")
    head = {
        "kind": "code",
        "step": about.step,
        **who,
        "protocol": {name: figures[name] for name in same},
    }
    figures["items"] = write_items(about.out, head, item_lines(data, scored))
    figures["results"] = f"{folder.parent.name}/{folder.name}" if results is None else str(results)
    return about.append("code", figures, **who)


def score_references(judge: Judge) -> JsonObject:
    """The figures of the reference solutions, which are also shown."""
    control = judge.control()
    console.print(f"reference solutions: {control['passed']} of {control['total']} pass")
    if failures := control["unexpected_failures"]:
        console.print(f"[red]unexpected failures: {failures}; is the machine overloaded?")
    return control


def item_lines(dataset: Dataset, scored: Scored) -> list[JsonObject]:
    """Lines of the file of items: of each problem the share of samples that pass the base tests, and
    the plus tests too.
    """
    lines = []
    for tests, task in enumerate((dataset.name, f"{dataset.name}+")):
        for number, problem in enumerate(dataset.problems):
            passed = [sample[tests] for sample in scored[problem["task_id"]]]
            lines.append(
                {"task": task, "item": number, "right": sum(passed) / len(passed), "losses": []}
            )
    return lines


def results_of(about: About, settings_key: str) -> Path:
    """The folder of these answers beside the records, in items/: each checkpoint and setting has its own."""
    assert about.out is not None
    return about.out.parent / ITEMS / f"code-{about.step or 0}-{settings_key}"


def check_options(options: Sequence[str]) -> None:
    """Raise ValueError if checkpoints cannot be evaluated so: one folder for all of them."""
    results = option_value("--results", options)
    if results and "{step}" not in results:
        raise ValueError(
            f"--results {results} must contain {{step}}, such as --results {results}/{{step}}"
        )


def check_here(options: Sequence[str]) -> None:
    """Raise ValueError if this machine cannot test solutions: no sandbox."""
    find_sandbox("--unsafe-no-sandbox" in options)


COMMAND = EvalCommand("code", main, reads=("--dataset",), refuse=check_options, ready=check_here)


if __name__ == "__main__":
    COMMAND.run()
