"""A model's answers to the problems of a code benchmark.

Answers come from a model folder through the engine or from an OpenAI-compatible endpoint. They are stored verbatim, one
line each, so that an interrupted run resumes and later scoring starts from the same text.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from rich.console import Console
from rich.progress import track

from evals.code.score import Dataset
from evals.scorer import open_engine
from records.files import append_line, model_sha256, read_lines, write_atomically

INSTRUCTION = (
    "Please provide a self-contained Python script that solves the following problem in a markdown code block:\n"
    "```python\n{prompt}\n```"
)
# a completion has left the requested function at one of these; endpoints accept four, so the likeliest come first
STOPS = ("\nif __name__", "\ndef main(", "\nprint(", "\nassert ")
STOPS_OF = {"humaneval": ("\ndef ", "\nclass ", "\nimport ", "\nfrom "), "mbpp": ('\n"""',)}
ATTEMPTS, FIRST_WAIT_S = 6, 1.0
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)


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
            raise ValueError(f"n = {self.n} greedy answers would be identical; set --temperature, such as 0.8")

    def seed_of(self, task_id: str, sample: int) -> int:
        """A distinct 31-bit seed for every answer, independent of the order in which they are generated."""
        digest = hashlib.sha256(f"{self.seed}:{task_id}:{sample}".encode()).digest()
        return int.from_bytes(digest[:4], "big") >> 1


