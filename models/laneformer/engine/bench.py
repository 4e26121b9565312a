"""Decode speed next to what the memory gives at the same moment.

A tokens/s figure of a shared machine says little by itself: its read bandwidth can change by a factor of three within
minutes. So the decode loop stops every few tokens and lets the same threads read a large buffer from end to end; each
segment of tokens is compared with the probes before and after it.

The ablation runs every second segment with a barrier of all threads after each module, as tensor parallelism without a
delay would: neighbouring segments then show what the delay is worth at that moment.
"""

from __future__ import annotations

import dataclasses
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .cpu.decoder import CpuDecoder
from .decoder import CUDA, Request
from .engine import Engine
from .options import GenerationOptions

SEGMENTS = 12
MIN_SEGMENT_S = 0.25  # long enough that one tick of another process does not decide it


def benchmark(
    engine: Engine, depth: int = 0, progress: Callable[[str], None] = print, barriers: bool = False
) -> dict[str, Any]:
    """Figures of single-request decoding after `depth` cached positions; the keys are those of `laneformer bench`.

    `barriers` adds the ablation: as many segments again, which no other figure includes. On GPUs: cuda/bench.py.
    """
    if engine.isa == CUDA:
        return on_gpus(engine, depth, progress, barriers)
    context = engine.config.max_position_embeddings
    if not 0 <= depth <= context - 64:
        raise ValueError(f"depth = {depth} is outside 0 to {context - 64} (the context of {context} less 64 to decode)")
    progress(f"prefill of {max(depth, prefill_length(engine))} positions")
    ttft_s, prefill_tokens_per_s = measure_prefill(engine, depth)

    prompt = random_prompt(engine, max(depth, 1))
    engine.generate(prompt[:1], max_new_tokens=8, ignore_eos=True)  # warm: pages, clocks
    token_s = measured(engine, prompt, 9, 0)[0]
    segment = max(1, round(MIN_SEGMENT_S / float(np.median(token_s))))
    segment = max(1, min(segment, (context - len(prompt)) // (2 * SEGMENTS)))
    progress(f"{SEGMENTS} segments of {segment} tokens, a read probe before and after each")
    token_s, probes = measured(engine, prompt, SEGMENTS * segment + 1, segment)

    segments = len(token_s) // segment
    seconds = token_s[: segments * segment].reshape(segments, segment).sum(1)
    tokens_per_s = segment / seconds
    probe = (probes[:segments] + probes[1 : segments + 1]) / 2
    bytes_per_token = engine.weight_bytes + cached_bytes(engine, len(prompt) + segments * segment / 2)
    percent = 100 * bytes_per_token * tokens_per_s / probe
    ablation = measure_barriers(engine, prompt, segment) if barriers else {}
    return {
        "tokens_per_s": float(np.median(tokens_per_s)),
        "tokens_per_s_p10": float(np.percentile(tokens_per_s, 10)),
        "tokens_per_s_p90": float(np.percentile(tokens_per_s, 90)),
        "bytes_per_token": int(bytes_per_token),
        "probe_bytes_per_s": float(np.median(probe)),
        "percent_of_probe": float(np.median(percent)),
        "percent_of_probe_p10": float(np.percentile(percent, 10)),
        "percent_of_probe_p90": float(np.percentile(percent, 90)),
        "token_s_p50": float(np.median(token_s)),
        "token_s_p99": float(np.percentile(token_s, 99)),
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "ttft_s": ttft_s,
        "stretches": segments,
        "tokens_per_stretch": segment,
        "depth": depth,
        "dtype": engine.dtype,
        "math": engine.math,
        "threads": engine.threads,
        "isa": engine.isa,
        "cpu": cpu_name(),
        **ablation,
    }


def on_gpus(engine: Engine, depth: int, progress: Callable[[str], None], barriers: bool) -> dict[str, Any]:
    from .cuda import bench  # imports torch
    from .cuda.decoder import CudaDecoder

    decoder = engine._open()
    assert isinstance(decoder, CudaDecoder), f"isa {CUDA!r} is the GPUs'"
    if barriers:
        raise ValueError(
            "barriers = True: on GPUs the ablation is a kernel of its own, which tools.bench.cuda measures"
        )
    return bench.benchmark(decoder.gpu, depth, progress)


def measure_barriers(engine: Engine, prompt: list[int], segment: int) -> dict[str, float]:
    """Tokens/s of segments with a barrier after every module, and how much faster their neighbours without are."""
    pairs = min(SEGMENTS, (engine.config.max_position_embeddings - len(prompt)) // (2 * segment))
    token_s, _ = measured(engine, prompt, 2 * pairs * segment + 1, segment, compare_barriers=True)
    delayed_s, barrier_s = token_s[: 2 * pairs * segment].reshape(pairs, 2, segment).sum(2).T
    ratio = barrier_s / delayed_s
    return {
        "barriers_tokens_per_s": float(np.median(segment / barrier_s)),
        "delay_over_barriers": float(np.median(ratio)),
        "delay_over_barriers_p10": float(np.percentile(ratio, 10)),
        "delay_over_barriers_p90": float(np.percentile(ratio, 90)),
    }


def measured(
    engine: Engine, prompt: list[int], tokens: int, probe_every: int, compare_barriers: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of every token after the first, and the probes in between, bytes/s."""
    request = engine._request([prompt], GenerationOptions(max_new_tokens=tokens, ignore_eos=True))
    request = dataclasses.replace(request, probe_every=probe_every, compare_barriers=compare_barriers)
    decoder = finished(engine, request)
    return decoder.token_s(), decoder.probe_bytes_per_s()


def finished(engine: Engine, request: Request) -> CpuDecoder:
    """The engine's decoder after this request, with its timings."""
    decoder = engine._start(request)
    engine._result(decoder, lambda d: None)
    assert isinstance(decoder, CpuDecoder)
    return decoder


def measure_prefill(engine: Engine, depth: int) -> tuple[float, float]:
    """Seconds to the first token after a prompt of `depth` (or a typical length), and prompt tokens per second."""
    length = max(depth, prefill_length(engine))
    options = GenerationOptions(max_new_tokens=1, reuse_prefix=False)
    decoder = finished(engine, engine._request([random_prompt(engine, length)], options))
    return decoder.first_token_s, length / decoder.first_token_s


def prefill_length(engine: Engine) -> int:
    return min(128, engine.config.max_position_embeddings // 2)


def random_prompt(engine: Engine, length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, engine.config.vocab_size, length).tolist()


def cached_bytes(engine: Engine, positions: float) -> float:
    """Bytes of keys and values (fp32) read for one token at this position."""
    config = engine.config
    per_position = 2 * 4 * config.head_dim * config.num_key_value_heads
    seen = [min(positions, config.window(i) or positions) for i in range(config.num_hidden_layers)]
    return per_position * sum(seen)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()} ({os.cpu_count()} cores)"
