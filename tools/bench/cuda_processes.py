"""The steps of `tools.bench cuda` that are other processes beside the one that runs them: they need room on
the GPU.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from laneformer.engine.cuda.compile import VERSIONS
from laneformer.engine.cuda.geometry import architecture_name
from laneformer.engine.cuda.launch import describe
from laneformer.engine.cuda.nvrtc import compiler_for
from laneformer.engine.device import driver_version
from tools.bench.bare.main import run_all
from tools.bench.bundle import EFFORT, Bundle
from tools.bench.cuda_session import SMOKE_SHAPE, Session, make_room, smoke_config
from tools.bench.harness import Result
from tools.check import cuda as check

SANITIZER_LIMIT_S = 120.0  # the same wait in a kernel that runs a hundred times slower
SERVER_TOKENS, SERVER_TRIALS = 128, 5
ROOM_BYTES = 3 << 30  # contexts, keys and values


def sanitizer(session: Session) -> Result:
    """A short text through the tiny model under compute-sanitizer, where the machine has it."""
    program, report = shutil.which("compute-sanitizer"), {}
    if program is None:
        return {"missing": "compute-sanitizer is not on the PATH"}
    smoke_test = [sys.executable, "-c", "from tools.bench.cuda_processes import smoke; smoke()"]
    for tool in ("memcheck", "racecheck"):
        seconds = session.time_left() - 5
        if seconds < 5:
            break
        command = [program, "--tool", tool, "--error-exitcode", "9", *smoke_test]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
            report[tool] = {"status": done.returncode, "tail": (done.stdout + done.stderr)[-800:]}
        except subprocess.TimeoutExpired:
            report[tool] = {"error": "it ran out of time"}
    return report


def smoke() -> None:
    """Greedy tokens by both versions of a small model; RuntimeError unless the tokens are equal."""
    session = Session("tiny", "bf16")
    session.config = smoke_config(session.config)
    decoders = [session.make(version, limit_s=SANITIZER_LIMIT_S, **SMOKE_SHAPE) for version in VERSIONS]
    made = [check.greedy(decoder, [5, 6, 7], 4) for decoder in decoders]
    if made[0] != made[1]:
        raise RuntimeError(f"passes and graph give different tokens: {made}")


def exchanges(session: Session) -> Result:
    """What words cost, and where a token's time goes: a bundle of this model for this GPU, with weights by a
    rule.
    """
    machine, driver = describe(torch.device(session.device)), driver_version()
    compiler = compiler_for(architecture_name(machine.architecture), driver)
    make_room(session, 2 * session.config.parameter_count()["total"] + ROOM_BYTES)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bundle.pyz"
        packed = Bundle(path, {session.flavor: session.config})
        card = packed.card("this GPU", machine, {compiler.version[0]: compiler})
        packed.close(
            {"made": "here", "effort": EFFORT, "measured": session.flavor, "cards": [card], "references": {}}
        )
        found = run_all(["latency", "trace"], path, Path(folder) / "report.json")["steps"]
    if failed := [
        f"{name}: {step['failed']} ({step['why']})" for name, step in found.items() if "failed" in step
    ]:
        raise RuntimeError("; ".join(failed))
    return {name: step["result"] for name, step in found.items()}


def server(session: Session) -> Result:
    """Tokens/s of the server as a client sees them; then of SGLang on a plain Llama of the same matrices."""
    from tools.bench.cuda_server import servers  # what a server needs, this machine may lack

    make_room(session, 2 * session.config.parameter_count()["total"] + ROOM_BYTES)
    found: Result = {"tokens": SERVER_TOKENS, "tokens_per_s": {}, "failed": {}}
    for each in servers(session.flavor, session.dtype):
        try:
            if each.missing:
                raise RuntimeError(each.missing)
            with each:
                body: Result = {"prompt": [5], "max_tokens": SERVER_TOKENS + 1, "ignore_eos": True}
                speeds = [each.ask("/v1/completions", **body).tokens_per_s for _ in range(SERVER_TRIALS + 1)]
            found["tokens_per_s"][each.name] = speeds[1:]
        except (RuntimeError, OSError) as error:
            found["failed"][each.name] = str(error)[-1000:]
    return found
