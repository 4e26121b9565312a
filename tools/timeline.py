"""When a token of lanes on several devices is complete: the one recurrence behind every calculator.

One clock runs through the modules: all lanes are alike, so one lane's clock is everybody's. A module takes its time,
its outputs reach the others `link_s` after it has finished, and a join waits for what it adds (config.Join). The
recurrence is exact for that machine. A delay of d layers hides a link as slow as d layers; beyond, every (2 d + 1)th
join waits for the excess, which gives the 2 d joins after it the time that they lack.
"""

from __future__ import annotations

from laneformer.config import MODULES, Join, LaneformerConfig


def awaited(config: LaneformerConfig, layer: int, module: int) -> int | None:
    """How many layers ago the outputs left that a join awaits: 0 for an all-reduce, None where it awaits nothing."""
    flushes = config.flush and (layer, module) == (config.num_hidden_layers - 1, 1)
    if config.join(layer, MODULES[module]) is Join.PRESENT or (flushes and config.delivers(layer, "mlp")):
        return 0
    return config.broadcast_delay if config.adds_delayed(layer, MODULES[module]) else None


def token_s(
    config: LaneformerConfig,
    module_s: tuple[float, float],
    link_s: float,
    *,
    head_s: float = 0.0,
    modules_late: int = 0,
    ends: int = 1,
) -> float:
    """Seconds of a token.

    module_s: of attention and MLP. head_s: of the head. link_s: from the end of a module until the other lanes can
    read its outputs.
    modules_late: outputs are awaited that many modules after the join that needs them by the config (1: Ladder
    Residual). ends: further exchanges that nothing hides, such as the one that agrees on the token.
    """
    clock, count = 0.0, 2 * config.num_hidden_layers
    arrival: list[float] = []  # by running number of the module
    due = [awaited(config, *divmod(number, 2)) for number in range(count)]
    for number in range(count):
        clock += module_s[number % 2]
        arrival.append(clock + link_s)
        late = due[number - modules_late] if number >= modules_late else None
        if late is not None:
            clock = max(clock, arrival[number - modules_late - 2 * late])
    # the head reads the finished stream
    last = [arrival[n] for n in range(count - modules_late, count) if due[n] is not None]
    return max([clock, *last]) + ends * link_s + head_s


def split_layer(config: LaneformerConfig, layer_s: float) -> tuple[float, float]:
    """Seconds of attention and MLP: those of a layer, by their weights."""
    attention = 2 * config.hidden_size * (config.query_size + config.head_dim * config.num_key_value_heads)
    share = attention / config.parameter_count()["layer"]
    return share * layer_s, (1 - share) * layer_s
