"""From what a caller gives to what a decoder is given: prompts and options are checked here, whoever asks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import LaneformerConfig
from .decoder import MAX_SEQUENCES, Decoder, Request
from .options import MAX_LOGPROBS, GenerationOptions, checked_ids, in_range


class Requests:
    """Makes the requests of one engine; ValueError for what its model or its decoder does not take."""

    def __init__(self, config: LaneformerConfig, eos_ids: Sequence[int], decoder: Decoder):
        self.config, self.eos_ids, self.decoder = config, eos_ids, decoder

    def generation(
        self, prompt: Sequence[int], options: Mapping[str, Any], what: str = "prompt_ids", **fields: Any
    ) -> Request:
        """`options` are those of GenerationOptions, `fields` others of Request."""
        ids = self.checked(prompt, what)
        return self._every([ids], GenerationOptions.from_kwargs(options), fields)[0]

    def batch(self, prompts: Sequence[Sequence[int]], options: Mapping[str, Any]) -> list[Request]:
        given: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # arrays and tensors
        if isinstance(given, str) or not hasattr(given, "__len__") or not 1 <= len(given) <= MAX_SEQUENCES:
            raise ValueError(
                f"prompts must be a list of 1 to {MAX_SEQUENCES} prompts, each a list of token ids"
            )
        every = [self.checked(prompt, f"prompts[{i}]") for i, prompt in enumerate(given)]
        return self._every(every, GenerationOptions.from_kwargs(options), {"quiet": True})

    def scoring(self, ids: Sequence[int], start: int, top: int, reuse_prefix: bool = True) -> Request:
        checked = self.checked(ids, "ids", self.config.max_position_embeddings + 1)
        first = in_range("start", start, int, 1, len(checked))
        count = in_range("top", top, int, 0, min(MAX_LOGPROBS, self.config.vocab_size))
        if not isinstance(reuse_prefix, bool):
            raise ValueError(f"reuse_prefix = {reuse_prefix!r} must be True or False")
        return Request(checked, score_from=first, logprobs=count, reuse_prefix=reuse_prefix)

    def logits(self, ids: Sequence[int], positions: Sequence[int] = ()) -> Request:
        """For the logits of every position, and the outputs of modules at `positions`."""
        request = Request(
            self.checked(ids, "ids"), score_from=1, logprobs=0, reuse_prefix=False, keep_logits=True,
            keep_partials=list(positions),
        )  # fmt: skip
        self.decoder.check(request)
        return request

    def checked(self, ids: Sequence[int], what: str, longest: int | None = None) -> list[int]:
        checked = checked_ids(ids, self.config.vocab_size, what)
        context = longest or self.config.max_position_embeddings
        if not checked:
            raise ValueError(f"{what} is empty; give at least one token (such as the begin-of-text id)")
        if len(checked) > context:
            raise ValueError(
                f"{what} has {len(checked)} tokens, more than the {context} that fit; shorten it"
            )
        return checked

    def _every(
        self, prompts: list[list[int]], options: GenerationOptions, fields: Mapping[str, Any]
    ) -> list[Request]:
        every = options.requests(prompts, self.config.vocab_size, self.eos_ids)
        every = [dataclasses.replace(request, **fields) for request in every]
        for request in every:
            self.decoder.check(request)
        return every
