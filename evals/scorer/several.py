"""Several devices that share one evaluation: a process each, which takes every n-th item."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from evals.scorer.base import Answer, AnyPrompt, Prompt, Scorer, Scores
from records.workers import end_with_parent

CHUNK = 16  # items that a process gets at a time, which it may pack into one pass
AHEAD = 4  # chunks that wait at each process

_own: Scorer  # of a worker process


def _open(opener: Callable[[], Scorer]) -> None:
    global _own
    end_with_parent()
    _own = opener()


def _about() -> tuple[str, str, str | None, int, int]:
    return _own.backend, _own.device, _own.dtype, _own.max_length, _own.scoring_room


def _score(items: list[Sequence[Prompt]]) -> list[list[Scores]]:
    return list(_own.score(items))


def _generate(*arguments: Any, **sampling: Any) -> Answer:
    return _own.generate(*arguments, **sampling)


class SeveralScorers(Scorer):
    """Scorers of the same model in processes of their own. openers: each makes one (picklable)."""

    def __init__(self, folder: Path, openers: Sequence[Callable[[], Scorer]]):
        super().__init__(folder)
        spawn = multiprocessing.get_context("spawn")
        self._workers = [ProcessPoolExecutor(1, spawn, _open, (opener,)) for opener in openers]
        about = [worker.submit(_about) for worker in self._workers]  # all of them load at once
        found = [future.result() for future in about]
        self.backend, _, self.dtype, self.max_length, self.scoring_room = found[0]
        self.device, self.parallel = ",".join(each[1] for each in found), len(openers)
        self._turn = itertools.count()

    def score(self, items: Iterable[Sequence[Prompt]]) -> Iterator[list[Scores]]:
        left, waiting = iter(items), deque[Future[list[list[Scores]]]]()
        turns = itertools.cycle(self._workers)
        while chunk := list(itertools.islice(left, CHUNK)):
            waiting.append(next(turns).submit(_score, chunk))
            if len(waiting) > AHEAD * len(self._workers):
                yield from waiting.popleft().result()
        for future in waiting:
            yield from future.result()

    def generate(
        self, prompt: AnyPrompt, max_new_tokens: int, stops: Sequence[str] = (), **sampling: Any
    ) -> Answer:
        worker = self._workers[next(self._turn) % len(self._workers)]
        return worker.submit(_generate, prompt, max_new_tokens, stops, **sampling).result()

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown()
