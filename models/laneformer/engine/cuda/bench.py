"""Decode speed on GPUs next to what their memory gives: percent of the read probe, and what
each layer leaves exposed.

    t = bytes / bandwidth + layers x c

c, the microseconds a layer that the stream of weights does not hide, is the figure that exchanges
decide. Times are those at which the host sees each token, so the figures are of decoding alone: after
the prompt and the launch.
"""

from __future__ import annotations

import ctypes as c
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..options import in_range
from .geometry import OPS, Geometry
from .launch import Kernels
from .memory import DeviceMemory
from .sequence import SequenceDecoder
from .tape import tape_starts

TOKENS = 256
EDGE_TOKENS = 32  # the first and the last of a run, to be reported apart
RUNS = 5
PROBES = ("stream", "loads")  # kernels of probe.cu
PROBED_BYTES = (
    8 << 30
)  # of one launch: far more than any cache, and milliseconds, so that its start does not count
LOOKS = 20_000  # at the number of tokens, between two looks whether the kernel has ended
DATASHEET = (  # bytes/s of the memory, by a part of the GPU's name; the first that fits
    ("GB200", 8.0e12), ("B200", 8.0e12), ("GH200 144G", 4.9e12), ("GH200", 4.0e12), ("H200", 4.8e12),
    ("H100 NVL", 3.938e12), ("H100 PCIe", 2.039e12), ("H100", 3.35e12), ("A100-SXM4-80GB", 2.039e12),
    ("A100 80GB PCIe", 1.935e12), ("A100-SXM4-40GB", 1.555e12), ("A100-PCIE-40GB", 1.555e12), ("L40S", 0.864e12),
    ("RTX 5090", 1.792e12), ("RTX 4090", 1.008e12), ("RTX 3090", 0.936e12),
)  # fmt: skip


