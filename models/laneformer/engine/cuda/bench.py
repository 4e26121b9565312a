"""Decode speed on GPUs, as a share of memory bandwidth and as the time exposed in each layer.

    t = bytes / bandwidth + layers x c

c is the microseconds a layer that the stream of weights does not hide; exchanges between lanes
decide it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...config import LaneformerConfig
from ..decoder import Request
from ..options import in_range
from .cards import card_of_device
from .executor import CudaExecutor
from .geometry import OPS, Geometry
from .launch import Kernels
from .memory import DeviceMemory
from .structures import PASSES_PER_LAUNCH, Probe
from .tape import tape_starts

TOKENS = 256
MIN_TOKENS = 6 * PASSES_PER_LAUNCH  # of the context, left to decode
RUNS = 5
# of one launch: far more than any cache, and milliseconds, so that its start does not count
PROBED_BYTES = 8 << 30
LONGEST_S = 60.0  # without news of a request


def benchmark(
    executor: CudaExecutor, depth: int = 0, progress: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure single-request decoding after `depth` cached positions.

    Returns:
        The keys of `laneformer bench`.

    Raises:
        ValueError: The context has no room for `depth`.
    """
    passes: Any = executor.passes
    config, context = passes.config, passes.config.max_position_embeddings
    in_range("depth", depth, int, 0, context - MIN_TOKENS)
    gpus = len(set(passes.devices))
    progress("read probe")
    probe_bytes_per_s = gpus * read_bandwidth(passes.memories[0])
    progress("prefill")
    ttft_s, prefill_tokens_per_s = measure_prefill(executor, depth)

    prompt = random_prompt(config, max(depth, 1))
    tokens = min(TOKENS, context - len(prompt))
    progress(f"{RUNS} runs of {tokens} tokens")
    arrivals(executor, prompt, MIN_TOKENS)  # warm: code, clocks
    # requests take the server's path, and a token's time is that of its news, with the rest of its
    # launch
    runs = [rate_of(arrivals(executor, prompt, tokens)) for _ in range(RUNS)]
    tokens_per_s = statistics.median(runs)
    bytes_per_token = weight_bytes(passes.geometry) + config.cached_bytes(
        len(prompt) + tokens / 2, 2
    )
    name = torch.cuda.get_device_name(passes.devices[0])
    return {
        "tokens_per_s": tokens_per_s,
        "runs_tokens_per_s": runs,
        "bytes_per_token": int(bytes_per_token),
        "tape_bytes_per_token": sum(memory.weight_bytes for memory in passes.memories),
        "probe_bytes_per_s": probe_bytes_per_s,
        **shares(
            tokens_per_s,
            bytes_per_token,
            probe_bytes_per_s,
            datasheet(name),
            gpus,
            config.num_hidden_layers,
        ),
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "ttft_s": ttft_s,
        "depth": depth,
        "tokens_per_run": tokens,
        "dtype": passes.geometry.dtype,
        "version": passes.version,
        "device": name,
    }


def shares(
    tokens_per_s: float,
    bytes_per_token: float,
    probe: float,
    datasheet: float | None,
    gpus: int,
    layers: int,
) -> dict[str, float | None]:
    """Return a speed as percent of the bandwidth, and the exposed microseconds a layer.

    Args:
        probe: Measured bandwidth of all GPUs, bytes/s.
        datasheet: The maker's bandwidth of one GPU, bytes/s.
    """
    rate = bytes_per_token * tokens_per_s
    return {
        "percent_of_probe": 100 * rate / probe,
        "percent_of_datasheet": None if datasheet is None else 100 * rate / (gpus * datasheet),
        "exposed_us_per_layer": 1e6 * (1 / tokens_per_s - bytes_per_token / probe) / layers,
    }


def datasheet(device: str) -> float | None:
    card = card_of_device(device)
    # the maker's figure, in bytes/s
    return None if card is None else card.bandwidth_bytes_per_s


