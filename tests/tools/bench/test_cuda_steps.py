"""Every step of the GPU benchmark from end to end, with stand-ins for the GPU alone: decoder, clocks, probe."""

from __future__ import annotations

import functools
import gc
import json
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda import bench
from laneformer.engine.cuda.executor import CudaExecutor
from laneformer.engine.cuda.geometry import H200, Geometry, Machine
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan, plan_builds
from tests.laneformer.cuda.stand_ins import LoopPasses
from tests.tools.check.test_cuda import CONFIG as SMALL_CONFIG
from tests.tools.check.test_cuda import PlainDecoder
from tools.bench import cuda_processes, cuda_report, cuda_session, cuda_steps
from tools.bench.compiling import in_order
from tools.bench.cuda_session import CUTS, Session, one_lane
from tools.bench.cuda_steps import first_lane
from tools.bench.harness import paired
from tools.check import cuda as check_cuda
from tools.check.cuda import reference_bytes, scored_length
from tools.check.reference import dequantised, hf_model, plain_model, random_weights, tensors_of

CONFIG = LaneformerConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
    num_lanes=2, broadcast_delay=1, sliding_window=6, swa_layers=(0, 1), max_position_embeddings=320, vocab_size=96,
)  # fmt: skip
STEPS = {step.name: step for step in cuda_report.STEPS}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    multi_processor_count=132,
    L2_cache_size=50 << 20,
    total_memory=141 << 30,
    major=9,
    minor=0,
    shared_memory_per_block_optin=227 << 10,
)


ELSEWHERE = {  # steps that are other processes: what they give (test_bundle.py, test_cuda_server.py)
    "server": {"tokens": 128, "tokens_per_s": {"laneformer": [1.0]}, "failed": {}},
    "exchanges": {
        "latency": {f"{state}_{key}": 1.0 for state in ("idle", "saturated")
                    for key in ("store_to_poll_us", "exchange_us", "bytes_per_s")},
        "trace": {"position": 1, "tokens_per_s": 1.0, "of_a_token": {"mail": {"mean_us": 1.0, "worst_us": 2.0}}},
    },
}  # fmt: skip


class StandIn(PlainDecoder):
    """PassDecoder's interface over model.py in float64."""

    def __init__(
        self, config: LaneformerConfig, tensors: Any, dtype: str, devices: Any = ("cuda:0",),
        limit_s: float = 10.0, cache_bytes: int = 0, version: str = "passes", **shape: Any,
    ):  # fmt: skip
        self.config, self.tensors, self.version, self.dtype = config, tensors, version, dtype
        self.devices = [torch.device("cpu")] * len(devices)
        self.geometry = plan_builds(config, dtype, H200, devices=len(devices), **shape)[-1]
        self.memories = [SimpleNamespace(geometry=self.geometry, tapes=torch.ones(1024), weight_bytes=4096)]
        self.known, self.noise, self.ids = {}, 0.0, []

    @functools.cached_property
    def model(self) -> Any:
        weights = {name: torch.from_numpy(t.values).view(TYPES[t.dtype]) for name, t in self.tensors.items()}
        return plain_model(self.config, weights if self.dtype in TYPES else dequantised(weights))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session on the CPU in which a token takes 1/800 s."""
    monkeypatch.setattr(Session, "device", "cpu")
    monkeypatch.setattr(cuda_session, "PassDecoder", StandIn)
    monkeypatch.setattr(cuda_steps, "CudaExecutor", lambda passes: SimpleNamespace(passes=passes))
    monkeypatch.setattr(cuda_session, "read_bandwidth", lambda memory: {"stream": 4.4e12, "loads": 4.3e12})
    monkeypatch.setattr(cuda_steps, "load_gpu", lambda device: None)
    monkeypatch.setattr(cuda_steps, "GREEDY_PROMPTS", 2)
    monkeypatch.setattr(cuda_steps, "TRIAL_TOKENS", 8)
    monkeypatch.setattr(bench, "arrivals", lambda executor, prompt, tokens, **_: np.arange(tokens) / 800)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(Session, "smaller", lambda self, flavor: self)
    monkeypatch.setattr(cuda_session, "compile_cubin", lambda *unit, driver: None)
    session = Session("tiny", "bf16", runs=3)
    session.config, session.deadline = CONFIG, time.monotonic() + 600
    return session


def batches(session: Session, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The step through a real schedule and executor."""
    with monkeypatch.context() as patch:
        patch.setattr(cuda_session, "PassDecoder", loop_of)
        patch.setattr(cuda_steps, "CudaExecutor", CudaExecutor)
        session.decoder.cache_clear()  # type: ignore[attr-defined]
        found = cuda_steps.run(STEPS["batches"], session)
        session.decoder.cache_clear()  # type: ignore[attr-defined]
        return found


