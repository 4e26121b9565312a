"""Launches as they reach a driver that refuses what a real one would, on a card of every generation.

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

from laneformer.engine.cuda.launch import describe
from tests.laneformer.cuda.cards import CARDS, Card
from tests.laneformer.cuda.fake_run import H200, NAMES, STREAM, filled, geometries_of

pytestmark = pytest.mark.job
ROOT = Path(__file__).resolve().parents[3]
COOPERATIVE, OVERLAP = 2, 6  # CUlaunchAttributeID in cuda.h


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


def test_every_launch_on_every_generation(made: dict[str, Any]) -> None:
    """Attributes, sizes, stream and argument; loaded and given its shared memory before."""
    for name, versions in made["cards"].items():
        for version, launches in versions.items():
            assert faults_of(CARDS[name], version, launches) == [], f"{version} on {name}"
        assert set(versions) == set(NAMES)


def test_every_fault_in_a_launch_is_found(made: dict[str, Any]) -> None:
    for fault, launches in made["planted"].items():
        if isinstance(launches, str):  # the driver refused
            assert "CUDA_ERROR_INVALID_VALUE" in launches, fault
        else:
            assert faults_of(H200, "passes", launches[:3]) or faults_of(H200, "graph", launches[3:]), fault


TOKENS = [(2 + i) * 7 % 96 for i in range(20)]  # fake_run.py: Choosing
ANSWER = {"tokens": TOKENS, "error": None}


def kernels_and_attributes(request: dict[str, Any]) -> list[tuple[str, list[list[int]]]]:
    return [(launch["kernel"], launch["attributes"]) for launch in request["launches"]]


def test_requests_launch_what_their_version_has(made: dict[str, Any]) -> None:
    """Of passes four launches at load, of which the last makes 16, then the request's; the graph is captured once.
    The compiler is asked for what the driver takes.
    """
    requests = made["requests"]
    one = kernels_and_attributes(requests["passes"])
    assert (len(one), set(map(str, one))) == (4 + 3, {str(("pass", [[COOPERATIVE, 1]]))})
    names = [name for name, _ in kernels_and_attributes(requests["graph"])]
    assert (names[:3], names[-2:]) == (["qkv", "attention", "output"], ["head", "choose"])
    for case in ("passes", "graph", "an older driver"):
        assert (requests[case]["answers"], requests[case]["warnings"]) == ([ANSWER], [])
    assert "CUDA_ERROR_INVALID_IMAGE" in requests["an image that is too new"]["error"]


def test_two_groups_of_lanes_on_one_gpu_are_launched_plainly(made: dict[str, Any]) -> None:
    """Two cooperative launches may run one after the other, and each waits for the other's words."""
    request = made["requests"]["shared"]
    assert set(map(str, kernels_and_attributes(request))) == {str(("pass", [[OVERLAP, 0]]))}
    assert sum(launch["grid"][0] for launch in request["launches"][:2]) <= H200.multiprocessors
    assert request["error"] is None


def test_the_graph_decodes_where_blocks_cannot_be_resident(made: dict[str, Any]) -> None:
    """Found at the first launch or before it; said once. Where there is no graph, it is an error."""
    requests = made["requests"]
    reasons = {"others are there": "LAUNCH_TOO_LARGE", "too many registers": "132 multiprocessors hold 0"}
    for case, reason in reasons.items():
        request = requests[case]
        assert kernels_and_attributes(request) == kernels_and_attributes(requests["graph"])
        (warning,) = request["warnings"]
        assert "the graph version decodes, one request at a time" in warning
        assert reason in warning
        assert request["answers"] == [ANSWER]
    shared = requests["too many registers, shared"]
    assert (shared["launches"], "use whole GPUs" in shared["error"]) == ([], True)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("a stuck stream", "the pass kernel has not ended within 0."),
        ("an illegal address", "CUDA error: fake error 700"),
        ("a launch that fails", "CUDA_ERROR_ILLEGAL_ADDRESS"),
    ],
)
def test_a_gpu_that_fails_ends_all_requests(made: dict[str, Any], fault: str, reason: str) -> None:
    """With one sentence, soon; the next one is refused with it, and nobody waits for ever."""
    request = made["requests"][fault]
    first, second = request["answers"]
    assert first["error"].startswith("the GPU has failed, and with it all requests: ")
    assert reason in first["error"]
    assert "\n" not in first["error"]
    assert second == {"refused": first["error"]}
    assert request["failure"] == first["error"]
    assert request["unanswered"] == (fault == "a stuck stream")


def test_a_refused_launch_ends_its_requests_alone(made: dict[str, Any]) -> None:
    request = made["requests"]["a launch is refused"]
    for answer in request["answers"]:
        assert "the GPU runs something else beside the engine, try again later: CUDA: " in answer["error"]
    assert (request["failure"], request["error"]) == (None, None)
    assert made["requests"]["launches are refused for a while"]["answers"] == [ANSWER] * 2


def test_a_displays_time_limit_makes_launches_shorter(made: dict[str, Any]) -> None:
    requests = made["requests"]
    slow, fast = requests["a display's time limit"], requests["a display's time limit, fast"]
    assert (slow["ahead"], fast["ahead"], requests["passes"]["ahead"]) == (0, 15, 15)
    assert slow["answers"] == [ANSWER]
