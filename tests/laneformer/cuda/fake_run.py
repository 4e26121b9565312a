"""A process in which the driver is fake_driver.c: the engine's launches on every generation.

    python -m tests.laneformer.cuda.fake_run LIBRARY

It ends with one line of JSON: {"cards": {card: {version: launches}}, "planted": {fault: launches or an
error's text}, "requests": {what: {"launches", "warnings", "error"}}}. NVRTC is replaced too: an image says
what a compiler promises, the registers of __launch_bounds__ and the size of the argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda import executor, graph, launch, passes
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.cuda.geometry import Geometry
from laneformer.engine.cuda.graph import GraphDecoder
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.passes import PassDecoder
from laneformer.engine.cuda.planning import plan_builds
from laneformer.engine.cuda.structures import Probe, decode_structure
from laneformer.engine.decoder import EngineLost, Request
from tests.laneformer.cuda.cards import CARDS, REGISTERS, Card
from tests.laneformer.cuda.harness import KERNELS, random_model, small_config, tensors_of

STREAM = 0x5EED
NOT_READY = 600  # CUresult in cuda.h
H200 = CARDS["H100 SXM, NVL, H200, GH200"]
NAMES = {**KERNELS, "probe": ("stream", "loads")}
CONFIG = LaneformerConfig.from_flavor("2b")
# text of launch.py -> what a mistake there would make of it
FAULTS = {
    "the number of another attribute": ("CU_LAUNCH_ATTRIBUTE_COOPERATIVE", "CU_LAUNCH_ATTRIBUTE_PRIORITY"),
    "not cooperative": ('version == "passes" and not shared', "False"),
    "less shared memory": ("sharedMemBytes = self.geometry.shared_bytes", "sharedMemBytes = 4096"),
    "the limit is not raised": (
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
        "CU_FUNC_ATTRIBUTE_CACHE_MODE_CA",
    ),
    "threads for warps": ("= self.geometry.threads, 1, 1", "= self.geometry.warps, 1, 1"),
    "another stream": ("torch.cuda.current_stream(self.device).cuda_stream", "0"),
    "another argument": ("ctypes.addressof(argument)", "ctypes.addressof(type(argument)())"),
    "no overlap": ('self.version == "graph" and', "False and"),
}


class FakeDriver:
    def __init__(self, library: str):
        """Whoever asks for libcuda.so.1 in this process gets `library`, as it has that name."""
        self.library = ctypes.CDLL(library)
        self.library.fake_log.restype = ctypes.c_char_p
        self.card = H200

    def use(self, card: Card, driver: int = 13000, max_blocks: int = 1 << 30) -> None:
        self.card = card
        fields = (driver, card.architecture, card.multiprocessors, card.threads, REGISTERS, card.shared_total)
        self.library.fake_card((ctypes.c_int * 8)(*fields, card.shared_block, max_blocks))

    def fail(self, launch: int = 0, query: int = 0, after: int = 0, time_limit: bool = False) -> None:
        """Statuses of launches, and of a stream's state, after so many launches; whether there is a display."""
        self.library.fake_fail((ctypes.c_int * 4)(launch, query, after, time_limit))

    def query(self) -> bool:
        """As torch's Stream.query."""
        status = self.library.fake_query()
        if status not in (0, NOT_READY):
            raise RuntimeError(
                f"CUDA error: fake error {status}\nFor debugging consider CUDA_LAUNCH_BLOCKING=1"
            )
        return bool(status == 0)

    def launches(self) -> list[dict[str, Any]]:
        """Those since the last call."""
        return [json.loads(line) for line in self.library.fake_log().decode().splitlines()]

    def properties(self, device: Any) -> SimpleNamespace:
        card = self.card
        return SimpleNamespace(
            name="fake", major=card.architecture // 10, minor=card.architecture % 10,
            multi_processor_count=card.multiprocessors, shared_memory_per_block_optin=card.shared_block,
        )  # fmt: skip


