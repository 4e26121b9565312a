"""Decode speed on GPUs next to what their memory gives: percent of the read probe, and what each layer leaves exposed.

    t = bytes / bandwidth + layers x c

c, the microseconds a layer that the stream of weights does not hide, is the figure that exchanges decide. Requests go
the server's way: the schedule, the executor's thread, launches of several passes. A token's time is that at which its
news comes, with all of its launch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..decoder import Request, Sampling
from ..options import in_range
from .bandwidth import datasheet, shares
from .executor import CudaExecutor
from .geometry import OPS, Geometry
from .launch import Kernels
from .memory import DeviceMemory
from .structures import PASSES_PER_LAUNCH, Column, Probe
from .tape import tape_starts

TOKENS = 256
EDGE_TOKENS = 3 * PASSES_PER_LAUNCH  # the first and the last of a run, to be reported apart
RUNS = 5
PROBES = ("stream", "loads")  # kernels of probe.cu
PROBED_BYTES = (
    8 << 30
)  # of one launch: far more than any cache, and milliseconds, so that its start does not count
GREEDY = Sampling(top_p=1.0)
LONGEST_S = 60.0  # without news of a request


def benchmark(
    executor: CudaExecutor,
    depth: int = 0,
    progress: Callable[[str], None] = print,
    probe_bytes_per_s: float | None = None,
    runs: int = RUNS,
) -> dict[str, Any]:
    """Figures of single-request decoding after `depth` cached positions; the keys are
    those of `laneformer bench`.

    `probe_bytes_per_s`: of all GPUs together; measured when it is not given. ValueError for
    a depth without room.
    """
    passes: Any = executor.passes
    config, context = passes.config, passes.config.max_position_embeddings
    in_range("depth", depth, int, 0, context - 2 * EDGE_TOKENS)
    gpus = len(set(passes.devices))
    if probe_bytes_per_s is None:
        progress("read probe")
        probe_bytes_per_s = gpus * max(read_bandwidth(passes.memories[0]).values())
    progress("prefill")
    ttft_s, prefill_tokens_per_s = measure_prefill(executor, depth)

    prompt = random_prompt(executor, max(depth, 1))
    tokens = min(TOKENS, context - len(prompt))
    progress(f"{runs} runs of {tokens} tokens")
    arrivals(executor, prompt, 2 * EDGE_TOKENS)  # warm: code, clocks
    measured = [speeds(arrivals(executor, prompt, tokens)) for _ in range(runs)]
    bytes_per_token = weight_bytes(passes.geometry) + config.cached_bytes(len(prompt) + tokens / 2, 2)
    name = torch.cuda.get_device_name(passes.devices[0])
    return {
        **{key: statistics.median(run[key] for run in measured) for key in measured[0]},
        "runs_tokens_per_s": [run["tokens_per_s"] for run in measured],
        "bytes_per_token": int(bytes_per_token),
        "tape_bytes_per_token": sum(memory.weight_bytes for memory in passes.memories),
        "probe_bytes_per_s": probe_bytes_per_s,
        **shares(
            statistics.median(run["tokens_per_s"] for run in measured), bytes_per_token, probe_bytes_per_s,
            datasheet(name), gpus, config.num_hidden_layers,
        ),
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "ttft_s": ttft_s,
        "depth": depth,
        "tokens_per_run": tokens,
        "dtype": passes.geometry.dtype,
        "version": passes.version,
        "device": name,
    }  # fmt: skip


def arrivals(executor: CudaExecutor, prompt: list[int], tokens: int, **options: Any) -> np.ndarray:
    """Seconds (of any origin) at which the news of each of `tokens` new tokens came. RuntimeError where the request
    fails, or no news comes.
    """
    times: list[float] = []
    executor.schedule.join([Request(prompt, tokens, **options)])
    while news := executor.schedule.collect(LONGEST_S):
        for _, _, new, _, ended in news:
            times += [time.perf_counter()] * len(new)
            if ended and ended[1] is not None:
                raise ended[1]
            if ended:
                return np.array(times)
    raise RuntimeError(f"no news of a request for {LONGEST_S:g} s")


def speeds(times: np.ndarray) -> dict[str, float]:
    """Tokens/s between the arrivals of one run: of all, of the first and of the last."""
    return {
        "tokens_per_s": rate_of(times),
        "first_tokens_per_s": rate_of(times[:EDGE_TOKENS]),
        "last_tokens_per_s": rate_of(times[-EDGE_TOKENS:]),
    }


def rate_of(times: np.ndarray) -> float:
    """Of the tokens that came after the first ones, which came together."""
    return float((times > times[0]).sum() / (times[-1] - times[0]))


def measure_prefill(executor: CudaExecutor, depth: int) -> tuple[float, float]:
    """Seconds to the first token after a prompt of `depth` (or a typical length), and
    prompt tokens per second.
    """
    assert executor.passes is not None
    length = max(depth, min(2048, executor.passes.config.max_position_embeddings // 2))
    prompt = random_prompt(executor, length)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        arrivals(executor, prompt, 1, reuse_prefix=False)
        seconds.append(time.perf_counter() - start)
    ttft_s = statistics.median(seconds[1:])  # the first loads the model and its kernels
    return ttft_s, len(prompt) / ttft_s


def random_prompt(executor: CudaExecutor, length: int) -> list[int]:
    assert executor.passes is not None
    return np.random.default_rng(0).integers(0, executor.passes.config.vocab_size, length).tolist()


def weight_bytes(geometry: Geometry) -> int:
    """Bytes of weights that all GPUs together read for one token, without what fills up
    the tapes' last chunks.
    """
    layers = geometry.config.num_hidden_layers
    scale = 4 if geometry.dtype == "int8" else 0  # of a row
    matrices = {op: geometry.matrix(op) for op in OPS}
    rows = {
        **{op: m.rows for op, m in matrices.items()},
        "head": geometry.config.vocab_size // geometry.config.num_lanes,
    }
    sizes = {op: rows[op] * (geometry.number_bytes * m.columns + scale) for op, m in matrices.items()}
    return geometry.config.num_lanes * (layers * sum(sizes[op] for op in OPS[:-1]) + sizes["head"])


# ---- the kernels alone, without a schedule; `passes`: a PassDecoder ----


def read(passes: Any, ids: list[int], start: int, logits: torch.Tensor | None = None) -> int:
    """Passes over ids[start:], of as many as it has columns: the token that the last would be followed by."""
    columns = [Column(token, i, 0, sampling=GREEDY) for i, token in enumerate(ids)]
    for at in range(start, len(ids), passes.columns):
        end = at + passes.columns
        (picked,) = passes.run(columns[at:end], 0, None if logits is None else logits[at:end])
    return picked[-1]


def greedy(passes: Any, prompt: list[int], new_tokens: int = 32, most: int = 16) -> list[int]:
    """Launches make up to `most` passes, of several lengths; the first token comes with the prompt's end."""
    start = 0
    if len(prompt) > passes.unread:
        start = len(prompt) - 1
        list(passes.read(prompt[:-1], 0, 0, start))
    made = [read(passes, prompt, start)]
    while len(made) < new_tokens:
        last = Column(made[-1], len(prompt) + len(made) - 1, 0, sampling=GREEDY)
        more = min(len(made) % most, passes.ahead, new_tokens - len(made) - 1)
        made += [row[0] for row in passes.run([last], more)]
    return made


