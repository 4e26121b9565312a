"""Tests of launches as they reach a driver, on a card of every generation."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda import executor, graph, launch, passes
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.cuda.geometry import Geometry
from laneformer.engine.cuda.graph import GraphRunner
from laneformer.engine.cuda.launch import describe
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.passes import PassRunner
from laneformer.engine.cuda.planning import plan_builds
from laneformer.engine.decoder import EngineLost, Request
from tests.laneformer.cuda.cards import CARDS
from tests.laneformer.cuda.fake_driver import (
    H200,
    NAMES,
    NOT_READY,
    STREAM,
    TOO_LARGE,
    FakeDriver,
    argument_of,
)
from tests.laneformer.cuda.harness import random_model, small_config, tensors_of

pytest.importorskip("cuda.bindings.driver")
COOPERATIVE, OVERLAP = 2, 6  # CUlaunchAttributeID in cuda.h
CONFIG = LaneformerConfig.from_flavor("2b")
GENERATIONS = {card.architecture: card for card in CARDS.values()}


def test_a_pytorch_for_rocm_is_refused(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(
        ValueError, match=r"for AMD GPUs, the CUDA engine for NVIDIA's; use device \"cpu\""
    ):
        describe(torch.device("cuda"))


# ---- every kernel of a version once, of each of its builds ----


def geometries_of(version, card) -> list[Geometry]:
    return plan_builds(CONFIG, "bf16", card.machine, version)


def fill_argument(version, geometry) -> bytes:
    return bytes((7 * i + 1) % 256 for i in range(ctypes.sizeof(argument_of(version, geometry))))


def launch_all(driver, version, kernels=launch) -> list[dict[str, Any]]:
    driver.launches.clear()
    for geometry in geometries_of(version, driver.card):
        loaded = kernels.Kernels(version, geometry, torch.device("cuda:0"))
        if version == "passes":
            loaded.require_resident(NAMES[version][0])
        loaded.load(*NAMES[version])
        argument = argument_of(version, geometry).from_buffer_copy(fill_argument(version, geometry))
        for name in NAMES[version]:
            loaded.launch(name, argument, 1 if name == "choose" else None)
    return driver.launches


def faults_of(card, version, launches) -> list[str]:
    """Return the faults of launches: attributes, sizes, stream, argument, loading or shared memory."""
    attributes = {
        "passes": {COOPERATIVE: 1},
        "graph": {OVERLAP: int(card.architecture >= 90)},
        "probe": {OVERLAP: 0},
    }[version]
    expected = [
        (name, geometry) for geometry in geometries_of(version, card) for name in NAMES[version]
    ]
    faults = []
    for record, (name, geometry) in itertools.zip_longest(launches, expected):
        right = {
            "name": name,
            "grid": [1 if name == "choose" else geometry.blocks, 1, 1],
            "block": [32 * geometry.warps, 1, 1],
            "shared": geometry.shared_bytes,
            "max_shared": geometry.shared_bytes,
            "stream": STREAM,
            "loaded": True,
            "carveout": 100,
            "attributes": attributes,
            "argument": fill_argument(version, geometry),
        }
        faults += [key for key, value in right.items() if record[key] != value]
        if name != "choose" and record["resident"] < (2 if version == "graph" else 1):
            faults.append("resident")
    return faults


@pytest.mark.parametrize("card", GENERATIONS.values(), ids=map(str, GENERATIONS))
def test_every_launch_on_every_generation(card, monkeypatch):
    driver = FakeDriver(monkeypatch, card)
    for version in NAMES:
        assert faults_of(card, version, launch_all(driver, version)) == [], version


FAULTS = [  # text of launch.py, and what a mistake there would make of it
    ("CU_LAUNCH_ATTRIBUTE_COOPERATIVE", "CU_LAUNCH_ATTRIBUTE_PRIORITY"),
    ("sharedMemBytes = self.geometry.shared_bytes", "sharedMemBytes = 4096"),
    ("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", "CU_FUNC_ATTRIBUTE_CACHE_MODE_CA"),
    ("torch.cuda.current_stream(self.device).cuda_stream", "0"),
    ("ctypes.addressof(argument)", "ctypes.addressof(type(argument)())"),
]


@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_a_fault_in_a_launch_is_found(right, wrong, monkeypatch):
    text = Path(launch.__file__).read_text()
    assert text.count(right) == 1
    planted: Any = ModuleType("laneformer.engine.cuda.planted")
    exec(compile(text.replace(right, wrong), "planted", "exec"), planted.__dict__)
    driver = FakeDriver(monkeypatch)
    planted.compile_cubin, planted.driver_version = launch.compile_cubin, launch.driver_version
    with contextlib.suppress(RuntimeError):  # the driver refuses it
        assert faults_of(H200, "passes", launch_all(driver, "passes", planted))


# ---- whole requests of a small model ----

SMALL_CONFIG = small_config()
TENSORS = tensors_of(random_model(SMALL_CONFIG), "bf16")
ANSWER = ([(2 + i) * 7 % 96 for i in range(20)], None)  # tokens, error
TWO = ("cuda:0", "cuda:0")


class Choosing(PassRunner):
    """Launches whose chosen tokens depend on their positions."""

    late_s = 0.05

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options, limit_s=0.1)

    def _launch(self, arguments: Sequence[Any]):
        super()._launch(arguments)
        order, memory = arguments[0].order, self.memories[0]
        for step in range(1 + order.extra_passes):
            for i, column in enumerate(order.columns[: order.column_count]):
                token = (column.position + step) * 7 % self.config.vocab_size
                memory.picks[step, i] = (order.epoch + step + 1) << 32 | token


class FakeGraph(Choosing, GraphRunner):
    pass


@pytest.fixture
def driver(monkeypatch):
    for module, name, value in (
        (passes, "PASS_S", 0.001),
        (passes, "connect", lambda devices: None),
        (executor, "RETRIES_S", (0.01, 0.01)),
        (passes, "DeviceMemory", lambda g, tensors, i, _, n: DeviceMemory(g, tensors, i, "cpu", n)),
        (graph, "RUNNERS", {"passes": Choosing, "graph": FakeGraph}),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("laneformer.engine.cuda.decoder.RUNNERS", graph.RUNNERS)
    return FakeDriver(monkeypatch)


def decoder_of(devices=("cuda:0",), version="passes") -> CudaDecoder:
    return CudaDecoder(SMALL_CONFIG, TENSORS, "bf16", devices, version=version, cache_bytes=0)


def answer(decoder) -> tuple[list[int], str | None]:
    decoder.join([Request([1, 2, 3], 20, quiet=True)])
    (collected,) = decoder.collect(60)
    return collected.tokens, collected.whole.error and str(collected.whole.error)


def launches_of(driver) -> list[tuple[str, dict[int, int]]]:
    return [(record["name"], record["attributes"]) for record in driver.launches]


def test_requests_launch_what_their_version_has(driver):
    # passes: four launches at load, the last of 16 passes, then the request's; the graph is
    # captured once
    assert answer(decoder_of()) == ANSWER
    assert launches_of(driver) == [("pass", {COOPERATIVE: 1})] * (4 + 3)
    driver.launches.clear()
    assert answer(decoder_of(version="graph")) == ANSWER
    names = [name for name, _ in launches_of(driver)]
    assert (names[:3], names[-2:]) == (["qkv", "attention", "output"], ["head", "choose"])


def test_two_groups_of_lanes_on_one_gpu_are_launched_plainly(driver):
    # two cooperative launches may run one after the other, while each waits for the other's words
    assert answer(decoder_of(TWO)) == ANSWER
    assert {str(record) for record in launches_of(driver)} == {str(("pass", {OVERLAP: 0}))}
    assert sum(record["grid"][0] for record in driver.launches[:2]) <= H200.multiprocessors


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_blocks": 16}, "LAUNCH_TOO_LARGE"),
        ({"registers": {"pass": 255}}, "132 multiprocessors hold 0"),
    ],
)
def test_the_graph_decodes_where_blocks_cannot_be_resident(changes, reason, driver):
    # detected at the first launch or before, reported once; without a graph it is an error
    vars(driver).update(changes)
    with pytest.warns(
        UserWarning, match=f"the graph version decodes, one request at a time.*{reason}"
    ):
        decoder = decoder_of()
    assert answer(decoder) == ANSWER
    assert {name for name, _ in launches_of(driver)} == {*NAMES["graph"]}
    if "registers" in changes:
        with pytest.raises(RuntimeError, match="use whole GPUs"):
            decoder_of(TWO)


GPU_FAULTS = [
    ({"stream_status": NOT_READY}, "the pass kernel has not ended within 0."),
    ({"stream_status": 700}, "CUDA error: fake error 700"),
    ({"launch_statuses": itertools.repeat(700)}, "CUDA_ERROR_ILLEGAL_ADDRESS"),
]


@pytest.mark.parametrize(("fault", "reason"), GPU_FAULTS)
def test_a_gpu_that_fails_ends_all_requests(fault, reason, driver):
    # within a short time, with one sentence; the next request is refused with it
    decoder = decoder_of()
    vars(driver).update(fault)
    _, error = answer(decoder)
    assert error.startswith("the GPU has failed, and with it all requests: ")
    assert reason in error
    assert "\n" not in error
    with pytest.raises(EngineLost) as refused:
        answer(decoder)
    assert str(refused.value) == decoder.failure == error
    assert decoder.has_hung == (fault.get("stream_status") == NOT_READY)


def test_a_refused_launch_ends_its_requests_alone(driver):
    decoder = decoder_of()
    driver.launch_statuses = iter([TOO_LARGE] * 3)
    assert "the GPU runs something else beside the engine, try again later: CUDA: " in str(
        answer(decoder)[1]
    )
    driver.launch_statuses = iter([TOO_LARGE] * 2)  # for a while: it is tried again
    assert [answer(decoder), decoder.failure] == [ANSWER, None]


def test_a_launch_ends_before_a_display_needs_the_gpu(driver, monkeypatch):
    assert decoder_of().executor.passes.extra_passes == 15
    monkeypatch.setattr(passes, "LAUNCH_S", 0.0)  # as if a pass took as long
    decoder = decoder_of()
    assert (decoder.executor.passes.extra_passes, answer(decoder)) == (0, ANSWER)
