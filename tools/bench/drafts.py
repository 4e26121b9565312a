"""What drafts are worth: wall time of whole answers with drafts off and as shipped, in alternating runs; and beside
them llama.cpp's prompt lookup against llama.cpp without.

    python -m tools.bench drafts MODEL [--dtypes bf16 int8 int4] [--texts 8] [--out FILE.md]

Edits are real ones, of this repository's history: the prompt is the old file, the answer the new one in the form that
a coding assistant writes. The engine runs as it does for a user, drawing included, but the ids of that answer come out
whatever was drawn, since no small model would write them. Chat is answered by the model itself. llama.cpp gets the same
ids, in weights of the same width; its binding has one drafter, which looks up the first place of the last two ids.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import itertools
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from laneformer.chat import USER
from laneformer.engine import Engine
from laneformer.engine.options import MAX_DRAFT_TOKENS
from laneformer.prompts import PromptEncoder
from tools.bench import harness
from tools.bench.decode_candidates import QUANTISED
from tools.bench.harness import ROOT, Result
from tools.bench.llamacpp import LlamaCpp, library
from tools.markdown import table

FILE_START = """# Drafts

A figure is the time of all tokens after the first without drafts, divided by the same with them."""
FILE_CHARS = range(1500, 9000)  # of the old file
MAX_COMMITS = 600  # that are looked through
LOOKUPS = (2, 10)  # most draft tokens: what llama-cpp-python advises on CPUs, and its default
CHAT = (
    "Explain to a ten-year-old why the sky is blue.",
    "Write a Python function that merges two sorted lists, with a short test.",
    "Compare TCP and UDP in a table of three rows.",
    "Write four lines about the sea at night.",
    "List ten facts about the Moon.",
    "What is the difference between a process and a thread?",
    "Write a short letter to a landlord about a broken heater.",
    "Translate to French: The train leaves at nine, and I have no ticket.",
)


@dataclass(kw_only=True)
class Options(harness.Options):
    """Speed with drafts against speed without, by kind of text and type of weights."""

    model: tyro.conf.Positional[Path]
    """Folder or GGUF file, with a tokenizer."""
    draft: Path | None = None
    """A small model that drafts as well."""
    dtypes: tuple[str, ...] = ("bf16", "int8", "int4")
    """Of the weights."""
    threads: int | None = None
    """Default: all cores."""
    texts: int = 8
    """Of each kind."""
    tokens: int = 300
    """Most new tokens of a text."""
    rounds: int = 3
    """Pairs of runs of each text; the median counts."""


@dataclass(frozen=True)
class Edit:
    """One file of one commit."""

    old: str
    new: str

    def forms(self) -> dict[str, str]:
        """The answer as whole file, blocks to search and replace, a diff, and the new lines alone."""
        old, new = self.old.splitlines(True), self.new.splitlines(True)
        changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        hunks = [(a, b, c, d) for kind, a, b, c, d in changes if kind != "equal"]
        blocks = [
            "<<<<<<< SEARCH\n" + "".join(old[max(0, a - 2) : b + 1]) + "=======\n"
            + "".join([*old[max(0, a - 2) : a], *new[c:d], *old[b : b + 1]]) + ">>>>>>> REPLACE\n"
            for a, b, c, d in hunks
        ]  # fmt: skip
        return {
            "whole file": self.new,
            "search and replace": "\n".join(blocks),
            "diff": "".join(difflib.unified_diff(old, new, "a", "b")),
            "new lines": "".join(line for _, _, c, d in hunks for line in new[c:d]),
        }


def edits() -> Iterator[Edit]:
    """The latest changes of single Python files; none where there is no history."""
    listed = git("log", "--no-merges", "--diff-filter=M", "--name-only", "--format=%x00%H", f"-{MAX_COMMITS}")
    for entry in listed.split("\0")[1:]:
        commit, *paths = entry.split()
        for path in [path for path in paths if path.endswith(".py")][:1]:
            with contextlib.suppress(subprocess.CalledProcessError):  # the oldest commit of a shallow clone
                old, new = git("show", f"{commit}~:{path}"), git("show", f"{commit}:{path}")
                if len(old) in FILE_CHARS and old != new:
                    yield Edit(old, new)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


@dataclass(frozen=True)
class Text:
    """ids: the answer; empty where the model writes it."""

    kind: str
    prompt: list[int]
    ids: list[int]


def texts(engine: Engine, options: Options) -> list[Text]:
    assert engine.tokenizer is not None
    encoder = PromptEncoder(engine.tokenizer, engine.tokenizer_config)
    found = []
    for edit in itertools.islice(edits(), options.texts):
        prompt = encoder.text(f"{edit.old}\n\nThe file after the change:\n\n")
        for kind, answer in edit.forms().items():
            ids = encoder.text(answer, add_special_tokens=False)[: options.tokens]
            if len(ids) > 8 and len(prompt) + len(ids) < engine.config.max_position_embeddings:
                found.append(Text(kind, prompt, ids))
    for question in CHAT[: options.texts]:
        found.append(Text("chat", encoder.conversation([{"role": USER, "content": question}]), []))
    return found


def measure(options: Options, console: Any) -> Result:
    """For each type of weights a list of texts: kind, speed-up, tokens a pass, llama.cpp's speed-ups."""
    harness.check_at_least(options, texts=1, tokens=9, rounds=1)
    result: Result = {"llama.cpp": why_not(options.model)}
    for dtype in options.dtypes:
        rows: list[Result] = []
        with Engine.from_pretrained(
            options.model, dtype=dtype, threads=options.threads, draft=options.draft
        ) as engine:
            every, threads = texts(engine, options), engine.threads
            for number, text in enumerate(every):
                with console.status(f"{dtype}: {text.kind}, {number + 1} of {len(every)}"):
                    every[number], row = speed_up(engine, text, options)
                    rows.append(row)
        if not result["llama.cpp"]:
            theirs = LlamaCpp(options.model, QUANTISED.get(dtype, [dtype])[0], threads)
            for text, row in zip(every, rows, strict=True):
                with console.status(f"{dtype}: llama.cpp, {text.kind}"):
                    row["lookup"] = lookup_speed_up(theirs, text, options.rounds)
        result[dtype] = rows
    return result


