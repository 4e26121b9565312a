"""The interface `Decoder` that the CPU and the CUDA engine implement, its requests and its results.

A new token passes through these types, from the schedule in C++ to a client's event stream:

    type            defined in             holds                                      made by
    News            schedule/sequence.h    ids of one request since the last collect  Schedule::collect
    Collected       engine/decoder.py      the same in Python                         Decoder.collect
    GeneratedToken  engine/decoder.py      an id with its log-probabilities           attach_scores
    Update          engine/batch.py        tokens and state of one request            Batch.updates
    Written         serve/choices.py       a token and the place of its text          Writing.push
    Piece           serve/choices.py       text and tokens of one choice              Choices
    Delta           engine/channels.py     text as reasoning, answer or call          AnswerReader.push
    Block, Part     serve/conversation.py  a part of the answer; its new text         ChoiceAnswer.push

An `Engine` call ends at GeneratedToken, a `Batch` at Update, /v1/completions at Piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from .sampling import Sampling

# cached keys and values: bytes per element, and per scale (one for each head and position)
KV_BYTES = {"fp32": (4, 0), "bf16": (2, 0), "fp16": (2, 0), "int8": (1, 4)}
CUDA = "cuda"  # the `isa` of the decoder on GPUs


class RequestFailed(RuntimeError):
    """The decoder could not finish this request, but can take the next one."""


class Unanswered(RequestFailed):
    """A launch never ended: the device's memory may not be freeable."""


class EngineLost(RuntimeError):
    """The device failed: no request can run until the model is loaded again."""


@dataclass(frozen=True)
class Request:
    """A checked request: generate after the prompt, or score prompt[score_from:] if score_from > 0."""

    # schedule/bindings.h reads the fields by name

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
    masked: bool = False  # each token is drawn among the ids that `Decoder.allow` permits
    # only its end is reported: waking the collecting thread for each token would take a core
    quiet: bool = False
    timed: bool = False  # record the times of tokens (bench.py)
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
    """A head for multi-token prediction."""

    # number of ids that it can draft
    ids: int
    # read for each draft
    weight_bytes: int


# log p (count,) float32; likeliest ids int32 and their log p float32, both flat (count * top,)
Scores = tuple[np.ndarray, np.ndarray, np.ndarray]


class Ended(NamedTuple):
    """The results that a request has at its end."""

    # the fields of `Statistics`
    statistics: dict[str, int]
    error: Exception | None = None  # it ended because of this
    # float32, [position][vocab], flat
    logits: np.ndarray | None = None
    # float32, [position][layer][module][lane][hidden], flat
    partials: np.ndarray | None = None
    # from the join
    first_token_s: float = 0.0
    # float64, of each token after the first
    token_s: np.ndarray | None = None


class Collected(NamedTuple):
    """New tokens of one request."""

    ticket: int
    # index of the first of these tokens
    first: int
    tokens: list[int]
    # of these tokens with `logprobs`; of a scoring request, all scores at its end
    scores: Scores | None = None
    # set once, at the request's end
    ended: Ended | None = None

    @property
    def whole(self) -> Ended:
        """Return `ended`; only for the last piece of a request."""
        assert self.ended is not None
        return self.ended


class Decoder(Protocol):
    """A loaded model and its decode loop; any thread may call it, but only one at a time `collect`.

    Requests join and leave between two tokens of the others; each gets the tokens it would get alone.
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
        """The reason why no request can run; None while it works."""
        ...

    def join(self, requests: Sequence[Request]) -> list[int]:
        """Begin requests before the same token; return their tickets, which are never reused.

        Raises RuntimeError for more than `max_joined` requests whose end is not collected yet, and ValueError
        for an option that this decoder does not have.
        """
        ...

    def collect(self, timeout_s: float) -> list[Collected]:
        """Wait up to `timeout_s` for progress of any request; return it."""
        ...

    @property
    def running(self) -> int:
        """The number of requests with an uncollected end."""
        ...

    def leave(self, ticket: int) -> None:
        """End a request at the next token; do nothing where it has ended."""
        ...

    def leave_all(self) -> None: ...

    def allow(self, ticket: int, index: int, mask: np.ndarray) -> None:
        """Set the ids possible for new token `index` (from 0) of a masked request; do nothing where it has ended.

        mask: a bit per id, uint32 (ceil(V / 32),). The draw waits for it, other requests do not.
        """
        ...

    def statistics(self) -> dict[str, int]:
        """Return the fields of `Statistics` over all requests that ended since none ran."""
        ...

    def close(self) -> None: ...


def finish_reason(request: Request, tokens: Sequence[int], cancelled: bool) -> str:
    """Return "stop" (a stop id, or all is scored), "cancelled" or "length" for a request without error."""
    if tokens and tokens[-1] in request.stop_ids:
        return "stop"
    if cancelled:
        return "cancelled"
    return "stop" if request.score_from else "length"


@dataclass(frozen=True)
class GeneratedToken:
    """One new token; with the option `logprobs=n`, its log-probability and the n likeliest ids'."""

    id: int
    # before penalties and temperature
    logprob: float | None = None
    # (id, log-probability), the likeliest first
    top: tuple[tuple[int, float], ...] = ()

    @staticmethod
    def attach_scores(ids: Sequence[int], scores: Scores | None) -> list[GeneratedToken]:
        """Return tokens with their scores, if any."""
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
    """Counts of one request, or of those that ran together."""

    # prompt tokens whose keys and values were cached, or copied from another request
    reused_tokens: int = 0
    # reads of all weights
    passes: int = 0
    # draft tokens
    proposed_tokens: int = 0
    # draft tokens that were right
    accepted_tokens: int = 0


@dataclass(frozen=True)
class Generation:
    """A finished request."""

    tokens: list[GeneratedToken]
    # "stop" (a stop id), "length" (max_new_tokens, or the context is full) or "cancelled"
    # (`Engine.cancel` or `close` came first; tokens are those until then)
    finish_reason: str
    prompt_tokens: int
    statistics: Statistics

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True)
class PromptLogprobs:
    """Scores of n ids of a prompt, each given all before it."""

    # float32 (n,)
    logprobs: np.ndarray
    # int32 (n, top), the likeliest first
    top_ids: np.ndarray
    # float32 (n, top)
    top_logprobs: np.ndarray
    # bool (n,): greedy decoding would choose the id; needs top >= 1
    is_greedy: np.ndarray

    @staticmethod
    def of(ids: Sequence[int], scores: Scores, top: int) -> PromptLogprobs:
        logprobs, *tops = scores
        top_ids, top_logprobs = (values.reshape(len(ids), top) for values in tops)
        # the first of equally likely ids is the lowest, which greedy decoding takes
        greedy = (top_ids[:, :1] == np.array(ids, np.int32)[:, None]).any(1)
        return PromptLogprobs(logprobs, top_ids, top_logprobs, greedy)
