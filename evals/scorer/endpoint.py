"""An OpenAI-compatible server as a scorer; its API key, if any, comes from OPENAI_API_KEY."""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np

from evals.scorer.base import (
    NOTHING,
    Answer,
    Answerer,
    AnyPrompt,
    Prompt,
    Scorer,
    Scores,
    read_config,
)
from evals.scorer.hf import cut_at_stop
from records.files import JsonObject
from records.run import number

ATTEMPTS, FIRST_WAIT_S = 6, 1.0
TRY_AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)
STOPS = 4  # that the API allows


class EndpointScorer(Scorer):
    """A model at `base_url`.

    Args:
        folder: of its tokenizer and config.json; None: it is only asked to generate.
    """

    backend, dtype = "endpoint", None

    def __init__(self, base_url: str, folder: Path | None, answerer: Answerer):
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(
                f"--base-url {base_url!r} must begin with http:// or https://, and end before /completions"
            )
        # only the server knows its context
        self.max_length = answerer.max_length or 1 << 30
        self.model = answerer.model or "laneformer"
        if folder is not None:
            super().__init__(folder)
            self.max_length = answerer.max_length or int(
                read_config(folder)["max_position_embeddings"]
            )
            self.model = answerer.model or folder.resolve().name
        self.device = base_url.rstrip("/").removesuffix("/completions")
        self.parallel = answerer.concurrency
        self.timeout_s = answerer.timeout_s
        # a server scores a prompt by generating one token more
        self.max_scored_ids = self.max_length - 1

    def score(self, items: Iterable[Sequence[Prompt]]) -> Iterator[list[Scores]]:
        with ThreadPoolExecutor(self.parallel) as pool:
            yield from pool.map(self._score, items)

    def _score(self, item: Sequence[Prompt]) -> list[Scores]:
        prompts = [self.check_prompt(Prompt(*prompt)) for prompt in item]
        # an option without a token of its own needs no request
        scored = [i for i, prompt in enumerate(prompts) if prompt.start < len(prompt.ids)]
        body = {
            "prompt": [prompts[i].ids for i in scored],
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
        }
        scores = [NOTHING] * len(prompts)
        choices = self._choices("completions", body | {"logprobs": 1}) if scored else []
        indices = [choice.get("index") for choice in choices]
        if not all(index in range(len(scored)) for index in indices) or len(choices) != len(scored):
            raise ValueError(
                f"{self.device} gave choices {indices} for {len(scored)} prompts; one each is needed"
            )
        by_index = dict(zip(indices, choices, strict=True))
        for place, i in enumerate(scored):
            scores[i] = scores_of(by_index[place], prompts[i])
        return scores

    def generate(
        self, prompt: AnyPrompt, max_new_tokens: int, stops: Sequence[str] = (), **sampling: Any
    ) -> Answer:
        chat = bool(prompt) and isinstance(prompt[0], dict)
        body: JsonObject = {"n": 1, "max_tokens": max_new_tokens, "temperature": 0.0, **sampling}
        body |= (
            {"messages": prompt}
            if chat
            else {"prompt": prompt if isinstance(prompt, str) else [prompt]}
        )
        body |= {"stop": list(stops[:STOPS])} if stops else {}
        path = "chat/completions" if chat else "completions"
        choice = self._choices(path, body)[0]
        try:
            text = (choice["message"]["content"] if chat else choice["text"]) or ""
            # JSON has half characters, which no file takes
            full_text = text.encode(errors="replace").decode()
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{self.device}/{path} returned a choice without text ({error!r})"
            ) from None
        text = cut_at_stop(full_text, stops)
        finish = choice.get("finish_reason")
        return Answer(
            text, "length" if len(text) == len(full_text) and finish == "length" else "stop"
        )

    def _choices(self, path: str, body: JsonObject) -> list[JsonObject]:
        reply = self._post(f"{self.device}/{path}", {"model": self.model, **body})
        choices = reply.get("choices") if isinstance(reply, dict) else None
        if isinstance(choices, list) and choices and all(isinstance(c, dict) for c in choices):
            return choices
        raise ValueError(f"{self.device}/{path} returned no choice, but {str(reply)[:200]}")

    def _post(self, url: str, body: JsonObject) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                reason = f"HTTP {error.code}: {error.read(500).decode(errors='replace')}"
                if error.code not in TRY_AGAIN:
                    raise ValueError(f"{url} refused the request, {reason}") from None
            # no connection, a timeout, not JSON, half a reply
            except (OSError, ValueError, HTTPException) as error:
                reason = repr(error)
        raise ValueError(
            f"{url} gave no answer in {ATTEMPTS} attempts ({reason}); run again to continue"
        )


def scores_of(choice: JsonObject, prompt: Prompt) -> Scores:
    """Read the scores of an echoed prompt.

    Raises:
        ValueError: an id, or the new one, has no score.
    """
    logprobs = list[float | None]()
    top = list[set[float | None]]()
    # of another kind, or too few: refused below
    with contextlib.suppress(AttributeError, KeyError, TypeError):
        choice_logprobs = choice["logprobs"]
        logprobs = [number(value) for value in choice_logprobs["token_logprobs"]]
        top = [
            {*map(number, candidates.values())}
            for candidates in choice_logprobs["top_logprobs"][1:]
        ]
    is_complete = len(logprobs) == len(top) + 1 == len(prompt.ids) + 1
    # without prompt scores, a server would get the accuracy of guessing
    if not is_complete or not all(top) or None in set(logprobs[1:]).union(*top):
        raise ValueError(
            f"the server gave {len(logprobs)} log-probabilities for a prompt of {len(prompt.ids)} ids; one for each of "
            "them and exactly one new token are needed (echo=true, logprobs=1, max_tokens=1)"
        )
    values = np.array(logprobs[prompt.start : -1], dtype=np.float64)
    best = [
        np.array([*candidates], dtype=np.float64).max() for candidates in top[prompt.start - 1 : -1]
    ]
    return Scores(values, values >= np.array(best))
