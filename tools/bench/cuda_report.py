"""The steps of `tools.bench cuda`, in the order of a run, and the page that shows their figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laneformer.engine.cuda.bandwidth import datasheet, shares
from tools.bench.harness import Result
from tools.markdown import cell, table

SMALLER = "300m"  # whose verdict counts where the model's own cannot be had
HOP_US = 2.0  # assumed: a word to another GPU and back into its reader's poll over NVLink
START = """# Decode speed on one GPU

Random weights of one shape, one request, greedy, the server's way: the schedule, the executor, launches of up to 16
passes. A token is timed when its news comes, with all of its launch. "of probe": bytes read per second over the best
rate that one of our kernels reached on the same bytes in the same run; "of datasheet": over the vendor's figure. c:
exposed latency per layer in microseconds, (time per token - bytes / probe) / layers. Bytes are weights without the
padding of the tapes' last chunks, plus keys and values."""


def facts_section(result: Result, steps: Result) -> str:
    simple = (bool, int, float)
    return table(["", ""], ((k, v if isinstance(v, simple) else one_line(v)) for k, v in result.items()))


@dataclass(frozen=True)
class Step:
    """A measurement: `function` of cuda_steps.py, which gets the session and `arguments`, and its section.

    It is worth starting with `min_s` seconds left, and may take `max_s`. Without a title, the page's head shows it.
    """

    name: str
    min_s: float
    max_s: float
    title: str = ""
    function: str = ""  # the step's name, unless given
    arguments: Mapping[str, str] = field(default_factory=dict)
    write: Callable[[Result, Result], str] = facts_section

    @property
    def first_of(self) -> str | None:
        """The version whose first tokens these are; if they fail, no later step tries it."""
        return self.arguments.get("version")


def markdown(report: Result) -> str:
    """The whole page; `report["steps"]` may hold any part of the steps."""
    report = {**report, "steps": with_gpu(report)}
    verdict = verdict_of(report["steps"], report["flavor"])
    parts = [
        START, f"## {report['date']}: `{report['flavor']}` in {report['dtype']}", f"    {report['command']}",
        machine_line(report), f"**Correctness: {verdict}.**",
    ]  # fmt: skip
    for step in STEPS:
        if step.title:
            parts += [f"### {step.title}", section(report["steps"], step)]
    return "\n\n".join(parts) + "\n"


def section(steps: Result, step: Step) -> str:
    done = steps.get(step.name, {"not_measured": "the run has not reached it"})
    return (
        step.write(done["result"], steps)
        if "result" in done
        else f"not measured: {one_line(reason_of(done))}"
    )


def reason_of(step: Result) -> str:
    return step.get("error") or step.get("not_measured") or "not measured"


def one_line(text: object) -> str:
    return " ".join(str(text).split())[:400].replace("|", "/")


def with_gpu(report: Result) -> Result:
    """The steps, with the GPU's name where `machine` has none to tell."""
    machine = report["steps"].get("machine", {})
    if "result" in machine or "gpu" not in report:
        return dict(report["steps"])
    return {**report["steps"], "machine": {**machine, "result": {"gpu": report["gpu"]}}}


def verdict_of(steps: Result, flavor: str) -> str:
    """Of the model; where its check did not end, as on a GPU with little memory, also of the smaller one, by name."""
    step = steps.get("correctness", {})
    if "result" not in step:
        smaller = figures_of(steps, SMALLER)
        said = "all checks hold" if smaller.get("holds") else f"FAILED: {smaller.get('failed')}"
        also = f"; of `{SMALLER}` {said}" if smaller and flavor != SMALLER else ""
        return f"not proven of `{flavor}` ({one_line(reason_of(step))}){also}"
    failed = "; ".join(step["result"]["failed"])
    return "all checks hold" if step["result"]["holds"] else f"FAILED: {failed}"


def figures_of(steps: Result, name: str) -> Result:
    """Of one step; empty where it has none."""
    return steps.get(name, {}).get("result", {})


def bandwidth(steps: Result) -> tuple[float | None, float | None]:
    """Measured and stated bytes/s, None where unknown."""
    measured = figures_of(steps, "probe").get("bytes_per_s")
    return measured, datasheet(figures_of(steps, "machine").get("gpu", ""))


