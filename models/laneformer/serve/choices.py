"""The choices of one answer: prompts x n requests of the scheduler, each read as text up to a stop string.

The engine reads a prompt once for all choices that wait for it; not more of them are
submitted than can decode.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple

from ..engine import Batch, GeneratedToken, GenerationOptions, PromptLogprobs
from ..engine.decoder import Request
from ..engine.options import batch_seeds
from ..engine.text import StopStrings, TextStream
from .context import ServingContext
from .grammar import AnswerGrammar
from .scheduler import Running
from .schema import refusal_of


class Written(NamedTuple):
    """A token, and where its text begins in the choice's text (characters)."""

    token: GeneratedToken
    offset: int


class Piece(NamedTuple):
    """What is new of one choice. tokens: those of the text, where they have log-probabilities;
    ids: all that came.

    scores: of the prompt, where they are wanted: in the first piece. stop: the stop string that ended it.
    """

    choice: int
    text: str = ""
    tokens: Sequence[Written] = ()
    ids: Sequence[int] = ()
    finish_reason: str | None = None
    scores: PromptLogprobs | None = None
    stop: str | None = None


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """All pieces of one choice as one."""
    tokens = [token for piece in pieces for token in piece.tokens]
    ids, text = [i for piece in pieces for i in piece.ids], "".join(piece.text for piece in pieces)
    return Piece(pieces[0].choice, text, tokens, ids, pieces[-1].finish_reason)


class Writing:
    """Tokens to text while they come, no further than a stop id or a stop string.

    scores_stop: a stop id has no text, but is among the tokens: who scores a prompt counts on one
    new token behind it.
    """

    def __init__(
        self,
        stream: TextStream,
        stops: Sequence[str],
        stop_ids: Sequence[int],
        detailed: bool,
        scores_stop: bool,
    ):
        self.read = 0  # tokens
        self._stream, self._stops, self._stop_ids = stream, StopStrings(stops), frozenset(stop_ids)
        self._detailed, self._scores_stop = detailed, scores_stop
        self._held: deque[Written] = deque()  # their text is not out yet
        self._decoded = self._shown = 0  # characters

    def push(self, tokens: Sequence[GeneratedToken]) -> tuple[str, list[Written]]:
        """Text that is certainly part of the answer, and its tokens."""
        out = ""
        for token in tokens:
            self.read += 1
            if token.id in self._stop_ids:
                if self._scores_stop:
                    self._held.append(Written(token, self._decoded))
                break
            text = self._stream.push(token.id)
            if self._detailed:
                self._held.append(Written(token, self._decoded))
                self._decoded += len(text)
            out += self._stops.push(text) if self._stops.stops else text
            if self.stop is not None:
                break
        return out, self._release(out)

    def finish(self) -> tuple[str, list[Written]]:
        """What was held back for a character or a stop string that never came."""
        out = "" if self.stop else self._stops.push(self._stream.finish()) + self._stops.finish()
        return out, self._release(out, everything=self.stop is None)

    @property
    def stop(self) -> str | None:
        """The stop string that has ended it."""
        return self._stops.found

    def _release(self, out: str, everything: bool = False) -> list[Written]:
        self._shown += len(out)
        released = []
        while self._held and (everything or self._held[0].offset < self._shown):
            released.append(self._held.popleft())
        return released


