"""Everything to measure of the CUDA engine, in one call: correctness first, then speeds
beside the read bandwidth.

    PYTHONPATH=models:. python3 -m tools.bench cuda --out docs/benchmarks/DATE-gpu-decode.md

Needs Python with torch (CUDA), transformers, cuda-bindings and NVRTC, and this checkout; nothing is installed
or built. The steps run in a process of their own (tools.bench.cuda_steps), each within its own time limit,
the most important ones first: a crash or a hang costs only its step, and a step that no time is left for is
reported as not measured. The report is written after every step. Speeds stand below the verdict of the
correctness check. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laneformer.config import FLAVORS
from laneformer.engine.cuda.bench import datasheet, shares
from laneformer.engine.device import why_no_cuda
from records.files import code_version, write_atomically
from tools.bench.harness import ROOT, Candidate, Result, command_line
from tools.markdown import cell, table

RESERVE_S = 5.0  # to write the report
KEPT = Path("build/bench-cuda.json")
HOP_US = 2.0  # assumed: a word to another GPU and back into its reader's poll over NVLink
START = """# Decode speed on one GPU

Random weights of one shape, one request, greedy; a token is timed when it becomes visible to the host, after the prompt
and the launch. "of probe": bytes read per second over the best rate that one of our kernels reached on the same bytes
in the same run; "of datasheet": over the vendor's figure. c: exposed latency per layer in microseconds, (time per token
- bytes / probe) / layers. Bytes are weights without the padding of the tapes' last chunks, plus keys and values."""


@dataclass(frozen=True)
class Step:
    """A measurement, the least time that makes it worth starting, and its limit, both in seconds.

    `first_of`: the version whose first tokens these are; if they fail, no later step tries it.
    """

    name: str
    min_s: float
    max_s: float
    first_of: str | None = None


STEPS = (  # the limits and RESERVE_S are nine minutes together
    Step("machine", 5, 10), Step("prepare", 10, 95), Step("tiny_persistent", 5, 10, "persistent"),
    Step("tiny_graph", 5, 10, "graph"), Step("tiny", 5, 15), Step("300m", 10, 30), Step("sanitizer", 15, 35),
    Step("load", 10, 30), Step("first_persistent", 5, 10, "persistent"), Step("first_graph", 5, 10, "graph"),
    Step("probe", 5, 15), Step("correctness", 20, 65), Step("decode", 10, 40), Step("baselines", 15, 40),
    Step("fp16", 10, 20), Step("int8", 10, 20), Step("fp8", 10, 20), Step("lane_alone", 10, 15),
    Step("compiled", 10, 15), Step("passes", 10, 30),
)  # fmt: skip
MAX_SHARES = (
    3  # of its limit that a step may take of what those before it have left over; the rest is for the others
)


def measure(
    steps: Sequence[Step], worker: Any, total_s: float, save: Callable[[Result], None],
    clock: Callable[[], float] = time.monotonic, kept: Result | None = None,
) -> Result:  # fmt: skip
    """{step: {"result"}, {"error"} or {"not_measured"}}, saved after each; none takes the time
    of those after it.

    `kept`: of a run before; what has a result there is not measured again.
    """
    end = clock() + total_s - RESERVE_S
    done: Result = {name: step for name, step in (kept or {}).items() if "result" in step}
    to_do = [step for step in steps if step.name not in done]
    for index, step in enumerate(to_do):
        start = clock()
        left = end - start
        if left < step.min_s:
            done[step.name] = {"not_measured": f"{max(0, left):.0f} s were left, it needs {step.min_s:.0f}"}
        else:
            print(f"{step.name}, {left:.0f} s left", file=sys.stderr, flush=True)
            spare = left - sum(later.max_s for later in to_do[index + 1 :])
            limit = min(left, max(step.max_s, min(spare, MAX_SHARES * step.max_s)))
            try:
                done[step.name] = {"result": worker.ask(step.name, timeout_s=limit, seconds=limit)}
            except RuntimeError as error:
                done[step.name] = {"error": str(error)}
                if step.first_of:
                    worker.close()
                    worker.command += ["--without", step.first_of]
            done[step.name]["seconds"] = round(clock() - start, 1)
        save(done)
    return done


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    about = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.bench cuda", description=__doc__, formatter_class=about)
    add = parser.add_argument
    add("--out", type=Path, help="Markdown file to write")
    add(
        "--json",
        type=Path,
        default=KEPT,
        help=f"JSON file with every figure, which an interrupted run goes on with (default {KEPT})",
    )
    add("--minutes", type=float, default=9.0, help="time limit of the whole run (default 9)")
    add("--flavor", choices=sorted(FLAVORS), default="2b", help="shape of the model; weights are random")
    add("--dtype", choices=("bf16", "fp16"), default="bf16", help="element type of the weights")
    add("--runs", type=int, default=100, help="repeated runs that must be bit-identical (default 100)")
    add("--steps", help=f"comma-separated steps to run, of {','.join(step.name for step in STEPS)}")
    add("--commit", help="commit of this code, for a checkout without .git")
    return parser.parse_args(arguments)