class EngineModel:
    """A model folder through the engine; chat: the prompt is a user message in the folder's chat template."""

    parallel = 1

    def __init__(self, folder: Path, chat: bool, sampling: Sampling, device: str = "auto"):
        from transformers import PreTrainedTokenizerFast

        self.identity = {"model": folder.resolve().name, "model_sha256": model_sha256(folder)}
        self.sampling = sampling
        self.engine = open_engine(folder, device)
        if self.engine.tokenizer is None:
            raise ValueError(f"{folder} holds no tokenizer.json; export the model with its tokenizer")
        self.tokenizer = self.engine.tokenizer
        self.template = PreTrainedTokenizerFast.from_pretrained(folder) if chat else None
        if self.template is not None and not self.template.chat_template:
            raise ValueError(f"{folder} has no chat template; use --prompt completion")

    def answer(self, prompt: str, seed: int, stops: tuple[str, ...]) -> tuple[str, str]:
        """The answer to a prompt and its finish reason, "stop" or "length"."""
        from laneformer.engine.text import StopStrings, TextStream, text_of

        s = self.sampling
        if self.template is not None:
            message = [{"role": "user", "content": prompt}]
            prompt = str(self.template.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        ids = self.tokenizer.encode(prompt, add_special_tokens=self.template is None).ids
        room = min(s.max_new_tokens, self.engine.config.max_position_embeddings - len(ids))
        if room < 1:
            raise ValueError(
                f"a prompt of {len(ids)} tokens leaves no room for an answer in a context of "
                f"{self.engine.config.max_position_embeddings}; evaluate a model with a longer context"
            )
        tokens = self.engine.stream(ids, max_new_tokens=room, temperature=s.temperature, top_p=s.top_p, seed=seed)
        stream, stop_strings = TextStream(self.tokenizer, ids), StopStrings(stops)
        answer = "".join(text_of(tokens, stream, stop_strings))
        ended = stop_strings.found or stream.ids[-1] in self.engine.eos_ids
        return answer, "stop" if ended else "length"


class EndpointModel:
    """An OpenAI-compatible endpoint; its API key, if any, comes from OPENAI_API_KEY."""

    def __init__(self, base_url: str, model: str, chat: bool, sampling: Sampling, parallel: int, timeout_s: float):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"--base-url {base_url!r} must begin with http:// or https://, and end before /completions"
            )
        self.identity = {"model": model, "base_url": base_url}
        self.url = f"{base_url.rstrip('/')}/{'chat/' * chat}completions"
        self.chat, self.sampling, self.parallel, self.timeout_s = chat, sampling, parallel, timeout_s

    def answer(self, prompt: str, seed: int, stops: tuple[str, ...]) -> tuple[str, str]:
        """The answer to a prompt and its finish reason, "stop" or "length"."""
        s = self.sampling
        body: dict[str, Any] = {"model": self.identity["model"], "n": 1, "seed": seed, "max_tokens": s.max_new_tokens}
        body |= {"temperature": s.temperature, "top_p": s.top_p}
        body |= {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body |= {"stop": list(stops[:4])} if stops else {}  # the API allows four
        try:
            choice = self._post(body)["choices"][0]
            whole = (choice["message"]["content"] if self.chat else choice["text"]) or ""
            answer = cut(whole, stops)
            return answer, "stop" if len(answer) < len(whole) else choice.get("finish_reason") or "stop"
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{self.url} returned no choice, or one without text ({error!r})") from None

    def _post(self, body: dict[str, Any]) -> dict[str, Any]:
        """The reply as JSON. Retries with exponential backoff while the server is busy or broken; then ValueError."""
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
                if error.code not in TRY_AGAIN:
                    raise ValueError(f"{self.url} refused the request, {reason}") from None
            except (OSError, ValueError) as error:  # no connection, a timeout, not JSON
                reason = repr(error)
        raise ValueError(f"{self.url} gave no answer in {ATTEMPTS} attempts ({reason}); run again to continue")


Model = EngineModel | EndpointModel


def cut(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def prompt_of(problem: dict[str, Any], chat: bool) -> str:
    prompt = problem["prompt"].strip()
    return INSTRUCTION.format(prompt=prompt) if chat else prompt + "\n"


def settings_of(dataset: Dataset, model: Model, sampling: Sampling, chat: bool) -> dict[str, Any]:
    """All that answers depend on."""
    prompt = "chat" if chat else "completion"
    return {**model.identity, "data_md5": dataset.md5, "prompt": prompt, **asdict(sampling)}


def collect(dataset: Dataset, model: Model, sampling: Sampling, chat: bool, folder: Path) -> list[dict[str, Any]]:
    """All answers, ordered by problem and sample; those already in `folder`/answers.jsonl are reused.

    ValueError if that file comes from another model, data set or sampling.
    """
    check_settings(folder / "settings.json", settings_of(dataset, model, sampling, chat))
    path = folder / "answers.jsonl"
    known = {(row["task_id"], row["sample"]): row for row in read_lines(path)}
    wanted = {(p["task_id"], i): p for p in dataset.problems for i in range(sampling.n)}
    missing = [key for key in wanted if key not in known]
    stops = () if chat else STOPS_OF[dataset.name] + STOPS

    recording = Lock()

    def ask(key: tuple[str, int]) -> None:
        """Record an answer where it arrives: when another request fails, none that was given is lost."""
        seed = sampling.seed_of(*key)
        text, finish = model.answer(prompt_of(wanted[key], chat), seed, stops)
        row = {"task_id": key[0], "sample": key[1], "seed": seed, "finish_reason": finish, "answer": text}
        with recording:
            append_line(path, json.dumps(row))
            known[key] = row

    with ThreadPoolExecutor(model.parallel) as pool:
        asked = [pool.submit(ask, key) for key in missing]
        try:
            for future in track(as_completed(asked), "answers", len(asked), console=Console(stderr=True)):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [known[key] for key in wanted]


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Store the settings of a folder's answers; ValueError if it holds answers with other settings."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=1) + "\n")
        return
    before = json.loads(path.read_text())
    other = sorted(name for name in settings | before if settings.get(name) != before.get(name))
    if other:
        differing = ", ".join(f"{name} {before.get(name)!r}, not {settings.get(name)!r}" for name in other)
        raise ValueError(
            f"{path.parent} holds answers with other settings: {differing}; choose another --results folder"
        )
