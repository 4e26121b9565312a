"""Every launch fits every card: the planner's numbers, and what reaches a driver that refuses what
a real one would.

fake_driver.c stands in for libcuda.so.1 in a process of its own (fake_run.py); cuda-bindings and launch.py
are the real ones. The drivers' rules that it knows are written down there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from laneformer.engine.cuda.geometry import RESERVED_BYTES, Machine
from laneformer.engine.cuda.launch import describe
from laneformer.engine.cuda.planning import plan, plan_builds
from tests.laneformer.cuda.cards import CARDS, LIMITS, MODELS, Card
from tests.laneformer.cuda.fake_run import FAULTS, H200, NAMES, STREAM, filled, geometries_of
from tests.laneformer.cuda.harness import small_config

ROOT = Path(__file__).resolve().parents[3]
COOPERATIVE, OVERLAP = 2, 6  # CUlaunchAttributeID in cuda.h


# ---- the plan ----


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CARDS)
def test_both_versions_fit_every_card(model: str, name: str) -> None:
    """With rings of at least two chunks, and registers for two blocks of the graph."""
    card, config = CARDS[name], MODELS[model]
    for resident, version in ((1, "passes"), (2, "graph")):
        geometry = plan_builds(config, "bf16", card.machine, graph=version == "graph")[-1]
        assert resident * geometry.warps <= 16
        assert geometry.chunks >= 2
        assert geometry.blocks <= card.multiprocessors
        assert geometry.shared_bytes <= card.shared_block
        assert resident * (geometry.shared_bytes + RESERVED_BYTES) <= card.shared_total
        assert resident * 32 * geometry.warps <= card.threads


def test_every_card_keeps_1_kib_of_a_multiprocessor() -> None:
    assert all(1024 * (total - block) == RESERVED_BYTES for total, block, _ in LIMITS.values())


def test_little_memory_makes_chunks_smaller_before_it_takes_warps() -> None:
    config = small_config()
    fixed = plan(config, "bf16", Machine(8, 2**20, 90), warps=8).fixed_shared_bytes
    ring = 8 * 2 * 8

    def cut(shared: int, **given: int) -> tuple[int, int, int]:
        geometry = plan(config, "bf16", Machine(8, shared, 90), **given)
        return geometry.warps, geometry.chunk_bytes, geometry.chunks

    assert cut(2**20) == (16, 2048, 16)
    both = (
        2 * (fixed + ring + 8 * 2 * 512 + RESERVED_BYTES) - RESERVED_BYTES
    )  # of two blocks, the least that fits
    assert cut(both, resident=2) == (8, 512, 2)
    assert cut(both - 2, resident=2)[0] == 4
    assert cut(both - 2)[0] == 16, "one block has its own warps"
    assert cut(both, chunk_bytes=2048, resident=2)[:2] == (2, 2048)
    with pytest.raises(
        ValueError, match=r"1200 bytes .* a block are too few .*: \d+ go to activations; use another GPU"
    ):
        cut(1200)
    with pytest.raises(ValueError, match="warps = 25 is outside 1 to 24"):
        cut(2**20, warps=25, resident=2)


# ---- the driver ----


def test_a_pytorch_for_rocm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ValueError, match=r"for AMD GPUs, the CUDA engine for NVIDIA's; use device \"cpu\""):
        describe(torch.device("cuda"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What fake_run.py prints."""
    pytest.importorskip("cuda.bindings.driver")
    compiler = shutil.which("gcc") or pytest.skip("needs gcc")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).with_name("fake_driver.c")
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *options, str(source), "-o", str(library), "-ldl"], check=True)
    command = [sys.executable, "-m", "tests.laneformer.cuda.fake_run", str(library)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def faults_of(card: Card, version: str, launches: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the launches of all kernels of a version; each build has run once, in order."""
    attribute = {
        "passes": [COOPERATIVE, 1], "graph": [OVERLAP, int(card.architecture >= 90)],
        "probe": [OVERLAP, 0],
    }[version]  # fmt: skip
    wanted = [(name, geometry) for geometry in geometries_of(version, card) for name in NAMES[version]]
    found = [] if [launch["kernel"] for launch in launches] == [name for name, _ in wanted] else ["kernels"]
    for launch, (_, geometry) in zip(launches, wanted, strict=False):
        right = {
            "grid": [1 if launch["kernel"] == "choose" else geometry.blocks, 1, 1],
            "block": [32 * geometry.warps, 1, 1], "shared": geometry.shared_bytes,
            "max_shared": geometry.shared_bytes, "stream": STREAM, "loaded": 1, "carveout": 100,
            "attributes": [attribute], "argument": filled(version, geometry).hex(),
        }  # fmt: skip
        found += [key for key, value in right.items() if launch[key] != value]
        if launch["kernel"] != "choose" and launch["resident"] < (2 if version == "graph" else 1):
            found.append("resident")
    return found


@pytest.mark.parametrize("name", CARDS)
def test_every_launch_on_every_card(made: dict[str, Any], name: str) -> None:
    """Attributes, sizes, stream and argument; loaded and given its shared memory before."""
    for version, launches in made["cards"][name].items():
        assert faults_of(CARDS[name], version, launches) == [], version
    assert set(made["cards"][name]) == set(NAMES)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_launch_is_found(made: dict[str, Any], fault: str) -> None:
    launches = made["planted"][fault]
    if isinstance(launches, str):  # the driver refused
        assert "CUDA_ERROR_INVALID_VALUE" in launches
    else:
        assert faults_of(H200, "passes", launches[:3]) or faults_of(H200, "graph", launches[3:])


def kernels_and_attributes(request: dict[str, Any]) -> list[tuple[str, list[list[int]]]]:
    return [(launch["kernel"], launch["attributes"]) for launch in request["launches"]]


TOKENS = [(2 + i) * 7 % 96 for i in range(20)]  # fake_run.py: Told


def test_requests_launch_what_their_version_has(made: dict[str, Any]) -> None:
    """Of passes four launches at load, of which the last makes 16, then the request's; the graph is captured once."""
    found = made["requests"]
    one, sixteen = kernels_and_attributes(found["passes"]), found["passes"]["ahead"]
    assert (sixteen, len(one), set(map(str, one))) == (15, 4 + 3, {str(("pass", [[COOPERATIVE, 1]]))})
    names = [name for name, _ in kernels_and_attributes(found["graph"])]
    assert names[:3] == ["qkv", "attention", "output"]
    assert names[-2:] == ["head", "choose"]
    assert {"gate_up", "down"} <= set(names)
    for request in (found["passes"], found["graph"]):
        assert not request["warnings"]
        assert request["answers"] == [{"tokens": TOKENS, "error": None}]


def test_two_groups_of_lanes_on_one_gpu_are_launched_plainly(made: dict[str, Any]) -> None:
    """Two cooperative launches may run one after the other, and each waits for the other's words."""
    request = made["requests"]["shared"]
    assert set(map(str, kernels_and_attributes(request))) == {str(("pass", [[OVERLAP, 0]]))}
    assert sum(launch["grid"][0] for launch in request["launches"][:2]) <= H200.multiprocessors
    assert request["error"] is None


@pytest.mark.parametrize(
    ("case", "reason"),
    [("others are there", "LAUNCH_TOO_LARGE"), ("too many registers", "132 multiprocessors hold 0")],
)
def test_the_graph_decodes_where_blocks_cannot_be_resident(
    made: dict[str, Any], case: str, reason: str
) -> None:
    """Found at the first launch or before it; said once."""
    request = made["requests"][case]
    assert kernels_and_attributes(request) == kernels_and_attributes(made["requests"]["graph"])
    (said,) = request["warnings"]
    assert "the graph version decodes, one request at a time" in said
    assert reason in said
    assert request["answers"] == [{"tokens": TOKENS, "error": None}]


def test_without_a_graph_it_is_an_error(made: dict[str, Any]) -> None:
    request = made["requests"]["too many registers, shared"]
    assert not request["launches"]
    assert "use whole GPUs" in request["error"]


def test_the_compiler_is_chosen_for_the_driver(made: dict[str, Any]) -> None:
    """Its version is asked for; what it does not know it refuses."""
    assert made["requests"]["an older driver"]["answers"] == [{"tokens": TOKENS, "error": None}]
    assert "CUDA_ERROR_INVALID_IMAGE" in made["requests"]["an image that is too new"]["error"]


# ---- faults of the GPU while a request runs ----


@pytest.mark.parametrize(
    ("fault", "reason", "unanswered"),
    [
        ("a stuck stream", "the pass kernel has not ended within 0.", True),
        ("an illegal address", "CUDA error: fake error 700", False),
        ("the time limit of a display", "CUDA error: fake error 702", False),
        ("a launch that fails", "CUDA_ERROR_ILLEGAL_ADDRESS", False),
    ],
)
def test_a_gpu_that_fails_ends_all_requests(
    made: dict[str, Any], fault: str, reason: str, unanswered: bool
) -> None:
    """With one sentence, soon; the next one is refused with it, and nobody waits for ever."""
    request = made["requests"][fault]
    first, second = request["answers"]
    assert first["error"].startswith("the GPU has failed, and with it all requests: ")
    assert reason in first["error"]
    assert "\n" not in first["error"]
    assert second == {"refused": first["error"]}
    assert (request["failure"], request["unanswered"]) == (first["error"], unanswered)


def test_a_refused_launch_ends_its_requests_alone(made: dict[str, Any]) -> None:
    request = made["requests"]["a launch is refused"]
    for answer in request["answers"]:
        assert "the GPU runs something else beside the engine, try again later: CUDA: " in answer["error"]
    assert (request["failure"], request["error"]) == (None, None)
    request = made["requests"]["launches are refused for a while"]
    assert request["answers"] == [{"tokens": TOKENS, "error": None}] * 2


def test_a_displays_time_limit_makes_launches_shorter(made: dict[str, Any]) -> None:
    request = made["requests"]["a display's time limit"]
    assert (request["ahead"], request["answers"][0]["tokens"]) == (0, TOKENS)
    assert made["requests"]["a display's time limit, fast"]["ahead"] == 15
