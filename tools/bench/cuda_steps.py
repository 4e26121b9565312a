"""The measurements of `tools.bench cuda`, one function each (session -> figures), and the
process that runs them.

A step that corrupts the GPU's context, or hangs, ends this process and no more: the next step gets a new one.
Percentages and tables are made by the report.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.benchmark import Timer
from transformers import CompileConfig

from laneformer import LaneformerConfig
from laneformer.config import MODULES, Join
from laneformer.engine.cuda import bench
from laneformer.engine.cuda.compile import VERSIONS
from laneformer.engine.cuda.executor import CudaExecutor
from laneformer.engine.cuda.passes import PassDecoder
from laneformer.engine.decoder import Request
from laneformer.tensors import Tensor
from tools.bench import harness
from tools.bench.cuda_processes import exchanges, sanitizer, server  # noqa: F401  (steps)
from tools.bench.cuda_report import STEPS, Step
from tools.bench.cuda_session import (
    CUTS,
    FAULTS_FLAVOR,
    LIMIT_S,
    Session,
    alone_blocks,
    make_room,
    one_lane,
    prepare,  # noqa: F401  (a step)
)
from tools.bench.harness import Result, Trial, paired, serve
from tools.check import cuda as check
from tools.check.reference import TORCH_DTYPES, dequantised, hf_model, random_weights, tensors_of

TRIAL_TOKENS = 128
GREEDY_PROMPTS = 8
PACKAGES = ("torch", "transformers", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy")
QUERIES = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def machine(session: Session) -> Result:
    """Name, sizes, clocks under load and versions; no clocks where nvidia-smi is missing."""
    properties = torch.cuda.get_device_properties(session.device)
    load_gpu(session.device)
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(QUERIES)}", "--format=csv,noheader"]
    said = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    return {
        "gpu": properties.name, "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size, "memory_bytes": properties.total_memory,
        "compute_capability": f"{properties.major}.{properties.minor}", "cuda": torch.version.cuda,
        "python": platform.python_version(), "kernel": platform.release(),
        **dict(zip(QUERIES, said.split(", "), strict=False)), **{name: harness.version(name) for name in PACKAGES},
    }  # fmt: skip


def load_gpu(device: str) -> None:
    """A few hundred milliseconds of work, so that the clocks are not idle ones; it may still run on return."""
    matrix = torch.ones(8192, 8192, device=device, dtype=torch.bfloat16)
    for _ in range(200):
        matrix = matrix @ matrix * 1e-4


def probe(session: Session) -> Result:
    """Bytes/s of the kernels' reads, and of torch's copy of a large tensor, which reads and writes."""
    memory = session.decoder().memories[0]
    tensors = {"source": memory.tapes, "target": torch.empty_like(memory.tapes)}
    copy = Timer("target.copy_(source)", globals=tensors)  # waits for the GPU
    copy_s = min(copy.timeit(10).mean for _ in range(5))
    return {
        **{f"{name}_bytes_per_s": rate for name, rate in session.bandwidth.items()},
        "torch_copy_bytes_per_s": 2 * memory.tapes.nbytes / copy_s, "bytes_per_s": max(session.bandwidth.values()),
        "weight_bytes": bench.weight_bytes(memory.geometry), "tape_bytes": memory.weight_bytes,
        "layers": session.config.num_hidden_layers,
    }  # fmt: skip


def load(session: Session) -> Result:
    """Weights made, packed and on the GPU, and kernels loaded, before anything of this model is measured."""
    report: Result = {}
    for version in VERSIONS:
        start = time.monotonic()
        with contextlib.suppress(RuntimeError):  # is reported where its first tokens are
            session.decoder(version)
        report[f"{version}_s"] = round(time.monotonic() - start, 1)
    return report


def first(session: Session, version: str, flavor: str | None = None) -> Result:
    """A few tokens before anything else: a version that hangs or crashes here is left out of all later steps."""
    decoder = (session.smaller(flavor) if flavor else session).decoder(version)
    names = ("blocks_per_lane", "warps", "chunk_bytes", "chunks", "splits", "shared_bytes")
    geometry = {name: getattr(decoder.geometry, name) for name in names}
    tokens = check.greedy(decoder, [5], 8)
    return {"tokens": tokens, "geometry": geometry, "version": decoder.version}


def verdict(session: Session) -> Result:
    """All checks of both versions but the planted faults."""
    length, prompts = (
        check.scored_length(session.config),
        check.greedy_prompts(session.config, GREEDY_PROMPTS),
    )
    assert session.weights  # on the GPU, so that what is free is free beside them
    make_room(session, check.reference_bytes(session.config, length))
    truth = check.reference(session.config, session.weights, length, prompts=prompts)
    torch.cuda.empty_cache()
    makers = {version: functools.partial(session.decoder, version) for version in VERSIONS}
    report = check.check(makers, truth, GREEDY_PROMPTS, session.runs, say)
    torch.cuda.empty_cache()
    return report


def outcome(passed: dict[str, bool]) -> Result:
    failed = [name for name, held in passed.items() if not held]
    return {"failed": failed, "holds": not failed}


def smaller(session: Session, flavor: str) -> Result:
    """The checks of a smaller model, which fail sooner."""
    report = verdict(session.smaller(flavor))
    Session.decoder.cache_clear()  # gives its memory back
    torch.cuda.empty_cache()
    found = outcome(report["passed"])
    errors = {name: report[name].get("relative_error") for name in ("hf_bf16", *VERSIONS)}
    return {"holds": found["holds"], "failed": "; ".join(found["failed"]), **errors}


def correctness(session: Session) -> Result:
    """The verdict; speeds are shown beside it."""
    report = verdict(session)
    say("planted faults")
    flavor = FAULTS_FLAVOR.get(session.flavor, session.flavor)
    config = LaneformerConfig.from_flavor(flavor)
    weights = random_weights(config, dtype=TORCH_DTYPES[session.dtype], device=session.device)
    planted = check.check_faults(config, weights, lambda *wrong: session.make(None, *wrong))
    report["passed"][f"planted faults are refused ({flavor})"] = planted["holds"]
    return {**report, "faults": planted["faults"], **outcome(report["passed"])}


def decode(session: Session) -> Result:
    """Speed of decoding and of reading the prompt, at several depths of the context, as the server decodes."""
    context, bandwidth = session.config.max_position_embeddings, max(session.bandwidth.values())
    depths = sorted({0, context // 2, context - 2 * bench.EDGE_TOKENS})
    return {
        "depths": {
            str(depth): bench.benchmark(CudaExecutor(session.decoder()), depth, say, bandwidth)
            for depth in depths
        }
    }


def trials_of(decoder: PassDecoder) -> Trial:
    executor = CudaExecutor(decoder)
    return lambda: bench.speeds(bench.arrivals(executor, [5], TRIAL_TOKENS))["tokens_per_s"]


def median_speed(decoder: PassDecoder) -> float:
    """Tokens/s of a few runs."""
    trial = trials_of(decoder)
    return statistics.median(trial() for _ in range(5))


def generate_of(session: Session, **options: Any) -> Trial:
    """Transformers' own generate(); without options as it comes, with a growing cache and no compilation."""
    model: Any = hf_model(session.config, session.weights, torch.bfloat16)
    ids = torch.tensor([[5]], device=model.device)
    options |= {"min_new_tokens": TRIAL_TOKENS, "max_new_tokens": TRIAL_TOKENS, "do_sample": False}

    def trial() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        made = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        assert made.shape[1] == TRIAL_TOKENS + 1, f"{made.shape[1] - 1} tokens instead of {TRIAL_TOKENS}"
        return TRIAL_TOKENS / seconds

    return trial


