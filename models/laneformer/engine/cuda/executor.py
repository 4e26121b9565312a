"""CudaExecutor: runs the passes that the schedule plans (schedule/schedule.h) in one host thread."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch

from ..cpu import _core
from ..decoder import Sampling, Unanswered
from .launch import NotResident
from .passes import PassRunner
from .prefill import scores_of
from .structures import Column

# the others wait for a chunk: 10 ms for the weights of `2b` and 9 for so many ids, both calculated
PROMPT_CHUNK_TOKENS = 1024
LONGEST_END_S = 10.0  # of a pass, when the interpreter ends
# after a launch that is refused, as others have the GPU's multiprocessors
RETRIES_S = (0.01, 0.1, 1.0)


class CudaExecutor:
    """Run passes in a thread that sleeps where nothing can run, and ends with this object.

    An error of the GPU ends all requests, and no further one can join: nothing in device memory can be
    trusted. `has_hung`: whether a launch has never ended.
    """

    has_hung = False

    def __init__(self, passes: PassRunner):
        self.passes: PassRunner | None = passes
        limits = _core.Limits(passes.config.vocab_size, passes.config.max_position_embeddings)
        limits.columns, limits.sequences, limits.extra_passes = (
            passes.columns,
            passes.sequences,
            passes.extra_passes,
        )
        limits.max_chunk_tokens, limits.unread, limits.paced, limits.picks = (
            PROMPT_CHUNK_TOKENS,
            passes.unread,
            False,
            True,
        )
        self.schedule = _core.Schedule(limits, passes.caches.shape())
        shape = passes.columns, passes.config.vocab_size
        self._logits = torch.empty(shape, device=passes.caches.memories[0].device)
        arguments = self.schedule, weakref.ref(self)
        thread = threading.Thread(
            target=run_when_woken, args=arguments, name="laneformer-passes", daemon=True
        )
        thread.start()
        weakref.finalize(self, close_schedule, self.schedule, thread)

    def close(self) -> None:
        self.schedule.close()

    def run(self) -> None:
        assert self.passes is not None
        results: dict[str, Any] = {}
        try:
            while (plan := self.schedule.next(**results)) is not None:
                results = self._pass(self.passes, plan)
        except Exception as error:
            self.has_hung = isinstance(error, Unanswered)
            reason = str(error).partition("\n")[0]  # torch's has advice for developers below
            self.schedule.fail(
                f"the GPU has failed, and with it all requests: {reason or type(error).__name__}"
            )

    def _pass(self, passes: PassRunner, plan: _core.Pass) -> dict[str, Any]:
        """Run a pass; return its results as arguments of `Schedule.next`."""
        for op in plan.ops:
            passes.caches.apply(op)
        if plan.chunk_tokens:
            return self._read_result(passes, plan)
        if not (columns := plan.columns):
            return {}
        rows = plan.logit_columns  # of the logits that the schedule draws from
        draws = {place: plan.draw(place) for place in {column.sequence for column in columns}}
        inputs = [column_of(column, draws[column.sequence]) for column in columns]
        look = (lambda rows: self.schedule.interrupts()) if plan.extra_passes else None
        try:
            picked = launch(passes, inputs, plan.extra_passes, self._logits if rows else None, look)
        except NotResident as error:
            return {
                "error": f"the GPU runs something else beside the engine, try again later: {error}"
            }
        results: dict[str, Any] = {"picked": np.array(picked, np.int32)}
        return {**results, "logits": self._logits[rows].cpu().numpy()} if rows else results

    def _read_result(self, passes: PassRunner, plan: _core.Pass) -> dict[str, Any]:
        chunk, start = self.schedule.prompt_chunk(), plan.start
        ids, row = chunk.ids, chunk.first_row
        try:
            for logits in passes.read(ids[: plan.chunk_tokens], start.cache, start.position, row):
                if chunk.keeps_logits:
                    self.schedule.keep_logits(row, logits.cpu().numpy())
                targets = ids[row + 1 - start.position :][: len(logits)]
                scores = scores_of(logits[: len(targets)], targets, chunk.top)
                self.schedule.score_chunk(row, *(values.numpy() for values in scores))
                row += len(logits)
        except torch.OutOfMemoryError as error:
            return {"error": f"the GPU has no memory for this request: {error}"}
        return {}


def launch(passes: PassRunner, *columns: Any) -> list[list[int]]:
    """Run passes; raise NotResident where the driver refuses the launch for a while."""
    for wait_s in RETRIES_S:
        with contextlib.suppress(NotResident):
            return passes.run(*columns)
        time.sleep(wait_s)
    return passes.run(*columns)


def column_of(column: _core.Column, draw: _core.Draw) -> Column:
    """Return a column as the kernel takes it; its sequence is the cache."""
    stops = draw.stops
    # without effect where the schedule draws
    rule = Sampling.from_buffer_copy(draw.rule)
    return Column(column.token, column.position, column.cache, 0, len(stops), tuple(stops), rule)


def close_schedule(schedule: _core.Schedule, thread: threading.Thread) -> None:
    """Close the schedule and wait for its thread, which must not outlive what it calls."""
    schedule.close()
    if thread is not threading.current_thread():
        thread.join(LONGEST_END_S)
    schedule.fail("the engine on the GPU is closed")  # whoever still waits


def run_when_woken(schedule: _core.Schedule, executor_ref: weakref.ref[CudaExecutor]) -> None:
    # a weak reference: the executor may be dropped while this sleeps
    while schedule.wait():
        if (executor := executor_ref()) is None:
            return
        executor.run()
        del executor
    if (executor := executor_ref()) is not None:
        executor.passes = None
        torch.cuda.empty_cache()
