"""One conversation and its answer, whatever the API: all of them are translations of a ConversationRequest,
and of the deltas in which it is answered.

A delta is OpenAI's: {"reasoning_content": ...}, {"content": ...}, or {"tool_calls": [...]} with the beginning
of a call or more of its arguments.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from ..engine.channels import ANSWER, NEXT, Harmony, Thinking, begun
from ..engine.text import TextStream
from .bodies import RequestError
from .choices import Choices, Piece
from .context import ServingContext
from .reasoning import ENDING, UNLIMITED, Budget
from .scheduler import Grammar
from .schema import ConversationRequest, texts_of
from .tool_calls import CallParser, ToolUse


class Said(NamedTuple):
    """What is new of one choice. finish_reason: OpenAI's, once it has ended."""

    piece: Piece
    deltas: list[dict[str, Any]]
    finish_reason: str | None


class Speaker:
    """The text of one choice as deltas: reasoning, content, calls."""

    def __init__(self, parser: CallParser | None, thinking: Thinking | Harmony):
        self.parser, self.thinking = parser, thinking
        self.reasoning_tokens = 0

    def push(self, piece: Piece) -> Said:
        self.reasoning_tokens += len(piece.ids) * self.thinking.inside
        deltas = self._deltas(*self.thinking.push(piece.text))
        if piece.finish_reason is None:
            return Said(piece, deltas, None)
        deltas += self._deltas(*self.thinking.finish())
        deltas += self.parser.finish() if self.parser else []
        called = piece.finish_reason == "stop" and self.parser is not None and self.parser.called
        return Said(piece, deltas, "tool_calls" if called else piece.finish_reason)

    def _deltas(self, reasoning: str, content: str) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"reasoning_content": reasoning}] if reasoning else []
        if self.parser is not None:
            return deltas + self.parser.push(content)
        return [*deltas, {"content": content}] if content else deltas


class Conversation:
    """`begin` submits it; then iterate for what is said. RequestError for what cannot be answered.

    Made in any thread: it renders and encodes the prompt and compiles grammars, which takes time.
    """

    def __init__(self, request: ConversationRequest, context: ServingContext):
        self.request, self.context = request, context
        tools, self.prompt = prepared(request, context)
        grammar = self._grammar(tools)
        forced = grammar is not None and not (tools.names and tools.optional)
        inside = not forced and begun(context.tokenizer, self.prompt)
        self.thinking: Callable[[], Thinking | Harmony] = partial(Thinking, inside)
        if context.harmony:
            self.thinking = partial(Harmony, bool(tools.names))
        if context.harmony or (not forced and (inside or context.reasons)):
            grammar = self._budget(tools, grammar)
        self.choices = self._choices(tools, grammar)
        self.speakers = [Speaker(tools.parser(), self.thinking()) for _ in range(request.n)]

    def begin(self) -> None:
        """On the event loop; what `Scheduler.submit` raises."""
        self.choices.begin()

    def cancel(self) -> None:
        self.choices.cancel()

    async def __aiter__(self) -> AsyncGenerator[Said, None]:
        async for piece in self.choices:
            yield self.speakers[piece.choice].push(piece)

    def _grammar(self, tools: ToolUse) -> Grammar | None:
        try:
            calls = tools.grammar()
            form = self.context.grammars.of_response_format(self.request.response_format)
        except ValueError as error:
            raise RequestError(str(error)) from None
        if calls and form:
            raise RequestError(
                "response_format cannot be combined with tools; send one of them", "response_format"
            )
        return calls or form

    def _budget(self, tools: ToolUse, grammar: Grammar | None) -> Grammar | None:
        """The grammar, or one that also ends a reasoning that takes too long."""
        context, tokens = self.context, self.request.reasoning_budget
        tokens = context.reasoning_budget if tokens is None else tokens
        if tokens == UNLIMITED:
            return grammar
        tokenizer, ending = context.tokenizer, ENDING
        if context.harmony:  # a grammar allows no second reasoning; without one the answer is begun
            ending = NEXT if grammar else f"{NEXT}{ANSWER}"
        ids = tokenizer.encode(ending, add_special_tokens=False).ids
        stream = partial(TextStream, tokenizer, (), not self._shows_control(tools))
        return Budget(tokens, self.thinking, ids, stream, context.vocab_size, grammar)

    def _shows_control(self, tools: ToolUse) -> bool:
        """Whether control tokens are read as text: around calls, and between harmony's messages."""
        return bool(tools.names) or self.context.harmony

    def _choices(self, tools: ToolUse, grammar: Grammar | None) -> Choices:
        request, context = self.request, self.context
        wanted = request.max_completion_tokens or request.max_tokens
        limit = context.room(request, [self.prompt], wanted, "messages")
        logprobs = request.top_logprobs or 0 if request.logprobs else None
        options = request.options(context.conversation_defaults, limit, logprobs)
        if request.prediction is not None:
            expected = "".join(texts_of(request.prediction.content))
            ids = context.prompts.text(context.check_length(expected, "prediction"), False)
            options = dataclasses.replace(options, prediction=ids)
        return Choices(
            context, [self.prompt], request.n, options, request.stop,
            grammar=grammar, with_control_tokens=self._shows_control(tools),
        )  # fmt: skip


def prepared(request: ConversationRequest, context: ServingContext) -> tuple[ToolUse, list[int]]:
    """The tools, and the prompt's ids."""
    try:
        tools = context.tool_calling.use(request.tools, request.tool_choice, request.parallel_tool_calls)
        rendered = context.prompts.rendered(
            tools.messages([message.plain() for message in request.messages]),
            tools=tools.template_tools,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
        )
        return tools, context.prompts.encode(context.check_length(rendered, "messages"))
    except RequestError:
        raise
    except Exception as error:  # a template is the makers' program, run on a client's data
        raise RequestError(str(error), "messages") from None


@dataclass
class Block:
    """A part of an answer. kind: "reasoning", "text" or "call"; text: of a call its arguments."""

    kind: str
    id: str = ""
    name: str = ""
    text: str = ""


class Blocks(list[Block]):
    """The parts of one choice, put together from deltas."""

    def push(self, delta: dict[str, Any]) -> Iterator[tuple[Block, str]]:
        """Blocks with the text that is new in them; a new block first comes without text."""
        for kind, name in (("reasoning", "reasoning_content"), ("text", "content")):
            if text := delta.get(name):
                if not self or self[-1].kind != kind:
                    self.append(Block(kind))
                    yield self[-1], ""
                yield self._more(text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                self.append(Block("call", call["id"], call["function"]["name"]))
                yield self[-1], ""
            if text := call["function"].get("arguments"):
                yield self._more(text)

    def text(self, kind: str) -> str:
        """Of all blocks of a kind."""
        return "".join(block.text for block in self if block.kind == kind)

    def _more(self, text: str) -> tuple[Block, str]:
        self[-1].text += text
        return self[-1], text