def run(engine: Engine, text: Text, tokens: int, speculate: int) -> tuple[float, list[int], float]:
    """Seconds of all tokens after the first, the ids, tokens a pass."""
    options: dict[str, Any] = {"max_new_tokens": len(text.ids) or tokens, "ignore_eos": bool(text.ids)}
    options["speculate"] = speculate
    request = engine._requests.generation(text.prompt, options, timed=True, quiet=True, replay=text.ids)
    news = engine._finished([request])[0]
    assert news.whole.token_s is not None
    made = len(news.tokens)
    a_pass = made / (made - news.whole.statistics["accepted_tokens"])
    return float(news.whole.token_s.sum()), news.tokens, a_pass


def speed_up(engine: Engine, text: Text, options: Options) -> tuple[Text, Result]:
    """And the text with its ids."""
    # reads the prompt, and writes the answer where there is none
    _, ids, _ = run(engine, text, options.tokens, 0)
    text, ratios, a_pass = dataclasses.replace(text, ids=ids), [], 1.0
    for _ in range(options.rounds):
        without, _, _ = run(engine, text, options.tokens, 0)
        with_drafts, _, a_pass = run(engine, text, options.tokens, MAX_DRAFT_TOKENS)
        ratios.append(without / with_drafts)
    return text, {"kind": text.kind, "speed_up": float(np.median(ratios)), "tokens_a_pass": a_pass}


def why_not(model: Path) -> str:
    """Why llama.cpp is not measured; empty where it is."""
    try:
        library()
    except ImportError as error:
        return f"not installed: {error}"
    return "" if model.suffix == ".gguf" else "needs a GGUF file"


def lookup_speed_up(theirs: LlamaCpp, text: Text, rounds: int) -> list[float]:
    """With each of LOOKUPS."""
    taken = [[lookup_s(theirs, text, most) for most in (0, *LOOKUPS)] for _ in range(rounds)]
    return [float(np.median([row[0] / row[1 + i] for row in taken])) for i in range(len(LOOKUPS))]


def lookup_s(theirs: LlamaCpp, text: Text, most: int) -> float:
    """Seconds of all tokens after the first, drafted by llama.cpp's lookup of up to `most` ids; 0: none."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    way, lookup = theirs.ways(1)["flash attention"], LlamaPromptLookupDecoding(num_pred_tokens=most)
    if theirs.held.get("lookup") != text.prompt:
        theirs.reset(way, 0)
        theirs.evaluate(way, text.prompt)
        theirs.held["lookup"] = text.prompt
    theirs.rewind(way, len(text.prompt))
    known, made = [*text.prompt, text.ids[0]], 1
    began = time.perf_counter()
    while made < len(text.ids):
        drafts = lookup(np.array(known, np.intc)).tolist() if most else []
        columns = enumerate([known[-1], *drafts], len(known) - 1)
        for row in theirs.decode_batch(way, [(token, position, 0) for position, token in columns]):
            row.argmax()
        pairs = zip(drafts, text.ids[made:], strict=False)
        right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        known += text.ids[made : made + right + 1]
        made += right + 1
        theirs.rewind(way, len(known) - 1)
    return time.perf_counter() - began


def section(options: Options, result: Result) -> tuple[str, str]:
    rows = []
    for dtype in options.dtypes:
        for kind in dict.fromkeys(row["kind"] for row in result[dtype]):
            of_kind = [row for row in result[dtype] if row["kind"] == kind]
            ratios = [row["speed_up"] for row in of_kind]
            a_pass = float(np.median([row["tokens_a_pass"] for row in of_kind]))
            theirs = [row["lookup"] for row in of_kind if "lookup" in row]
            columns = [f"{np.median(ratios):.2f}", f"{min(ratios):.2f}", f"{a_pass:.2f}"]
            columns += [
                f"{np.median(column):.2f} ({min(column):.2f})" for column in zip(*theirs, strict=True)
            ]
            rows.append([kind, dtype, len(ratios), *columns])
    heads = ["text", "weights", "texts", "median", "worst", "tokens a pass"]
    if not result["llama.cpp"]:
        heads += [f"llama.cpp, lookup of {most}" for most in LOOKUPS]
    about = f"`{options.model.name}`; medians of {options.rounds} pairs of runs, at most {options.tokens} new tokens."
    small = f" `{options.draft.name}` drafts as well." if options.draft else ""
    rival = result["llama.cpp"] or "the same texts, median (worst), against llama.cpp without it"
    return "drafts on against off", f"{about}{small} llama.cpp's lookup: {rival}.\n\n{table(heads, rows)}"
