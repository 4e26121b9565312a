"""Does the fast encoder give the ids of the tokenizer's library on a gigabyte of text, and how fast is it?

    python -m tools.bench encode tokenizer.json [--megabytes 1000] [--state FILE.json] [--out FILE.md]

The text is what the machine has: text files of Python, of its packages and of the system, each content
once; where that is not enough, the same again with other lines first, other digits and other cases. In one document
of SPELLED the vocabulary's special tokens are spelled out, which are to stay text. Ids are
compared document by document with tiktoken's, made of the same file; where they differ, and for one
document in `--every`, with those of `tokenizers`, which decide. CPU seconds of one process on one core.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from tokenizers import pre_tokenizers

from data_mixtures import tokenizer
from records.files import write_atomically
from tools.bench import harness, text
from tools.bench.harness import Result, version
from tools.markdown import table

ROOTS = (sys.prefix, sysconfig.get_path("stdlib"), "/usr/share", "/usr/include", "/usr/lib/python3")
SUFFIXES = {
    ".py", ".pyi", ".c", ".h", ".cpp", ".hpp", ".js", ".css", ".html", ".md", ".rst", ".txt", ".json", ".toml", ".xml",
    ".po", ".pl", ".pm", ".sh", ".gz", ".tcl", ".el", ".tex", ".yaml", ".yml", ".rs", ".go", ".java", ".ts",
}  # fmt: skip
LONGEST = 4 << 20
CANDIDATES = ("fast", "tiktoken", "tokenizers")
BATCH_BYTES, STAGE_BYTES, SPELLED = 16 << 20, 64 << 20, 4
FILE_START = """# A gigabyte of text by the fast encoder and by the libraries"""


@dataclass(kw_only=True)
class Options(harness.Options):
    """Compare the fast encoder with tiktoken and `tokenizers` on much text; the last line of stdout is
    JSON.
    """

    model: Annotated[Path, tyro.conf.Positional]
    """A tokenizer.json of byte-level BPE with one regular expression."""
    megabytes: float = 1000
    """How much text."""
    every: int = 200
    """One document in this many is compared with `tokenizers` as well, which is slow; 1: all."""
    state: Path | None = None
    """Keeps what was compared after every batch; the same command goes on from there."""


def documents(size: int, seed: int = 1) -> Iterator[tuple[int, str]]:
    """(how often all files were read before, text) of about so many bytes together."""
    paths = sorted(
        {p for root in ROOTS for p in Path(root).rglob("*") if p.suffix in SUFFIXES and p.is_file()}
    )
    random.Random(seed).shuffle(paths)
    seen, left = set[bytes](), size
    for again in range(1000):
        for path in paths:
            content = _text_of(path)
            digest = hashlib.sha256(f"{again}/{content}".encode(errors="replace")).digest()
            if content is None or digest in seen:
                continue
            seen.add(digest)
            content = varied(content, random.Random(f"{again}/{path}")) if again else content
            yield again, content
            left -= len(content.encode())
            if left <= 0:
                return


def _text_of(path: Path) -> str | None:
    try:
        if path.stat().st_size > LONGEST:
            return None
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return raw.decode("utf-8") or None
    except (OSError, ValueError, EOFError):
        return None


def varied(content: str, draw: random.Random) -> str:
    """Lines in another order, other digits, a fifth of the lines in the other case."""
    lines = content.splitlines(keepends=True)
    draw.shuffle(lines)
    digits = list("0123456789")
    draw.shuffle(digits)
    other = str.maketrans("0123456789", "".join(digits))
    return "".join(
        line.translate(other).swapcase() if draw.random() < 0.2 else line.translate(other) for line in lines
    )


def tiktoken_of(path: Path) -> Any:
    """The same vocabulary in tiktoken. ValueError where it is none of one regular expression and byte-level
    BPE.
    """
    import tiktoken

    spec = json.loads(path.read_text(encoding="utf-8"))
    parts = (spec["pre_tokenizer"] or {}).get("pretokenizers", [])
    patterns = [part["pattern"]["Regex"] for part in parts if "Regex" in part.get("pattern", {})]
    if len(patterns) != 1 or spec["model"]["type"] != "BPE" or spec["normalizer"]:
        raise ValueError(
            f"{path} is no byte-level BPE with one regular expression, as Llama 3's and Qwen's are"
        )
    bytes_of = dict(zip(_byte_order(), range(256), strict=True))
    added = {each["content"] for each in spec["added_tokens"]}
    pieces = spec["model"]["vocab"].items()
    ranks = {bytes(bytes_of[c] for c in piece): number for piece, number in pieces if piece not in added}
    return tiktoken.Encoding("same", pat_str=patterns[0], mergeable_ranks=ranks, special_tokens={})


