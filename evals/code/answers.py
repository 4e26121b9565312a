"""A model's answers to the problems of a code benchmark, stored verbatim."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field
from rich.progress import track

from evals.code.score import Dataset
from evals.items import Partial
from evals.scorer import AnyPrompt, Scorer
from evals.tables import console
from records.command import Count, check_ranges
from records.files import JsonObject

INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```python\n{prompt}\n```"
)
# a completion has left the requested function at one of these; endpoints accept four, so the
# likeliest come first
STOPS = ("\nif __name__", "\ndef main(", "\nprint(", "\nassert ")
STOPS_OF = {"humaneval": ("\ndef ", "\nclass ", "\nimport ", "\nfrom "), "mbpp": ('\n"""',)}


@dataclass(frozen=True)
class Sampling:
    """How answers are sampled: one greedy answer per problem, or `n` at a temperature."""

    n: Count = 1
    """answers per problem"""
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    """sampling temperature; 0 is greedy"""
    top_p: Annotated[float, Field(ge=1e-6, le=1)] = 1.0
    """nucleus sampling: probability mass of the most likely tokens to sample from"""
    seed: int = 0
    """sampling seed"""
    max_new_tokens: Count = 768
    """maximum length of an answer in tokens"""

    def __post_init__(self) -> None:
        check_ranges(Sampling, vars(self))
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n = {self.n} greedy answers would be identical; set --temperature, such as 0.8"
            )

    def seed_of(self, task_id: str, sample: int) -> int:
        """Return a distinct 31-bit seed for every answer, in any order."""
        digest = hashlib.sha256(f"{self.seed}:{task_id}:{sample}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


def make_prompt(problem: JsonObject, chat: bool) -> str:
    prompt = problem["prompt"].strip()
    return INSTRUCTION.format(prompt=prompt) if chat else prompt + "\n"


def collect(
    dataset: Dataset,
    scorer: Scorer,
    sampling: Sampling,
    chat: bool,
    partial: Partial,
    settings_key: str,
) -> list[JsonObject]:
    """Collect all answers, ordered by problem and sample.

    Args:
        chat: prompts are user messages.
        settings_key: names the model and its settings; only answers to the same are reused.
    """
    stops = () if chat else STOPS_OF[dataset.name] + STOPS

    def answer_problem(problem: JsonObject) -> list[JsonObject]:
        task = problem["task_id"]
        text = make_prompt(problem, chat)
        prompt: AnyPrompt = [{"role": "user", "content": text}] if chat else text

        def answer(samples: Iterator[int]) -> Iterator[JsonObject]:
            for sample in samples:
                options = {
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "seed": sampling.seed_of(task, sample),
                }
                text, finish = scorer.generate(prompt, sampling.max_new_tokens, stops, **options)
                yield {
                    "task_id": task,
                    "sample": sample,
                    "seed": options["seed"],
                    "finish_reason": finish,
                    "answer": text,
                }

        # each answer is kept where it arrives: when another request fails, none that was given is lost
        return partial.complete(f"{task} {settings_key}", range(sampling.n), answer, together=1)

    # threads wait for a server; the engine answers one request at a time
    with ThreadPoolExecutor(scorer.parallel) as pool:
        answered = pool.map(answer_problem, dataset.problems)
        total = len(dataset.problems)
        return [row for rows in track(answered, "answers", total, console=console) for row in rows]