def image(version: str, geometry: Geometry, architecture: str, *, driver: int = 13000) -> bytes:
    """What fake_driver.c takes for machine code; of an NVRTC for this driver."""
    resident = 2 if version == "graph" else 1
    lines = [f"{''.join(c for c in architecture if c.isdigit())} {driver // 1000}"]
    for name in NAMES[version]:
        registers = min(
            255, REGISTERS // (32 * geometry.warps * (1 if name == "choose" else resident)) // 8 * 8
        )
        lines.append(f"{name} {registers} {ctypes.sizeof(argument_of(version, geometry))}")
    return ("\n".join(lines) + "\n\0").encode()


class Graph:
    def replay(self) -> None:
        pass


class Choosing(PassDecoder):
    """Launches have chosen tokens, unless the driver has been told of a fault: each a number of its position."""

    late_s = 0.05

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **options, limit_s=0.1)

    def _launch(self, arguments: Sequence[Any]) -> None:
        super()._launch(arguments)
        order, memory = arguments[0].order, self.memories[0]
        for step in range(1 + order.ahead):
            for i, column in enumerate(order.columns[: order.column_count]):
                token = (column.position + step) * 7 % self.config.vocab_size
                memory.picks[step, i] = (order.epoch + step + 1) << 32 | token


class FakePasses(Choosing):
    pass


class FakeGraph(Choosing, GraphDecoder):
    pass


def replace_torch(driver: FakeDriver) -> None:
    """What the engine asks of torch's CUDA, on the CPU."""
    stream = SimpleNamespace(cuda_stream=STREAM, query=driver.query, synchronize=lambda: None)
    replaced: dict[str, Any] = {
        "get_device_properties": driver.properties, "synchronize": lambda *device: None,
        "device": lambda device: contextlib.nullcontext(), "stream": lambda stream: contextlib.nullcontext(),
        "current_stream": lambda device: stream, "Stream": lambda device: stream, "CUDAGraph": Graph,
        "graph": lambda *given, **options: contextlib.nullcontext(), "mem_get_info": lambda device: (1 << 40, 1 << 40),
    }  # fmt: skip
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    passes.PASS_S, executor.RETRIES_S = 0.001, (0.01, 0.01)
    graph.DECODERS.update(passes=FakePasses, graph=FakeGraph)
    passes.connect = lambda devices: None
    passes.DeviceMemory = lambda geometry, tensors, i, _, n: DeviceMemory(geometry, tensors, i, "cpu", n)  # type: ignore[misc,assignment]
    launch.compile_cubin = image  # type: ignore[assignment]


def argument_of(version: str, geometry: Geometry) -> type[ctypes.Structure]:
    return Probe if version == "probe" else decode_structure(geometry.devices)


def geometries_of(version: str, card: Card) -> list[Geometry]:
    """As planned for the card, of each build."""
    return plan_builds(CONFIG, "bf16", card.machine, version)


def filled(version: str, geometry: Geometry) -> bytes:
    """An argument's bytes, all of them known."""
    return bytes((7 * i + 1) % 256 for i in range(ctypes.sizeof(argument_of(version, geometry))))


def launched(
    driver: FakeDriver, card: Card, version: str, kernels: ModuleType | Any = launch
) -> list[dict[str, Any]]:
    """Every kernel of a version once, of each of its builds."""
    driver.use(card)
    for geometry in geometries_of(version, card):
        loaded = kernels.Kernels(version, geometry, torch.device("cuda:0"))
        if version == "passes":
            loaded.require_resident(NAMES[version][0])
        loaded.load(*NAMES[version])
        argument = argument_of(version, geometry).from_buffer_copy(filled(version, geometry))
        for name in NAMES[version]:
            loaded.launch(name, argument, 1 if name == "choose" else None)
    return driver.launches()