def loop_of(config: LaneformerConfig, tensors: Any, dtype: str, *_: Any, **__: Any) -> LoopPasses:
    return LoopPasses(config, tensors, dtype)


@pytest.mark.rotate
def test_every_step_gives_what_the_report_shows(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_processes.shutil, "which", lambda name: None)
    results = {
        name: {"result": cuda_steps.run(step, session)}
        for name, step in STEPS.items()
        if name not in ("300m", "batches", "server", "exchanges")
    }
    results["batches"] = {"result": batches(session, monkeypatch)}
    results["300m"] = results["tiny"]  # the same function
    results |= {name: {"result": found} for name, found in ELSEWHERE.items()}
    steps = json.loads(json.dumps(results))  # as the worker hands them over
    assert steps["prepare"]["result"]["late"] == steps["prepare"]["result"]["failed"] == "none"
    assert steps["300m"]["result"]["holds"]
    assert steps["tiny_graph"]["result"]["version"] == "graph"
    assert steps["correctness"]["result"]["failed"] == []
    assert steps["correctness"]["result"]["holds"]
    assert set(steps["decode"]["result"]["depths"]) == {"0", "160", "224"}
    assert steps["baselines"]["result"]["failed"] == {}
    assert set(steps["baselines"]["result"]["tokens_per_s"]) == {"passes", "graph", "hf_generate", *CUTS}
    assert steps["compiled"]["result"]["failed"] == {}
    assert (
        steps["lane_alone"]["result"]["blocking_exchanges"] == 3
    )  # one layer of PRESENT joins, and the best token
    read = {dtype: steps[dtype]["result"]["bytes_per_token"] for dtype in ("fp16", "int8")}
    assert all(steps[dtype]["result"]["holds"] for dtype in read)
    assert read["fp16"] / 2 < read["int8"] < 0.6 * read["fp16"]
    shared = steps["batches"]["result"]
    assert [name for name, held in shared.items() if held is True] == [
        "batch of 1, as alone", "batch of 2, as alone", "batch of 4, as alone", "drafts, as alone"
    ]  # fmt: skip
    assert shared["drafts, passes"] < 24 + 8
    head = {"date": "2026-01-01", "command": "x", "commit": "abc", "flavor": "tiny", "dtype": "bf16"}
    page = cuda_report.markdown({**head, "steps": steps})
    assert "not measured" not in page
    assert "compute-sanitizer is not on the PATH" in page


@pytest.mark.rotate
def test_everything_is_compiled_at_once_and_what_is_late_is_named(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every unit in a process of its own; neither a crash nor a hang stops the others."""

    def compile_cubin(version: str, geometry: Geometry, architecture: str, driver: int | None) -> None:
        if version == "probe":
            time.sleep(600)
        if geometry.config.num_lanes == 1:
            os._exit(9)
        (tmp_path / f"{version} {architecture} {geometry.dtype} {os.getpid()}").touch()

    monkeypatch.setattr(cuda_session, "compile_cubin", compile_cubin)
    session.deadline = time.monotonic() + cuda_session.RESERVE_S + 15
    report = cuda_steps.run(STEPS["prepare"], session)
    made = sorted(path.name.rpartition(" ")[0] for path in tmp_path.iterdir())
    assert report["late"].startswith("probe")
    assert report["failed"].count("passes") == 6  # one lane on 128 and on 132 blocks, three builds each
    assert set(made) == {
        *(f"{unit} sm_90a bf16" for unit in ("graph", "fill", "traced")),
        *(f"passes sm_90a {dtype}" for dtype in ("bf16", "fp16", "int8")),
    }
    assert len(made) == report["units"] - 7


@pytest.mark.rotate
def test_kernels_are_compiled_in_order(tmp_path: Path) -> None:
    """What is needed first is there first; what the time does not suffice for is late."""

    def job(name: str, seconds: float) -> Callable[[], None]:
        def act() -> None:
            time.sleep(seconds)
            with (tmp_path / "made").open("a") as made:
                made.write(f"{name} ")

        return act

    jobs = {
        "first": job("first", 0.3),
        "second": job("second", 0),
        "third": lambda: os._exit(9),
        "last": job("last", 60),
    }
    report = in_order({**jobs, "never": job("never", 0)}, 8.0, cores=1)
    assert (tmp_path / "made").read_text().split() == ["first", "second"]
    assert (report["units"], report["late"], report["failed"]) == (5, "last, never", "third")


def test_room_is_made_where_it_is_needed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 24 GB: the decoders go, the reference is computed without them; on less it is refused with both sizes."""
    first, free = session.decoder(), [8 << 30]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (free[0], 1 << 40))
    cuda_session.make_room(session, 7 << 30)
    assert session.decoder() is first
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.append(free.pop() + (5 << 30)))
    cuda_session.make_room(session, 12 << 30)
    assert session.decoder() is not first
    with pytest.raises(RuntimeError, match=r"the GPU has 19\.3 GB free, and this needs 21\.5"):
        cuda_session.make_room(session, 20 << 30)
    config = LaneformerConfig.from_flavor("2b")
    needed = reference_bytes(config, scored_length(config)) + 2 * config.parameter_count()["total"]
    assert needed < 22.5e9, "of a 24 GB card"