class Choices:
    """`begin` submits the first request; then iterate for the pieces of all choices as they come."""

    def __init__(
        self,
        context: ServingContext,
        prompts: Sequence[list[int]],
        n: int,
        options: GenerationOptions | None,
        stops: Sequence[str],
        score_top: int | None = None,
        grammar: AnswerGrammar | None = None,
        with_control_tokens: bool = False,
    ):
        """options: None to generate nothing. score_top: score the prompts, with this many likeliest ids.
        grammar: every choice gets a copy. with_control_tokens: spell them out in the text.
        """
        for prompt in prompts:  # here, in a thread of its own: no stream waits for the disk
            context.scheduler.engine.load_prefix(prompt)
        self.context, self.prompts, self.n = context, prompts, n
        self.generated = [0] * (len(prompts) * n)  # tokens of each choice
        self.options, self._stops, self._score_top, self._grammar = (
            options,
            stops,
            score_top,
            grammar,
        )
        self._control = with_control_tokens
        self.unused: list[str] = []  # what of the request has no effect, for its header `warnings`
        self._runs: list[Running] = []
        self._generating: dict[int, Running] = {}  # by choice
        self._room = asyncio.Semaphore(context.scheduler.max_joined)
        self._ready: Running | None = None  # the first request, until it is read

    def begin(self) -> None:
        """On the event loop. RequestError for what the engine refuses; further errors as of `Scheduler.submit`."""
        self._ready = self._score(0) or self._generate(0)

    def cancel(self) -> None:
        """End everything that still waits or runs. Safe to call again."""
        for running in self._runs:
            running.cancel()

    def used(self, name: str) -> int | None:
        """Sum of a field of `Statistics`, reused tokens of each prompt once; None before the end."""
        statistics = [
            running.statistics
            for choice, running in sorted(self._generating.items())
            if name != "reused_tokens" or choice % self.n == 0
        ]
        return None if None in statistics else sum(getattr(one, name) for one in statistics)

    async def __aiter__(self) -> AsyncGenerator[Piece, None]:
        pieces = self._choice(0) if len(self.generated) == 1 else self._merge_choices()
        try:
            async for piece in pieces:
                yield piece
        finally:
            self.cancel()

    async def _merge_choices(self) -> AsyncGenerator[Piece, None]:
        news: asyncio.Queue[Piece | asyncio.Task[None]] = asyncio.Queue()

        async def follow(choice: int) -> None:
            async for piece in self._choice(choice):
                news.put_nowait(piece)

        tasks = [asyncio.create_task(follow(choice)) for choice in range(len(self.generated))]
        for task in tasks:
            task.add_done_callback(news.put_nowait)
        try:
            left = len(tasks)
            while left:
                piece = await news.get()
                if isinstance(piece, Piece):
                    yield piece
                else:
                    piece.result()  # raises what has ended it
                    left -= 1
        finally:
            for task in tasks:
                task.cancel()

    async def _choice(self, choice: int) -> AsyncGenerator[Piece, None]:
        async with self._room:
            if running := self._score(choice):
                async for _ in running:
                    pass
                yield Piece(choice, scores=running.scores)
            if running := self._generate(choice):
                self._generating[choice] = running
                async for piece in self._written(choice, running):
                    yield piece
            else:
                yield Piece(choice, finish_reason="length")

    async def _written(self, choice: int, running: Running) -> AsyncGenerator[Piece, None]:
        assert self.options is not None
        prompt = self.prompts[choice // self.n]
        stream = TextStream(self.context.tokenizer, prompt, skip_special_tokens=not self._control)
        detailed, scores_stop = self.options.logprobs is not None, self._score_top is not None
        writing = Writing(stream, self._stops, running.request.stop_ids, detailed, scores_stop)
        async for tokens in running:
            if writing.stop is not None:
                continue  # they came before the engine heard of it
            before = writing.read
            text, written = writing.push(tokens)
            if writing.stop is not None:
                running.cancel()
            self.generated[choice] = writing.read
            yield Piece(
                choice, text, written, [token.id for token in tokens[: writing.read - before]]
            )
        text, written = writing.finish()
        reason = running.finish_reason if writing.stop is None else "stop"
        yield Piece(choice, text, written, (), reason, stop=writing.stop)

    def _score(self, choice: int) -> Running | None:
        ids, top = self.prompts[choice // self.n], self._score_top
        if top is None or len(ids) < 2:
            return None
        return self._submit(lambda batch: batch.scoring(ids, top=top))

    def _generate(self, choice: int) -> Running | None:
        if self.options is None:
            return None
        assert isinstance(self.options.seed, int)
        seed = batch_seeds(self.options.seed, choice + 1)[choice]
        options = {**vars(self.options), "seed": seed, "masked": self._grammar is not None}
        prompt = self.prompts[choice // self.n]
        return self._submit(lambda batch: batch.generation(prompt, **options), self._grammar)

    def _submit(
        self, make: Callable[[Batch], Request], grammar: AnswerGrammar | None = None
    ) -> Running:
        if self._ready is not None:  # this is the first choice's first request
            running, self._ready = self._ready, None
            return running
        scheduler = self.context.scheduler
        try:
            request = make(scheduler.batch)
        except ValueError as error:
            raise refusal_of(error) from None
        own_grammar = grammar and grammar.copy()
        self._runs.append(scheduler.submit(request, own_grammar, admitted=bool(self._runs)))
        return self._runs[-1]