def baselines(session: Session) -> Result:
    """The graph of kernels, Transformers, and the kernel cut in other ways (CUTS)."""

    def cut(name: str) -> Callable[[], Trial]:
        return lambda: trials_of(session.make("passes", **CUTS[name]))

    makers = {
        "graph": lambda: trials_of(session.decoder("graph")),
        "hf_generate": lambda: generate_of(session),
        **{name: cut(name) for name in CUTS},
    }
    return beside_ours(session, makers, 6)


def beside_ours(session: Session, makers: dict[str, Callable[[], Trial]], rounds: int) -> Result:
    """Trials of the kernel of passes, alternating with those of others."""
    ours = {"passes": lambda: trials_of(session.decoder("passes"))}
    return {"tokens": TRIAL_TOKENS, **paired({**ours, **makers}, rounds, session.time_left)}


def compiled(session: Session) -> Result:
    """Transformers with a static cache under torch.compile, which replays CUDA graphs in this mode."""
    mode = "reduce-overhead"
    options = {"cache_implementation": "static", "compile_config": CompileConfig(mode=mode, fullgraph=False)}
    makers = {"hf_compiled": lambda: generate_of(session, **options)}
    return {"mode": mode, **beside_ours(session, makers, 4)}


def other_type(session: Session, dtype: str) -> Result:
    """Distances and speed of the same model with other weights; those of 8 bits are held to
    what they stand for.
    """
    if dtype == "fp16":
        weights = meant = {name: weight.half() for name, weight in session.weights.items()}
    else:
        weights, meant = session.weights, dequantised(session.weights)
    decoder = session.make(tensors=tensors_of(weights), dtype=dtype)
    truth = check.reference(session.config, meant, check.SHORT_LENGTH)
    distances = check.compare(check.score(decoder, truth.ids), truth)
    read = bench.weight_bytes(decoder.geometry)
    return {**distances, "bytes_per_token": read, "tokens_per_s": median_speed(decoder)}


