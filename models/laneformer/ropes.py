"""Rotary embedding that `rope_theta` alone does not say: a base of its own for windowed layers, and YaRN.

A config's `window_rope_theta` is the base of the layers with a window, None for that of all. Its `rope_scaling` is
Llama 3's (LLAMA3_KEYS), or of rope_type "yarn": YARN_KEYS, what else Transformers' has, and `layers`, "all" or "full",
for those without a window.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
YARN_KEYS = ("factor", "original_max_position_embeddings")  # that it needs
YARN_NUMBERS = (
    *YARN_KEYS,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
LAYERS = ("all", "full")  # that `rope_scaling` of type yarn applies to


class Rope(NamedTuple):
    """How a head's first pairs are rotated; the pairs after them are left as they are.

    frequencies: radians per position of each rotated pair. scale: of the cosine and sine of those. short: the
    frequencies of a context of at most `short_context` positions instead (LongRoPE).
    """

    frequencies: tuple[float, ...]
    scale: float = 1.0
    short: tuple[float, ...] = ()
    short_context: int = 0

    def of_pairs(self, context: int, pairs: int) -> tuple[list[float], list[float]]:
        """Frequency and scale of all of a head's `pairs`, in a context of so many positions."""
        turning = self.short if context <= self.short_context else self.frequencies
        rest = pairs - len(turning)
        return [*turning, *[0.0] * rest], [*[self.scale] * len(turning), *[1.0] * rest]


# Plain Python, each step rounded as in Transformers' modeling_rope_utils.py: every device gets the same
# numbers, and config.py needs no library
def float32(x: float) -> float:
    return float(struct.unpack("f", struct.pack("f", x))[0])


def wavelengths(theta: float, rotated: int) -> list[float]:
    """Positions per radian of each of a head's rotated / 2 pairs."""
    return [float32(theta ** float32(i / rotated)) for i in range(0, rotated, 2)]


def plain(theta: float, rotated: int) -> Rope:
    return Rope(tuple(float32(1 / wavelength) for wavelength in wavelengths(theta, rotated)))


def stretch_llama3(frequencies: Any, scaling: Mapping[str, Any] | None) -> Any:
    """Radians per position, an array of numpy or torch in float32, with Llama 3's scaling if there is one."""
    if scaling is None:
        return frequencies
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    # 0: long wavelengths, stretched; 1: short ones, kept
    blend = ((turns - low) / (high - low)).clip(0.0, 1.0)
    return frequencies * (blend + (1 - blend) / scaling["factor"])


def yarn(parameters: Mapping[str, Any], theta: float, rotated: int, trained: float) -> Rope:
    """Long wavelengths stretched by the factor, short ones kept (arXiv 2309.00071). trained: positions before."""
    factor = parameters["factor"]

    def growth_factor(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    scale = parameters.get("attention_factor")
    if scale is None:
        scale = growth_factor(over) / growth_factor(under) if over and under else growth_factor(1.0)

    def pair_that_turns(times: float) -> float:
        return rotated * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = (
        pair_that_turns(parameters.get(name) or n)
        for name, n in (("beta_fast", 32), ("beta_slow", 1))
    )
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    width = float32((high - low) or 0.001)

    def stretch(pair: int, length: float) -> float:
        ramp = float32(float32(pair - float32(low)) / width)
        ramped = float32(1 - min(max(ramp, 0.0), 1.0))
        long = float32(1 / float32(float32(factor) * length))
        return float32(float32(long * float32(1 - ramped)) + float32(float32(1 / length) * ramped))

    return Rope(
        tuple(stretch(*pair) for pair in enumerate(wavelengths(theta, rotated))), float(scale)
    )


def own_ropes(
    theta: float, of_windows: float | None, scaling: Mapping[str, Any] | None, head_dim: int
) -> tuple[Rope, ...]:
    """Of a Laneformer's layers that see everything and of those with a window, or one for all; none where `theta` and
    Llama 3's scaling say it all.
    """
    yarns = scaling if scaling and scaling.get("rope_type") == "yarn" else None
    if of_windows is None and yarns is None:
        return ()

    def rope(base: float, scaled: bool) -> Rope:
        return (
            yarn(yarns, base, head_dim, yarns[YARN_KEYS[1]])
            if yarns and scaled
            else plain(base, head_dim)
        )

    full = rope(theta, True)
    windowed = rope(of_windows or theta, yarns is not None and yarns.get("layers", "all") == "all")
    return (full,) if windowed == full else (full, windowed)


def check_scaling(scaling: Mapping[str, Any], of_windows: float | None) -> None:
    """ValueError for what `rope_scaling` gets wrong."""
    kind = scaling.get("rope_type", "llama3")
    if kind not in ("llama3", "yarn"):
        raise ValueError(f"rope_scaling has rope_type = {kind!r}; choose from 'llama3' and 'yarn'")
    needed = LLAMA3_KEYS if kind == "llama3" else YARN_KEYS
    if missing := [key for key in needed if key not in scaling]:
        style = "Llama-3 style" if kind == "llama3" else "YaRN"
        raise ValueError(f"rope_scaling lacks {missing}; it needs {list(needed)} ({style})")
    if kind == "llama3" and of_windows is not None:
        raise ValueError(
            "window_rope_theta goes with no rope_scaling, or with one of rope_type 'yarn', not 'llama3'"
        )
    if kind == "yarn":
        _check_yarn(scaling)


def _check_yarn(scaling: Mapping[str, Any]) -> None:
    if unknown := [
        key for key in scaling if key not in (*YARN_NUMBERS, "rope_type", "truncate", "layers")
    ]:
        parameters = [*YARN_NUMBERS, "truncate", "layers"]
        raise ValueError(
            f"rope_scaling of rope_type 'yarn' has unknown keys {unknown}; choose from {parameters}"
        )
    for name in (key for key in YARN_NUMBERS if key in scaling):
        value = scaling[name]
        if isinstance(value, bool | str) or not value > 0:
            raise ValueError(f"{name} = {value!r} in rope_scaling must be a number greater than 0")
    if not isinstance(scaling.get("truncate", True), bool):
        raise ValueError(
            f"truncate = {scaling['truncate']!r} in rope_scaling must be true or false"
        )
    if scaling.get("layers", "all") not in LAYERS:
        raise ValueError(
            f"layers = {scaling['layers']!r} in rope_scaling is unknown; choose from {LAYERS}"
        )
