"""What 8- and 4-bit weights lose, ours beside llama.cpp's types of about the same size, on one
model and one text.

    python -m tools.bench quality MODEL.gguf --text FILE --out docs/benchmarks/DATE-quality.md

Every type is made of the same 16-bit weights, whose logits in fp32 are the reference. A file of llama.cpp's is also
served by our engine as it is, and both are compared with that file's weights in fp32.
"""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from tools.bench import harness
from tools.bench.harness import Result
from tools.bench.llamacpp import LlamaCpp, as_gguf
from tools.check.reference import mean_kl
from tools.markdown import table

OURS = (("bf16", "exact"), ("bf16", "bf16"), ("int8", "exact"), ("int8", "int8"), ("int4", "int8"))
LLAMACPP = ("bf16", "q8_0", "q6_k", "q5_k_m", "q4_0", "q4_1", "iq4_nl", "q4_k_m")
FILE_START = """# What quantised weights lose

Each section is one run of its command. All types are made of the same 16-bit weights; the reference are their logits in
fp32. "bits": of the weights that a token reads, over the model's parameters. "KL": of the reference's next-token
distribution from the type's, mean over positions, in nats; "of the file": from the same file's weights in fp32, what
arithmetic alone loses. "same best": positions whose likeliest id is the
reference's. Keys and values as each engine has them by default."""


@dataclass(kw_only=True)
class Options(harness.Options):
    """What quantised weights lose, beside llama.cpp's types; the last line of stdout is JSON."""

    model: Annotated[Path, tyro.conf.Positional]
    """A GGUF file of a Llama-family model."""
    text: Path | None = None
    """Text to predict; default: Python's reference topics (pydoc_data), which every machine has."""
    windows: int = 4
    """Windows of the text that are scored."""
    window_tokens: int = 512
    """Tokens of each."""
    threads: int = 2
    """Threads of both engines."""
    llamacpp: bool = True
    """Also measure llama.cpp's types."""


def measure(options: Options, console: Any) -> Result:
    from laneformer import Engine

    if not options.model.is_file():
        raise ValueError(f"model = {options.model} is not a file; give a GGUF file")
    base = as_gguf(options.model, "bf16")

    def engine_of(path: Path, dtype: str, math: str) -> Engine:
        return Engine.from_pretrained(path, "cpu", dtype, options.threads, cache=False, math=math)

    with engine_of(base, "fp32", "exact") as engine:
        windows, text_bytes = windows_of(engine.tokenizer, options)
        reference, parameters = [engine.logits(ids) for ids in windows], engine.weight_bytes / 4
    rows = {"fp32": compared(reference, reference, windows, text_bytes) | {"bits": 32.0}}

    def score(name: str, engine: Any, bits: float, of_file: list[np.ndarray] | None = None) -> None:
        with console.status(name):
            logits = [engine.logits(ids) for ids in windows]
            found = compared(reference, logits, windows, text_bytes)
        rows[name] = found | {"bits": bits}
        if of_file:
            rows[name]["kl_of_file"] = compared(of_file, logits, windows, text_bytes)["kl"]
        console.print(f"{name}: {rows[name]}", style="dim")

    for dtype, math in OURS:
        with engine_of(base, dtype, math) as engine:
            score(f"{dtype}, math {math}", engine, 8 * engine.weight_bytes / parameters)
    for kind in LLAMACPP if options.llamacpp else ():
        path = as_gguf(options.model, kind)
        with engine_of(path, "fp32", "exact") as engine:
            of_file = [engine.logits(ids) for ids in windows]
        baseline = LlamaCpp(options.model, kind, options.threads)
        score(f"llama.cpp {kind}", baseline, 8 * baseline.weight_bytes / parameters, of_file)
        if kind != "bf16":
            with engine_of(path, "gguf", "auto") as engine:
                score(f"ours on {kind}", engine, 8 * engine.weight_bytes / parameters, of_file)
    return {"model": str(options.model), "tokens": sum(map(len, windows)), "types": rows}


def windows_of(tokenizer: Any, options: Options) -> tuple[list[list[int]], int]:
    """Windows of token ids, and the bytes of text in them. ValueError where the text is too short."""
    topics = pydoc_data.topics.topics
    text = options.text.read_text() if options.text else "\n\n".join(topics[name] for name in sorted(topics))
    ids, length = tokenizer.encode(text, add_special_tokens=False).ids, options.window_tokens
    if len(ids) < options.windows * length:
        raise ValueError(f"the text has {len(ids)} tokens; {options.windows} windows of {length} need more")
    step = len(ids) // options.windows  # spread over the text
    windows = [ids[i * step : i * step + length] for i in range(options.windows)]
    return windows, sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)


def compared(
    reference: list[np.ndarray], logits: list[np.ndarray], windows: list[list[int]], text_bytes: int
) -> dict[str, float]:
    """KL from the reference, share of positions with the same best id, and bits per byte of the text."""
    kl, same, nats = [], [], 0.0
    for expected, found, ids in zip(reference, logits, windows, strict=True):
        kl.append(mean_kl(expected[:-1], found[:-1]))
        same.append(np.mean(expected[:-1].argmax(-1) == found[:-1].argmax(-1)))
        wide = torch.from_numpy(found[:-1]).double()
        nats += float(torch.nn.functional.cross_entropy(wide, torch.tensor(ids[1:]), reduction="sum"))
    bits = nats / np.log(2)
    return {
        "kl": float(np.mean(kl)),
        "same_best": float(np.mean(same)),
        "bits_per_byte": float(bits / text_bytes),
    }


def section(options: Options, result: Result) -> tuple[str, str]:
    rows = [
        [name, f"{row['bits']:.2f}", f"{row['kl']:.2g}", f"{row['kl_of_file']:.2g}" if "kl_of_file" in row else "",
         f"{row['same_best']:.1%}", f"{row['bits_per_byte']:.4f}"]
        for name, row in result["types"].items()
    ]  # fmt: skip
    text = options.text.name if options.text else "Python's reference topics"
    about = f"{result['tokens']} tokens of {text}, in {options.windows} windows."
    return (
        options.model.name,
        f"{about}\n\n{table(['', 'bits', 'KL', 'of the file', 'same best', 'bits per byte'], rows)}",
    )
