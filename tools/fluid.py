"""Time of a token on one GPU: a fluid model of the CUDA kernel's rings and stalls.

Each block (one a multiprocessor) consumes weights out of its rings at the rate C of its arithmetic, and the
memory fills them at F, its share of the bandwidth. While an exchange holds a block up, its rings fill; when
they are full, the memory stands idle. Afterwards they drain at C - F until they are empty, and the block runs
at F. Blocks of a lane are alike, and lanes wait for each other where their joins do: one whose rings are full
leaves its share of the bandwidth to the others.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

TOKENS = 8


@dataclass(frozen=True)
class Step:
    """Bytes that a block consumes at no more than `rate` (bytes/us), and how long an exchange
    then holds it up.

    behind: the exchange waits until all lanes have done this step but so many before it; None:
    for no other lane.
    """

    bytes: float
    rate: float
    stall_us: float
    behind: int | None


@dataclass
class Lane:
    """One block of a lane: bytes in its rings, bytes left of its step, then us left of a stall, steps done."""

    ring: float
    left: float
    stall_us: float = 0.0
    waiting: bool = False
    done: int = 0


@dataclass(frozen=True)
class Memory:
    """Bytes/us: of all lanes' blocks together, one of each lane; into one block. And bytes
    of a block's rings.
    """

    rate: float
    port: float
    ring: float


def token_us(steps: Sequence[Step], lanes: int, memory: Memory, jitter: float, tokens: int = TOKENS) -> float:
    """Microseconds of a token, after a first one."""
    draw, clock = random.Random(0), 0.0
    ends: list[float] = []
    state = [Lane(memory.ring, steps[0].bytes) for _ in range(lanes)]
    while len(ends) < tokens + 2:
        while any(go_on(lane, state, steps, jitter, draw) for lane in state):
            if not state[0].waiting and state[0].done == len(steps) * (len(ends) + 1):
                ends.append(clock)
        rates = [steps[lane.done % len(steps)].rate if working(lane) else 0.0 for lane in state]
        wanted = [
            memory.port if lane.ring < memory.ring else rate for lane, rate in zip(state, rates, strict=True)
        ]
        filled = shared_out(wanted, memory.rate)
        used = [min(r, f) if lane.ring <= 0 else r for lane, r, f in zip(state, rates, filled, strict=True)]
        step_us = min(
            us for each in zip(state, used, filled, strict=True) for us in next_events(*each, memory.ring)
        )
        clock += step_us
        for lane, use, fill in zip(state, used, filled, strict=True):
            lane.left -= use * step_us
            lane.stall_us -= step_us
            lane.ring = snapped(lane.ring + (fill - use) * step_us, memory.ring)
    return (ends[-1] - ends[1]) / tokens


def working(lane: Lane) -> bool:
    return not lane.waiting and lane.stall_us <= 0


def go_on(
    lane: Lane, state: Sequence[Lane], steps: Sequence[Step], jitter: float, draw: random.Random
) -> bool:
    """From the end of a step into its stall, when no lane is awaited; true if something has changed."""
    if working(lane) and lane.left <= 1e-3:
        lane.waiting, lane.done = True, lane.done + 1
    ended = steps[(lane.done - 1) % len(steps)]
    if not lane.waiting or any(
        other.done < lane.done - ended.behind for other in state if ended.behind is not None
    ):
        return False
    lane.waiting, lane.left = False, steps[lane.done % len(steps)].bytes
    lane.stall_us = ended.stall_us * (1 + jitter * (2 * draw.random() - 1))
    return True


def shared_out(demands: Sequence[float], rate: float) -> list[float]:
    """Equal shares of the rate; what a lane does not want, the others get."""
    given, left = [0.0] * len(demands), rate
    for count, i in enumerate(sorted(range(len(demands)), key=demands.__getitem__)):
        given[i] = min(demands[i], left / (len(demands) - count))
        left -= given[i]
    return given


def next_events(lane: Lane, used: float, filled: float, ring: float) -> Iterator[float]:
    """Microseconds until its step or stall ends, its rings are full or empty; at least a
    thousandth of a nanosecond.
    """
    if used > 0:
        yield max(lane.left / used, 1e-6)
    if lane.stall_us > 0:
        yield max(lane.stall_us, 1e-6)
    if filled > used and lane.ring < ring:
        yield max((ring - lane.ring) / (filled - used), 1e-6)
    if filled < used and lane.ring > 0:
        yield max(lane.ring / (used - filled), 1e-6)


def snapped(level: float, ring: float) -> float:
    """Full and empty are exact, so that rounding makes no events."""
    return ring if level > ring - 0.01 else level if level > 0.01 else 0.0
