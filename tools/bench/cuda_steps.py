"""The measurements of tools.bench.cuda, a function each: session -> figures. Shares and tables are the report's."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda import bench
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.folder import Tensor
from tools.bench import cuda_check as bench_cuda_check
from tools.bench.cuda_alone import TURN_TOKENS, lane_alone, median_speed, turn_of, two_groups
from tools.bench.cuda_machine import machine_facts
from tools.bench.cuda_rivals import alternate, eager, later, static
from tools.bench.cuda_sanitize import sanitizer
from tools.bench.cuda_session import DEVICE, LIMIT_S, Report, Session, say
from tools.check.reference import random_weights, tensors_of

GREEDY_PROMPTS = 8
FAULTS_FLAVOR = {"2b": "300m"}  # planted faults need a model each, so a smaller one
SWEEP: tuple[dict[str, Any], ...] = (
    {"chunk_bytes": 1024}, {"chunk_bytes": 4096}, {"warps": 8}, {"warps": 8, "chunk_bytes": 4096},
    {"blocks_per_lane": 15}, {"blocks_per_lane": 12},
)  # fmt: skip


def machine(session: Session) -> Report:
    return machine_facts(torch.device(DEVICE))


def first(session: Session, version: str) -> Report:
    """A few tokens, before anything else is asked of a version: one that hangs or crashes is left out from here on."""
    decoder = getattr(session, version)
    return {"tokens": bench_cuda_check.greedy(decoder, [5], 8), "geometry": shape_of(decoder)}


def shape_of(decoder: CudaDecoder) -> Report:
    g = decoder.geometry
    names = ("blocks_per_lane", "warps", "chunk_bytes", "chunks", "splits", "shared_bytes")
    return {name: getattr(g, name) for name in names}


def probe(session: Session) -> Report:
    """The kernels' reads, and torch's copy of a large tensor, which reads and writes."""
    memory = session.any_version.memories[0]
    source = memory.tapes
    target, (start, end) = torch.empty_like(source), (torch.cuda.Event(enable_timing=True) for _ in range(2))
    seconds = []
    for _ in range(6):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return {
        **{f"{name}_bytes_per_s": rate for name, rate in session.bandwidth.items()},
        "torch_copy_bytes_per_s": 2 * source.nbytes / min(seconds[1:]),
        "bytes_per_s": max(session.bandwidth.values()),
        "weight_bytes": bench.weight_bytes(memory.geometry),
        "tape_bytes": memory.weight_bytes,
        "layers": session.config.num_hidden_layers,
    }


def correctness(session: Session) -> Report:
    """The verdict; speeds are shown beside it."""
    truth = bench_cuda_check.reference(session.config, session.weights, bench_cuda_check.scored_length(session.config))
    makers = {"persistent": lambda: session.persistent, "graph": lambda: session.graph}
    report = bench_cuda_check.check(makers, truth, GREEDY_PROMPTS, session.runs, say)
    del truth
    torch.cuda.empty_cache()
    say("planted faults")
    flavor = FAULTS_FLAVOR.get(session.flavor, session.flavor)
    config = LaneformerConfig.from_flavor(flavor)
    weights = random_weights(config, dtype=session.weights["lm_head.weight"].dtype, device=DEVICE)

    def make(wrong: LaneformerConfig, tensors: dict[str, Tensor]) -> CudaDecoder:
        return CudaDecoder(wrong, tensors, session.dtype, (DEVICE,), session.version, LIMIT_S)

    planted = bench_cuda_check.check_faults(config, weights, make)
    report["passed"][f"planted faults are refused ({flavor})"] = planted["holds"]
    failed = [name for name, held in report["passed"].items() if not held]
    return {**report, "faults": planted["faults"], "failed": failed, "holds": not failed}


def decode(session: Session) -> Report:
    """Speed at several depths of the context."""
    context, measured = session.config.max_position_embeddings, {}
    bandwidth = max(session.bandwidth.values())
    for depth in sorted({0, context // 2, context - 2 * bench.EDGE_TOKENS}):
        measured[str(depth)] = bench.benchmark(session.any_version, depth, say, bandwidth)
    return {"depths": measured}


def prefill(session: Session) -> Report:
    ttft_s, tokens_per_s = bench.measure_prefill(session.any_version, 0)
    return {"prompt": bench.prefill_length(session.any_version), "ttft_s": ttft_s, "tokens_per_s": tokens_per_s}


def rivals(session: Session) -> Report:
    """The graph of kernels, the kernel whose exchanges wait for all blocks, and Transformers."""
    turns = {
        "persistent": later(lambda: turn_of(session.persistent)),
        "graph": later(lambda: turn_of(session.graph)),
        "wide_exchanges": later(lambda: turn_of(session.make(wide_exchanges=True))),
        "hf_generate": later(lambda: eager(session.config, session.weights)),
    }  # fmt: skip
    return alternate(turns, 6, TURN_TOKENS, session.time_left)


def compiled(session: Session, mode: str) -> Report:
    turns = {
        "persistent": later(lambda: turn_of(session.persistent)),
        "hf_compiled": later(lambda: static(session.config, session.weights, mode)),
    }
    return {"mode": mode, **alternate(turns, 4, TURN_TOKENS, session.time_left)}


def sweep(session: Session) -> Report:
    """Other cuts of the same work; all must give the tokens of the default one."""
    expected, rows, longest = bench_cuda_check.greedy(session.persistent, [5]), [], 0.0
    for shape in ({}, *SWEEP):
        if session.time_left() < longest:
            break
        start = time.monotonic()
        try:
            decoder = session.make(**shape)
            same = bench_cuda_check.greedy(decoder, [5]) == expected
            speed = median_speed(decoder)
            row = {"shape": shape, "chunks": decoder.geometry.chunks, "tokens_per_s": speed, "same_tokens": same}
        except (ValueError, RuntimeError) as error:
            row = {"shape": shape, "error": str(error)[:300]}
        rows.append(row)
        longest = max(longest, time.monotonic() - start)
    return {"rows": rows}


def fp16(session: Session) -> Report:
    """The same model in fp16: within the same limits, and as fast?"""
    weights = {name: weight.half() for name, weight in session.weights.items()}
    decoder = CudaDecoder(session.config, tensors_of(weights), "fp16", (DEVICE,), session.version, LIMIT_S)
    truth = bench_cuda_check.reference(session.config, weights, bench_cuda_check.SHORT_LENGTH)
    compared = bench_cuda_check.compare(bench_cuda_check.score(decoder, truth.ids), truth)
    return {**compared, "tokens_per_s": median_speed(decoder)}


STEPS: dict[str, Callable[[Session], Report]] = {
    "machine": machine,
    "first_persistent": functools.partial(first, version="persistent"),
    "first_graph": functools.partial(first, version="graph"),
    "probe": probe,
    "correctness": correctness,
    "decode": decode,
    "rivals": rivals,
    "sweep": sweep,
    "prefill": prefill,
    "fp16": fp16,
    "lane_alone": lane_alone,
    "two_groups": two_groups,
    "sanitizer": sanitizer,
    "compiled": functools.partial(compiled, mode="reduce-overhead"),
    "max_autotune": functools.partial(compiled, mode="max-autotune"),
}