def chosen_steps(names: str | None) -> list[Step]:
    """ValueError for an unknown name."""
    known = [step.name for step in STEPS]
    wanted = names.split(",") if names else known
    for name in wanted:
        if name not in known:
            raise ValueError(f"unknown step {name!r}; choose from {known}")
    return [step for step in STEPS if step.name in wanted]


def kept_steps(path: Path, report: Result) -> Result:
    """The steps of an unfinished run of the same command, code and GPU; none of them is lost."""
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    same = all(before.get(key) == report[key] for key in ("command", "commit", "gpu"))
    finished = all("result" in step for step in before["steps"].values())
    if not same or (finished and before["finished"]):
        return {}
    print(f"going on with what {path} has; remove it to measure anew", file=sys.stderr)
    return dict(before["steps"])


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    try:
        steps = chosen_steps(options.steps)
        if reason := why_no_cuda():
            raise ValueError(f"{reason}. On a CPU, python -m tools.bench decode measures the CPU engine")
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("transformers, the reference, cannot be imported: pip install transformers")
    except ValueError as error:
        print(f"cuda: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    report: Result = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command_line("cuda", arguments), "commit": options.commit or code_version(ROOT),
        "flavor": options.flavor, "dtype": options.dtype, "gpu": gpu_name(), "steps": {}, "finished": False,
    }  # fmt: skip
    kept = kept_steps(options.json, report)

    def save(done: Result) -> None:
        report["steps"], report["finished"] = done, all(step.name in done for step in steps)
        for path, text in (
            (options.out, markdown(report)),
            (options.json, json.dumps(report, indent=1) + "\n"),
        ):
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)

    command = ["-m", "tools.bench.cuda_steps", "--flavor", options.flavor, "--dtype", options.dtype]
    worker = Candidate("the CUDA engine", [*command, "--runs", str(options.runs)], quiet=False)
    try:
        measure(steps, worker, 60 * options.minutes, save, kept=kept)
    finally:
        worker.close()
    print(json.dumps(report))


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name(0)


def markdown(report: Result) -> str:
    """The whole page; `report["steps"]` may hold any part of the steps."""
    verdict = verdict_of(report["steps"].get("correctness", {}))
    parts = [
        START, f"## {report['date']}: `{report['flavor']}` in {report['dtype']}", f"    {report['command']}",
        machine_line(report), f"**Correctness: {verdict}.**",
    ]  # fmt: skip
    for name, (title, write) in SECTIONS.items():
        parts += [f"### {title}", section(report["steps"], name, write)]
    return "\n\n".join(parts) + "\n"


def section(steps: Result, name: str, write: Callable[[Result, Result], str]) -> str:
    step = steps.get(name, {"not_measured": "the run has not reached it"})
    return write(step["result"], steps) if "result" in step else f"not measured: {one_line(reason_of(step))}"


def reason_of(step: Result) -> str:
    return step.get("error") or step.get("not_measured") or "not measured"


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:400].replace("|", "/")


