"""The bundle from end to end without a GPU: packed here, run by a bare Python whose driver is the CUDA emulator.

bare_driver.c stands in for libcuda.so.1, and an emulated library for each cubin; the runner, its launches and the
kernels' source are those that ship. One small model has the names of both.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from laneformer.config import LaneformerConfig
from laneformer.engine.cuda.compile import INCLUDES, source_of
from laneformer.engine.cuda.geometry import Geometry
from laneformer.engine.cuda.memory import DeviceMemory
from laneformer.engine.cuda.structures import Fill
from tests.laneformer.cuda import emulator
from tests.laneformer.cuda.harness import small_config
from tests.proofs import CACHE
from tools.bench import bundle, cuda_processes
from tools.bench.bare import checks, contents
from tools.bench.bare.driver import Failure
from tools.bench.bundle import Bundle
from tools.bench.cuda_report import exchanges_section
from tools.bench.planned import CARDS, Card
from tools.bench.rule import weights_by_rule
from tools.check import reference as whole
from tools.check.imports import imported
from tools.check.reference import tensors_of

COMPILER = shutil.which("gcc") or shutil.which("cc")
pytestmark = [
    pytest.mark.rotate,
    pytest.mark.skipif(bool(emulator.MISSING), reason=emulator.MISSING),
    pytest.mark.skipif(COMPILER is None, reason="the fake driver needs a C compiler"),
]
CONFIG = small_config(num_hidden_layers=2, swa_layers=(0,))
CARD = Card(8, 90)
SHAPE = {"warps": 2, "chunk_bytes": 512, "columns": 3}
KERNELS = {
    "passes": {"pass": "Decode"}, "traced": {"pass": "Decode"}, "fill": {"fill": "Fill"},
    "probe": {"stream": "Probe", "loads": "Probe", "exchanges": "Exchanges"},
}  # fmt: skip
EFFORT = {
    "runs": 2, "trials": 1, "rounds": 20, "read_rounds": 3, "probed_bytes": 1, "tokens": 16, "launch_s": 1.0,
    "limits_s": dict.fromkeys(bundle.EFFORT["limits_s"], 120.0),  # type: ignore[call-overload]
}  # fmt: skip


def emulated(unit: str, geometry: Geometry) -> Any:
    source = source_of(unit, geometry) + "".join(f"EMULATE({k}, {p})\n" for k, p in KERNELS[unit].items())
    return emulator.build(source, INCLUDES, {"TABLE": "constexpr"}, CACHE / "emulated")


def image(unit: str, geometry: Geometry, architecture: str, _: Any) -> bytes:
    """What bare_driver.c takes for machine code."""
    assert architecture == "sm_90a"
    return f"90 13\n{emulated(unit, geometry)._name}\0".encode()


@dataclass
class Bare:
    """A bundle, and the folder of the fake libcuda.so.1."""

    path: Path
    driver: Path
    description: dict[str, Any]

    def run(self, *options: str, gpu: str = "90 8 232448 13000 1", fault: str = "", steps: str = "") -> Any:
        """(report, status, stdout) of the bundle under a Python without site-packages."""
        kept = self.path.parent / "kept.json"
        kept.unlink(missing_ok=True)
        command = [sys.executable, "-I", "-S", str(self.path), "--json", str(kept), *options]
        command += ["--steps", steps] if steps else []
        env = {
            "LD_LIBRARY_PATH": str(self.driver),
            "FAKE_GPU": gpu,
            "FAKE_FAULT": fault,
            "PATH": os.environ["PATH"],
        }
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900)
        assert kept.exists(), done.stderr
        return json.loads(kept.read_text()), done.returncode, done.stdout

    def changed(self, folder: Path, **changes: Any) -> Bare:
        """The same with another description."""
        path, description = folder / "changed.pyz", {**self.description, **changes}
        with zipfile.ZipFile(self.path) as old, zipfile.ZipFile(path, "w") as new:
            for name in old.namelist():
                new.writestr(
                    name, json.dumps(description) if name == contents.DESCRIPTION else old.read(name)
                )
        return Bare(path, self.driver, description)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Bare:
    folder = tmp_path_factory.mktemp("bundle")
    source = Path(__file__).with_name("bare_driver.c")
    command = [
        str(COMPILER),
        "-shared",
        "-fPIC",
        "-w",
        str(source),
        "-o",
        str(folder / "libcuda.so.1"),
        "-ldl",
    ]
    subprocess.run(command, check=True)
    made = Bundle(folder / "laneformer-cuda.pyz", {"tiny": CONFIG, "300m": CONFIG}, image, **SHAPE)
    geometry = made.builds(CARD.machine, CONFIG)[-1]
    reference = made.reference(CONFIG, geometry, prompts=2, new_tokens=8)
    description = {
        "made": "in a test", "effort": EFFORT, "measured": "300m",
        "cards": [made.card("a small card", CARD.machine, {13: None})],
        "references": {"tiny": reference, "300m": reference},
    }  # fmt: skip
    made.close(description)
    return Bare(folder / "laneformer-cuda.pyz", folder, json.loads(json.dumps(description)))


# ---- all of it ----


def test_a_sound_gpu_passes_and_is_measured(bare: Bare) -> None:
    report, status, said = bare.run()
    assert (report["verdict"], status) == ("all checks hold", 0), said
    assert list(report["steps"]) == ["machine", "tiny", "300m", "probe", "latency", "decode", "trace"]
    results = {name: step["result"] for name, step in report["steps"].items()}
    assert (results["machine"]["gpu"], results["machine"]["exact"]) == ("Fake GPU", True)
    names = ["weights made and read", "logits closer to float32 than bf16 is", "greedy tokens", "equal bits"]
    assert list(results["tiny"]["checks"]) == [*names, "one launch is many", "a planted fault is refused"]
    assert results["probe"].keys() == {"stream_bytes_per_s", "loads_bytes_per_s"}
    assert results["latency"]["idle_bytes_per_s"] == 0
    assert all(value > 0 for key, value in results["latency"].items() if key != "idle_bytes_per_s")
    assert results["decode"]["depths"].keys() == {"0", "16"}
    assert results["decode"]["depths"]["0"]["percent_of_probe"] > 0
    traced = results["trace"]["of_a_token"]
    waited = {name for name, found in traced.items() if found["mean_us"] > 0}
    assert waited >= {
        "stream",
        "q/k/v",
        "partial attention",
        "activation",
        "choice",
        "weights",
        "whole",
        "the rest",
    }
    assert "scores" not in waited, "a greedy token needs none"
    parts = sum(found["mean_us"] for name, found in traced.items() if name != "whole")
    assert parts == pytest.approx(traced["whole"]["mean_us"])
    assert "VERDICT: all checks hold." in said
    rows = "saturated store to poll us", "decoding after 16 positions", "a token: partial attention"
    for text in (*rows, "tiny: equal bits", "Fake GPU"):
        assert text in said


def test_the_benchmark_runs_it_for_its_own_model(bare: Bare, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tools.bench cuda`: latencies and times by exchange, of a bundle that it makes for the GPU it finds."""
    replaced: dict[str, Any] = {
        "describe": lambda device: CARD.machine, "driver_version": lambda: 13000, "make_room": lambda *asked: None,
        "compiler_for": lambda *asked: SimpleNamespace(version=(13, 5)), "EFFORT": EFFORT,
        "Bundle": lambda path, models: Bundle(path, models, image, **SHAPE),
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(cuda_processes, name, value)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(bare.driver))
    monkeypatch.setenv("FAKE_GPU", "90 8 232448 13000 1")
    session: Any = SimpleNamespace(device="cpu", flavor="2b", config=CONFIG)
    found = cuda_processes.exchanges(session)
    text = exchanges_section(found, {})
    assert "| saturated |" in text
    assert "| partial attention |" in text
    monkeypatch.setenv("FAKE_FAULT", "an illegal address")
    with pytest.raises(RuntimeError, match=r"latency: the driver .*700"):
        cuda_processes.exchanges(session)