def planted(driver: FakeDriver, wrong: str, right: str) -> list[dict[str, Any]] | str:
    """The launches of both versions by a launch.py with this fault; or the error."""
    text = Path(launch.__file__).read_text()
    assert text.count(right) == 1, f"{right!r} does not stand once in launch.py"
    module = ModuleType("laneformer.engine.cuda.planted")
    exec(compile(text.replace(right, wrong), "planted", "exec"), module.__dict__)
    module.compile_cubin = image  # type: ignore[attr-defined]
    try:
        return [
            record for version in ("passes", "graph") for record in launched(driver, H200, version, module)
        ]
    except RuntimeError as error:
        return str(error)


TWO = ("cuda:0", "cuda:0")
CASES: dict[str, dict[str, Any]] = {
    "passes": {},
    "graph": {"version": "graph"},
    "shared": {"devices": TWO},
    "others are there": {"max_blocks": 16},
    "too many registers": {"registers": 255},
    "too many registers, shared": {"registers": 255, "devices": TWO},
    "an older driver": {"driver": 12020},
    "an image that is too new": {"driver": 12020, "compiler": 13000},
    # faults of the GPU, after the tests at load
    "a stuck stream": {"fault": {"query": NOT_READY}},
    "an illegal address": {"fault": {"query": 700}},
    "a launch that fails": {"fault": {"launch": 700}},
    "a launch is refused": {"fault": {"launch": 720}},
    "launches are refused for a while": {"fault": {"launch": 720, "after": -2}},
    "a display's time limit": {"launch_s": 0.0},  # as if a pass took as long
    "a display's time limit, fast": {"launch_s": 10.0},
}
SMALL_CONFIG = small_config()
TENSORS = tensors_of(random_model(SMALL_CONFIG), "bf16")


def request(fake: FakeDriver, case: dict[str, Any]) -> dict[str, Any]:
    """A whole request of a small model, or two after a fault: launches, warnings, answers, an error at load."""
    fake.use(H200, case.get("driver", 13000), case.get("max_blocks", 1 << 30))
    fake.fail(time_limit="launch_s" in case)

    def compile_image(*given: Any, driver: int) -> bytes:
        text = image(*given, driver=case.get("compiler", driver))
        return text.replace(b"pass 128", b"pass %d" % case.get("registers", 128))

    result: dict[str, Any] = {"error": None}
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        patch.setattr(launch, "compile_cubin", compile_image)
        patch.setattr(passes, "LAUNCH_S", case.get("launch_s", 0.1))
        try:
            devices, version = case.get("devices", ("cuda:0",)), case.get("version", "passes")
            decoder = CudaDecoder(SMALL_CONFIG, TENSORS, "bf16", devices, version=version, cache_bytes=0)
            assert decoder.executor.passes is not None
            result["ahead"] = decoder.executor.passes.ahead
            fake.fail(**case.get("fault", {}))
            result["answers"] = [answer(decoder) for _ in range(1 + ("fault" in case))]
            fake.fail()
            result |= {"failure": decoder.failure, "unanswered": decoder.executor.unanswered}
        except (RuntimeError, ValueError) as error:
            result["error"] = f"{type(error).__name__}: {error}"
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return {**result, "launches": fake.launches(), "warnings": texts}


def answer(decoder: CudaDecoder) -> dict[str, Any]:
    """Tokens and error of a request."""
    try:
        decoder.join([Request([1, 2, 3], 20, quiet=True)])
    except EngineLost as error:
        return {"refused": str(error)}
    (collected,) = decoder.collect(60)
    assert collected.whole is not None
    return {"tokens": collected.tokens, "error": collected.whole.error and str(collected.whole.error)}


def main() -> None:
    driver = FakeDriver(sys.argv[1])
    replace_torch(driver)
    generations = {card.architecture: name for name, card in CARDS.items()}
    cards = {
        name: {version: launched(driver, CARDS[name], version) for version in NAMES}
        for name in generations.values()
    }
    faults = {name: planted(driver, wrong, right) for name, (right, wrong) in FAULTS.items()}
    requests = {name: request(driver, case) for name, case in CASES.items()}
    print(json.dumps({"cards": cards, "planted": faults, "requests": requests}))


if __name__ == "__main__":
    main()