def benchmark(
    decoder: SequenceDecoder,
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
    context = decoder.config.max_position_embeddings
    in_range("depth", depth, int, 0, context - 2 * EDGE_TOKENS)
    if probe_bytes_per_s is None:
        progress("read probe")
        gpus = len(set(decoder.devices))
        probe_bytes_per_s = gpus * max(read_bandwidth(decoder.memories[0]).values())
    progress("prefill")
    ttft_s, prefill_tokens_per_s = measure_prefill(decoder, depth)

    prompt = random_prompt(decoder, max(depth, 1))
    tokens = min(TOKENS, context - len(prompt))
    progress(f"{runs} runs of {tokens} tokens")
    arrivals(decoder, prompt, 2 * EDGE_TOKENS)  # warm: code, clocks
    measured = [speeds(arrivals(decoder, prompt, tokens)) for _ in range(runs)]
    bytes_per_token = weight_bytes(decoder.geometry) + decoder.config.cached_bytes(
        len(prompt) + tokens / 2, 2
    )
    name = torch.cuda.get_device_name(decoder.devices[0])
    return {
        **{key: statistics.median(run[key] for run in measured) for key in measured[0]},
        "runs_tokens_per_s": [run["tokens_per_s"] for run in measured],
        "bytes_per_token": int(bytes_per_token),
        "tape_bytes_per_token": sum(memory.weight_bytes for memory in decoder.memories),
        "probe_bytes_per_s": probe_bytes_per_s,
        **shares(
            statistics.median(run["tokens_per_s"] for run in measured), bytes_per_token, probe_bytes_per_s,
            datasheet(name), len(set(decoder.devices)), decoder.config.num_hidden_layers,
        ),
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "ttft_s": ttft_s,
        "depth": depth,
        "tokens_per_run": tokens,
        "dtype": decoder.geometry.dtype,
        "version": decoder.version,
        "device": name,
    }  # fmt: skip


def shares(
    tokens_per_s: float, bytes_per_token: float, probe: float, datasheet: float | None, gpus: int, layers: int
) -> dict[str, float | None]:
    """How much of the bandwidth (bytes/s; `datasheet` of one GPU) a speed is, and the time a
    layer that is not.
    """
    rate = bytes_per_token * tokens_per_s
    return {
        "percent_of_probe": 100 * rate / probe,
        "percent_of_datasheet": None if datasheet is None else 100 * rate / (gpus * datasheet),
        "exposed_us_per_layer": 1e6 * (1 / tokens_per_s - bytes_per_token / probe) / layers,
    }


def datasheet(name: str) -> float | None:
    """Bytes/s that the maker states for a GPU of this name; None where the table has it not."""
    return next((rate for part, rate in DATASHEET if part in name), None)


def arrivals(decoder: SequenceDecoder, prompt: list[int], tokens: int) -> np.ndarray:
    """Seconds (of any origin) at which the host saw each of `tokens` new tokens."""
    decoder.start(prompt, tokens)
    seen, times = decoder.memories[0].published.numpy(), np.zeros(tokens)
    count, looks = 0, 0
    while count < tokens and looks < LOOKS:
        if decoder.version == "graph":
            queue_one(decoder)
        there, looks = int(seen[0]), looks + 1
        if there > count:
            times[count:there] = time.perf_counter()
            count, looks = there, 0
        elif looks == LOOKS and not all(stream.query() for stream in decoder._streams):
            looks = 0
    made = decoder.wait()  # RuntimeError after a hang
    if len(made) != tokens:
        raise RuntimeError(f"{len(made)} tokens of {tokens} were made")
    return times


def queue_one(decoder: SequenceDecoder) -> None:
    """One more token of the graph, without waiting for it."""
    if decoder._replays < decoder.read_tokens + decoder.max_tokens - 1:
        with torch.cuda.stream(decoder._streams[0]):
            decoder._graph.replay()
        decoder._replays += 1


def speeds(times: np.ndarray) -> dict[str, float]:
    """Tokens/s between the arrivals of one run: of all, of the first and of the last."""
    edge = min(EDGE_TOKENS, len(times) - 1)
    return {
        "tokens_per_s": float((len(times) - 1) / (times[-1] - times[0])),
        "first_tokens_per_s": float(edge / (times[edge] - times[0])),
        "last_tokens_per_s": float(edge / (times[-1] - times[-1 - edge])),
    }


def measure_prefill(decoder: SequenceDecoder, depth: int) -> tuple[float, float]:
    """Seconds to the first token after a prompt of `depth` (or a typical length), and
    prompt tokens per second.
    """
    length = max(depth, min(2048, decoder.config.max_position_embeddings // 2))
    prompt = random_prompt(decoder, length)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        decoder.start(prompt, 1, reuse_prefix=False)
        decoder.wait()
        seconds.append(time.perf_counter() - start)
    ttft_s = statistics.median(seconds[1:])  # the first loads the model and its kernels
    return ttft_s, len(prompt) / ttft_s


def random_prompt(decoder: SequenceDecoder, length: int) -> list[int]:
    return np.random.default_rng(0).integers(0, decoder.config.vocab_size, length).tolist()


def weight_bytes(geometry: Geometry) -> int:
    """Bytes of weights that all GPUs together read for one token, without what fills up
    the tapes' last chunks.
    """
    layers = geometry.config.num_hidden_layers
    scale = 4 if geometry.dtype == "int8" else 0  # of a row
    matrices = {op: geometry.matrix(op) for op in OPS}
    sizes = {op: m.rows * (geometry.number_bytes * m.columns + scale) for op, m in matrices.items()}
    return geometry.config.num_lanes * (layers * sum(sizes[op] for op in OPS[:-1]) + sizes["head"])


# ---- the read bandwidth of a GPU, over the very bytes that decoding reads (probe.cu) ----


class Probe(c.Structure):
    """The kernels' argument (probe.cu: Probe)."""

    _fields_ = [
        ("tapes", c.c_void_p), ("tape_at", c.c_void_p), ("sums", c.c_void_p), ("bytes", c.c_uint64),
        ("rounds", c.c_int),
    ]  # fmt: skip


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
