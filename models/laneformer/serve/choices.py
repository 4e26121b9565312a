"""The choices of an answer: each is a request of the scheduler, read as text up to a stop string.

engine/decoder.py lists the types that a new token passes through.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..engine import Batch, GeneratedToken, GenerationOptions, PromptLogprobs
from ..engine.decoder import Request
from ..engine.options import batch_seeds
from ..engine.text import StopStrings, TextStream
from .context import ServingContext
from .grammar import AnswerGrammar
from .scheduler import Running
from .schema import make_option_error


class Written(NamedTuple):
    """A token, and where its text begins in the text of its choice (characters)."""

    token: GeneratedToken
    offset: int


class Piece(NamedTuple):
    """What one choice has gained: text that no stop string can take back, and its tokens."""

    choice: int
    text: str = ""
    tokens: Sequence[Written] = ()  # of the text, where log-probabilities are wanted
    ids: Sequence[int] = ()  # all that came
    finish_reason: str | None = None
    scores: PromptLogprobs | None = None  # of the prompt, in the first piece
    stop: str | None = None  # the stop string that ended the choice


class Usage(NamedTuple):
    """The tokens of an answer so far."""

    prompt: int
    completion: int
    reasoning: int
    # What the engine reports at the end; cached is None until then
    cached: int | None = None
    proposed: int = 0
    accepted: int = 0


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    tokens = [token for piece in pieces for token in piece.tokens]
    ids = [i for piece in pieces for i in piece.ids]
    text = "".join(piece.text for piece in pieces)
    return Piece(pieces[0].choice, text, tokens, ids, pieces[-1].finish_reason)


@dataclass
class Writing:
    """Tokens to text as they come, up to a stop id or a stop string."""

    stream: TextStream
    stops: StopStrings
    stop_ids: Sequence[int]
    detailed: bool
    # Report a stop id among the tokens although it has no text: evaluations that score a prompt
    # expect exactly one new token behind it.
    scores_stop: bool
    read: int = 0  # tokens
    decoded_chars: int = 0
    released_chars: int = 0
    pending: deque[Written] = field(default_factory=deque)  # tokens whose text is not out yet

    def push(self, tokens: Sequence[GeneratedToken]) -> tuple[str, list[Written]]:
        """Return text that is certainly part of the answer, and its tokens."""
        out = ""
        for token in tokens:
            self.read += 1
            if token.id in self.stop_ids:
                if self.scores_stop:
                    self.pending.append(Written(token, self.decoded_chars))
                break
            text = self.stream.push(token.id)
            if self.detailed:
                self.pending.append(Written(token, self.decoded_chars))
                self.decoded_chars += len(text)
            out += self.stops.push(text) if self.stops.stops else text
            if self.stop is not None:
                break
        return out, self._release(out)

    def finish(self) -> tuple[str, list[Written]]:
        """Return what was held back for a character or a stop string that never came."""
        out = "" if self.stop else self.stops.push(self.stream.finish()) + self.stops.finish()
        return out, self._release(out, everything=self.stop is None)

    @property
    def stop(self) -> str | None:
        return self.stops.found

    def _release(self, out: str, everything: bool = False) -> list[Written]:
        self.released_chars += len(out)
        released = []
        # A token is released once its text has begun to appear
        while self.pending and (everything or self.pending[0].offset < self.released_chars):
            released.append(self.pending.popleft())
        return released


@dataclass
class Choices:
    """`begin` submits the first request; then iterate over the pieces of all choices."""

    context: ServingContext
    prompts: Sequence[list[int]]
    n: int  # choices of each prompt
    options: GenerationOptions | None  # None: generate nothing
    stops: Sequence[str]
    score_top: int | None = None  # score the prompts, with this many likeliest ids
    grammar: AnswerGrammar | None = None  # each choice gets a copy
    with_control_tokens: bool = False  # spell them out in the text
    unused: list[str] = field(default_factory=list)  # parts without effect, for `warnings`
    reasoning_tokens: int = 0  # counted by whoever reads the text

    def __post_init__(self) -> None:
        self.generated = [0] * (len(self.prompts) * self.n)  # tokens of each choice
        self._runs: list[Running] = []
        self._generating: dict[int, Running] = {}  # by choice
        # The engine reads a prompt once for all its choices that wait; more than decode side by
        # side would only fill the queue of others
        self._room = asyncio.Semaphore(self.context.scheduler.max_joined)
        self._ready: dict[int, Running] = {}  # by choice: begun, and not read yet

    def load_prefixes(self) -> None:
        """Load what the prefix cache has on disk, outside of the event loop, where streams would wait."""
        for prompt in self.prompts:
            self.context.scheduler.engine.load_prefix(prompt)

    def begin(self) -> None:
        """Submit the first request, on the event loop; RequestError where the engine refuses it."""
        if running := self._submit_scoring(0) or self._submit_generation(0):
            self._ready[0] = running

    def cancel(self) -> None:
        """End everything that waits or runs; may be called again."""
        for running in self._runs:
            running.cancel()

    def count_usage(self) -> Usage:
        read = sum(map(len, self.prompts))
        usage = Usage(read, sum(self.generated), self.reasoning_tokens)
        ended = {
            choice: running.statistics
            for choice, running in self._generating.items()
            if running.statistics is not None
        }
        if len(ended) < len(self._generating):
            return usage
        # The tokens of a prompt are reused for each of its choices, and count once
        firsts = [counts for choice, counts in ended.items() if choice % self.n == 0]
        return usage._replace(
            cached=sum(counts.reused_tokens for counts in firsts),
            proposed=sum(counts.proposed_tokens for counts in ended.values()),
            accepted=sum(counts.accepted_tokens for counts in ended.values()),
        )

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        pieces = self._follow_choice(0) if len(self.generated) == 1 else self._merge_choices()
        try:
            async for piece in pieces:
                yield piece
        finally:
            self.cancel()

    async def _merge_choices(self) -> AsyncGenerator[Piece, None]:
        # Pieces of all choices, and the tasks of those that have ended
        events: asyncio.Queue[Piece | asyncio.Task[None]] = asyncio.Queue()

        async def follow(choice: int) -> None:
            async for piece in self._follow_choice(choice):
                events.put_nowait(piece)

        tasks = [asyncio.create_task(follow(choice)) for choice in range(len(self.generated))]
        for task in tasks:
            task.add_done_callback(events.put_nowait)
        try:
            unfinished = len(tasks)
            while unfinished:
                piece = await events.get()
                if isinstance(piece, Piece):
                    yield piece
                else:
                    piece.result()  # raises the exception of its choice
                    unfinished -= 1
        finally:
            for task in tasks:
                task.cancel()

    async def _follow_choice(self, choice: int) -> AsyncGenerator[Piece, None]:
        # A prompt that is scored is read by a request of its own, before the tokens are drawn
        async with self._room:
            if running := self._submit_scoring(choice):
                async for _ in running:
                    pass
                yield Piece(choice, scores=running.scores)
            if running := self._submit_generation(choice):
                self._generating[choice] = running
                async for piece in self._follow_generation(choice, running):
                    yield piece
            else:
                yield Piece(choice, finish_reason="length")

    async def _follow_generation(
        self, choice: int, running: Running
    ) -> AsyncGenerator[Piece, None]:
        assert self.options is not None
        prompt = self.prompts[choice // self.n]
        stream = TextStream(
            self.context.tokenizer, prompt, skip_special_tokens=not self.with_control_tokens
        )
        detailed = self.options.logprobs is not None
        scores_stop = self.score_top is not None
        writing = Writing(
            stream, StopStrings(self.stops), running.request.stop_ids, detailed, scores_stop
        )
        async for tokens in running:
            if writing.stop is not None:
                continue  # these came before the engine knew of the stop string
            read_before = writing.read
            text, written = writing.push(tokens)
            if writing.stop is not None:
                running.cancel()
            self.generated[choice] = writing.read
            yield Piece(
                choice, text, written, [token.id for token in tokens[: writing.read - read_before]]
            )
        text, written = writing.finish()
        reason = running.finish_reason if writing.stop is None else "stop"
        yield Piece(choice, text, written, (), reason, stop=writing.stop)

    def _submit_scoring(self, choice: int) -> Running | None:
        ids = self.prompts[choice // self.n]
        top = self.score_top
        if top is None or len(ids) < 2:
            return None
        return self._submit(choice, lambda batch: batch.scoring(ids, top=top))

    def _submit_generation(self, choice: int) -> Running | None:
        if self.options is None:
            return None
        assert isinstance(self.options.seed, int)
        # Each choice has the seed that it would have in a batch of the engine
        seed = batch_seeds(self.options.seed, choice + 1)[choice]
        options = {**vars(self.options), "seed": seed, "masked": self.grammar is not None}
        prompt = self.prompts[choice // self.n]
        return self._submit(choice, lambda batch: batch.generation(prompt, **options), self.grammar)

    def _submit(
        self, choice: int, make: Callable[[Batch], Request], grammar: AnswerGrammar | None = None
    ) -> Running:
        if running := self._ready.pop(choice, None):
            return running
        scheduler = self.context.scheduler
        try:
            request = make(scheduler.batch)
        except ValueError as error:
            raise make_option_error(error) from None
        own_grammar = grammar and grammar.copy()
        self._runs.append(scheduler.submit(request, own_grammar, admitted=bool(self._runs)))
        return self._runs[-1]
