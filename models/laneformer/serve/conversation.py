"""One conversation and its answer in blocks, into which and from which each API translates.

engine/decoder.py lists the types that a new token passes through.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from ..chat import ChatError
from ..engine.channels import ANSWER, BEGIN, END, NEXT, AnswerReader, begins_reasoning
from ..engine.text import TextStream
from .bodies import RequestError
from .choices import Choices, Piece
from .context import ServingContext
from .grammar import AnswerGrammar, Grammar, ReasoningBudget
from .parts import is_cut, list_texts
from .schema import ConversationRequest
from .tool_calls import ToolUse

UNLIMITED = -1  # tokens of reasoning
ENDING = f"\n{END}\n\n"  # is forced where a reasoning has used up its budget
ID_CHARS = 9  # of a call's id, as Mistral's templates take it


@dataclass(eq=False)
class Block:
    """A reasoning, a text or a call in an answer."""

    kind: str  # "reasoning", "text" or "call"
    index: int  # its place in the answer
    name: str = ""  # of the function that a call is for
    text: str = ""  # of a call, its arguments
    is_cut: bool = False  # the answer has ended within it
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:ID_CHARS])


Part = tuple[Block, str]  # a block and its new text, which is empty when the block begins


class ChoiceAnswer:
    """The blocks of one choice, as its text comes."""

    def __init__(self, reader: AnswerReader):
        self.blocks: list[Block] = []
        self.reader = reader
        self._call_id = ""

    def push(self, piece: Piece) -> tuple[Piece, list[Part]]:
        """Return the piece, whose end may become that of a call, and what is new in the blocks."""
        deltas = self.reader.push(piece.text)
        if piece.finish_reason is not None:
            deltas += self.reader.finish()
        parts = [part for kind, text in deltas for part in self._add_delta(kind, text)]
        if piece.finish_reason is not None and self.blocks:
            last = self.blocks[-1]
            last.is_cut = (
                is_cut(last.text) if last.kind == "call" else piece.finish_reason == "length"
            )
            if piece.finish_reason == "stop" and self.list_calls() and not last.is_cut:
                piece = piece._replace(finish_reason="tool_calls")
        return piece, parts

    def join_text(self, kind: str) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def list_calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    def _add_delta(self, kind: str, text: str) -> Iterator[Part]:
        if kind == "id":
            # Models repeat ids; a call needs one of its own
            self._call_id = "" if text in (block.id for block in self.blocks) else text
            return
        # Arguments continue the call, and text of one kind continues its block
        block = self.blocks[-1] if self.blocks else None
        if block is None or kind == "call" or kind not in ("arguments", block.kind):
            block = Block(kind, len(self.blocks), name=text if kind == "call" else "")
            block.id = self._call_id or block.id
            self._call_id = ""
            self.blocks.append(block)
            yield block, ""
        if kind != "call":
            block.text += text
            yield block, text


class Conversation:
    """A conversation's prompt and grammars; RequestError for what cannot be answered."""

    def __init__(self, request: ConversationRequest, context: ServingContext):
        # Outside of the event loop: to render, to encode and to compile takes time
        self.request = request
        self.context = context
        tools, self.prompt = prepare_prompt(request, context)
        # Control tokens are read as text: they stand around calls, and between harmony's messages
        self.reads_control = bool(tools.names) or context.harmony
        grammar = self._make_grammar(tools)
        # Which answers may reason, and which begin inside a reasoning, that the prompt has opened:
        #
        #   format of the model     answer allowed       prompt opens one   may reason   begins inside
        #   harmony                 any                  never              yes          no
        #   others                  text, optional call  yes                yes          yes
        #   others, with <think>    text, optional call  no                 yes          no
        #   others, without         text, optional call  no                 no           no
        #   others                  schema, forced call  either             no           no
        #
        # In the last row the grammar has no place for a reasoning; those of harmony have one.
        allows_text = grammar is None or (tools.optional and tools.form is not None)
        begins_inside = allows_text and (
            continues_reasoning(request) or begins_reasoning(context.tokenizer, self.prompt)
        )
        may_reason = context.harmony or (allows_text and (begins_inside or context.reasons))
        reader = partial(AnswerReader, tools.form, begins_inside, context.harmony)
        self.choices = self._make_choices(
            self._add_budget(reader, grammar) if may_reason else grammar
        )
        self.choices.unused = tools.unused
        self.answers = [ChoiceAnswer(reader()) for _ in range(request.n)]

    async def __aiter__(self) -> AsyncGenerator[tuple[Piece, list[Part]], None]:
        async for piece in self.choices:
            answer = self.answers[piece.choice]
            # Read the state before the piece: tokens of the end tag count as reasoning
            if answer.reader.inside:
                self.choices.reasoning_tokens += len(piece.ids)
            yield answer.push(piece)

    def _make_grammar(self, tools: ToolUse) -> Grammar | None:
        form = self.request.response_format
        calls = tools.make_grammar()
        if form.type == "text":
            return calls
        if calls:
            message = "response_format cannot be combined with tools; send one of them"
            raise RequestError(message, "response_format")
        return self.context.grammars.compile_schema(*form.find_schema())

    def _add_budget(
        self, reader: Callable[[], AnswerReader], grammar: Grammar | None
    ) -> AnswerGrammar | None:
        """Return the grammar of an answer that may reason, with the end of a reasoning over its budget."""
        context = self.context
        tokens = self.request.reasoning_budget
        tokens = context.reasoning_budget if tokens is None else tokens
        if tokens == UNLIMITED:
            return grammar
        tokenizer = context.tokenizer
        ending = ENDING
        if context.harmony:
            # A grammar allows no second reasoning; without a grammar the answer itself is begun
            ending = NEXT if grammar else f"{NEXT}{ANSWER}"
        ids = tokenizer.encode(ending, add_special_tokens=False).ids
        stream = partial(TextStream, tokenizer, (), not self.reads_control)
        return ReasoningBudget(tokens, reader, ids, stream, context.vocab_size, grammar)

    def _make_choices(self, grammar: AnswerGrammar | None) -> Choices:
        request = self.request
        context = self.context
        max_tokens = request.max_completion_tokens or request.max_tokens
        limit = context.limit_tokens(request, [self.prompt], max_tokens, "messages")
        logprobs = request.top_logprobs or 0 if request.logprobs else None
        options = request.generation_options(context.conversation_defaults, limit, logprobs)
        if request.prediction is not None:
            prediction = "".join(list_texts(request.prediction.content))
            ids = context.prompt_encoder.encode_text(
                context.check_length(prediction, "prediction"), False
            )
            options = dataclasses.replace(options, prediction=ids)
        return Choices(
            context,
            [self.prompt],
            request.n,
            options,
            request.stop,
            grammar=grammar,
            with_control_tokens=self.reads_control,
        )


def continues_reasoning(request: ConversationRequest) -> bool:
    """Return whether the message that the answer continues ends within its reasoning."""
    text = "\n".join(list_texts(request.messages[-1].content))
    return request.continue_final_message and text.rfind(BEGIN) > text.rfind(END)


def prepare_prompt(
    request: ConversationRequest, context: ServingContext
) -> tuple[ToolUse, list[int]]:
    """Return the tools of a request, and the ids of its prompt."""
    encoder = context.prompt_encoder
    if encoder.missing:
        raise RequestError(encoder.missing, "messages")
    tools = context.tool_calling.select_tools(request)
    messages = tools.translate_messages([message.to_template() for message in request.messages])
    try:
        rendered = encoder.render(
            messages,
            tools=tools.template_tools,
            add_generation_prompt=request.add_generation_prompt,
            variables=request.chat_template_kwargs,
            continue_final=request.continue_final_message,
        )
    except ChatError as error:
        raise RequestError(str(error), "messages") from None
    return tools, encoder.encode(context.check_length(rendered, "messages"))
