"""What 8- and 4-bit weights lose, ours beside llama.cpp's types of about the same size, on one
model and one text.

    python -m tools.bench quality MODEL.gguf --text FILE --out docs/benchmarks/DATE-quality.md

Every type is made of the same 16-bit weights, whose logits in fp32 are the reference.
"""

from __future__ import annotations

import dataclasses
import pydoc_data.topics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from tools.bench import harness
from tools.bench.harness import Result
from tools.bench.llamacpp import LlamaCpp, as_gguf
from tools.markdown import table

OURS = (("bf16", "exact"), ("bf16", "bf16"), ("int8", "exact"), ("int8", "int8"), ("int4", "int8"))
FP8 = "fp8, weights alone"  # a type of the GPU engine: what its numbers stand for, in the CPU engine's fp32
LLAMACPP = ("bf16", "q8_0", "q4_0", "iq4_nl", "q4_k_m")
FILE_START = """# What quantised weights lose

Each section is one run of its command. All types are made of the same 16-bit weights; the reference are their logits in
fp32. "bits": of the weights that a token reads, over the model's parameters. "KL": of the reference's next-token
distribution from the type's, mean over positions, in nats. "same best": positions whose likeliest id is the
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


def main(arguments: list[str] | None = None) -> None:
    harness.run("quality", Options, measure, section, FILE_START, arguments)


def measure(options: Options, console: Any) -> Result:
    from laneformer import Engine

    if not options.model.is_file():
        raise ValueError(f"model = {options.model} is not a file; give a GGUF file")
    base = as_gguf(options.model, "bf16")

    def ours(dtype: str, math: str) -> tuple[list[np.ndarray], int]:
        with Engine.from_pretrained(base, "cpu", dtype, options.threads, cache=False, math=math) as engine:
            return [engine.logits(ids) for ids in windows], engine.weight_bytes

    with Engine.from_pretrained(base, "cpu", "fp32", options.threads, cache=False) as engine:
        windows, text_bytes = windows_of(engine.tokenizer, options)
        reference, parameters = [engine.logits(ids) for ids in windows], engine.weight_bytes / 4
    rows = {"fp32": compared(reference, reference, windows, text_bytes) | {"bits": 32.0}}
    for dtype, math in OURS:
        with console.status(f"{dtype}, math {math}"):
            logits, size = ours(dtype, math)
        name = f"{dtype}, math {math}"
        rows[name] = compared(reference, logits, windows, text_bytes) | {"bits": 8 * size / parameters}
        console.print(f"{name}: {rows[name]}", style="dim")
    with console.status(FP8), fp8_engine(base, options.threads) as engine:
        logits = [engine.logits(ids) for ids in windows]
    rows[FP8] = compared(reference, logits, windows, text_bytes) | {"bits": rows["int8, math exact"]["bits"]}
    for kind in LLAMACPP if options.llamacpp else ():
        with console.status(f"llama.cpp {kind}"):
            baseline = LlamaCpp(None, options.model, kind, options.threads)
            logits = [baseline.logits(ids) for ids in windows]
        bits = 8 * baseline.weight_bytes / parameters
        rows[f"llama.cpp {kind}"] = compared(reference, logits, windows, text_bytes) | {"bits": bits}
        console.print(f"llama.cpp {kind}: {rows[f'llama.cpp {kind}']}", style="dim")
    return {"model": str(options.model), "tokens": sum(map(len, windows)), "types": rows}


def fp8_engine(path: Path, threads: int) -> Any:
    """An fp32 engine with the matrices that fp8 stands for; the embedding stays as it is, also
    of a tied head.
    """
    from laneformer import Engine
    from laneformer.engine.folder import read_checkpoint
    from tools.check.reference import dequantised, tensors_of, weights_of

    checkpoint = read_checkpoint(path, None, threads, "fp32")
    config = dataclasses.replace(checkpoint.config, tie_word_embeddings=False)
    weights = weights_of(checkpoint.tensors)
    if checkpoint.config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["tok_embeddings.weight"].reshape(config.head_shape)
    meant = {name: weight.float() for name, weight in dequantised(weights, "fp8").items()}
    return Engine(config, tensors_of(meant), device="cpu", dtype="fp32", threads=threads)


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
        p, q = log_softmax(expected[:-1]), log_softmax(found[:-1])
        kl.append((np.exp(p) * (p - q)).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        nats -= float(q[np.arange(len(ids) - 1), ids[1:]].sum())
    return {
        "kl": float(np.concatenate(kl).mean()), "same_best": float(np.concatenate(same).mean()),
        "bits_per_byte": float(nats / np.log(2) / text_bytes),
    }  # fmt: skip


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def section(options: Options, result: Result) -> tuple[str, str]:
    rows = [
        [
            name,
            f"{row['bits']:.2f}",
            f"{row['kl']:.2g}",
            f"{100 * row['same_best']:.1f}%",
            f"{row['bits_per_byte']:.4f}",
        ]
        for name, row in result["types"].items()
    ]
    text = options.text.name if options.text else "Python's reference topics"
    about = f"{result['tokens']} tokens of {text}, in {options.windows} windows."
    return options.model.name, f"{about}\n\n{table(['', 'bits', 'KL', 'same best', 'bits per byte'], rows)}"
