"""Measure decode and prompt speed against probes of memory and matrix products at the same moment."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..config import MATRICES
from ..llama.variant import variant_of
from .decoder import CUDA, KV_BYTES
from .options import MAX_DRAFT_TOKENS, in_range

if TYPE_CHECKING:
    from .engine import Engine

SEGMENTS = 12
MIN_SEGMENT_S = 0.25  # long enough that one tick of another process does not decide it
PROMPTS = 5
MIN_TOKENS = 64  # of the context, left to decode
DRAFTED_TOKENS, DRAFTED_ROUNDS = 192, 5  # a few acceptances more or less do not decide a round
LINK_TOKENS, LINK_ROUNDS = 24, 5


def benchmark(
    engine: Engine, depth: int = 0, progress: Callable[[str], None] = print
) -> dict[str, Any]:
    """Return the figures of `laneformer bench`: single-request decoding after `depth` cached positions."""
    decoder: Any = engine._open()
    if engine.isa == CUDA:
        from .cuda import bench  # imports torch

        return bench.benchmark(decoder.executor, depth, progress)
    context = engine.config.max_position_embeddings
    in_range("depth", depth, int, 0, context - MIN_TOKENS)
    length = max(depth, min(128, context // 2))
    progress(f"prefill of {length} positions")
    prompts = prompt_speed(engine, length)
    prompt = random_prompt(engine, max(depth, 1))
    engine.generate(prompt[:1], max_new_tokens=8, ignore_eos=True)  # warm: pages, clocks
    segment = max(
        1, round(MIN_SEGMENT_S / float(np.median(run_timed(engine, prompt, 9).whole.token_s)))
    )
    segment = max(1, min(segment, (context - len(prompt)) // (2 * SEGMENTS)))
    progress(f"{SEGMENTS} segments of {segment} tokens, a read probe before and after each")
    # the read bandwidth of a shared machine can change by a factor of three within minutes, so each
    # segment is compared with the probes before and after it: the same threads read a large buffer
    ids, token_s, probes = list(prompt), np.empty((SEGMENTS, segment)), [decoder.probe()]
    for i in range(SEGMENTS):
        collected = run_timed(engine, ids, segment + 1)
        ids += collected.tokens[:segment]
        token_s[i] = collected.whole.token_s
        probes.append(decoder.probe())

    tokens_per_s = segment / token_s.sum(1)
    probe = (np.array(probes[:-1]) + np.array(probes[1:])) / 2
    token_bytes = bytes_per_token(engine, len(prompt) + SEGMENTS * segment / 2)
    return {
        **spread("tokens_per_s", tokens_per_s),
        "bytes_per_token": int(token_bytes),
        "probe_bytes_per_s": float(np.median(probe)),
        **spread("percent_of_probe", 100 * token_bytes * tokens_per_s / probe),
        "token_s_p50": float(np.median(token_s)),
        "token_s_p99": float(np.percentile(token_s, 99)),
        **prompts,
        "stretches": SEGMENTS,
        "tokens_per_stretch": segment,
        "depth": depth,
        "dtype": engine.dtype,
        "math": engine.math,
        "kv_dtype": engine.kv_dtype,
        "threads": engine.threads,
        "isa": engine.isa,
        "cpu": cpu_name(),
    }


def prompt_speed(engine: Engine, length: int) -> dict[str, float]:
    """Measure prompts of this many tokens, against probes."""
    decoder: Any = engine._open()
    # the probe: matrix products of a layer's own shapes, with weights in the caches
    first_s, probes = [], [decoder.probe_products()]
    for _ in range(PROMPTS):
        collected = run_timed(engine, random_prompt(engine, length), 1, reuse_prefix=False)
        first_s.append(collected.whole.first_token_s)
        probes.append(decoder.probe_products())
    probe = (np.array(probes[:-1]) + np.array(probes[1:])) / 2
    shapes = engine.config.tensor_shapes().items()
    experts = variant_of(engine.config).experts
    active_share = experts.active / experts.total if experts else 1.0
    products = sum(
        math.prod(shape) * (active_share if "feed_forward" in name else 1.0)
        for name, shape in shapes
        if name.startswith("layers.") and any(f".{matrix}.weight" in name for matrix in MATRICES)
    )
    tokens_per_s = length / np.array(first_s)
    return {
        "prefill_tokens_per_s": float(np.median(tokens_per_s)),
        "ttft_s": float(np.median(first_s)),
        "probe_products_per_s": float(np.median(probe)),
        **spread("percent_of_product_probe", 100 * products * tokens_per_s / probe),
    }


def run_timed(engine: Engine, prompt: list[int], tokens: int, **options: Any) -> Any:
    """Run a timed request; `options` are those of GenerationOptions."""
    # one token per pass, unless options override speculate
    options = {"max_new_tokens": tokens, "ignore_eos": True, "speculate": 0, **options}
    request = engine._requests.generation(prompt, options, timed=True, quiet=True)
    return engine._call(request).finish()


def measure_drafts(engine: Engine, depth: int = 0) -> dict[str, Any]:
    """Measure speed-up and acceptance of the model's own head on greedy text after random ids."""
    assert engine.draft_head is not None, "a model without a head that drafts"
    if engine.isa == CUDA:
        raise ValueError("drafts are measured by the CPU engine; use device = 'cpu'")
    prompt = random_prompt(engine, max(depth, 1))
    room = engine.config.max_position_embeddings - len(prompt)
    tokens = in_range(
        "tokens that the context leaves", min(DRAFTED_TOKENS, room), int, MIN_TOKENS, room
    )
    seconds, passes, proposed, accepted = [], [], 0, 0
    for turn in range(DRAFTED_ROUNDS + 1):  # the first one learns what columns cost
        # else the outputs of earlier turns would be drafted
        plain, drafted = (
            run_timed(engine, prompt, tokens, reuse_prefix=False, speculate=speculate).whole
            for speculate in (0, MAX_DRAFT_TOKENS)
        )
        if turn:
            seconds.append((float(plain.token_s.sum()), float(drafted.token_s.sum())))
            passes.append(tokens / (tokens - drafted.statistics["accepted_tokens"]))
            proposed += drafted.statistics["proposed_tokens"]
            accepted += drafted.statistics["accepted_tokens"]
    without, with_drafts = np.array(seconds).T
    return {
        **dataclasses.asdict(engine.draft_head),
        "tokens_per_s": (tokens - 1) / float(np.median(with_drafts)),
        "tokens_per_s_without": (tokens - 1) / float(np.median(without)),
        "speed_up": float(np.median(without / with_drafts)),
        "tokens_a_pass": float(np.median(passes)),
        "right": accepted / max(1, proposed),
    }