def arrivals(executor: CudaExecutor, prompt: list[int], tokens: int, **options: Any) -> np.ndarray:
    """Return the seconds (of any origin) at which the news of each new token came.

    Raises:
        RuntimeError: The request failed, or no news came.
    """
    times: list[float] = []
    executor.schedule.join([Request(prompt, tokens, **options)])
    while progress := executor.schedule.collect(LONGEST_S):
        for _, _, tokens_arrived, _, ended in progress:
            times += [time.perf_counter()] * len(tokens_arrived)
            if ended and ended[1] is not None:
                raise ended[1]
            if ended:
                return np.array(times)
    raise RuntimeError(f"no news of a request for {LONGEST_S:g} s")


def rate_of(times: np.ndarray) -> float:
    # without the first tokens, which came together
    return float((times > times[0]).sum() / (times[-1] - times[0]))


def measure_prefill(executor: CudaExecutor, depth: int) -> tuple[float, float]:
    """Return the seconds to the first token, and prompt tokens/s."""
    passes: Any = executor.passes
    # `depth`, or a typical length
    length = max(depth, min(2048, passes.config.max_position_embeddings // 2))
    prompt = random_prompt(passes.config, length)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        arrivals(executor, prompt, 1, reuse_prefix=False)
        seconds.append(time.perf_counter() - start)
    ttft_s = statistics.median(seconds[1:])  # the first loads the model and its kernels
    return ttft_s, length / ttft_s


def random_prompt(config: LaneformerConfig, length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, config.vocab_size, length).tolist()


def weight_bytes(geometry: Geometry) -> int:
    """Return the bytes that all GPUs read for one token, without padding."""
    config, scale = geometry.config, 4 * (geometry.dtype == "int8")  # bytes a row
    matrices = {op: geometry.matrix(op) for op in OPS}
    rows = {op: matrix.rows * config.num_hidden_layers for op, matrix in matrices.items()}
    rows["head"] = config.vocab_size // config.num_lanes
    sizes = (rows[op] * (geometry.number_bytes * m.columns + scale) for op, m in matrices.items())
    return config.num_lanes * sum(sizes)


# ---- the read bandwidth of a GPU, over the very bytes that decoding reads (probe.cu) ----


def probe_argument(memory: DeviceMemory, sums: torch.Tensor, rounds: int) -> Probe:
    return Probe(memory.tapes.data_ptr(), memory.tape_at.data_ptr(), sums.data_ptr(), rounds)


def sum_tapes(memory: DeviceMemory) -> int:
    return int(memory.tapes.view(torch.int32).sum(dtype=torch.int64))


def read_bandwidth(memory: DeviceMemory) -> float:
    """Measure how fast a GPU reads its tapes, in bytes/s."""
    geometry, size = memory.geometry, int(tape_starts(memory.geometry)[-1])
    kernels = Kernels("probe", geometry, memory.device)
    sums = torch.zeros(geometry.blocks * geometry.threads, dtype=torch.int32, device=memory.device)
    rounds = math.ceil(PROBED_BYTES / size)
    argument, words = probe_argument(memory, sums, rounds), memory.tapes.view(torch.int32)
    # the best of the decode kernels' own ring and of plain loads. The weights of small models stay
    # in the L2 cache, so the figure is then the cache's.
    ways: list[Callable[[], object]] = [
        lambda: kernels.launch("stream", argument),
        lambda: [words.sum(dtype=torch.int64) for _ in range(rounds)],
    ]
    seconds = min(measure_seconds(read, memory.device) for read in ways for _ in range(RUNS))
    total, expected = (
        value % 2**32 for value in (int(sums.sum(dtype=torch.int64)), sum_tapes(memory) * rounds)
    )
    if total != expected:
        raise RuntimeError(f"the read probe read something else: sum {total}, expected {expected}")
    return rounds * size / seconds


def measure_seconds(work: Callable[[], object], device: torch.device) -> float:
    with torch.cuda.device(device):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
    return float(start.elapsed_time(end)) / 1000
