"""Parts that all benchmarks share: candidates, alternating trials, machine facts, Markdown.

A candidate is a process of its own that sleeps while others are measured.
"""

from __future__ import annotations

import contextlib
import datetime
import inspect
import json
import multiprocessing
import os
import platform
import re
import shlex
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from records.files import code_version, write_atomically
from tools import ROOT

TIMEOUT_S = 900.0
INSTRUCTIONS = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}
Result = dict[str, Any]


class Candidate:
    """The object that `make` returns, in a process of its own that sleeps between commands.

    It starts at the first `ask`, and again after it has ended. settle_s: pause before each command.
    """

    def __init__(self, name: str, make: Callable[[], Any], settle_s: float = 0.0):
        self.name, self.make, self.settle_s = name, make, settle_s
        self.process: Any = None

    def ask(self, do: str, timeout_s: float = TIMEOUT_S, **arguments: Any) -> Any:
        """Return what method `do` returns; RuntimeError if it fails, dies or times out."""
        time.sleep(self.settle_s)
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, self.make), daemon=True)
            self.process.start()
            theirs.close()
        try:
            self.connection.send((do, arguments))
            if not self.connection.poll(timeout_s):
                self.close()
                raise RuntimeError(
                    f"{self.name}: no answer within {timeout_s:.0f} s; its process was killed"
                )
            failed, reply = self.connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(
                f"{self.name}: its process ended with status {self.close()}"
            ) from None
        if failed:
            raise RuntimeError(f"{self.name}: {reply}")
        return reply

    def close(self) -> int | None:
        """Kill the process, if it runs; return its exit status."""
        if self.process is None:
            return None
        self.connection.close()
        self.process.join(1.0)
        self.process.kill()
        self.process.join()
        status, self.process = self.process.exitcode, None
        return status


def serve(connection: Connection, make: Callable[[], Any]) -> None:
    """Answer commands until the other end is closed."""
    # what libraries print goes to stderr
    os.dup2(2, 1)
    candidate: Any = None
    with contextlib.suppress(EOFError):
        while True:
            do, arguments = connection.recv()
            try:
                candidate = candidate or make()
                reply = False, getattr(candidate, do)(**arguments)
            except Exception as error:  # whatever a library raises
                traceback.print_exc()
                reply = True, f"{type(error).__name__}: {str(error)[:1000]}"
            connection.send(reply)


T = TypeVar("T")


def alternate(candidates: Iterable[T], rounds: int) -> Iterator[list[T]]:
    """Return each round's order, every second one reversed."""
    # a shared machine changes within seconds: figures are comparable where trials alternate
    forward = list(candidates)
    return (forward[:: -1 if index % 2 else 1] for index in range(rounds))


def spread(values: Sequence[float]) -> dict[str, float]:
    return dict(
        zip(("median", "p10", "p90"), np.percentile(values, (50, 10, 90)).tolist(), strict=True)
    )


def machine_facts() -> dict[str, str]:
    """Return lscpu's facts of the CPU, and the memory; fewer where there is no lscpu."""
    text = ""
    with contextlib.suppress(OSError):
        env = {**os.environ, "LC_ALL": "C"}
        text = subprocess.run(["lscpu"], capture_output=True, text=True, env=env).stdout
    values = dict(re.findall(r"(?m)^ *([^:]+): *(.*)$", text))
    flags = [flag for flag in values.get("Flags", "").split() if flag in INSTRUCTIONS]
    return {
        "cpu": values.get("Model name", platform.processor()),
        "cpus": values.get("CPU(s)", str(os.cpu_count())),
        "instructions": " ".join(flags),
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
    }


def heading(result: Result, title: str) -> str:
    """Title, command and machine of one run; every figure below it is of this run."""
    machine, (before, after) = result["machine"], result["load_average"]
    return (
        f"## {result['date']}: {title}\n\n    {result['command']}\n\n"
        f"{machine['cpu']}, {machine['cpus']} CPUs ({machine['instructions']}), "
        f"{machine['memory']}; {machine['system']}. Commit {result['commit']}. "
        f"Load average {before:.1f} before, {after:.1f} after; {result['seconds']} s in all."
    )


def append_section(path: Path, section: str, file_start: str) -> None:
    """Add a section to a benchmark file, which opens with its title and what the columns mean."""
    before = path.read_text(encoding="utf-8") if path.exists() else file_start
    write_atomically(path, f"{before.rstrip()}\n\n{section}\n")


@dataclass(kw_only=True)
class Options:
    """The options of every benchmark."""

    json: bool = False
    """Print nothing but the JSON line."""
    out: Path | None = None
    """Markdown file to append a dated section to."""


def stamp(name: str, arguments: Sequence[str]) -> Result:
    """Return a run's facts for the page: its begin, command and code."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": f"python -m tools.bench {shlex.join([name, *arguments])}",
        "commit": code_version(ROOT),
    }


def run(name: str, benchmark: Any, arguments: Sequence[str]) -> None:
    """Run `python -m tools.bench NAME`: measure, report, end with one JSON line.

    Args:
        benchmark: a module with `Options` (a subclass of the class above whose docstring is the
            help text), `measure(options, console)` (ValueError for what cannot be measured),
            `section(options, result)` (title and body) and `FILE_START`, which opens a new file.
    """
    # here: the CUDA benchmark, which runs on other machines, needs none of them
    import tyro
    from rich.console import Console
    from rich.markdown import Markdown

    from records.command import check_ranges

    chosen = tyro.cli(
        benchmark.Options,
        args=arguments,
        prog=f"python -m tools.bench {name}",
        description=inspect.cleandoc(benchmark.Options.__doc__),
    )
    console = Console(stderr=True, quiet=chosen.json, width=None if sys.stderr.isatty() else 160)
    result, started, load = stamp(name, arguments), time.monotonic(), os.getloadavg()[0]
    check_ranges(benchmark.Options, vars(chosen))
    try:
        measured = benchmark.measure(chosen, console)
    except RuntimeError as error:  # of a candidate
        raise ValueError(str(error)) from error
    result |= {
        "seconds": round(time.monotonic() - started),
        "machine": machine_facts(),
        "load_average": [load, os.getloadavg()[0]],
        **measured,
    }
    title, body = benchmark.section(chosen, result)
    text = f"{heading(result, title)}\n\n{body}"
    console.print(Markdown(text))
    print(json.dumps(result))  # before the file, which may be refused
    if chosen.out is not None:
        append_section(chosen.out, text, benchmark.FILE_START)
        console.print(f"appended to {chosen.out}")
