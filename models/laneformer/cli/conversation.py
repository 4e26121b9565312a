"""A conversation with a model: its messages, and the ids that the engine last saw of them."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..chat import ASSISTANT, SYSTEM, USER
from ..engine import Engine, Statistics, StopStrings, TextStream
from ..engine.channels import AnswerReader, Delta, begins_reasoning, speaks_harmony
from ..prompts import PromptEncoder

Message = dict[str, str]  # "role" and "content"
MAX_PROMPT = 7 / 8  # of the context; the oldest turns of a longer prompt are dropped
# Of the context, once turns are dropped: the rest is read again, which should happen rarely
SHORTENED_PROMPT = 1 / 2


@dataclass
class Reply:
    """The answer to messages, as text and as ids."""

    messages: list[Message]
    rendered: str
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    text: str = ""
    content: str = ""  # the text without the reasoning
    times_s: list[float] = field(default_factory=list)  # of each id, since the start
    interrupted: bool = False
    statistics: Statistics = field(init=False)


class Conversation:
    """Messages in a model's chat template; ValueError where the model has none."""

    def __init__(self, engine: Engine, messages: list[Message]):
        if engine.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer, but the model has none")
        self.engine = engine
        self.tokenizer = engine.tokenizer
        self.messages = messages
        self.encoder = PromptEncoder(engine.tokenizer, engine.tokenizer_config)
        self.context_tokens = engine.config.max_position_embeddings
        self.last: Reply | None = None

    def instruct(self, system: str) -> None:
        """Replace the system message; an empty text removes it."""
        others = [message for message in self.messages if message["role"] != SYSTEM]
        self.messages = [{"role": SYSTEM, "content": system}, *others] if system else others

    def reset(self) -> None:
        """Drop all messages but the system's."""
        self.messages = [message for message in self.messages if message["role"] == SYSTEM]

    def fit(self, messages: list[Message]) -> Reply:
        """Return an empty reply, without the oldest turns where the context is too small."""
        limit = MAX_PROMPT * self.context_tokens
        # Whole turns go, the oldest first; the system message stays
        while len((reply := self._encode(messages)).prompt) > limit:
            limit = SHORTENED_PROMPT * self.context_tokens
            instructions = [message for message in messages[:1] if message["role"] == SYSTEM]
            turns = [i for i, message in enumerate(messages) if message["role"] == USER]
            if len(turns) < 2:
                break
            messages = [*instructions, *messages[turns[1] :]]
        if len(reply.prompt) > self.context_tokens:
            raise ValueError(
                f"the message makes a prompt of {len(reply.prompt)} tokens, but the context holds "
                f"{self.context_tokens}; shorten it"
            )
        return reply

    def _encode(self, messages: list[Message]) -> Reply:
        rendered = self.encoder.render(messages)
        last = self.last
        if last and rendered == last.rendered:
            return Reply(messages, rendered, last.prompt)
        # The reply goes back as the ids that the model wrote: its text may encode into other ids,
        # at which the engine's cache would end. Only what the template writes behind it is encoded.
        if last and rendered.startswith(last.rendered):
            rest = rendered[len(last.rendered) :]
            # Some templates strip contents
            reply_text = last.text if rest.startswith(last.text) else last.text.strip()
            closing = (
                self.encoder.encode(rest[len(reply_text) :]) if rest.startswith(reply_text) else []
            )
            # Only behind an end-of-text id is it certain that both encodings agree
            if closing and closing[0] in self.engine.eos_ids:
                body = last.ids[:-1] if last.ids[-1] in self.engine.eos_ids else last.ids
                return Reply(messages, rendered, last.prompt + body + closing)
        return Reply(messages, rendered, self.encoder.encode(rendered))

    def complete(
        self,
        reply: Reply,
        show: Callable[[str], None],
        show_reasoning: Callable[[str], None],
        stop: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Generate the reply; `show` gets its content, `show_reasoning` its reasoning."""
        harmony = speaks_harmony(self.engine.tokenizer_config)
        reader = AnswerReader(None, begins_reasoning(self.tokenizer, reply.prompt), harmony)
        stream = TextStream(self.tokenizer, reply.prompt, not harmony)
        stops = StopStrings(stop)
        start_s = time.monotonic()

        def add(deltas: list[Delta]) -> None:
            for kind, text in deltas:
                if kind == "reasoning":
                    show_reasoning(text)
                else:
                    reply.content += text
                    show(text)

        try:
            with (
                allow_one_interrupt(),
                contextlib.closing(self.engine.stream(reply.prompt, **options)) as tokens,
            ):
                for token in tokens:
                    reply.ids.append(token)
                    reply.times_s.append(time.monotonic() - start_s)
                    if token not in self.engine.eos_ids:
                        reply.text += (piece := stream.push(token))
                        add(reader.push(stops.push(piece)))
                    if stops.found:
                        break
        except KeyboardInterrupt:
            reply.interrupted = True
        if not stops.found:
            reply.text += (piece := stream.finish())
            add(reader.push(stops.push(piece) + stops.finish()))
        add(reader.finish())
        reply.statistics = self.engine.statistics
        if reply.ids:
            # The next prompt is without the reasoning
            self.messages = [*reply.messages, {"role": ASSISTANT, "content": reply.content}]
            self.last = reply


@contextlib.contextmanager
def allow_one_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first Ctrl-C, and ignore further ones while it is handled."""

    def interrupt(*_: object) -> None:
        # A second Ctrl-C would interrupt the clean-up
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def read_messages(path: Path) -> list[Message]:
    """Return the messages in a file of `/save`; ValueError where it is none."""
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as a conversation: {error}") from None
    for number, message in enumerate(messages if isinstance(messages, list) else [messages]):
        fields = message if isinstance(message, dict) else {}
        if fields.get("role") not in (SYSTEM, USER, ASSISTANT) or not isinstance(
            fields.get("content"), str
        ):
            raise ValueError(
                f"{path}: message {number} is {message!r:.80}; it needs a role (system, user or assistant) and content"
            )
    return messages


def write_messages(path: Path, messages: list[Message]) -> None:
    """Write messages; ValueError where another file would be overwritten."""
    if path.exists():
        read_messages(path)
    path.write_text(json.dumps(messages, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