def _byte_order() -> list[str]:
    """The characters that stand for the bytes 0 to 255 in a byte-level vocabulary (GPT-2's table)."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    moved = iter(range(256, 512))
    order = [chr(byte) if byte in plain else chr(next(moved)) for byte in range(256)]
    assert set(order) == set(pre_tokenizers.ByteLevel.alphabet()), "another table than the library's"
    return order


def spelled(content: str, specials: list[str], draw: random.Random) -> str:
    """With special tokens as text, some between words and some within."""
    pieces = content.split(" ")
    for _ in range(min(len(pieces), 8) if specials else 0):
        at = draw.randrange(len(pieces))
        pieces[at] += draw.choice(("", " ", "\n")) + draw.choice(specials)
    return " ".join(pieces)


@dataclass
class Comparison:
    """What was compared so far: the state of a run that can go on."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CANDIDATES, 0.0))
    differing: list[str] = field(default_factory=list)

    def compare(self, made: tokenizer.Tokenizer, peer: Any, batch: list[str], every: int) -> None:
        assert made.fast is not None
        counts, clocks = self.counts, [time.process_time()]
        tokens, lengths = made.fast(batch)
        clocks.append(time.process_time())
        others = [peer.encode_ordinary(each) for each in batch]
        clocks.append(time.process_time())
        self.seconds["fast"] += clocks[1] - clocks[0]
        self.seconds["tiktoken"] += clocks[2] - clocks[1]
        for content, ids, other in zip(batch, np.split(tokens, np.cumsum(lengths)[:-1]), others, strict=True):
            counts["documents"] += 1
            counts["tokens"] += len(ids)
            counts["bytes"] += len(content.encode())
            if not np.array_equal(ids, other) or counts["documents"] % every == 0:
                started, expected = time.process_time(), made.reference(content)
                self.seconds["tokenizers"] += time.process_time() - started
                counts["bytes by tokenizers"] += len(content.encode())
                counts["documents by tokenizers"] += 1
                counts["tiktoken differs from tokenizers"] += other != expected
                counts["differ"] += (apart := not np.array_equal(ids, expected))
                self.differing += [content[:80]] if apart else []


def measure(options: Options, console: Any) -> Result:
    made, peer = tokenizer.load(options.model), tiktoken_of(options.model)
    if made.fast is None:
        raise ValueError(f"{options.model} has no fast encoder; there is nothing to compare")
    found = Comparison()
    if options.state and options.state.is_file():
        kept = json.loads(options.state.read_text(encoding="utf-8"))
        found = Comparison(Counter(kept["counts"]), kept["seconds"], kept["differing"])
    batch, first, before = list[str](), list[str](), found.counts["documents"]
    for number, (again, content) in enumerate(texts(options)):
        if sum(map(len, first)) < STAGE_BYTES:
            first.append(content)
        if number < before:
            continue
        batch.append(content)
        found.counts["bytes not repeated"] += 0 if again else len(content.encode())
        if sum(map(len, batch)) > BATCH_BYTES:
            finish(found, made, peer, batch, options, console)
    if batch:
        finish(found, made, peer, batch, options, console)
    return {"model": str(options.model), "counts": dict(found.counts), "differ": found.counts["differ"],
            "differing": found.differing[:20], "mb_per_s": rates(found.counts, found.seconds),
            "stage_mb_per_s": stage_rate(options.model, first),
            "shards": shard_rates(options.model, first)}  # fmt: skip


def finish(
    found: Comparison, made: tokenizer.Tokenizer, peer: Any, batch: list[str], options: Options, console: Any
) -> None:
    """Compare a batch, empty it, and keep the state."""
    found.compare(made, peer, batch, options.every)
    batch.clear()
    if options.state:
        write_atomically(options.state, json.dumps(vars(found)))
    console.print(f"{found.counts['bytes'] / 1e6:.0f} MB, {found.counts['differ']} differ")


def texts(options: Options) -> Iterator[tuple[int, str]]:
    """`documents`, in some of which special tokens are spelled."""
    added = json.loads(options.model.read_text(encoding="utf-8"))["added_tokens"]
    specials = [each["content"] for each in added if each["special"]]
    for number, (again, content) in enumerate(documents(int(options.megabytes * 1e6))):
        if number % SPELLED == SPELLED - 1:
            content = spelled(content, specials, random.Random(number))
        yield again, content


def rates(counts: Counter[str], seconds: dict[str, float]) -> dict[str, float]:
    sizes = {"fast": "bytes", "tiktoken": "bytes", "tokenizers": "bytes by tokenizers"}
    return {name: counts[size] / 1e6 / max(seconds[name], 1e-9) for name, size in sizes.items()}


def stage_rate(model: Path, texts: list[str]) -> float:
    """MB of text per CPU second of the stage `tokenize`, as a worker does its second unit."""
    with tempfile.TemporaryDirectory() as folder:
        run = text.our_stage(Path(folder), texts, model)
        run()
        started = time.process_time()
        run()
        return sum(len(each.encode()) for each in texts) / 1e6 / (time.process_time() - started)


def shard_rates(model: Path, texts: list[str]) -> dict[str, float]:
    """MB of text per CPU second from JSON lines to shards, as a worker does it whose tokenizer is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        return text.to_shards(texts, model, Path(folder) / "data")


def section(options: Options, result: Result) -> tuple[str, str]:
    counts, found = result["counts"], result["mb_per_s"]
    rows = [
        ["documents", f"{counts['documents']:,}"],
        ["bytes", f"{counts['bytes']:,}"],
        ["of these read once, not repeated with variation", f"{counts['bytes not repeated']:,}"],
        ["documents in which the fast encoder differs from `tokenizers`", result["differ"]],
        ["documents compared with `tokenizers` itself", f"{counts['documents by tokenizers']:,}"],
        ["bytes of these", f"{counts['bytes by tokenizers']:,}"],
        ["of these, where tiktoken differs from it", counts["tiktoken differs from tokenizers"]],
        *([f"MB per CPU second, {name}", f"{rate:.1f}"] for name, rate in found.items()),
        ["MB per CPU second, stage `tokenize`, second unit", f"{result['stage_mb_per_s']:.1f}"],
    ]
    rows += [
        [f"MB per CPU second, JSON lines to shards: {name}", f"{each:.1f}"]
        for name, each in result["shards"].items()
    ]
    versions = ", ".join(f"{name} {version(name)}" for name in ("gigatoken", "tokenizers", "tiktoken"))
    return f"{options.model.parent.name}/{options.model.name}", f"{versions}.\n\n{table(['', ''], rows)}"