# ---- the read bandwidth of a GPU, over the very bytes that decoding reads (probe.cu) ----


def probe_argument(memory: DeviceMemory, sums: torch.Tensor, rounds: int) -> Probe:
    """Read the device's tapes `rounds` times; `sums`: int32, one for each thread of the launch."""
    return Probe(
        memory.tapes.data_ptr(), memory.tape_at.data_ptr(), sums.data_ptr(), memory.tapes.nbytes, rounds
    )


def expected_sum(memory: DeviceMemory, rounds: int) -> int:
    """What the threads' sums must add up to, modulo 2^32."""
    return int(memory.tapes.view(torch.int32).sum(dtype=torch.int64)) * rounds % 2**32


def read_bandwidth(memory: DeviceMemory, runs: int = RUNS) -> dict[str, float]:
    """Bytes/s of each kernel, the best of `runs`; RuntimeError if one of them has not read everything.

    The weights of small models stay in the L2, and so the figure is the L2's.
    """
    geometry, size = memory.geometry, int(tape_starts(memory.geometry)[-1])
    kernels = Kernels("probe", geometry, memory.device)
    sums = torch.zeros(geometry.blocks * geometry.threads, dtype=torch.int32, device=memory.device)
    rounds = math.ceil(PROBED_BYTES / size)
    argument, expected = probe_argument(memory, sums, rounds), expected_sum(memory, rounds)
    best = {}
    for name in PROBES:
        seconds = []
        for _ in range(runs + 1):
            sums.zero_()
            with torch.cuda.device(memory.device):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                kernels.launch(name, argument)
                end.record()
                end.synchronize()
            seconds.append(start.elapsed_time(end) / 1000)
            found = int(sums.sum(dtype=torch.int64)) % 2**32
            if found != expected:
                raise RuntimeError(f"the {name} probe read something else: sum {found}, expected {expected}")
        best[name] = rounds * size / min(seconds[1:])  # the first loads the code
    return best
