"""laneformer generate: the continuation of one prompt, or the reply to one message."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import tyro

from ..chat import USER
from ..engine import Engine, GenerationOptions
from .conversation import Conversation
from .options import ModelName, ModelOptions, SamplingOptions


@dataclass
class Generate:
    """Stream the continuation of a prompt, or the reply to it with --chat.

    Sampling defaults to the model's generation_config.json. Without one, decoding is greedy; with
    --chat, llama.cpp's defaults apply.
    """

    hf_dir: ModelName
    prompt: str
    """Text to continue, or with --chat the message to reply to."""
    sampling: SamplingOptions
    model: ModelOptions
    chat: bool = False
    """Send the prompt as a user's message in the model's own chat template."""
    system: str | None = None
    """With --chat: a system message before it."""
    max_new_tokens: int = 128
    """Maximum length of the output."""
    min_new_tokens: int = 0
    """Minimum length of the output: no end-of-text token before."""
    ignore_eos: bool = False
    """Continue after the model's end-of-text token."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text before which the output ends; may be given several times."""

    def run(self) -> None:
        lengths = {
            name: getattr(self, name) for name in ("max_new_tokens", "min_new_tokens", "ignore_eos")
        }
        # Errors show before the weights are loaded
        GenerationOptions(**lengths, **self.sampling.check_options())
        if self.system is not None and not self.chat:
            raise ValueError("--system is a message of a conversation; add --chat")
        with self.model.load(self.hf_dir) as engine:
            options = {**lengths, **self.sampling.resolve_options(engine, self.chat)}
            if self.chat:
                self._reply(engine, options)
            else:
                for piece in engine.stream_text(self.prompt, stop=self.stop, **options):
                    show(piece)
            show("\n")
            figures = engine.statistics
            if figures.proposed_tokens:
                drafts = f"{figures.accepted_tokens} of {figures.proposed_tokens} draft tokens were right"
                print(drafts, file=sys.stderr)

    def _reply(self, engine: Engine, options: dict[str, Any]) -> None:
        """Print the reply to the prompt as a message; its reasoning goes to stderr."""
        conversation = Conversation(engine, [])
        conversation.instruct(self.system or "")
        reply = conversation.fit([*conversation.messages, {"role": USER, "content": self.prompt}])
        conversation.complete(reply, show, partial(show, file=sys.stderr), self.stop, **options)
        # The exit status is then that of an interrupted command
        if reply.interrupted:
            raise KeyboardInterrupt


show = partial(print, end="", flush=True)
