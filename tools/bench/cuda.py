"""The CUDA engine in eight minutes of one GPU: is it right, how fast is it, and what is as fast.

    PYTHONPATH=models:. python3 -m tools.bench cuda --out docs/benchmarks/gpu-decode.md

Parts run one after the other, the most important first, each in a process of its own within a time limit. A figure is
printed, and the page written again, when it is there. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from laneformer import LaneformerConfig
from laneformer.engine.device import driver_version, why_no_cuda
from records.files import write_atomically
from tools.bench.harness import ROOT, Result, stamp
from tools.markdown import records

DEVICE = "cuda:0"
# of the verdict; the float32 reference of a larger one needs more time than there is
FLAVORS = ("tiny", "300m")
TOKENS, TRIALS = 128, 5
MARK = "figure "  # begins the lines that a part is read by; libraries print others
START = """# Decode speed on one GPU

Random weights of one shape in bf16, one request, greedy. Speeds stand below the verdict: logits closer to Transformers'
float32 than its bf16 is, greedy tokens apart from ties, equal bits in repeated runs, planted faults refused."""
Figures = Iterator[tuple[str, Any]]


@dataclass(frozen=True)
class Part:
    """Figures of `title` from `function` (FLAVOR -> name and value of each), within `limit_s`."""

    title: str
    function: str
    flavor: str
    limit_s: float


# ---- the parts, in processes of their own ----


def compile_kernels(flavor: str) -> Figures:
    """Compile the kernels of all parts to disk, by one process per core."""
    import torch

    from laneformer.engine.cuda.compile import compile_cubin
    from laneformer.engine.cuda.geometry import architecture_name
    from laneformer.engine.cuda.graph import RUNNERS
    from laneformer.engine.cuda.launch import describe
    from laneformer.engine.cuda.planning import plan_builds

    machine, start = describe(torch.device(DEVICE)), time.monotonic()
    units = []
    for name, version in itertools.product((*FLAVORS, flavor), RUNNERS):
        config = LaneformerConfig.from_flavor(name)
        builds = plan_builds(config, "bf16", machine, version)
        units += [(version, geometry) for geometry in builds]
    architecture, driver = architecture_name(machine.architecture), driver_version()
    with ProcessPoolExecutor() as pool:
        jobs = [
            pool.submit(compile_cubin, *unit, architecture=architecture, driver=driver)
            for unit in units
        ]
        yield "kernels", sum(len(job.result()) > 0 for job in jobs)
    yield "seconds", time.monotonic() - start


def verdict(flavor: str) -> Figures:
    """Compare the persistent kernel and the graph of kernels with Transformers in float32."""
    from tools.check.cuda import check_flavor

    return check_flavor(flavor)


def decode(flavor: str) -> Figures:
    """Return what `laneformer bench --device cuda` measures at three depths."""
    from laneformer import Engine
    from laneformer.engine.bench import benchmark
    from laneformer.engine.cuda.bench import MIN_TOKENS

    context = LaneformerConfig.from_flavor(flavor).max_position_embeddings
    with Engine.random(flavor, "bf16", device=DEVICE) as engine:
        for depth in (0, context // 2, context - MIN_TOKENS):
            figures = benchmark(engine, depth, functools.partial(print, file=sys.stderr))
            yield f"depth {depth}", {name: figures[name] for name in COLUMNS}


COLUMNS = (
    "depth",
    "tokens_per_s",
    "bytes_per_token",
    "percent_of_probe",
    "percent_of_datasheet",
    "exposed_us_per_layer",
    "prefill_tokens_per_s",
    "ttft_s",
)


def transformers(flavor: str) -> Figures:
    """Measure generate() as it comes, and compiled with a static cache (CUDA graphs)."""
    import torch
    from transformers import CompileConfig

    from tools.check.reference import hf_model, random_weights

    config = LaneformerConfig.from_flavor(flavor)
    model: Any = hf_model(config, random_weights(config, device=DEVICE), torch.bfloat16)
    ids = torch.tensor([[5]], device=DEVICE)
    length = {
        "min_new_tokens": TOKENS,
        "max_new_tokens": TOKENS,
        "do_sample": False,
        "pad_token_id": 0,
    }
    static = {
        "cache_implementation": "static",
        "compile_config": CompileConfig(mode="reduce-overhead", fullgraph=False),
    }
    for name, options in (("generate", {}), ("compiled", static)):
        seconds = []
        for _ in range(TRIALS + 1):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(ids, attention_mask=torch.ones_like(ids), **length, **options)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        yield name, speed(flavor, TOKENS / statistics.median(seconds[1:]))  # the first one compiles


def speed(flavor: str, tokens_per_s: float) -> Result:
    """Return the speed, and its weight reads in percent of the datasheet's bandwidth."""
    import torch

    from laneformer.engine.cuda.bench import datasheet

    count = LaneformerConfig.from_flavor(flavor).parameter_count()
    read = 2 * (count["total"] - count["embedding"])
    stated = datasheet(torch.cuda.get_device_name(DEVICE))
    percent = 100 * tokens_per_s * read / stated if stated else None
    return {"tokens_per_s": tokens_per_s, "percent_of_datasheet": percent}


# ---- the server ----