@pytest.mark.rotate
def test_no_model_of_the_reference_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are two there at a time."""
    alive, most = weakref.WeakSet[Any](), list[int]()

    def made(*given: Any) -> Any:
        gc.collect()
        model = hf_model(*given)
        alive.add(model)
        most.append(len(alive))
        return model

    monkeypatch.setattr(check_cuda, "hf_model", made)
    prompts = check_cuda.greedy_prompts(CONFIG, 2)
    truth = check_cuda.reference(CONFIG, random_weights(CONFIG), 4, prompts=prompts)
    gc.collect()
    assert (most, len(alive)) == ([1, 1], 0)
    assert [len(truth.greedy(prompt, 5)[0]) for prompt in prompts] == [5, 5]


@pytest.mark.rotate
def test_a_wrong_engine_fails_the_whole_verdict(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = StandIn.scores
    monkeypatch.setattr(StandIn, "scores", lambda self, text: exact(self, text).roll(1, -1))
    found = cuda_steps.correctness(session)
    assert not found["holds"]
    assert "passes: closer to float32 than bf16 is" in found["failed"]
    assert "passes: greedy tokens" in found["failed"]


@pytest.mark.rotate
def test_without_the_kernel_of_passes_the_graph_is_measured(session: Session) -> None:
    session.without = ("passes",)
    with pytest.raises(RuntimeError, match="the passes version failed at its first tokens"):
        cuda_steps.run(STEPS["first_passes"], session)
    assert {row["version"] for row in cuda_steps.decode(session)["depths"].values()} == {"graph"}
    trials = cuda_steps.baselines(session)
    assert set(trials["failed"]) == {"passes", *CUTS}
    assert set(trials["tokens_per_s"]) == {"graph", "hf_generate"}
    found = cuda_steps.correctness(session)
    assert found["failed"] == ["passes: runs"]
    with pytest.raises(RuntimeError, match="the passes version"):
        cuda_steps.lane_alone(session)


def test_a_lane_alone_is_packed_like_any_model() -> None:
    """Its tapes hold the first lane's weights, whatever the number of splits."""
    config, tensors = one_lane(SMALL_CONFIG), tensors_of(random_weights(SMALL_CONFIG))
    geometry = plan(config, "bf16", Machine(8, 32 * 1024, 90), warps=2, chunk_bytes=512)
    memory = DeviceMemory(geometry, {name: first_lane(name, t) for name, t in tensors.items()}, 0, "cpu")
    lanes = sum(
        np.abs(t.values[0].astype(np.int64)).sum() for name, t in tensors.items() if t.values.ndim == 3
    )
    assert int(memory.tapes.view(torch.uint16).long().sum()) == lanes
    assert geometry.blocks == 8
    assert 2 * bench.weight_bytes(geometry) == bench.weight_bytes(
        plan(SMALL_CONFIG, "bf16", Machine(8, 32 * 1024, 90), warps=2)
    )


def test_candidates_alternate_and_a_failing_one_is_left_out() -> None:
    order = list[str]()

    def maker(name: str, fails: bool = False) -> Any:
        def run() -> float:
            order.append(name)
            if fails:
                raise RuntimeError("no")
            return 8.0

        return lambda: run

    found = paired({"a": maker("a"), "b": maker("b"), "c": maker("c", True)}, 2, lambda: 100.0)
    assert order == ["a", "b", "c", "a", "b", "b", "a"]
    assert found["tokens_per_s"] == {"a": [8.0, 8.0], "b": [8.0, 8.0]}
    assert found["failed"] == {"c": "RuntimeError: no"}
