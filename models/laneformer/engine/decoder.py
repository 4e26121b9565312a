"""What an engine asks of a decoder, the request that it hands over, and the results that it gives back.

`CpuDecoder` (cpu/decoder.py) and `CudaDecoder` (cuda/decoder.py) implement `Decoder`; `Engine`
holds one of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from .sampling import Sampling

# of cached keys and values: bytes of an element, and of the scale that a head has at each position
KV_BYTES = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "int8": (1, 4)}
CUDA = "cuda"  # the `isa` of the decoder on GPUs


class RequestFailed(RuntimeError):
    """A decoder could not finish this request; it is ready for the next one."""


class Unanswered(RequestFailed):
    """A launch has never ended: the device does not answer, and may not even let go of its memory."""


class EngineLost(RuntimeError):
    """The device has failed: no request can run until the model is loaded again."""


@dataclass(frozen=True)
class Request:
    """One request, complete and checked (requests.py); both decoders read it field by field.

    A request either generates up to `max_new_tokens` after its prompt, or, with `score_from` > 0, scores the
    ids of its prompt from that index on.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 0
    stop_ids: Sequence[int] = ()
    min_new_tokens: int = 0
    reuse_prefix: bool = True  # start from what the KV cache still holds
    speculate: int = 0  # most draft tokens verified in one pass
    prediction: Sequence[int] = ()  # what the output may look like, to take drafts from
    # likeliest ids to record with each token; None: no log-probabilities at all
    logprobs: int | None = None
    sampling: Sampling = dataclasses.field(default_factory=lambda: Sampling(top_p=1.0))  # greedy
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()
    masked: bool = False  # each token is drawn among the ids that `allow` names
    # its end alone is news: no token wakes who collects, which would take a core
    quiet: bool = False
    replay: Sequence[int] = ()  # for measurements: the output's first ids, whatever is drawn
    # for measurements: odds of drafts of `replay` to be right, by place
    acceptance: Sequence[float] = ()
    timed: bool = False  # with the times of tokens at its end (bench.py)
    # scoring
    score_from: int = 0
    keep_logits: bool = False  # the logits of every position as well
    # with keep_logits: positions, ascending, whose modules' outputs are kept
    keep_partials: Sequence[int] = ()


@dataclass(frozen=True)
class DraftModel:
    name: str
    dtype: str
    weight_bytes: int


@dataclass(frozen=True)
class DraftHead:
    """For multi-token prediction. ids: that it can draft. weight_bytes: read for each draft."""

    ids: int
    weight_bytes: int


# of scored tokens: log p (count,) float32, likeliest ids int32 and their log p float32, flat
Scores = tuple[np.ndarray, np.ndarray, np.ndarray]


class Ended(NamedTuple):
    """What a request leaves: the fields of `Statistics`, and what it was asked to keep.

    logits: float32, [position][vocab], flat. partials: float32, [position][layer][module][lane][hidden], flat.
    first_token_s: from the join. token_s: float64, of each token after the first.
    """

    statistics: dict[str, int]
    error: Exception | None = None  # it ended because of this
    logits: np.ndarray | None = None
    partials: np.ndarray | None = None
    first_token_s: float = 0.0
    token_s: np.ndarray | None = None


class Collected(NamedTuple):
    """News of one request: tokens first, first + 1, ...; `ended` once it has.

    scores: of these tokens where the request has `logprobs`; of a scoring request, all of them at its end.
    """

    ticket: int
    first: int
    tokens: list[int]
    scores: Scores | None = None
    ended: Ended | None = None

    @property
    def whole(self) -> Ended:
        """Of news that are the last."""
        assert self.ended is not None
        return self.ended


