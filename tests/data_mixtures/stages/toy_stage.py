"""A stage whose units wait, fail or die on demand; `python -m` runs it in its own process.

A file with a unit's number in the folder `faults` holds that unit's fault: "value", "bug", "disk",
"kill", or "wait" until the file is gone.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from data_mixtures.stages import stage
from data_mixtures.stages.run import Options, run_units
from data_mixtures.stages.stage import Unit, key_of


@dataclass(frozen=True)
class Toy:
    out: Path
    faults: Path
    wait_s: float = 0.0
    name: ClassVar[str] = "toy"

    def units(self) -> list[Unit]:
        return [Unit("a" if number % 2 else "b", number) for number in range(6)]

    def result_key(self, unit: Unit) -> str:
        return key_of("fetch", unit.number)

    def make(self, unit: Unit, folder: Path) -> dict[str, Any]:
        # a fault leaves this file in the unit's partial folder
        (folder / "half").write_bytes(b"half")
        time.sleep(self.wait_s)
        fault = self.faults / str(unit.number)
        match fault.read_text() if fault.is_file() else "":
            case "value":
                raise ValueError("the third row has no text")
            case "bug":
                raise KeyError("nobody thought of this")
            case "disk":
                raise OSError(errno.ENOSPC, "No space left on device")
            case "kill":
                print("about to be killed", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "wait":
                while fault.is_file():
                    time.sleep(0.02)
        (folder / "number").write_text(str(unit.number))
        return {"documents": unit.number, "dropped": {"empty": 1, "too_long": 2}}


def run(toy: Toy, options: Options) -> str:
    """Run the stage as a command does; return what it prints."""
    console = Console(record=True, width=200, force_terminal=False)
    with stage.exclusive(toy.out) as out:
        run_units(replace(toy, out=out), options, console)
    return console.export_text()


if __name__ == "__main__":
    out, faults, workers = sys.argv[1:]
    from data_mixtures.prepare import STOPPED
    from records.command import run_command

    toy = Toy(Path(out), Path(faults))
    run_command("toy", lambda: run(toy, Options(workers=int(workers))), interrupted=STOPPED)