# ---- what fails is named ----

FAULTS = {  # of the GPU or its driver -> what the verdict says of the first model
    "a launch never ends": "tiny: hang (the fill kernel has not ended within 1 s)",
    "a block is missing": "tiny: hang",
    "an illegal address": "tiny: the driver (the fill kernel gave 700 FAKE_ERROR (of the tests))",
    "the process crashes": "tiny: crash (its process ended with status -6)",
    "others are there": "tiny: the GPU is not free (8 blocks of 64 threads",
    "wrong numbers": "tiny: logits closer to float32 than bf16 is",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(bare: Bare, fault: str) -> None:
    """And ends neither the run nor the report."""
    report, status, said = bare.run(fault=fault, steps="machine,tiny")
    assert FAULTS[fault] in report["verdict"].replace("\n", " ")
    assert status == 1
    assert "VERDICT: FAILED: " in said
    assert "gpu" in report["steps"]["machine"]["result"]
    if fault == "a block is missing":  # the kernel's own time-out tells who waited for what
        assert "the pass kernel waited 3.0 s in vain: lane 0, layer 0, exchange 'mail', block " in said


def test_a_driver_that_never_answers_costs_its_step_alone(bare: Bare, tmp_path: Path) -> None:
    limits = {**EFFORT["limits_s"], "tiny": 3.0, "300m": 3.0}  # type: ignore[dict-item]
    slow = bare.changed(tmp_path, effort={**EFFORT, "limits_s": limits})
    report, status, _ = slow.run(fault="the driver is stuck", steps="machine,tiny,300m")
    assert status == 1
    for name in ("tiny", "300m"):
        assert f"{name}: hang (no answer within 3 s; its process was killed)" in report["verdict"]


CARDS_THAT_ARE_NOT = {
    "90 8 232448 12040 1": "driver too old (it is for CUDA 12.4, the code is of CUDA 13: update the driver",
    "90 8 232448 13000 0": "no GPU (the driver for CUDA 13.0 finds none; see nvidia-smi and CUDA_VISIBLE_DEVICES)",
    "89 9 101376 13000 1": "unknown card (Fake GPU is sm_89 with 9 multiprocessors; code is packed for a small card "
    "(sm_90, 8 multiprocessors); pack it with",
    "90 7 232448 13000 1": "unknown card (Fake GPU is sm_90 with 7 multiprocessors",
}  # fmt: skip


@pytest.mark.parametrize("gpu", CARDS_THAT_ARE_NOT)
def test_a_machine_that_cannot_run_it_is_told_why(bare: Bare, gpu: str) -> None:
    report, status, _ = bare.run(gpu=gpu)
    assert report["verdict"].startswith(f"FAILED: machine: {CARDS_THAT_ARE_NOT[gpu]}")
    assert (list(report["steps"]), status) == (["machine"], 1)


def test_without_a_driver(bare: Bare, tmp_path: Path) -> None:
    report, status, _ = Bare(bare.path, tmp_path, {}).run()
    assert report["verdict"].startswith(
        "FAILED: machine: no driver (libcuda.so.1: cannot open shared object file"
    )
    assert "--gpus all" in report["verdict"]
    assert status == 1


def test_a_larger_card_takes_the_code_of_a_smaller_one(bare: Bare) -> None:
    report, _, _ = bare.run(gpu="90 9 232448 13020 1", steps="machine")
    assert report["steps"]["machine"]["result"]["exact"] is False
    assert report["verdict"] == "not proven: tiny, 300m did not run"


def chosen(facts: dict[str, Any], **cards: Card) -> str:
    packed: Any = contents.Contents.__new__(contents.Contents)
    packed.description = {
        "cards": [
            {"name": name, "architecture": card.architecture, "multiprocessors": card.multiprocessors,
             "shared_bytes": card.shared_block, "compilers": [12, 13]}
            for name, card in cards.items()
        ]
    }  # fmt: skip
    return str(packed.choose({"gpu": "x", "driver": 12080, **facts})["card"])


def test_the_largest_card_that_fits_is_chosen() -> None:
    def here(name: str, **changes: int) -> dict[str, Any]:
        card = CARDS[name]
        facts = {"architecture": card.architecture, "multiprocessors": card.multiprocessors}
        return {**facts, "shared_bytes": card.shared_block, **changes}

    for name in CARDS:
        assert chosen(here(name), **CARDS) == name
    assert chosen(here("H100 PCIe", multiprocessors=78), **CARDS) == "H100 MIG 2g"  # an H20
    assert chosen(here("RTX 3090", multiprocessors=84), **CARDS) == "RTX 3090"  # an A40
    assert chosen(here("L4", multiprocessors=76), **CARDS) == "A10"  # an RTX 4080
    with pytest.raises(Failure, match="unknown card: x is sm_103"):
        chosen(here("B200", architecture=103), **CARDS)


# ---- its parts ----


def test_a_bare_python_has_all_that_is_packed() -> None:
    """Whatever the packed files import is packed too, or of the standard library; Python 3.10 reads them."""
    root, packed = bundle.harness.ROOT, dict[str, Path]()
    for folder, patterns in bundle.SOURCES.items():
        for path in (path for pattern in patterns for path in (root / folder).glob(pattern)):
            name = path.relative_to(root / folder).with_suffix("")
            packed[".".join(name.parts).removesuffix(".__init__")] = path
    for name, path in packed.items():
        tree = ast.parse(path.read_text(), feature_version=(3, 10))
        tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for module, _ in imported(tree, package):
            known = module in packed or module.split(".")[0] in sys.stdlib_module_names
            assert known, f"{name} imports {module}, which is not packed"


def test_the_kernel_makes_the_weights_that_the_host_has(tmp_path: Path) -> None:
    """Bit for bit, at the places where tape.pack puts them; embedding and norms too."""
    made = Bundle(tmp_path / "unused.pyz", {"tiny": CONFIG}, **SHAPE)
    g = made.builds(CARD.machine, CONFIG)[-1]
    weights, total = weights_by_rule(CONFIG, g)
    memory = DeviceMemory(g, tensors_of(weights), 0, "cpu")
    tapes, embedding = torch.zeros_like(memory.tapes), torch.zeros_like(memory.embedding)
    norms = torch.zeros_like(memory.norms)
    places = (tensor.data_ptr() for tensor in (tapes, memory.tape_at, embedding, norms))
    argument = Fill(*places, norms.numel(), 0)
    argument.exponents[:] = made.shape([g])["exponents"]
    emulator.launch(emulated("fill", g), "fill", argument, blocks=g.blocks, threads=g.threads)
    assert torch.equal(tapes, memory.tapes)
    assert torch.equal(embedding.view(torch.int16), memory.embedding.view(torch.int16))
    assert torch.equal(norms, memory.norms)
    assert int(tapes.view(torch.int32).sum(dtype=torch.int64)) % 2**32 == total
    assert made.shape([g])["bytes"]["tapes"] == memory.tapes.nbytes
    sizes = {
        name: getattr(memory, name).nbytes for name in ("lane_words", "inbox", "kv", "embedding", "norms")
    }
    assert {name: made.shape([g])["bytes"][name] for name in sizes} == sizes


def test_distances_are_those_of_the_other_checks() -> None:
    rng = np.random.default_rng(0)
    expected, found = rng.normal(size=(2, 1, 300)).astype(np.float32) * 3
    error, kl = checks.relative_error(found[0], expected[0]), checks.kl_divergence(expected[0], found[0])
    assert error == pytest.approx(float(whole.relative_errors(found, expected)[0]), rel=1e-5)
    assert kl == pytest.approx(whole.mean_kl(expected, found), rel=1e-5)


def test_what_is_shipped_is_shaped(tmp_path: Path) -> None:
    """Every planned card, both models: shapes and units, without compiling."""
    models = {name: LaneformerConfig.from_flavor(name) for name in ("tiny", "300m")}
    made = Bundle(tmp_path / "x.pyz", models, lambda unit, geometry, architecture, _: unit.encode())
    for name, card in CARDS.items():
        facts = made.card(name, card.machine, {13: None})
        for flavor, model in facts["models"].items():
            assert model["blocks"] <= card.multiprocessors
            units = {"fill", "probe", *(each["unit"] for each in model["builds"])}
            assert {*model["code"]} == units | ({"traced"} if flavor == "300m" else set())
            assert all(each["shared_bytes"] <= card.shared_block for each in model["builds"])
            assert model["columns"] == model["builds"][-1]["columns"]
    made.close({})
    assert zipfile.is_zipfile(tmp_path / "x.pyz")


def test_no_part_of_a_bundle_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of one that is too large, nor of one that was stopped."""
    written = [9]

    def write(path: Path, options: object) -> None:
        path.write_bytes(bytes(written[0]))
        if written[0] == 7:
            raise RuntimeError("a kernel does not compile")

    monkeypatch.setattr(bundle, "write", write)
    monkeypatch.setattr(bundle, "MOST_BYTES", 8)
    for size, says in ((9, "would have 9 bytes, more than 8"), (7, "does not compile")):
        written[0] = size
        with pytest.raises(RuntimeError, match=says):
            bundle.main(tmp_path / "folder/cuda.pyz", argparse.Namespace())
        assert not [*(tmp_path / "folder").iterdir()]
    written[0] = 8
    bundle.main(tmp_path / "folder/cuda.pyz", argparse.Namespace())
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["cuda.pyz"]
