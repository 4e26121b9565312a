"""The decode engine as a scorer: prefixes that follow each other share its KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.scorer.base import NOTHING, Answer, AnyPrompt, Prompt, Scorer, Scores


class EngineScorer(Scorer):
    """`laneformer.Engine` as a scorer. options: those of `Engine.from_pretrained`."""

    backend, parallel = "engine", 1
    reused_tokens: int

    def __init__(
        self, folder: Path, device: str = "auto", max_length: int | None = None, **options: Any
    ):
        from laneformer import Engine
        from laneformer.engine.device import cuda_devices

        super().__init__(folder)
        on_gpu = cuda_devices(device)
        # on the CPU keys and values are exact, so that figures are the model's
        exact = {} if on_gpu else {"kv_dtype": "fp32"}
        self.engine = Engine.from_pretrained(
            folder, device=device, **{"context_tokens": max_length, **exact, **options}
        )
        self.device = ",".join(on_gpu) or "cpu"
        self.dtype = str(self.engine.dtype)
        self.max_length = self.engine.config.max_position_embeddings
        self.max_scored_ids = self.max_length + 1
        self.reused_tokens = 0

    def score(self, items: Iterable[Sequence[Prompt]]) -> Iterator[list[Scores]]:
        for item in items:
            yield [self._score(self.check_prompt(Prompt(*prompt))) for prompt in item]

    def _score(self, prompt: Prompt) -> Scores:
        if prompt.start == len(prompt.ids):
            return NOTHING
        scores = self.engine.logprobs(prompt.ids, top=1, start=prompt.start)
        return Scores(scores.logprobs.astype(np.float64), scores.is_greedy)

    def generate(
        self, prompt: AnyPrompt, max_new_tokens: int, stops: Sequence[str] = (), **sampling: Any
    ) -> Answer:
        from laneformer.engine.text import StopStrings, TextStream, text_of

        ids = self.prompt_ids(prompt)
        tokens = self.engine.stream(
            ids, max_new_tokens=self.room(ids, max_new_tokens), **{"temperature": 0.0, **sampling}
        )
        assert self.engine.tokenizer is not None, "the folder has a tokenizer.json"
        text = TextStream(self.engine.tokenizer, ids)
        stop_strings = StopStrings(stops)
        answer = "".join(text_of(tokens, text, stop_strings))
        self.reused_tokens += self.engine.statistics.reused_tokens
        ended = stop_strings.found or text.ids[-1] in self.engine.eos_ids
        return Answer(answer, "stop" if ended else "length")

    def close(self) -> None:
        self.engine.close()