def bytes_per_token(engine: Engine, positions: float) -> float:
    return engine.weight_bytes + engine.config.cached_bytes(positions, *KV_BYTES[engine.kv_dtype])


def probe(engine: Engine) -> float:
    """Measure the bytes/s that the CPU engine's threads read."""
    decoder: Any = engine._open()
    return decoder.probe()


def slower_link(engine: Engine, link_us: float) -> dict[str, float]:
    """Simulate a link of this latency between the lanes of different threads, and keep it on.

    Returns tokens/s with and without it, medians of turns; the tokens stay the same.
    Raises ValueError on GPUs, and where threads share every lane.
    """
    if engine.isa == CUDA:
        raise ValueError(f"link_us = {link_us:g} is for the CPU engine; use device = 'cpu'")
    decoder: Any = engine._open()
    if not decoder.set_latency(0.0):
        raise ValueError(
            f"link_us = {link_us:g}: {engine.threads} threads share every lane of {engine.config.num_lanes}, so there "
            "is no link between lanes; take as many threads as lanes, or a divisor above 1"
        )
    # the first turn only warms up
    turns = [link_speeds(engine, (0.0, link_us)) for _ in range(LINK_ROUNDS + 1)]
    without, with_link = np.median(turns[1:], axis=0).tolist()
    return {"us": link_us, "tokens_per_s": with_link, "tokens_per_s_without": without}


def link_speeds(engine: Engine, links_us: Sequence[float]) -> list[float]:
    """Return tokens/s at each of these latencies; RuntimeError where one changes a token."""
    # the last latency stays set
    decoder: Any = engine._open()
    speeds: list[float] = []
    tokens: list[list[int]] = []
    for link_us in links_us:
        decoder.set_latency(1e-6 * link_us)
        collected = run_timed(engine, random_prompt(engine, 1), LINK_TOKENS)
        speeds.append(1 / float(np.median(collected.whole.token_s)))
        tokens.append(collected.tokens)
        if tokens[-1] != tokens[0]:
            raise RuntimeError(f"other tokens behind a link of {link_us:g} us")
    return speeds


def spread(name: str, values: np.ndarray) -> dict[str, float]:
    low, median, high = (float(np.percentile(values, percent)) for percent in (10, 50, 90))
    return {name: median, f"{name}_p10": low, f"{name}_p90": high}


def random_prompt(engine: Engine, length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, engine.config.vocab_size, length).tolist()


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()} ({os.cpu_count()} cores)"
