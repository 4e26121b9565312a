"""A model's answers to the problems of a code benchmark.

Answers come from any scorer (evals/scorer). They are stored verbatim, one line each (evals/items.py), so that an
interrupted run resumes and later scoring starts from the same text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.progress import track

from evals.code.score import Dataset
from evals.items import Partial
from evals.scorer import Answer, AnyPrompt, Source, open_scorer, origin
from evals.tables import console
from records.files import JsonObject, read_json, write_atomically

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
    """How answers are sampled: temperature 0 is greedy with one answer per problem, otherwise `n` answers."""

    n: int = 1
    """answers per problem"""
    temperature: float = 0.0
    """sampling temperature; 0 is greedy"""
    top_p: float = 1.0
    """nucleus sampling: probability mass of the most likely tokens to sample from"""
    seed: int = 0
    """sampling seed"""
    max_new_tokens: int = 768
    """maximum length of an answer in tokens"""

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_new_tokens < 1 or self.temperature < 0 or not 0 < self.top_p <= 1:
            raise ValueError(f"{self}: n and max_new_tokens must be >= 1, temperature >= 0, top_p in (0, 1]")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(
                f"n = {self.n} greedy answers would be identical; set --temperature, such as 0.8"
            )

    def seed_of(self, task_id: str, sample: int) -> int:
        """A distinct 31-bit seed for every answer, independent of the order in which they are generated."""
        digest = hashlib.sha256(f"{self.seed}:{task_id}:{sample}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


class Model:
    """What answers problems: a scorer; chat: the prompt is a user message in the
    folder's (or server's) template.
    """

    def __init__(self, folder: Path | None, source: Source, chat: bool, sampling: Sampling):
        self.scorer = open_scorer(folder, source)
        self.chat, self.sampling, self.parallel = chat, sampling, self.scorer.parallel
        self.settings = {"prompt": "chat" if chat else "completion", **asdict(sampling)}
        self.origin = origin(folder, self.scorer)
        if folder is not None:
            ran = {key: self.origin[key] for key in ("model_sha256", "backend", "dtype")}
            self.identity = {"model": folder.resolve().name, **ran, "max_length": self.scorer.max_length}
        else:
            self.identity = {"model": source.model or "laneformer", "base_url": source.base_url}

    def answer(self, prompt: str, seed: int, stops: tuple[str, ...]) -> Answer:
        """The answer to a prompt and its finish reason, "stop" or "length"."""
        s = self.sampling
        asked: AnyPrompt = [{"role": "user", "content": prompt}] if self.chat else prompt
        sampled = {"temperature": s.temperature, "top_p": s.top_p, "seed": seed}
        return self.scorer.generate(asked, s.max_new_tokens, stops, **sampled)


def prompt_of(problem: JsonObject, chat: bool) -> str:
    prompt = problem["prompt"].strip()
    return INSTRUCTION.format(prompt=prompt) if chat else prompt + "\n"


def settings_of(dataset: Dataset, model: Model) -> JsonObject:
    """Everything that answers depend on."""
    return {**model.identity, "data_md5": dataset.md5, **model.settings}


def collect(dataset: Dataset, model: Model, folder: Path) -> list[JsonObject]:
    """All answers, ordered by problem and sample; those already in `folder`/answers.jsonl are reused.

    ValueError if that file comes from another model, data set or sampling.
    """
    check_settings(folder / "settings.json", settings_of(dataset, model))
    partial = Partial(folder / "answers.jsonl")
    stops = () if model.chat else STOPS_OF[dataset.name] + STOPS

    def answer_problem(problem: JsonObject) -> list[JsonObject]:
        task, prompt = problem["task_id"], prompt_of(problem, model.chat)

        def answer(samples: Iterator[int]) -> Iterator[JsonObject]:
            for sample in samples:
                seed = model.sampling.seed_of(task, sample)
                text, finish = model.answer(prompt, seed, stops)
                yield {
                    "task_id": task,
                    "sample": sample,
                    "seed": seed,
                    "finish_reason": finish,
                    "answer": text,
                }

        # each answer is kept where it arrives: when another request fails, none that was given is lost
        return partial.complete(task, range(model.sampling.n), answer, together=1)

    with ThreadPoolExecutor(model.parallel) as pool:
        answered = pool.map(answer_problem, dataset.problems)
        total = len(dataset.problems)
        return [row for rows in track(answered, "answers", total, console=console) for row in rows]


def check_settings(path: Path, settings: JsonObject) -> None:
    """Store the settings of a folder's answers; ValueError if it holds answers with other settings."""
    if (before := read_json(path)) is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=1) + "\n")
        return
    differing = ", ".join(
        f"{name} {before.get(name)!r}, not {settings.get(name)!r}"
        for name in sorted(settings | before)
        if settings.get(name) != before.get(name)
    )
    if differing:
        raise ValueError(
            f"{path.parent} holds answers with other settings: {differing}; choose another --results folder"
        )
