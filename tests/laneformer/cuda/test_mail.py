"""The words' protocol in every order: Spin searches all states of mail.pml, whose numbers are
those of a geometry.

The emulator runs the kernels' source and proves the orders that follow from each run (test_order.py); this is
the same claim about the protocol alone, by exhaustion: no word is overwritten before all its readers have
read it, nobody waits for ever, each reader finds the epoch that it waits for. Both must see the same faults.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from laneformer.config import MODULES, Join
from laneformer.engine.cuda.geometry import Geometry, Machine
from laneformer.engine.cuda.planning import plan
from tests.laneformer.cuda.harness import small_config
from tests.proofs import KERNEL_SOURCES

MODEL = Path(__file__).with_name("mail.pml")
MISSING = [program for program in ("spin", "gcc") if shutil.which(program) is None]
pytestmark = [
    pytest.mark.proof(*KERNEL_SOURCES),
    pytest.mark.job,
    pytest.mark.skipif(
        bool(MISSING), reason=f"the model checker needs {' and '.join(MISSING)}: apt-get install spin"
    ),
]
LATE: dict[str, Any] = {"use_early_comm": False, "use_mlp_comm": False}
BOTH_LATE: dict[str, Any] = {"use_early_comm": False}
AGAIN: dict[str, Any] = {"rebroadcast_early": True}


@dataclass(frozen=True)
class Case:
    """How lanes exchange, and the bounds of the search. layers: 0 for two more than the mail has slots."""

    delay: int
    config: dict[str, Any]
    lanes: int = 2
    layers: int = 0
    tokens: int = 2
    attending: int = 2


CASES = {
    "delay 0": Case(0, {}), "delay 1": Case(1, {}), "delay 2": Case(2, {}),
    "delay 1, sent twice": Case(1, AGAIN), "delay 1, late": Case(1, BOTH_LATE),
    "delay 2, attention alone": Case(2, LATE), "delay 1, few keys": Case(1, LATE, attending=1),
    "delay 1, three tokens": Case(1, {}, layers=3, tokens=3),
    "delay 0, three tokens": Case(0, {}, layers=3, tokens=3),
    "lanes that share nothing but the choice": Case(9, LATE, layers=2, tokens=3),
    "delay 0, three lanes": Case(0, {}, lanes=3),
}  # fmt: skip
FAULTS = {
    "mail has one slot too few": ("delay 2, attention alone", {"MAIL_SLOTS": -1}),
    "mail has one slot too few, delay 1": ("delay 1, few keys", {"MAIL_SLOTS": -1}),
    "a block goes on before the choice": ("lanes that share nothing but the choice", {"EARLY": 1}),
    "a cancel is seen by one GPU alone": ("delay 1, three tokens", {"ALONE": -1}),
}


def geometry_of(case: Case) -> Geometry:
    config = small_config(
        num_lanes=case.lanes, broadcast_delay=case.delay, num_hidden_layers=case.layers or 2 * case.delay + 4,
        hidden_size=96, intermediate_size=192, num_attention_heads=12, num_key_value_heads=6, **case.config,
    )  # fmt: skip
    return plan(config, "bf16", Machine(2 * case.lanes, 64 * 1024, 90), warps=2)


def defines(case: Case) -> dict[str, int]:
    """The model's numbers."""
    geometry = geometry_of(case)
    config, layers = geometry.config, range(geometry.config.num_hidden_layers)
    numbers = {
        "LANES": config.num_lanes, "LAYERS": len(layers), "DELAY": case.delay, "TOKENS": case.tokens,
        "MAIL_SLOTS": geometry.mail_slots, "ATTENDING": case.attending, "EARLY": 0, "ALONE": config.num_lanes - 1,
    }  # fmt: skip
    for i, module in enumerate(MODULES):
        now = [config.join(layer, module) is Join.PRESENT for layer in layers]
        sent = [a or config.broadcasts(layer, module) for layer, a in zip(layers, now, strict=True)]
        later = [config.adds_delayed(layer, module) for layer in layers]
        for name, flags in (("NOW", now), ("LATER", later), ("SENT", sent)):
            numbers[f"{name}_{i}"] = sum(flag << layer for layer, flag in enumerate(flags))
    return numbers


def search(folder: Path, numbers: dict[str, int]) -> str:
    """What Spin's verifier says after all states, or after the first error."""
    flags = [f"-D{name}={value}" for name, value in numbers.items()]
    verifier = ["gcc", "-O0", "-w", "-DSAFETY", "-DCOLLAPSE", "-DMEMLIM=3000", "-o", "pan", "pan.c"]
    for command in (["spin", "-a", *flags, str(MODEL)], verifier, ["./pan", "-m2000000"]):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_every_order(name: str, tmp_path: Path) -> None:
    said = search(tmp_path, defines(CASES[name]))
    assert "errors: 0" in said
    assert "Search not completed" not in said
    assert "max search depth too small" not in said
    assert "-end-" not in said, "no block came to its end"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    case, changes = FAULTS[name]
    numbers = defines(CASES[case])
    said = search(tmp_path, {**numbers, **{key: numbers[key] + change for key, change in changes.items()}})
    assert re.search("assertion violated|invalid end state", said)
    assert "errors: 1" in said
