"""What do fewer bits cost, and does the engine compute what int8 weights mean?

    python -m tools.check quality runs/demo/hf --text held-out.txt
    python -m tools.check quality MODEL.gguf --files MODEL-Q8_0.gguf MODEL-Q4_K_M.gguf

The figures: every type that the engine makes of the model's weights, and every file of another type (as llama-quantize
writes them), against the model's weights in fp32. KL and bits per byte are no gates: what a model may lose is its
user's decision. The gate: `dequantised` says what int8 weights mean, and model.py in float64 on those is the reference.
How far float32 may be from it, the engine shows on fp32 copies of them; the int8 engine gets four times that error. An
engine with one of its scales doubled must be refused, else the gate proves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console
from torch.nn.functional import cross_entropy

from laneformer import Engine, LaneformerConfig
from laneformer.config import HEAD
from tools.check.gates import MARGIN, load, run_check, verdict
from tools.check.reference import Weights, dequantised, mean_kl, plain_model, relative_errors, tensors_of

TYPES = (("bf16", "exact"), ("bf16", "bf16"), ("int8", "exact"), ("int8", "int8"), ("int4", "int8"))
GATE_POSITIONS = 128


@dataclass
class Options:
    """Measure what quantised weights lose. Exit status 1 when int8 is not computed as it is meant."""

    model: Annotated[Path, tyro.conf.Positional]
    """A Hugging Face folder with its tokenizer, or a GGUF file."""
    files: tuple[Path, ...] = ()
    """GGUF files of the same model in other types."""
    text: Path | None = None
    """Text to predict; default: Python's reference topics (pydoc_data), which every machine has."""
    windows: int = 4
    """Windows of the text that are scored."""
    window_tokens: int = 512
    """Tokens of each."""
    json: bool = False
    """Print nothing but the JSON line."""


def measure(options: Options, console: Console) -> dict[str, Any]:
    """The gate, and what every type costs."""
    with open_engine(options.model, "fp32", "exact") as engine:
        windows, text_bytes = windows_of(engine.tokenizer, options)
        truth, parameters = read_windows(engine, windows), engine.weight_bytes / 4
    following = [token for ids in windows for token in ids[1:]]
    types: dict[str, dict[str, Any]] = {}

    def score(name: str, path: Path, dtype: str, math: str) -> np.ndarray:
        with open_engine(path, dtype, math) as engine:
            logits, bits = read_windows(engine, windows), 8 * engine.weight_bytes / parameters
        types[name] = {"bits": bits, "kl_of_file": None, **compare(truth, logits, following, text_bytes)}
        console.print(f"{name}: {types[name]}", style="dim")
        return logits

    for dtype, math in TYPES:
        score(f"{dtype}, math {math}", options.model, dtype, math)
    for path in options.files:
        alone = score(f"{path.stem} in fp32", path, "fp32", "exact")
        logits = score(path.stem, path, "gguf", "auto")
        # what arithmetic alone loses
        types[path.stem]["kl_of_file"] = compare(alone, logits, following, text_bytes)["kl"]
    return {
        "types": types,
        "tables": {"What every type costs": [{"": name, **row} for name, row in types.items()]},
        **check(*load(str(options.model), "fp32"), windows[0][:GATE_POSITIONS]),
    }


def open_engine(path: Path, dtype: str, math: str) -> Engine:
    return Engine.from_pretrained(path, "cpu", dtype, cache=False, math=math)


def windows_of(tokenizer: Any, options: Options) -> tuple[list[list[int]], int]:
    """Windows of token ids, spread over the text, and the bytes of text in them."""
    text = options.text.read_text() if options.text else "\n\n".join(topics.values())
    ids, length = tokenizer.encode(text, add_special_tokens=False).ids, options.window_tokens
    if len(ids) < options.windows * length:
        raise ValueError(f"the text has {len(ids)} tokens; {options.windows} windows of {length} need more")
    step = len(ids) // options.windows
    windows = [ids[i * step : i * step + length] for i in range(options.windows)]
    return windows, sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)


def read_windows(engine: Engine, windows: list[list[int]]) -> np.ndarray:
    """Logits in front of every id that a window holds, but for its first."""
    return np.concatenate([engine.logits(ids)[:-1] for ids in windows])


def compare(truth: np.ndarray, logits: np.ndarray, ids: list[int], text_bytes: int) -> dict[str, float]:
    """Means over positions: KL from the truth in nats, and how often both have the same best id; bits per byte of the
    text, and how many more they are than the truth's.
    """
    nats = [cross_entropy(torch.tensor(each).double(), torch.tensor(ids)).item() for each in (truth, logits)]
    bits = np.array(nats) * len(ids) / np.log(2) / text_bytes
    return {
        "kl": mean_kl(truth, logits),
        "same_best": float((truth.argmax(-1) == logits.argmax(-1)).mean()),
        "bits_per_byte": float(bits[1]),
        "more_bits_per_byte": float(bits[1] - bits[0]),
    }


def check(config: LaneformerConfig, weights: Weights, ids: list[int]) -> dict[str, Any]:
    """The gate on the logits after `ids`: the int8 engine's error, what is allowed, and the planted fault's."""
    if config.tie_word_embeddings:  # the engine rounds a tied head, and reads the embedding as it is
        config = replace(config, tie_word_embeddings=False)
        weights = weights | {HEAD: weights["tok_embeddings.weight"].reshape(config.head_shape)}
    meant = dequantised(weights)
    truth = plain_model(config, meant)(torch.tensor([ids]))[0].detach().numpy()

    def error_of(engine: Engine) -> float:
        return float(relative_errors(engine.logits(ids), truth).max())

    with Engine(config, tensors_of({name: weight.float() for name, weight in meant.items()})) as engine:
        allowed = MARGIN * error_of(engine)
    with Engine(config, tensors_of(weights), dtype="int8", kv_dtype="fp32") as engine:
        error = error_of(engine)
        decoder: Any = engine._open()
        # of the scales: that of a query row of the first lane and layer
        first = 64 * -(-config.hidden_size // 2)
        decoder.part(0)[first : first + 4].view(np.float32)[:] *= 2
        planted = error_of(engine)
    return verdict(
        {
            "relative error": (error, allowed, error <= allowed),
            "refuses: one scale doubled": (planted, allowed, planted > allowed),
        }
    )


def main(arguments: list[str] | None = None) -> None:
    run_check("quality", Options, measure, arguments)


if __name__ == "__main__":
    main()