def machine_line(report: Result) -> str:
    facts = figures_of(report["steps"], "machine")
    if "multiprocessors" not in facts:
        return f"{facts.get('gpu', 'An unknown GPU')}; commit {report['commit']}. Machine: not measured."
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
    rows, ties = list[Sequence[Any]](), list[str]()
    for version in ("hf_bf16", "passes", "graph"):
        found = result.get(version, {})
        greedy = found.get("greedy", {})
        same = f"{greedy['same']} of {greedy['prompts']}" if greedy else None
        figures = (found.get(key) for key in ("relative_error", "kl", "differing_runs"))
        rows.append((version, *figures, same))
        ties += [
            f"{version}: prompt {p['prompt']} diverges at token {p['token']} where the lead is {p['lead']:.2e} "
            f"(a tie below {p['tie']:.2e})."
            for p in greedy.get("diverged", ())
        ]
    columns = [
        "against HF float32",
        "largest relative error",
        "KL, nats",
        "runs that differ",
        "prompts alike",
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
    sizes, ours, rows = figures_of(steps, "probe"), result["tokens_per_s"].get("passes", []), []
    for name, speeds in result["tokens_per_s"].items():
        median = statistics.median(speeds)
        shown: Iterable[float | None] = (None, None, None)
        if probe:
            shown = shares(median, sizes["weight_bytes"], probe, stated, 1, sizes["layers"]).values()
        ratio = statistics.median(a / b for a, b in zip(ours, speeds, strict=False)) if ours else None
        rows.append((name, median, min(speeds), max(speeds), *shown, ratio))
    columns = [f"trials of {result['tokens']} tokens", "tokens/s", "min", "max", "% of probe", "% of datasheet",
               "c, us/layer", "ours over it"]  # fmt: skip
    failed = "".join(
        f"\n\n{name}: not measured, {one_line(reason)}" for name, reason in result["failed"].items()
    )
    mode = f"torch.compile mode {result['mode']}.\n\n" if "mode" in result else ""
    return mode + table(columns, rows) + failed


BAR_PERCENT = (
    71  # of the datasheet: a published kernel for a 4B model inside SGLang on an H100 (arXiv 2609.12379)
)


def server_section(result: Result, steps: Result) -> str:
    """Speeds at the client, ours over the other's."""
    median = statistics.median(result["tokens_per_s"].get("laneformer", [0.0]))
    sizes, (_, stated) = figures_of(steps, "probe"), bandwidth(steps)
    reached = (
        f"{100 * median * sizes['weight_bytes'] / stated:.1f}%" if sizes and stated and median else "unknown"
    )
    renamed = {"passes" if name == "laneformer" else name: v for name, v in result["tokens_per_s"].items()}
    return baselines_section({**result, "tokens_per_s": renamed}, steps) + (
        f"\n\n`passes` is our server. Of the datasheet: {reached}; the bar is {BAR_PERCENT}% at 2 to 4B inside a "
        "server, where plain SGLang 0.5.18 reaches 63%. SGLang runs a plain Llama of the same matrices."
    )


def exchanges_section(result: Result, steps: Result) -> str:
    latency, trace = result["latency"], result["trace"]
    rows = [(state, *(latency[f"{state}_{key}"] for key in ("store_to_poll_us", "exchange_us")),
             latency[f"{state}_bytes_per_s"] / 1e9) for state in ("idle", "saturated")]  # fmt: skip
    waits = [(name, found["mean_us"], found["worst_us"]) for name, found in trace["of_a_token"].items()]
    return "\n\n".join([
        table(["memory", "us from a store to its poll", "us of a stream's exchange", "GB/s read meanwhile"], rows),
        f"After {trace['position']} positions, {trace['tokens_per_s']:.0f} tokens/s in a build that counts what the "
        "first warp of each block waits for; the rest it computes, or waits for the other warps.",
        table(["of a token", "us, mean of the blocks", "us, worst block"], waits),
    ])  # fmt: skip


def projection(result: Result, probe: float | None) -> Result:
    """{"tokens_per_s", "exposed_us_per_layer"} of one lane per GPU: the lane's own time, and a round trip
    between GPUs wherever all lanes wait for each other; delayed outputs are assumed to arrive in time.
    """
    alone_s = 1 / max(row["tokens_per_s"] for row in result["rows"])
    whole_s = alone_s + result["blocking_exchanges"] * HOP_US * 1e-6
    exposed = probe and 1e6 * (alone_s - result["bytes_per_token"] / probe) / result["layers"]
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


RUN_MINUTES, RESERVE_S = 12.0, 5.0  # of all limits below together; to write the report
STEPS = (  # in the order of a run
    Step("machine", 5, 40),
    Step("prepare", 10, 95, "Kernels compiled"),
    Step("tiny_passes", 5, 10, "The kernel's first tokens, `tiny`", "first", {"version": "passes", "flavor": "tiny"}),
    Step("tiny_graph", 5, 10, "The graph's first tokens, `tiny`", "first", {"version": "graph", "flavor": "tiny"}),
    Step("tiny", 5, 15, "Correctness of `tiny`", "smaller", {"flavor": "tiny"}),
    Step("300m", 10, 30, "Correctness of `300m`", "smaller", {"flavor": "300m"}),
    Step("sanitizer", 15, 35, "compute-sanitizer"),
    Step("load", 10, 30, "Weights packed and loaded"),
    Step("first_passes", 5, 10, "The kernel's first tokens", "first", {"version": "passes"}),
    Step("first_graph", 5, 10, "The graph's first tokens", "first", {"version": "graph"}),
    Step("probe", 5, 15, "Read bandwidth", write=probe_section),
    Step("correctness", 20, 65, "Correctness", write=correctness_section),
    Step("decode", 10, 40, "Decode", write=decode_section),
    Step("server", 30, 90, "The server over HTTP", write=server_section),
    Step("exchanges", 20, 60, "Where a token's time goes", write=exchanges_section),
    Step("baselines", 15, 40, "Baselines, alternating", write=baselines_section),
    *(Step(dtype, 10, 20, dtype, "other_type", {"dtype": dtype}) for dtype in ("fp16", "int8")),
    Step("lane_alone", 10, 15, "One lane on all multiprocessors", write=alone_section),
    Step("compiled", 10, 15, "Transformers, compiled", write=baselines_section),
    Step("batches", 10, 30, "Passes of several columns"),
)  # fmt: skip