def verdict_of(step: Result) -> str:
    if "result" not in step:
        return f"not proven ({reason_of(step)})"
    failed = "; ".join(step["result"]["failed"])
    return "all checks hold" if step["result"]["holds"] else f"FAILED: {failed}"


def bandwidth(steps: Result) -> tuple[float | None, float | None]:
    """Measured and stated bytes/s, None where unknown."""
    probe, machine = (steps.get(name, {}).get("result", {}) for name in ("probe", "machine"))
    return probe.get("bytes_per_s"), datasheet(machine.get("gpu", ""))


def machine_line(report: Result) -> str:
    facts = report["steps"].get("machine", {}).get("result")
    if facts is None:
        return f"Commit {report['commit']}. Machine: not measured."
    known = ("gpu", "multiprocessors", "l2_bytes", "memory_bytes")
    others = ", ".join(f"{key} {value}" for key, value in facts.items() if key not in known)
    return (
        f"{facts['gpu']}, {facts['multiprocessors']} multiprocessors, L2 {facts['l2_bytes'] / 2**20:.0f} MiB, "
        f"{facts['memory_bytes'] / 2**30:.0f} GiB; {others}. Commit {report['commit']}."
    )


def probe_section(result: Result, steps: Result) -> str:
    stated = bandwidth(steps)[1]
    names = {"stream": "our ring of bulk copies", "loads": "plain 16-byte loads",
             "torch_copy": "torch copy (reads and writes)"}  # fmt: skip
    rates = {title: result[f"{key}_bytes_per_s"] for key, title in names.items()}
    rows = [(title, rate / 1e9, stated and 100 * rate / stated) for title, rate in rates.items()]
    return table(["read by", "GB/s", "% of datasheet"], rows) + (
        f"\n\nWeights: {result['weight_bytes'] / 1e9:.3f} GB per token; {result['tape_bytes'] / 1e9:.3f} GB with the "
        "padding of the tapes' last chunks."
    )


def correctness_section(result: Result, steps: Result) -> str:
    rows: list[Sequence[Any]] = [
        ("HF bf16", *(result["hf_bf16"][k] for k in ("relative_error", "kl")), None, None)
    ]
    ties = []
    for version in ("persistent", "graph"):
        found = result.get(version, {})
        greedy = found.get("greedy", {})
        same = f"{greedy['same']} of {greedy['prompts']}" if greedy else None
        rows.append(
            (version, found.get("relative_error"), found.get("kl"), same, found.get("differing_runs"))
        )
        ties += [
            f"{version}: prompt {p['prompt']} diverges at token {p['token']} where the lead is {p['lead']:.2e} "
            f"(a tie below {p['tie']:.2e})."
            for p in greedy.get("diverged", ())
        ]
    columns = [
        "against HF float32",
        "largest relative error",
        "KL, nats",
        "prompts alike",
        "runs that differ",
    ]
    faults = [
        (name, r["relative_error"], r["kl"], r["holds"]) for name, r in result.get("faults", {}).items()
    ]
    return "\n\n".join([
        table(columns, rows), *ties,
        table(["planted fault", "relative error", "KL, nats", "passes the gate"], faults),
        table(["check", "holds"], result["passed"].items()),
    ])  # fmt: skip


DECODE_COLUMNS = {
    "depth": "depth", "tokens_per_s": "tokens/s", "first_tokens_per_s": "first 32", "last_tokens_per_s": "last 32",
    "bytes_per_token": "MB/token", "percent_of_probe": "% of probe", "percent_of_datasheet": "% of datasheet",
    "exposed_us_per_layer": "c, us/layer", "prefill_tokens_per_s": "prompt tokens/s", "ttft_s": "s to first token",
    "version": "version",
}  # fmt: skip


def decode_section(result: Result, steps: Result) -> str:
    rows = ({**row, "bytes_per_token": row["bytes_per_token"] / 1e6} for row in result["depths"].values())
    return table(list(DECODE_COLUMNS.values()), ([row[key] for key in DECODE_COLUMNS] for row in rows))


