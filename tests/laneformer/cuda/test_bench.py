"""Tests of `laneformer bench` for GPUs without one: arrivals, bytes, shares, the probe's sums."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda import bench
from laneformer.engine.cuda.bench import shares
from laneformer.engine.cuda.compile import FOLDER, INCLUDES, source_of
from laneformer.engine.cuda.executor import CudaExecutor
from laneformer.engine.cuda.geometry import H200
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.emulated import EmulatedPasses, needs_emulator
from tests.laneformer.cuda.harness import SMALL, random_model, small_config, tensors_of
from tests.proofs import KERNEL_SOURCES

CONFIG = LaneformerConfig.from_flavor("2b")


def test_shares_by_hand():
    # 1000 us per token, of which 909.09 are the stream
    one_gpu, two_gpus = (
        shares(1000.0, 4e9, 4.4e12, 5e12, 1, 10),
        shares(1000.0, 4e9, 8.8e12, 5e12, 2, 10),
    )
    assert one_gpu["percent_of_probe"] == pytest.approx(90.909, abs=1e-3)
    assert (one_gpu["percent_of_datasheet"], two_gpus["percent_of_datasheet"]) == pytest.approx(
        (80, 40)
    )
    assert one_gpu["exposed_us_per_layer"] == pytest.approx(9.0909, abs=1e-4)
    assert shares(1000.0, 4e9, 4e12, None, 1, 10)["percent_of_datasheet"] is None


def test_the_figures_of_a_run_have_the_contracts_names(monkeypatch):
    # a token reads two bytes per weight but the embedding, and 6144 bytes of keys and values a
    # layer
    geometry, counts = plan(CONFIG, "bf16", H200), CONFIG.parameter_count()
    assert (
        bench.weight_bytes(geometry)
        == 2 * (15 * counts["layer"] + counts["lm_head"])
        == 4_443_340_800
    )
    passes = SimpleNamespace(
        config=CONFIG,
        geometry=geometry,
        devices=[torch.device("cuda:0")],
        version="passes",
        memories=[SimpleNamespace(weight_bytes=4_445_437_952)],
    )
    executor = SimpleNamespace(passes=passes)
    monkeypatch.setattr(bench, "arrivals", lambda executor, prompt, tokens: np.arange(tokens) / 800)
    monkeypatch.setattr(bench, "read_bandwidth", lambda memory: 4.4e12)
    monkeypatch.setattr(bench, "measure_prefill", lambda executor, depth: (0.1, 20480.0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    figures = bench.benchmark(executor, 2048, lambda text: None)
    names = (
        "tokens_per_s",
        "bytes_per_token",
        "probe_bytes_per_s",
        "percent_of_probe",
        "prefill_tokens_per_s",
        "ttft_s",
        "percent_of_datasheet",
        "exposed_us_per_layer",
    )
    assert all(isinstance(figures[name], (int, float)) for name in names)
    token_bytes = 4_443_340_800 + 6144 * (10 * 2048 + 5 * (2048 + 128))
    assert figures["bytes_per_token"] == token_bytes
    assert figures["tokens_per_s"] == pytest.approx(800)
    assert figures["percent_of_datasheet"] == pytest.approx(100 * 800 * token_bytes / 4.8e12)
    with pytest.raises(ValueError, match="depth = 4033 is outside 0 to 4000"):
        bench.benchmark(executor, 4033, lambda text: None)


@pytest.mark.job
@needs_emulator
def test_every_token_has_the_time_of_its_launch(cuda_builds):
    executor = CudaExecutor(EmulatedPasses(cuda_builds, 3, blocks_per_lane=2))
    times = bench.arrivals(executor, [5], 19)
    launches, counts = np.unique(times, return_counts=True)
    # the prompt's pass, a launch of as many passes as there may be, and the rest
    assert counts.tolist() == [1, 16, 2]
    assert bench.rate_of(times) == pytest.approx(18 / (launches[-1] - launches[0]))
    executor.schedule.fail("the GPU has failed")
    with pytest.raises(RuntimeError, match="the GPU has failed"):
        bench.arrivals(executor, [5], 8)


@pytest.mark.proof(*KERNEL_SOURCES)
@needs_emulator
def test_the_probe_reads_every_byte_as_often_as_it_says(cuda_builds):
    geometry = plan(small_config(), "bf16", SMALL, warps=2, chunk_bytes=1024)
    memory = DeviceMemory(geometry, tensors_of(random_model(small_config()), "bf16"), 0, "cpu")
    source = source_of("probe", geometry) + "EMULATE(stream, Probe)\n"
    library = emulator.build(source, [FOLDER, *INCLUDES], {"TABLE": "constexpr"}, cuda_builds)
    shape = {
        "blocks": geometry.blocks,
        "threads": geometry.threads,
        "shared_bytes": geometry.shared_bytes,
    }
    # sums wrap at 32 bits, and still change with every byte that is read too often or never
    for rounds in (1, 3):
        sums = torch.zeros(geometry.blocks * geometry.threads, dtype=torch.int32)
        emulator.launch(
            library, "stream", bench.probe_argument(memory, sums, rounds), seed=rounds, **shape
        )
        assert int(sums.sum(dtype=torch.int64)) % 2**32 == bench.sum_tapes(memory) * rounds % 2**32
