"""What the matrix unit (Intel's AMX) is worth: the engine with it, without it, and llama.cpp, in paired runs.

    python -m tools.bench amx

The one command for the first machine that has the unit: it writes docs/benchmarks/DATE-amx.md. Everything but
the choice of instruction sets is `tools.bench decode`, with its probes in the same run.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer.engine.machine import this_machine
from tools.bench import decode
from tools.bench.decode_candidates import Math
from tools.bench.harness import ROOT, Result

FLAGS = {
    "amx": ("amx_tile", "amx_bf16"),
    "avx512_bf16": ("avx512_bf16", "avx512_vnni"),
}  # as /proc/cpuinfo names them
CPU_FACTS = Path("/proc/cpuinfo")
FILE_START = (
    decode.FILE_START.replace("# Decode speed on CPU", "# The matrix unit (AMX) on CPU", 1)
    + """

"laneformer" is the engine on the first instruction set of the command, in its first arithmetic; ratios over
other instruction sets are of one arithmetic. On the unit, `math=bf16` is one product and `math=exact` three
([why](../decisions/cpu-engine.md)); blocks of fewer than four columns do not use it, so decoding should not
differ."""
)
section = decode.section


@dataclass(kw_only=True)
class Options(decode.Options):
    """The matrix unit (AMX) beside the level below it and llama.cpp; writes its page. Refuses other machines."""

    isa: tuple[str, ...] = ("amx", "avx512_bf16")
    """Instruction sets, the one in question first; others than these two try the command out."""
    math: tuple[Math, ...] = ("bf16", "exact")
    against: str = "llamacpp"
    threads: int = this_machine().threads
    prefill: tuple[int, ...] = (128, 512, 2048)
    batch: tuple[int, ...] = (4, 8)
    out: Path | None = ROOT / f"docs/benchmarks/{datetime.date.today()}-amx.md"


def measure(options: Options, console: Any) -> Result:
    check_here(options.isa)
    return decode.measure(options, console)


def check_here(isas: Sequence[str]) -> None:
    """ValueError for an instruction set that cannot run here: which flag the CPU lacks."""
    from laneformer.engine.cpu import _core

    for isa in isas:
        try:
            _core.isa_of(isa)
        except ValueError as error:
            flags = CPU_FACTS.read_text().split() if CPU_FACTS.exists() else []
            lacks = [flag for flag in FLAGS.get(isa, ()) if flag not in flags]
            why = (
                f"this CPU lacks {', '.join(lacks)}"
                if lacks
                else "the CPU has it, the system or this build does not"
            )
            raise ValueError(f"{error}; {why if isa in FLAGS else 'choose one of these'}") from None
