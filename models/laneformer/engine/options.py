"""The options of one generation and their ranges; requests.py checks the ids among them."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .decoder import Sampling

MAX_DRAFT_TOKENS = 31  # columns of a pass beside the last known token's
MAX_LOGPROBS = 100
MIN_TEMPERATURE = 1e-6  # colder draws are greedy
# for conversations with models that recommend nothing: llama.cpp's defaults, as greedy chats
# end in loops
CONVERSATION_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
# odd, so all seeds of a batch differ; far apart, so neighbouring seeds share none
SEED_STEP = 0x9E3779B97F4A7C15
BIAS_RANGE = (-100.0, 100.0)  # OpenAI's: enough to forbid an id or to force it
RANGES: dict[str, tuple[type, float, float]] = {
    "max_new_tokens": (int, 1, 2**31 - 1),
    "temperature": (float, 0.0, 1e6),
    "top_k": (int, 0, 2**31 - 1),
    "top_p": (float, 0.0, 1.0),
    "min_p": (float, 0.0, 1.0),
    "seed": (int, 0, 2**64 - 1),
    "repetition_penalty": (float, 0.01, 100.0),
    "frequency_penalty": (float, -2.0, 2.0),
    "presence_penalty": (float, -2.0, 2.0),
    "min_new_tokens": (int, 0, 2**31 - 1),
    "logprobs": (int, 0, MAX_LOGPROBS),
    "speculate": (int, 0, MAX_DRAFT_TOKENS),
}


@dataclass(frozen=True)
class GenerationOptions:
    """Options of `Engine.generate` and its variants. ValueError for invalid values.

    max_new_tokens: upper limit; generation also ends when the context is full.
    temperature: 0 is greedy (the lowest id wins a tie). seed: the same seed and prompt give the same tokens, for any
    number of threads and on every device, up to ties within rounding.
    A token's logits are changed in this order:
    1. repetition_penalty (Hugging Face's definition): logits of ids in the prompt or the output are divided by it, or
       multiplied where negative.
    2. frequency_penalty and presence_penalty (OpenAI's): for ids in the output, less frequency_penalty times their
       count, less presence_penalty.
    3. logit_bias: {id: value added}.
    4. min_new_tokens: stop ids are impossible before this many tokens.
    5. temperature, then top_k (0: off), top_p (the fewest likely tokens that reach this probability), min_p (tokens at
       least this many times as likely as the likeliest). Tokens with equal logits are kept or dropped together.
    stop_ids: end after one of these, which is returned as the last token; the model's own end-of-text ids
    are added unless ignore_eos. logprobs: for each token its log-probability and those of this many
    likeliest ids, of the model's own distribution (before step 1); None: none. Only for
    `generate_detailed` and `stream_detailed`. reuse_prefix: start from keys and values of earlier requests
    where the prompt begins alike, and draft from their outputs. speculate: most draft tokens to verify in
    one pass, 0 for none; they are taken from the text so far, `prediction` and earlier outputs, as many as
    make tokens come sooner; the output stays the same. prediction: ids that the output may contain.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_new_tokens: int = 0
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    reuse_prefix: bool = True
    speculate: int = MAX_DRAFT_TOKENS
    prediction: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name, (kind, low, high) in RANGES.items():
            if name != "logprobs" or self.logprobs is not None:
                object.__setattr__(self, name, in_range(name, getattr(self, name), kind, low, high))
        if self.top_p == 0.0:
            raise ValueError(
                "top_p = 0 would leave no token; use a value above 0, or temperature = 0 for greedy"
            )
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens = {self.min_new_tokens} exceeds max_new_tokens = {self.max_new_tokens}"
            )
        for name in ("ignore_eos", "reuse_prefix"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(
                f"logit_bias = {self.logit_bias!r} must map token ids to numbers, as {{42: -5.0}}"
            )
        low, high = BIAS_RANGE
        bias = {
            i: in_range(f"logit_bias[{i!r}]", b, float, low, high)
            for i, b in self.logit_bias.items()
        }
        object.__setattr__(self, "logit_bias", bias)

    def sampling(self) -> Sampling:
        # one candidate: nothing to draw
        greedy = self.temperature < MIN_TEMPERATURE or self.top_k == 1
        return Sampling(
            seed=self.seed,
            inverse_temperature=0.0 if greedy else 1 / self.temperature,
            top_p=max(self.top_p, float(np.finfo(np.float32).tiny)),  # not rounded to 0
            min_p=self.min_p,
            top_k=self.top_k,
        )

    @classmethod
    def from_kwargs(cls, options: Mapping[str, Any]) -> GenerationOptions:
        """Make options by name; ValueError for an unknown name, with the nearest known one."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"choose from {names}"
                raise ValueError(f"unknown option {name!r}; {hint}")
        return cls(**options)


def one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    if value not in (allowed := tuple(choices)):
        raise ValueError(f"{name} = {value!r} is unknown; choose from {allowed}")


def check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} = {value!r} must be True or False")


def without_logprobs(options: Mapping[str, Any]) -> Mapping[str, Any]:
    if options.get("logprobs") is not None:
        raise ValueError(
            "logprobs: this call returns token ids only; use generate_detailed or stream_detailed"
        )
    return options


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that `generation_config.json` recommends; empty where it recommends none."""
    # as in Transformers' generate(): without do_sample only the repetition penalty counts, with it
    # top_k is 50 unless given; do_sample = false is a temperature of 0
    settings = {name: value for name, value in generation_config.items() if value is not None}
    names = ["repetition_penalty"]
    recommended: dict[str, Any] = {}
    if settings.get("do_sample"):
        names += ["temperature", "top_k", "top_p", "min_p"]
        recommended = {"temperature": 1.0, "top_k": 50}
    recommended |= {name: settings[name] for name in names if name in settings}
    defaults = vars(GenerationOptions())
    options = vars(GenerationOptions(**recommended))  # ValueError for what the file gets wrong
    changed = {name: options[name] for name in recommended if options[name] != defaults[name]}
    return {"temperature": 0.0, **changed} if settings.get("do_sample") is False else changed


def conversation_defaults(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of conversations: the model's, else CONVERSATION_SAMPLING."""
    return dict(defaults or CONVERSATION_SAMPLING)


def batch_seeds(seed: int, prompts: int) -> list[int]:
    return [(seed + i * SEED_STEP) % 2**64 for i in range(prompts)]


def in_range(name: str, value: Any, kind: type, low: float, high: float) -> Any:
    """Return the value as `kind` (int or float); ValueError unless it is one, finite and in low .. high."""
    types = (int, np.integer) if kind is int else (int, float, np.integer, np.floating)
    if isinstance(value, bool) or not isinstance(value, types) or not math.isfinite(value):
        raise ValueError(
            f"{name} = {value!r} must be {'an integer' if kind is int else 'a finite number'}"
        )
    if not low <= value <= high:
        raise ValueError(f"{name} = {value!r} is outside {low} to {high}")
    return kind(value)