def server(flavor: str, device: str = DEVICE) -> Figures:
    """Tokens/s at the client of our server."""
    command = [sys.executable, "-m", "tools.bench.cuda", "serve", flavor, device]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        try:
            assert process.stdout is not None
            # it prints its address once it answers
            *_, address = process.stdout.readline().split() or [""]
            if not address:
                log.seek(0)
                raise RuntimeError(f"the server did not start: {log.read()[-1500:]}")
            speeds = [stream_answer(f"{address}/v1") for _ in range(TRIALS + 1)]
            yield "at the client", speed(flavor, statistics.median(speeds[1:]))
        finally:
            process.kill()
            process.wait()


def stream_answer(address: str) -> float:
    """Return tokens/s of a greedy answer of TOKENS tokens, after its first text."""
    length = {"max_tokens": TOKENS, "ignore_eos": True}
    body = {"model": "model", "prompt": [5], "temperature": 0, "stream": True, **length}
    headers = {"Content-Type": "application/json"}
    times = []
    with urlopen(
        Request(f"{address}/completions", json.dumps(body).encode(), headers), timeout=60
    ) as answer:
        for line in answer:
            if line.startswith(b"data: {") and any(
                c.get("text") for c in json.loads(line[6:])["choices"]
            ):
                times.append(time.perf_counter())
    if len(times) < 2:
        raise RuntimeError("an answer without text")
    return (TOKENS - 1) / (times[-1] - times[0])


def serve(flavor: str, device: str) -> None:
    """Run `laneformer serve` with random weights and a word for each id."""
    from tokenizers import Tokenizer, decoders, models

    from laneformer import Engine
    from laneformer.serve.app import run
    from laneformer.serve.options import ServerOptions

    vocab_size = LaneformerConfig.from_flavor(flavor).vocab_size
    tokenizer = Tokenizer(models.WordLevel({f" w{i}": i for i in range(vocab_size)}, " w0"))
    tokenizer.decoder = decoders.Fuse()
    options = ServerOptions("model", port=0, speculate=0)
    with (
        options.listen() as listening,
        Engine.random(flavor, device=device, tokenizer=tokenizer) as engine,
    ):
        run(engine, options, None, listening)


# ---- the run and its page ----


def parts_of(flavor: str) -> list[Part]:
    return [
        Part("Kernels compiled", "compile_kernels", flavor, 90),
        *(Part(f"Correctness of `{name}`", "verdict", name, 60) for name in FLAVORS),
        Part(f"Decode, `{flavor}`", "decode", flavor, 90),
        Part("The server over HTTP", "server", flavor, 60),
        Part("Transformers", "transformers", flavor, 50),
    ]


def run_part(part: Part, figures: Result, save: Any) -> None:
    """Add each figure of a part to `figures` as it comes, and how it ended if not well."""
    command = [sys.executable, "-m", "tools.bench.cuda", part.function, part.flavor]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    # a crash or a hang costs what this part had left, and no other part
    timer = threading.Timer(part.limit_s, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                name, value = json.loads(line.removeprefix(MARK))
                figures[name] = value
                print(f"{part.title}: {name}: {value}", file=sys.stderr, flush=True)
                save()
        status, in_time = process.wait(), timer.is_alive()
    finally:
        timer.cancel()
        process.kill()
    if status:
        figures["ended"] = (
            f"with status {status}" if in_time else f"after {part.limit_s:g} s, its limit"
        )
        save()


def markdown(report: Result) -> str:
    """Return the page; `report["parts"]`: figures by title, of the parts that have begun."""
    head = f"## {report['date']}: {report['gpu']}"
    lines = [START, head, f"    {report['command']}", f"Commit {report['commit']}."]
    for title, figures in report["parts"].items():
        verdict = f": {verdict_of(figures)}" if title.startswith("Correctness") else ""
        lines.append(f"### {title}{verdict}")
        wide = {name: value for name, value in figures.items() if isinstance(value, dict)}
        speeds = [{"": name, **columns} for name, columns in wide.items()]
        alone = [{"": name, "value": value} for name, value in figures.items() if name not in wide]
        lines += [records(rows) for rows in (speeds, alone) if rows]
    return "\n\n".join(lines) + "\n"


def verdict_of(figures: Result) -> str:
    failed = [name for name, value in figures.items() if value is False]
    if failed or "ended" in figures:
        return f"FAILED ({'; '.join(failed) or figures['ended']})"
    return "all checks hold" if "planted faults are refused" in figures else "not proven"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python -m tools.bench cuda", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--flavor", default="2b", help="shape of the model that is measured")
    options = parser.parse_args(arguments)
    if reason := why_no_cuda():
        print(
            f"cuda: {reason}. On a CPU, python -m tools.bench decode measures the CPU engine",
            file=sys.stderr,
        )
        raise SystemExit(2)
    import torch

    report = stamp("cuda", arguments)
    gpu = torch.cuda.get_device_name(0)
    report |= {"gpu": gpu, "parts": {}}

    def save() -> None:
        if options.out is not None:
            write_atomically(options.out, markdown(report))

    for part in parts_of(options.flavor):
        run_part(part, report["parts"].setdefault(part.title, {}), save)
    print(json.dumps(report))


if __name__ == "__main__":  # one part, or our server: serve FLAVOR DEVICE
    name, flavor, *more = sys.argv[1:]
    if name == "serve":
        serve(flavor, *more)
    else:
        for figure in globals()[name](flavor):
            print(MARK + json.dumps(figure), flush=True)
