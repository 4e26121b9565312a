"""When one token is through: modules in order, each waiting for the exchanges that its join needs.

A delay of d layers hides a link as slow as d layers. Beyond, every (2 d + 1)th join waits for the excess: a
wait gives the 2 d joins after it the time that they lack.

All lanes are alike, so one lane's clock is everybody's: a module takes its time, its outputs reach the
others `link_s` after it has finished, and a join waits for what it adds (config.Join). The recurrence is
exact for that machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from laneformer import LaneformerConfig
from laneformer.config import MODULES, Join

Ready = Callable[
    [int, int], int | None
]  # layer, module -> how many layers ago the outputs left that the join awaits


def laneformer_joins(config: LaneformerConfig) -> Ready:
    """The update table of a config: 0 where a join is an all-reduce, the delay where outputs
    arrive late, else None.
    """

    def awaited(layer: int, module: int) -> int | None:
        if config.join(layer, MODULES[module]) is Join.PRESENT:
            return 0
        return config.broadcast_delay if config.adds_delayed(layer, MODULES[module]) else None

    return awaited


def token_s(
    layers: int,
    module_s: tuple[float, float],
    link_s: float,
    awaited: Ready,
    *,
    modules_late: int = 0,
    ends: int = 1,
) -> float:
    """Seconds of a token.

    module_s: of attention and MLP, with their part of what a layer costs beside reading weights. link_s: from
    the end of a module until the other lanes can read its outputs. modules_late: outputs are awaited that
    many modules after the join that needs them by the table (1: Ladder Residual). ends: further exchanges
    that nothing hides, such as the one that agrees on the token.
    """
    clock = 0.0
    arrival: dict[int, float] = {}  # by running number of the module
    due: Mapping[int, int | None] = {2 * i + m: awaited(i, m) for i in range(layers) for m in (0, 1)}
    for number in range(2 * layers):
        clock += module_s[number % 2]
        arrival[number] = clock + link_s
        late = due.get(number - modules_late)
        if late is not None:
            clock = max(clock, arrival[number - modules_late - 2 * late])
    if modules_late:  # the head reads the finished stream
        clock = max(
            clock, *(arrival[n] for n in due if n >= 2 * layers - modules_late and due[n] is not None)
        )
    return clock + ends * link_s
