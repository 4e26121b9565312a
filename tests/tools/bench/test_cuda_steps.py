"""Every step of the GPU benchmark from end to end, with stand-ins for the GPU alone: decoder, clocks, probe."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda import bench
from laneformer.engine.cuda.geometry import H200, Geometry, Machine
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.planning import plan
from tests.laneformer.cuda.stand_ins import LoopPasses
from tests.tools.check.test_cuda import CONFIG as SMALL_CONFIG
from tests.tools.check.test_cuda import PlainDecoder
from tools.bench import cuda_report, cuda_session, cuda_steps
from tools.bench.cuda_session import CUTS, Session, one_lane
from tools.bench.cuda_steps import first_lane
from tools.bench.harness import paired
from tools.check.reference import dequantised, plain_model, random_weights, tensors_of

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


class StandIn(PlainDecoder):
    """SequenceDecoder's interface over model.py in float64."""

    def __init__(
        self, config: LaneformerConfig, tensors: Any, dtype: str, devices: Any = ("cuda:0",),
        version: str = "persistent", limit_s: float = 10.0, **shape: Any,
    ):  # fmt: skip
        self.config, self.tensors, self.version, self.dtype = config, tensors, version, dtype
        self.devices = [torch.device("cpu")] * len(devices)
        self.geometry = plan(config, dtype, H200, devices=len(devices), **shape)
        self.memories = [SimpleNamespace(geometry=self.geometry, tapes=torch.ones(1024), weight_bytes=4096)]
        self.known, self.noise = {}, 0.0

    @functools.cached_property
    def model(self) -> Any:
        weights = {name: torch.from_numpy(t.values).view(TYPES[t.dtype]) for name, t in self.tensors.items()}
        return plain_model(self.config, weights if self.dtype in TYPES else dequantised(weights))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Session:
    """A session on the CPU in which a token takes 1/800 s."""
    monkeypatch.setattr(Session, "device", "cpu")
    monkeypatch.setattr(cuda_session, "SequenceDecoder", StandIn)
    monkeypatch.setattr(cuda_steps, "PassDecoder", LoopPasses)
    monkeypatch.setattr(cuda_session, "read_bandwidth", lambda memory: {"stream": 4.4e12, "loads": 4.3e12})
    monkeypatch.setattr(cuda_steps, "load_gpu", lambda device: None)
    monkeypatch.setattr(cuda_steps, "GREEDY_PROMPTS", 2)
    monkeypatch.setattr(cuda_steps, "TRIAL_TOKENS", 8)
    monkeypatch.setattr(bench, "arrivals", lambda decoder, prompt, tokens: np.arange(tokens) / 800)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(Session, "smaller", lambda self, flavor: self)
    monkeypatch.setattr(cuda_session, "compile_cubin", lambda *unit: None)
    session = Session("tiny", "bf16", runs=3)
    session.config, session.deadline = CONFIG, time.monotonic() + 600
    return session


def test_every_step_gives_what_the_report_shows(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_steps.shutil, "which", lambda name: None)
    results = {
        name: {"result": cuda_steps.run(step, session)} for name, step in STEPS.items() if name != "300m"
    }
    results["300m"] = results["tiny"]  # the same function
    steps = json.loads(json.dumps(results))  # as the worker hands them over
    assert steps["prepare"]["result"]["late"] == steps["prepare"]["result"]["failed"] == "none"
    assert steps["300m"]["result"]["holds"]
    assert steps["tiny_graph"]["result"]["version"] == "graph"
    assert steps["correctness"]["result"]["failed"] == []
    assert steps["correctness"]["result"]["holds"]
    assert set(steps["decode"]["result"]["depths"]) == {"0", "160", "256"}
    assert steps["baselines"]["result"]["failed"] == {}
    assert set(steps["baselines"]["result"]["tokens_per_s"]) == {"persistent", "graph", "hf_generate", *CUTS}
    assert steps["compiled"]["result"]["failed"] == {}
    assert (
        steps["lane_alone"]["result"]["blocking_exchanges"] == 3
    )  # one layer of PRESENT joins, and the best token
    read = {dtype: steps[dtype]["result"]["bytes_per_token"] for dtype in ("fp16", "int8")}
    assert all(steps[dtype]["result"]["holds"] for dtype in read)
    assert read["fp16"] / 2 < read["int8"] < 0.6 * read["fp16"]
    shared = steps["passes"]["result"]
    assert [name for name, held in shared.items() if held is True] == [
        "batch of 1, as alone", "batch of 2, as alone", "batch of 4, as alone", "drafts, as alone"
    ]  # fmt: skip
    assert shared["drafts, passes"] < 24 + 8
    head = {"date": "2026-01-01", "command": "x", "commit": "abc", "flavor": "tiny", "dtype": "bf16"}
    page = cuda_report.markdown({**head, "steps": steps})
    assert "not measured" not in page
    assert "compute-sanitizer is not on the PATH" in page


@pytest.mark.slow
def test_everything_is_compiled_at_once_and_what_is_late_is_named(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every unit in a process of its own; neither a crash nor a hang stops the others."""

    def compile_cubin(
        version: str, geometry: Geometry, architecture: str, cache: None, driver: int | None
    ) -> None:
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
    assert report["failed"].count("persistent") == 2  # one lane on 128 and on 132 blocks
    persistent = {f"persistent sm_90a {dtype}" for dtype in ("bf16", "fp16", "int8")}
    assert set(made) == {"graph sm_90a bf16", "passes sm_90a bf16", *persistent}
    assert len(made) == report["units"] - 3


def test_no_figure_is_of_a_version_that_was_not_asked_for(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = cuda_session.SequenceDecoder

    def falls_back(*given: Any, **shape: Any) -> Any:
        decoder = make(*given, **shape)
        decoder.version = "graph"
        return decoder

    monkeypatch.setattr(cuda_session, "SequenceDecoder", falls_back)
    with pytest.raises(
        RuntimeError, match="the persistent version cannot run here; graph would decode instead"
    ):
        cuda_steps.run(STEPS["first_persistent"], session)
    assert cuda_steps.run(STEPS["first_graph"], session)["version"] == "graph"


def test_a_wrong_engine_fails_the_whole_verdict(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = StandIn.scores
    monkeypatch.setattr(StandIn, "scores", lambda self, text: exact(self, text).roll(1, -1))
    found = cuda_steps.correctness(session)
    assert not found["holds"]
    assert "persistent: closer to float32 than bf16 is" in found["failed"]
    assert "persistent: greedy tokens" in found["failed"]


def test_without_the_persistent_kernel_the_graph_is_measured(session: Session) -> None:
    session.without = ("persistent",)
    with pytest.raises(RuntimeError, match="the persistent version failed at its first tokens"):
        cuda_steps.run(STEPS["first_persistent"], session)
    assert {row["version"] for row in cuda_steps.decode(session)["depths"].values()} == {"graph"}
    trials = cuda_steps.baselines(session)
    assert set(trials["failed"]) == {"persistent", *CUTS}
    assert set(trials["tokens_per_s"]) == {"graph", "hf_generate"}
    found = cuda_steps.correctness(session)
    assert found["failed"] == ["persistent: runs"]
    with pytest.raises(RuntimeError, match="the persistent version"):
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