def lane_alone(session: Session) -> Result:
    """One lane on all multiprocessors, as each GPU of a machine with one lane per GPU would run it."""
    config, rows = one_lane(session.config), []
    tensors = {name: first_lane(name, tensor) for name, tensor in session.tensors.items()}
    for blocks in alone_blocks(session.device):
        decoder = session.make("passes", config, tensors, blocks_per_lane=blocks)
        rows.append({"blocks": blocks, "tokens_per_s": median_speed(decoder)})
    bytes_per_token = bench.weight_bytes(decoder.geometry) + decoder.config.cached_bytes(TRIAL_TOKENS / 2, 2)
    joins = [session.config.join(i, m) for i in range(session.config.num_hidden_layers) for m in MODULES]
    return {
        "rows": rows, "lanes": session.config.num_lanes, "layers": session.config.num_hidden_layers,
        "bytes_per_token": bytes_per_token, "blocking_exchanges": joins.count(Join.PRESENT) + 1,
    }  # fmt: skip


def batches(session: Session) -> Result:
    """Tokens/s of batches, and of draft tokens behind a text that repeats itself; each sequence
    as it is alone.
    """
    decoder = session.decoder()
    columns, report = decoder.columns, Result()
    executor = CudaExecutor(decoder)
    schedule = executor.schedule

    def run(prompts: list[list[int]], drafts: int) -> tuple[list[list[int]], float]:
        options: dict[str, Any] = {"reuse_prefix": False, "speculate": drafts, "quiet": True}
        start = time.perf_counter()
        tickets = schedule.join([Request(ids, TRIAL_TOKENS, **options) for ids in prompts])
        made: dict[int, list[int]] = {}
        while len(made) < len(tickets):
            for ticket, _, tokens, _, (_, error, *_) in schedule.collect(LIMIT_S):
                if error is not None:
                    raise error
                made[ticket] = tokens
        seconds = time.perf_counter() - start
        return [made[ticket] for ticket in tickets], sum(map(len, made.values())) / seconds

    prompts = [[5 + i] for i in range(columns)]
    cases = {f"batch of {n}": (prompts[:n], 0) for n in (1, 2, 4, 8) if n <= columns}
    cases["drafts"] = ([[5, 6, 7] * 8], columns - 1)
    for name, (asked, drafts) in cases.items():
        alone = [run([ids], 0)[0][0] for ids in asked]
        trials = [run(asked, drafts) for _ in range(3)]
        report[f"{name}, tokens/s"] = statistics.median(speed for _, speed in trials)
        report[f"{name}, as alone"] = all(made == alone for made, _ in trials)
    found = schedule.statistics()  # of the last one
    accepted = f"{found['accepted_tokens']} of {found['proposed_tokens']}"
    return {**report, "drafts": accepted, "drafts, passes": found["passes"]}


def first_lane(name: str, tensor: Tensor) -> Tensor:
    whole = name.startswith("tok_embeddings") or name.endswith("norm.weight")
    return tensor if whole else Tensor(tensor.dtype, tensor.values[:1])


def run(step: Step, session: Session) -> Result:
    function: Callable[..., Result] = globals()[step.function or step.name]
    return function(session, **step.arguments)


def context_alive() -> bool:
    """Whether the GPU still answers this process: after an illegal access it never does again."""
    try:
        torch.cuda.synchronize()
    except Exception:
        return False
    return True


def main() -> None:
    flavor, dtype, runs, *without = sys.argv[1:]
    session = Session(flavor, dtype, int(runs), without)

    def answer(do: str, seconds: float) -> Result:
        session.deadline = time.monotonic() + seconds
        step = next(step for step in STEPS if step.name == do)
        return run(step, session)

    serve(answer, context_alive)


if __name__ == "__main__":
    main()
