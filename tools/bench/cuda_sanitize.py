"""The kernels under compute-sanitizer, on a model so small that it ends in time."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys

from laneformer.engine.cuda.decoder import CudaDecoder
from tools.bench.cuda_check import greedy
from tools.bench.cuda_session import DEVICE, Report, Session

SANITIZERS = ("memcheck", "racecheck")
LIMIT_S = 120.0  # of a wait inside a kernel that runs a hundred times slower


def sanitizer(session: Session) -> Report:
    """A short text through the tiny model under compute-sanitizer, where the machine has it."""
    program, report = shutil.which("compute-sanitizer"), {}
    if program is None:
        return {"missing": "compute-sanitizer is not on the PATH"}
    for tool in SANITIZERS:
        if session.time_left() < 10:
            break
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, "-m", "tools.bench.cuda_worker"]
        seconds = session.time_left() - 5
        try:
            done = subprocess.run(
                [*command, "--flavor", "tiny", "--smoke"],
                capture_output=True,
                text=True,
                timeout=seconds,
            )
            report[tool] = {"status": done.returncode, "tail": (done.stdout + done.stderr)[-800:]}
        except subprocess.TimeoutExpired:
            report[tool] = {"error": "it ran out of time"}
    return report


def smoke(session: Session) -> None:
    """A prompt and some tokens by both versions, and the same ones."""
    config = dataclasses.replace(session.config, num_hidden_layers=4, swa_layers=(0, 1))
    tensors = {name: t for name, t in session.tensors.items() if not name.startswith(("layers.4.", "layers.5."))}
    made = []
    for version in ("persistent", "graph"):
        decoder = CudaDecoder(config, tensors, session.dtype, (DEVICE,), version, LIMIT_S, blocks_per_lane=4, warps=4)
        made.append(greedy(decoder, [5, 6, 7], 4))
    if made[0] != made[1]:
        raise RuntimeError(f"persistent and graph give other tokens: {made}")
