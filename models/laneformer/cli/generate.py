"""laneformer generate: the continuation of one prompt, or the reply to one message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tyro

from ..chat import SYSTEM, USER
from ..engine import Engine, GenerationOptions, StopStrings, TextStream
from ..engine.channels import AnswerReader, Delta, speaks_harmony
from ..engine.text import text_of
from ..prompts import PromptEncoder
from .options import ModelFlags, ModelName, ModelOptions, SamplingFlags, SamplingOptions


@dataclass
class Generate:
    """Stream text from a model: the prompt's continuation, as it is decoded.

    Temperature, top-k, top-p, min-p and repetition penalty default to the model's generation_config.json, as
    in Transformers. Without one, decoding is greedy, and with --chat as `laneformer chat` samples. --greedy turns
    sampling off.
    """

    hf_dir: ModelName
    prompt: str
    """Text to continue, or with --chat the message to reply to."""
    chat: bool = False
    """Send the prompt as a user's message in the model's own chat template."""
    system: str | None = None
    """With --chat: a system message before it."""
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    """No end of text before this many tokens."""
    ignore_eos: bool = False
    """Continue after the model's end-of-text token."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text to end before; may be given several times."""
    sampling: SamplingFlags = field(default_factory=SamplingOptions)
    model: ModelFlags = field(default_factory=ModelOptions)

    def run(self) -> None:
        lengths = {name: getattr(self, name) for name in ("max_new_tokens", "min_new_tokens", "ignore_eos")}
        GenerationOptions(**lengths, **self.sampling.given())  # errors show before the weights are loaded
        if self.system is not None and not self.chat:
            raise ValueError("--system is a message of a conversation; add --chat")
        with self.model.load(self.hf_dir) as engine:
            prompt = conversation(engine, self.prompt, self.system) if self.chat else self.prompt
            options: dict[str, Any] = {"stop": self.stop, **lengths, **self.sampling.of(engine, self.chat)}
            harmony = self.chat and speaks_harmony(engine.tokenizer_config)
            stream: Callable[..., Iterator[str]] = engine.stream_text
            if harmony:
                stream = partial(in_harmony, engine)
            for piece in stream(prompt, **options):
                print(piece, end="", flush=True)
            print(flush=True)
            figures = engine.statistics
            if figures.proposed_tokens:
                print(
                    f"{figures.accepted_tokens} of {figures.proposed_tokens} draft tokens were right",
                    file=sys.stderr,
                )


def in_harmony(engine: Engine, prompt: list[int], stop: Sequence[str], **options: Any) -> Iterator[str]:
    """The answer of a model that writes the harmony format; its reasoning goes to stderr."""
    assert engine.tokenizer is not None, "a conversation has one"
    reader, text = AnswerReader(harmony=True), TextStream(engine.tokenizer, prompt, skip_special_tokens=False)

    def without_reasoning(deltas: list[Delta]) -> str:
        for kind, part in deltas:
            if kind == "reasoning":
                print(part, end="", file=sys.stderr, flush=True)
        return "".join(part for kind, part in deltas if kind == "text")

    for piece in text_of(engine.stream(prompt, **options), text, StopStrings(stop)):
        yield without_reasoning(reader.push(piece))
    yield without_reasoning(reader.finish())


def conversation(engine: Engine, prompt: str, system: str | None) -> list[int]:
    """The ids of one user's message, after a system message, up to where the model replies."""
    if engine.tokenizer is None:
        raise ValueError("a conversation needs a tokenizer, but the model has none")
    messages = [{"role": SYSTEM, "content": system}] if system is not None else []
    messages.append({"role": USER, "content": prompt})
    return PromptEncoder(engine.tokenizer, engine.tokenizer_config).conversation(messages)