class Decoder(Protocol):
    """A model in memory and the loop that decodes with it.

    Requests join and leave between two tokens of the others, and each gets what it gets alone. Any thread may
    call these, but only one at a time `collect`.
    """

    dtype: str
    math: str
    kv_dtype: str
    isa: str
    threads: int
    weight_bytes: int
    max_joined: int

    @property
    def failure(self) -> str | None:
        """Why all requests have ended, and none can join any more."""
        ...

    def join(self, requests: Sequence[Request]) -> list[int]:
        """Begin requests before the same token; returns their tickets, which are never used again.

        RuntimeError where more than `max_joined` would run whose end has not been collected; ValueError for an
        option that this decoder does not have.
        """
        ...

    def collect(self, timeout_s: float) -> list[Collected]:
        """News of every request since the last call; waits until there are some, or the time is up."""
        ...

    @property
    def running(self) -> int:
        """Requests whose end has not been collected."""
        ...

    def leave(self, ticket: int) -> None:
        """End a request at the next token; nothing where it has ended."""
        ...

    def leave_all(self) -> None: ...

    def allow(self, ticket: int, index: int, mask: np.ndarray) -> None:
        """New token `index` (from 0) of a masked request is one of these ids: bits, uint32 (ceil(V / 32),).

        The draw waits for it; the other requests do not. Nothing where the request has ended.
        """
        ...

    def statistics(self) -> dict[str, int]:
        """The fields of `Statistics`, of all requests that have ended since none ran."""
        ...

    def close(self) -> None: ...


def finish_reason(request: Request, tokens: Sequence[int], cancelled: bool) -> str:
    """Why a request without an error has ended: "stop" (a stop id, or all is scored), "cancelled" or "length"."""
    if tokens and tokens[-1] in request.stop_ids:
        return "stop"
    if cancelled:
        return "cancelled"
    return "stop" if request.score_from else "length"


@dataclass(frozen=True)
class GeneratedToken:
    """One new token; with the option `logprobs=n`, of the model's own
    distribution (before penalties, temperature):

    logprob: its log-probability. top: (id, log-probability) of the n likeliest ids, the likeliest first.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def attach_scores(ids: Sequence[int], scores: Scores | None) -> list[GeneratedToken]:
        """Tokens with their scores, where they have such."""
        if scores is None or not ids:
            return [GeneratedToken(i) for i in ids]
        logprobs, top_ids, top_logprobs = (values.tolist() for values in scores)
        pairs, top = list(zip(top_ids, top_logprobs, strict=True)), len(top_ids) // len(ids)
        return [
            GeneratedToken(i, logprobs[n], tuple(pairs[n * top : (n + 1) * top]))
            for n, i in enumerate(ids)
        ]


@dataclass(frozen=True)
class Statistics:
    """Of one request, or of those that ran together.

    reused_tokens: prompt tokens whose keys and values were still there, or were copied from another
    request's. passes: reads of all the weights. proposed_tokens: draft tokens of `speculate`;
    accepted_tokens: those that were right.
    """

    reused_tokens: int = 0
    passes: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Generation:
    """A request that has ended. finish_reason: "stop" (a stop id), "length" (max_new_tokens, or the context
    is full) or "cancelled" (`Engine.cancel` or `close` came first; tokens are those until then).
    """

    tokens: list[GeneratedToken]
    finish_reason: str
    prompt_tokens: int
    statistics: Statistics

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True)
class PromptLogprobs:
    """Of the n scored ids of a prompt, each given all before it; the likeliest id is first in `top_ids`.

    logprobs: float32 (n,). top_ids: int32 (n, top). top_logprobs: float32 (n, top). is_greedy: bool (n,),
    whether the id is the one that greedy decoding would have chosen (the lowest of equally likely ones); it
    needs top >= 1.
    """

    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    is_greedy: np.ndarray

    @staticmethod
    def of(ids: Sequence[int], scores: Scores, top: int) -> PromptLogprobs:
        """From a decoder's scores of these ids."""
        logprobs, *tops = scores
        top_ids, top_logprobs = (values.reshape(len(ids), top) for values in tops)
        greedy = (top_ids[:, :1] == np.array(ids, np.int32)[:, None]).any(1)
        return PromptLogprobs(logprobs, top_ids, top_logprobs, greedy)
