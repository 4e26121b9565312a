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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from evals.code.answers import EndpointModel, EngineModel, Model, Sampling
from evals.code.evaluate import evaluate
from evals.code.sandbox import find_sandbox
from evals.code.score import Dataset, EvalPlus, evalplus_environment, open_dataset, set_up
from records.evals import NOWHERE, AboutFlags, EvalCommand
from records.files import file_sha256

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "laneformer"


@dataclass(frozen=True)
class Backend:
    """What answers: the engine on a model folder, or an OpenAI-compatible endpoint if `base_url` is given."""

    base_url: str | None = None
    """OpenAI-compatible endpoint to ask instead of the engine, such as http://127.0.0.1:8000/v1"""
    model: str = "laneformer"
    """name of the model at the endpoint"""
    prompt: Literal["auto", "chat", "completion"] = "auto"
    """a user message, or the beginning of a function (base models); auto: chat at an endpoint and for a folder that has
    a chat template"""
    concurrency: int = 4
    """concurrent requests to the endpoint"""
    request_timeout_s: float = 600.0
    """timeout of one request to the endpoint"""
    device: str = "auto"
    """device that runs the engine: auto, cpu or cuda"""

    def chat(self, hf_dir: Path | None) -> bool:
        """Whether the prompts are user messages of a chat."""
        template = hf_dir is None or (hf_dir / "chat_template.jinja").exists()
        return self.prompt == "chat" or (self.prompt == "auto" and template)

    def open(self, hf_dir: Path | None, sampling: Sampling) -> Model:
        chat = self.chat(hf_dir)
        if hf_dir is not None:
            return EngineModel(hf_dir, chat, sampling, self.device)
        assert self.base_url is not None, "main requires a folder or an endpoint"
        return EndpointModel(self.base_url, self.model, chat, sampling, self.concurrency, self.request_timeout_s)


@dataclass(frozen=True)
class Scoring:
    """How solutions are tested."""

    parallel: int = max(1, (os.cpu_count() or 1) // 2)
    """solutions tested concurrently"""
    unsafe_no_sandbox: bool = False
    """run the model's code with your own rights, without any sandbox"""
    cache: Path = CACHE
    """folder that keeps EvalPlus's expected outputs between runs"""
    setup: bool = False
    """install EvalPlus into its own environment and exit"""

    def open(self, data: Dataset, results: Path) -> EvalPlus:
        """EvalPlus in the best sandbox of this machine; ValueError if there is none."""
        sandbox = find_sandbox(self.unsafe_no_sandbox)
        results.mkdir(parents=True, exist_ok=True)
        return EvalPlus(data, evalplus_environment(), sandbox, results.resolve(), self.cache, self.parallel)


ENGINE, GREEDY, SANDBOXED = Backend(), Sampling(), Scoring()


def main(
    hf_dir: Annotated[Path | None, tyro.conf.Positional] = None,
    dataset: Path | None = None,
    results: Path | None = None,
    backend: Annotated[Backend, tyro.conf.OmitArgPrefixes] = ENGINE,
    sampling: Annotated[Sampling, tyro.conf.OmitArgPrefixes] = GREEDY,
    scoring: Annotated[Scoring, tyro.conf.OmitArgPrefixes] = SANDBOXED,
    about: AboutFlags = NOWHERE,
) -> dict[str, Any] | None:
    """HumanEval+ or MBPP+ of a model. The last line on stdout is the record, JSON.

    Args:
        hf_dir: folder of the exported model
        dataset: HumanEvalPlus.jsonl or MbppPlus.jsonl, optionally gzipped, or a subset of one
        results: folder for answers and results; an interrupted run resumes there
        backend: what answers
        sampling: how answers are sampled
        scoring: how solutions are tested
        about: options of the record
    """
    if scoring.setup:
        set_up(evalplus_environment())
        print(evalplus_environment())
        return None
    if dataset is None or results is None or (hf_dir is None) == (backend.base_url is None):
        raise ValueError("--dataset, --results, and either a model folder or --base-url are required")
    started = time.perf_counter()
    data = open_dataset(dataset)
    evalplus = scoring.open(data, results)
    figures = evaluate(data, backend.open(hf_dir, sampling), sampling, backend.chat(hf_dir), evalplus)
    return about.append(
        "code",
        figures,
        seconds=time.perf_counter() - started,
        tokenizer_sha256=file_sha256(hf_dir / "tokenizer.json") if hf_dir is not None else None,
        data_sha256=file_sha256(dataset),
    )


COMMAND = EvalCommand("code", main, needs=("--dataset", "--results"), excludes=("--setup", "--base-url"))


if __name__ == "__main__":
    COMMAND.run()
