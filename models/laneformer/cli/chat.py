"""laneformer chat: a conversation in the terminal, or line by line through pipes."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ..chat import USER
from .conversation import Conversation, Message, Reply, read_messages, write_messages
from .options import ModelName, ModelOptions, SamplingOptions

COMMANDS = "help", "quit", "reset", "retry", "save", "system"  # methods command_* of Terminal
# A model may write escape sequences, which a terminal would execute
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


@dataclass
class Chat:
    """Talk with a model in the terminal, in its own chat template.

    Ctrl-C stops an answer, Ctrl-D exits, /help lists the commands. A line that ends in a backslash
    continues in the next; three double quotes begin and end a message of several lines.
    """

    hf_dir: ModelName
    sampling: SamplingOptions
    model: ModelOptions
    system: str | None = None
    """System message of the conversation."""
    load: Path | None = None
    """Continue a conversation that /save wrote."""
    max_new_tokens: int | None = None
    """Maximum length of an answer; default: the rest of the context."""

    def run(self) -> None:
        # Errors show before the weights are loaded
        self.sampling.check_options()
        messages = read_messages(self.load) if self.load else []
        console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        with console.status("loading weights"):
            engine = self.model.load(self.hf_dir)
        with engine:
            conversation = Conversation(engine, messages)
            if self.system is not None:
                conversation.instruct(self.system)
            longest = self.max_new_tokens or conversation.context_tokens
            terminal = Terminal(
                conversation,
                {
                    "max_new_tokens": longest,
                    **self.sampling.resolve_options(engine, conversation=True),
                },
                console,
            )
            terminal.note(
                f"{self.hf_dir.name}: {engine.dtype}, {conversation.context_tokens} tokens of context; "
                "Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands"
            )
            terminal.converse()


class Terminal:
    """Reads messages and commands, prints replies to stdout and notes to stderr."""

    def __init__(self, conversation: Conversation, options: dict[str, Any], console: Console):
        self.conversation = conversation
        self.options = options
        self.console = console
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.has_quit = False
        self.in_reasoning = False  # the last text printed was reasoning
        sys.stdin.reconfigure(errors="replace", newline=None)  # type: ignore[union-attr]
        if self.interactive:
            with contextlib.suppress(ImportError):
                # Once imported, `input` edits and remembers lines
                import readline

                # Python's default breaks a paste at its lines
                readline.parse_and_bind("set enable-bracketed-paste on")

    def note(self, text: str) -> None:
        self.console.print(text.translate(CONTROLS), style="dim")

    def show(self, piece: str) -> None:
        if self.in_reasoning:
            self.note("\n")
            self.in_reasoning = False
        print(piece.translate(CONTROLS), end="", flush=True)

    def show_reasoning(self, piece: str) -> None:
        self.console.print(piece.translate(CONTROLS), style="dim", end="")
        self.in_reasoning = True

    def converse(self) -> None:
        while not self.has_quit:
            try:
                self.take_turn()
            except BrokenPipeError:
                raise
            except (ValueError, OSError) as error:
                self.note(str(error))
            except KeyboardInterrupt:
                # While a line is being written, which is discarded
                if not self.interactive:
                    raise

    def take_turn(self) -> None:
        text = self.read_message()
        if text is None:
            self.has_quit = True
        elif text.startswith("/"):
            self.run_command(*text[1:].split(maxsplit=1))
        elif text.strip():
            self.answer([*self.conversation.messages, {"role": USER, "content": text}])

    def read_message(self) -> str | None:
        """Return a message of one or several lines; None at the end of the input."""
        lines: list[str] = []
        quoted = False
        while True:
            try:
                line = self.read_line("... " if lines else "> ")
            except EOFError:
                return "\n".join(lines) if lines else None
            if not lines and line.startswith('"""'):
                quoted = True
                line = line[3:]
            mark = '"""' if quoted else "\\"
            marked = line.rstrip().endswith(mark)
            lines.append(line.rstrip().removesuffix(mark) if marked else line)
            # Three quotes end a message, and so does a line without a backslash
            if marked == quoted:
                return "\n".join(lines).strip("\n")

    def read_line(self, prompt: str) -> str:
        # OSError: the terminal was closed
        with contextlib.suppress(OSError):
            if self.interactive:
                try:
                    return input(prompt)
                except KeyboardInterrupt:
                    print()
                    raise
            if line := sys.stdin.readline():
                return line.removesuffix("\n")
        raise EOFError

    def answer(self, messages: list[Message]) -> None:
        """Answer the messages; with the answer they become the conversation."""
        reply = self.conversation.fit(messages)
        if dropped := len(messages) - len(reply.messages):
            self.note(f"the context is full: the {dropped} oldest messages are dropped")
        self.conversation.complete(reply, self.show, self.show_reasoning, **self.options)
        self.show("\n")
        self.note(self.describe_reply(reply))

    def describe_reply(self, reply: Reply) -> str:
        times_s = reply.times_s
        statistics = reply.statistics
        figures = [f"{len(reply.ids)} tokens"]
        if len(times_s) > 1:
            figures.append(
                f"{(len(times_s) - 1) / max(times_s[-1] - times_s[0], 1e-9):.1f} tokens/s"
            )
        if times_s:
            figures.append(f"first after {times_s[0]:.2f} s")
        figures.append(f"{statistics.reused_tokens} of {len(reply.prompt)} prompt tokens cached")
        if statistics.proposed_tokens:
            figures.append(
                f"{statistics.accepted_tokens} of {statistics.proposed_tokens} draft tokens right"
            )
        if reply.interrupted:
            figures.append("stopped")
        elif len(reply.prompt) + len(reply.ids) > self.conversation.context_tokens:
            figures.append("cut: the context is full")
        elif len(reply.ids) == self.options["max_new_tokens"]:
            figures.append("cut at --max-new-tokens")
        return ", ".join(figures)

    def run_command(self, name: str = "", argument: str = "") -> None:
        if name not in COMMANDS:
            # A message may begin with a slash, such as a path: the error explains how to send it
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean /{near[0]}?" if near else f"there are /{', /'.join(COMMANDS)}"
            raise ValueError(
                f"unknown command /{name}; {hint} A message that begins so needs a space before it"
            )
        getattr(self, f"command_{name}")(argument)

    def command_help(self, _: str) -> None:
        """what the commands do"""
        for name in COMMANDS:
            self.note(f"/{name:<8}{getattr(self, f'command_{name}').__doc__}")

    def command_quit(self, _: str) -> None:
        """leave, as Ctrl-D does"""
        self.has_quit = True

    def command_reset(self, _: str) -> None:
        """begin again; the system message stays"""
        self.conversation.reset()
        self.note("a new conversation")

    def command_retry(self, _: str) -> None:
        """answer the last message once more, with another seed"""
        messages = list(self.conversation.messages)
        while messages and messages[-1]["role"] != USER:
            messages.pop()
        if not messages:
            raise ValueError("there is nothing to answer yet")
        # The same seed would give the same answer
        self.options["seed"] = (self.options["seed"] + 1) % 2**64
        self.answer(messages)

    def command_save(self, file: str) -> None:
        """FILE: write the messages as JSON, for --load"""
        if not file:
            raise ValueError("give a file: /save FILE")
        write_messages(Path(os.path.expanduser(file)), self.conversation.messages)
        self.note(f"{len(self.conversation.messages)} messages in {file}")

    def command_system(self, text: str) -> None:
        """TEXT: set the system message; without a text there is none"""
        self.conversation.instruct(text)
        self.note("the system message is set" if text else "there is no system message")