def baselines_section(result: Result, steps: Result) -> str:
    """Medians of the rounds, and ratios within a round."""
    probe, stated = bandwidth(steps)
    sizes = steps.get("probe", {}).get("result", {})
    size, layers = sizes.get("weight_bytes"), sizes.get("layers", 0)
    ours, rows = result["tokens_per_s"].get("persistent", []), []
    for name, speeds in result["tokens_per_s"].items():
        median = statistics.median(speeds)
        part = shares(median, size, probe, stated, 1, layers) if size and probe else {}
        ratio = statistics.median(a / b for a, b in zip(ours, speeds, strict=False)) if ours else None
        percents = (
            part.get(key) for key in ("percent_of_probe", "percent_of_datasheet", "exposed_us_per_layer")
        )
        rows.append((name, median, min(speeds), max(speeds), *percents, ratio))
    columns = [f"trials of {result['tokens']} tokens", "tokens/s", "min", "max", "% of probe", "% of datasheet",
               "c, us/layer", "ours over it"]  # fmt: skip
    failed = "".join(
        f"\n\n{name}: not measured, {one_line(reason)}" for name, reason in result["failed"].items()
    )
    mode = f"torch.compile mode {result['mode']}.\n\n" if "mode" in result else ""
    return mode + table(columns, rows) + failed


def projection(result: Result, probe: float | None, hop_us: float = HOP_US) -> Result:
    """{"tokens_per_s", "exposed_us_per_layer"} of one lane per GPU: the lane's own time, and a round trip
    between GPUs wherever all lanes wait for each other; delayed outputs are assumed to arrive in time.
    """
    alone_s = 1 / max(row["tokens_per_s"] for row in result["rows"])
    whole_s = alone_s + result["blocking_exchanges"] * hop_us * 1e-6
    exposed = (
        None if probe is None else 1e6 * (alone_s - result["bytes_per_token"] / probe) / result["layers"]
    )
    return {"tokens_per_s": 1 / whole_s, "exposed_us_per_layer": exposed}


def alone_section(result: Result, steps: Result) -> str:
    projected = projection(result, bandwidth(steps)[0])
    rows = [(row["blocks"], row["tokens_per_s"]) for row in result["rows"]]
    exposed = cell(projected["exposed_us_per_layer"])
    return table(["blocks", "tokens/s of one lane alone"], rows) + (
        f"\n\n**A projection, not a measurement**: {result['lanes']} GPUs with one lane each would make "
        f"{projected['tokens_per_s']:.0f} tokens/s (c {exposed} us/layer), if the other lanes' outputs arrive within "
        f"the delay and each of {result['blocking_exchanges']} blocking exchanges a token costs {HOP_US} us (assumed)."
    )


def facts_section(result: Result, steps: Result) -> str:
    simple = (bool, int, float)
    return table(["", ""], ((k, v if isinstance(v, simple) else one_line(v)) for k, v in result.items()))


SECTIONS: dict[str, tuple[str, Callable[[Result, Result], str]]] = {
    "prepare": ("Kernels compiled", facts_section),
    "tiny_persistent": ("The persistent kernel's first tokens, `tiny`", facts_section),
    "tiny_graph": ("The graph's first tokens, `tiny`", facts_section),
    "tiny": ("Correctness of `tiny`", facts_section),
    "300m": ("Correctness of `300m`", facts_section),
    "sanitizer": ("compute-sanitizer", facts_section),
    "load": ("Weights packed and loaded", facts_section),
    "first_persistent": ("The persistent kernel's first tokens", facts_section),
    "first_graph": ("The graph's first tokens", facts_section),
    "probe": ("Read bandwidth", probe_section),
    "correctness": ("Correctness", correctness_section),
    "decode": ("Decode", decode_section),
    "baselines": ("Baselines, alternating", baselines_section),
    "compiled": ("Transformers, compiled", baselines_section),
    **{dtype: (dtype, facts_section) for dtype in ("fp16", "int8", "fp8")},
    "lane_alone": ("One lane on all multiprocessors", alone_section),
    "passes": ("Passes of several columns", facts_section),
}
