"""Make checked requests of callers' ids and options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..config import LaneformerConfig
from .decoder import Request
from .options import MAX_LOGPROBS, GenerationOptions, check_flag, in_range

SAME_FIELDS = (  # of GenerationOptions and of Request
    "max_new_tokens",
    "min_new_tokens",
    "reuse_prefix",
    "speculate",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)


class Requests:
    """Make the requests of one engine; ValueError for ids and options that its model does not take."""

    def __init__(self, config: LaneformerConfig, eos_ids: Sequence[int]):
        self.config, self.eos_ids = config, eos_ids

    def generation(
        self,
        prompt: Sequence[int],
        options: Mapping[str, Any],
        what: str = "prompt_ids",
        **fields: Any,
    ) -> Request:
        """Make a request of `options` (GenerationOptions) and further `fields`."""
        ids = self._check_prompt(prompt, what)
        checked = GenerationOptions.from_kwargs(options)
        request = make_request(checked, ids, self.config.vocab_size, self.eos_ids)
        return dataclasses.replace(request, **fields)

    def scoring(
        self, ids: Sequence[int], start: int, top: int, reuse_prefix: bool = True
    ) -> Request:
        checked = self._check_prompt(ids, "ids", self.config.max_position_embeddings + 1)
        first = in_range("start", start, int, 1, len(checked))
        count = in_range("top", top, int, 0, min(MAX_LOGPROBS, self.config.vocab_size))
        check_flag("reuse_prefix", reuse_prefix)
        return Request(checked, score_from=first, logprobs=count, reuse_prefix=reuse_prefix)

    def logits(self, ids: Sequence[int], positions: Sequence[int] = ()) -> Request:
        """Make a request for the logits of every position, and outputs of modules at `positions`."""
        return Request(
            self._check_prompt(ids, "ids"),
            score_from=1,
            logprobs=0,
            reuse_prefix=False,
            keep_logits=True,
            keep_partials=list(positions),
        )

    def _check_prompt(self, ids: Sequence[int], what: str, longest: int | None = None) -> list[int]:
        checked = check_ids(ids, self.config.vocab_size, what)
        context = longest or self.config.max_position_embeddings
        if not checked:
            raise ValueError(
                f"{what} is empty; give at least one token (such as the begin-of-text id)"
            )
        if len(checked) > context:
            raise ValueError(
                f"{what} has {len(checked)} tokens, more than the {context} that fit; shorten it"
            )
        return checked


def make_request(
    options: GenerationOptions, prompt: Sequence[int], vocab_size: int, eos_ids: Sequence[int] = ()
) -> Request:
    # the prompt is checked already, ids in the options are not
    biased = check_ids(list(options.logit_bias), vocab_size, "logit_bias")
    stops = check_ids(options.stop_ids, vocab_size, "stop_ids")
    return Request(
        prompt,
        **{name: getattr(options, name) for name in SAME_FIELDS},
        sampling=options.sampling(),
        logit_bias=list(zip(biased, options.logit_bias.values(), strict=True)),
        prediction=check_ids(options.prediction, vocab_size, "prediction"),
        stop_ids=stops if options.ignore_eos else [*stops, *eos_ids],
        logprobs=options.logprobs and min(options.logprobs, vocab_size),
    )


def check_ids(ids: Any, vocab_size: int, what: str) -> list[int]:
    """Return token ids as Python ints; ValueError unless each is in 0 .. vocab_size - 1."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"{what} must be a flat sequence of integers, not {type(ids).__name__} of shape {array.shape}"
        )
    invalid = array[(array < 0) | (array >= vocab_size)] if array.size else array
    if invalid.size:
        raise ValueError(
            f"{what} holds {int(invalid[0])}, outside the vocabulary of 0 to {vocab_size - 1}"
        )
    return [int(i) for i in array]
