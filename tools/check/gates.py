"""What the checks of the CPU engine share: their options, models, gates and greedy continuations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from laneformer import Engine, LaneformerConfig
from laneformer.config import FLAVORS
from laneformer.engine.folder import read_checkpoint
from laneformer.hf.modeling_laneformer import LaneformerForCausalLM
from tools.check.reference import (
    Weights,
    compare_greedy,
    hf_greedy,
    random_prompts,
    random_weights,
    weights_of,
)

MARGIN = 4.0  # another order of summation changes a rounding error's value, hardly its size


@dataclass
class Options:
    """Check the engine; a table, and the last line of stdout is JSON. Exit status 1 when a check fails."""

    model: Annotated[str, tyro.conf.Positional]
    """A Hugging Face folder (the Llama family's, too), or a flavor (2b, 300m, tiny) with random bf16 weights;
    for `published` also a GGUF file.
    """
    against: Literal["pytorch", "int8", "published"] = "pytorch"
    """What the engine is held against: PyTorch on the same weights; what int8 weights stand for, with their
    cost over bf16; or our modeling code and the code that the model was published with.
    """
    prompts: int = 8
    """Prompts whose greedy continuation is compared token for token."""
    new_tokens: int = 32
    """Length of those continuations."""
    runs: int = 100
    """Repeated runs for each number of threads, which must agree to the last bit."""
    threads: tuple[int, ...] = (1, 2, 3)
    """Numbers of threads that must give the same bits."""
    math: Literal["exact", "bf16"] = "exact"
    """The engine's arithmetic; with bf16 the allowed error is that of Transformers in bf16."""
    data: Path | None = None
    """int8: directory made by `python -m data_mixtures.prepare`; its held-out windows are scored."""
    windows: int = 32
    """int8: windows of each source."""
    trust_remote_code: bool = False
    """published: run the Python code in the folder."""
    positions: int = 128
    """int8 and published: length of the compared text."""
    json: bool = False
    """Print nothing but the JSON line."""


def load(name: str, dtype: str = "auto") -> tuple[LaneformerConfig, Weights]:
    """Config and weights of a folder or GGUF file, or of a flavor with random weights."""
    if name in FLAVORS:
        config = LaneformerConfig.from_flavor(name)
        return config, random_weights(config)
    if not Path(name).exists():
        raise ValueError(
            f"{name!r} is neither a folder with config.json nor a flavor; flavors: {sorted(FLAVORS)}"
        )
    checkpoint = read_checkpoint(Path(name), dtype=dtype)
    return checkpoint.config, weights_of(checkpoint.tensors)


def verdict(gates: Mapping[str, tuple[Any, Any, bool]]) -> dict[str, Any]:
    """`gates`: by check the figure, what is allowed, and whether the check holds."""
    rows = [
        {"check": name, "figure": figure, "allowed": allowed, "holds": bool(held)}
        for name, (figure, allowed, held) in gates.items()
    ]
    passed = {row["check"]: row["holds"] for row in rows}
    failed = [name for name, held in passed.items() if not held]
    return {"passed": passed, "failed": failed, "ok": not failed, "gates": rows}


def check_greedy(
    engine: Engine, model: LaneformerForCausalLM, options: Options, tie: float
) -> dict[str, Any]:
    """Continuations of random prompts, short ones and some beyond the window."""
    new_tokens, lengths = options.new_tokens, (1, 5, 11, min(engine.config.sliding_window + 3, 200))
    found = compare_greedy(
        random_prompts(engine.config, options.prompts, lengths, new_tokens),
        lambda prompt: engine.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True),
        lambda prompt, count: hf_greedy(model, prompt, count),
        lambda prompt: tie,
    )
    return {**found, "new_tokens": new_tokens, "tie": tie}
