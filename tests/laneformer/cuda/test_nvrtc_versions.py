"""The kernels compile with older compilers that users have, beside the newest one, which all other tests use.

`make extras` installs each in a folder of its own. Each is loaded in a fresh process, as a user's would be.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer.engine.cuda.planning import plan_builds
from tests.laneformer.cuda import sass
from tests.laneformer.cuda.cards import CARDS, MODELS
from tests.laneformer.cuda.test_compile import CUBINS, small
from tests.laneformer.cuda.test_machine_code import (
    H200,
    every_gate,
    products_spill_nothing,
    read,
    words_are_whole,
)
from tests.proofs import KERNEL_SOURCES

ROOT = Path(__file__).resolve().parents[3]
LIBRARIES = {"12.9": "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "13.0": "nvidia/cu13/lib/libnvrtc.so.13"}
UNITS = [("passes", "sm_80"), ("passes", "sm_120a"), ("graph", "sm_89"), ("graph", "sm_100a")]
BUILD = plan_builds(MODELS["2b"], "bf16", CARDS[H200].machine)[-1]
JOBS = [  # file, version, geometry, architecture
    *((f"{unit}-{architecture}.cubin", unit, small(), architecture) for unit, architecture in UNITS),
    ("2b.cubin", "passes", BUILD, "sm_90a"),
]
COMPILE = """
import pickle, sys
from pathlib import Path
from laneformer.engine.cuda.compile import compile_cubin
from laneformer.engine.cuda.nvrtc import Nvrtc

library, version, cache, folder = sys.argv[1:]
compiler = Nvrtc(library)
assert ".".join(map(str, compiler.version)) == version
for file, *unit in pickle.load(sys.stdin.buffer):
    (Path(folder) / file).write_bytes(compile_cubin(*unit, Path(cache), compiler=compiler))
"""


@pytest.mark.proof(*KERNEL_SOURCES)
@pytest.mark.parametrize("version", LIBRARIES)
def test_an_older_compiler(version: str, tmp_path: Path) -> None:
    """Compiles every version, and its machine code passes the gates that that of the newest does."""
    library = ROOT / ".venv" / f"nvrtc-{version}" / LIBRARIES[version]
    if not library.is_file():
        pytest.skip(f"make extras brings NVRTC {version}")
    command = [sys.executable, "-c", COMPILE, str(library), version, str(CUBINS), str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=1100, input=pickle.dumps(JOBS))  # without PyTorch
    assert len(list(tmp_path.glob("*.cubin"))) == len(JOBS)
    if sass.tools() is None:
        return
    for file, unit, geometry, architecture in JOBS:
        for name, c in read(unit, geometry, architecture, tmp_path / file).items():
            every_gate(c, name)
            if name == "pass":
                words_are_whole(c)
                products_spill_nothing(c)
