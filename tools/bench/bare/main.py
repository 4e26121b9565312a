"""Is the CUDA engine right on this GPU, and how fast? Python's standard library and NVIDIA's driver are
enough.

    python3 laneformer-cuda.pyz [--json FILE] [--steps NAMES]

Each step runs in a process of its own with a limit: a hang or a crash of the GPU costs its step, and is
named. The exit status is 0 where all checks hold; the figures of every step are in the JSON file, to be sent
with a report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.bench.bare import measures
from tools.bench.bare.checks import Reference, verdict
from tools.bench.bare.contents import Contents
from tools.bench.bare.driver import Driver, Failure
from tools.bench.bare.model import Model

STEPS = ("machine", "tiny", "300m", "probe", "latency", "decode", "trace")
VERDICTS = ("machine", "tiny", "300m")
KEPT = Path("laneformer-cuda.json")
Figures = dict[str, Any]


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


# ---- a step, in its own process ----


def step(name: str, path: Path, known: Figures) -> Figures:
    """The figures of one step; `known`: those of the steps before it."""
    contents, driver = Contents(path), Driver()
    facts = driver.facts()
    chosen = contents.choose(facts)
    if name == "machine":
        return {**facts, **chosen}
    driver.start()
    if name in VERDICTS:
        return verdict(Model(driver, contents, name), Reference(contents, name), say)
    model = Model(driver, contents, contents.description["measured"])
    if name == "decode":
        rates = known.get("probe", {}) or measures.probe(model)
        return measures.decode(model, facts["gpu"], max(rates.values()))
    measure: Callable[[Model], Figures] = getattr(measures, name)
    return measure(model)


def run_step(name: str, path: Path) -> None:
    """Prints one line of JSON, and ends the process whatever the driver still does."""
    found: Figures
    try:
        found = {"result": step(name, path, json.loads(sys.stdin.read() or "{}"))}
    except Failure as failure:
        found = {"failed": failure.what, "why": failure.why}
    print(json.dumps(found), flush=True)
    os._exit(0)


# ---- all of them ----


def ask(name: str, path: Path, known: Figures, limit_s: float) -> Figures:
    """{"result"} of a step, or {"failed", "why"}."""
    command = [sys.executable, "-I", "-S", str(path), "--step", name]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        said, _ = process.communicate(json.dumps(known), timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()  # it may not end even so, in a call of the driver: nobody waits for that
        return {"failed": "hang", "why": f"no answer within {limit_s:g} s; its process was killed"}
    lines = said.splitlines()
    if process.returncode or not lines:
        return {"failed": "crash", "why": f"its process ended with status {process.returncode}"}
    return dict(json.loads(lines[-1]))


def run_all(names: list[str], path: Path, kept: Path) -> Figures:
    """The report, written after each step."""
    contents = Contents(path)
    report: Figures = {"bundle": contents.description["made"], "python": platform.python_version()}
    report |= {"system": platform.platform(), "steps": {}}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.monotonic()
        known = {n: s["result"] for n, s in report["steps"].items() if "result" in s}
        found = ask(name, path, known, contents.effort["limits_s"][name])
        report["steps"][name] = {**found, "seconds": round(time.monotonic() - start, 1)}
        report["verdict"] = verdict_of(report["steps"])
        kept.write_text(json.dumps(report, indent=1) + "\n")
        if name == "machine" and "failed" in found:
            break
    return report


def verdict_of(steps: Figures) -> str:
    """ "all checks hold", or which does not; what was only measured decides nothing."""
    failed = []
    for name, found in steps.items():
        if "failed" in found:
            failed.append(f"{name}: {found['failed']} ({found['why']})")
        elif name in VERDICTS:
            failed += [f"{name}: {each}" for each in found["result"].get("failed", ())]
    if failed:
        return "FAILED: " + "; ".join(failed)
    missing = [name for name in VERDICTS if name not in steps]
    return f"not proven: {', '.join(missing)} did not run" if missing else "all checks hold"


def table(report: Figures) -> str:
    """For people: machine, checks, speeds."""
    steps = {name: found.get("result", {}) for name, found in report["steps"].items()}
    machine = steps.get("machine", {})
    rows = [("", ""), ("bundle", report["bundle"]), *((k, machine[k]) for k in machine)]
    for name in VERDICTS[1:]:
        for check, found in steps.get(name, {}).get("checks", {}).items():
            rows.append(
                (f"{name}: {check}", f"{'holds' if found['holds'] else 'FAILED'}, {found['figures']}")
            )
    for name in ("probe", "latency"):
        rows += [(key.replace("_", " "), shown(key, value)) for key, value in steps.get(name, {}).items()]
    for depth, found in steps.get("decode", {}).get("depths", {}).items():
        figures = (f"{key} {value:.4g}" for key, value in found.items() if isinstance(value, float))
        rows.append((f"decoding after {depth} positions", ", ".join(figures)))
    for columns, ms in steps.get("decode", {}).get("passes_ms", {}).items():
        rows.append((f"a pass of {columns} columns", f"{ms:.3f} ms"))
    for name, found in steps.get("trace", {}).get("of_a_token", {}).items():
        rows.append(
            (f"a token: {name}", f"{found['mean_us']:.1f} us, {found['worst_us']:.1f} in the worst block")
        )
    rows += [
        (name, f"FAILED: {s['failed']}, {s['why']}") for name, s in report["steps"].items() if "failed" in s
    ]
    wide = max(len(str(name)) for name, _ in rows)
    return "\n".join(f"{name!s:{wide}}  {value}" for name, value in rows)


def shown(key: str, value: float) -> str:
    return f"{value / 1e9:.1f} GB/s" if key.endswith("bytes_per_s") else f"{value:.2f}"


def main() -> None:
    path = Path(sys.argv[0]).resolve()
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(path.name, description=__doc__, formatter_class=about)
    parser.add_argument("--json", type=Path, default=KEPT, help=f"file with every figure (default {KEPT})")
    parser.add_argument("--steps", default=",".join(STEPS), help="comma-separated (default: all)")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        run_step(options.step, path)
    names = options.steps.split(",")
    if unknown := [name for name in names if name not in STEPS]:
        parser.error(f"unknown steps {unknown}; choose from {list(STEPS)}")
    report = run_all(names, path, options.json)
    print(table(report))
    print(f"\nVERDICT: {report['verdict']}. Every figure is in {options.json}.")
    sys.stdout.flush()
    os._exit(report["verdict"] != "all checks hold")  # a process that hangs in the driver is not waited for
