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
    first_difference,
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


def load(name: str) -> tuple[LaneformerConfig, Weights]:
    """Config and weights of a folder, or of a flavor with random weights."""
    if name in FLAVORS:
        config = LaneformerConfig.from_flavor(name)
        return config, random_weights(config)
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"{name!r} is neither a folder with config.json nor a flavor; flavors: {sorted(FLAVORS)}"
        )
    checkpoint = read_checkpoint(folder)
    return checkpoint.config, weights_of(checkpoint.tensors)


def verdict(gates: Mapping[str, tuple[Any, Any, bool]]) -> dict[str, Any]:
    """`gates`: by check the figure, what is allowed, and whether the check holds."""
    passed = {name: bool(held) for name, (*_, held) in gates.items()}
    failed = [name for name, held in passed.items() if not held]
    rows = [
        dict(zip(("check", "figure", "allowed", "holds"), (n, *gate), strict=True))
        for n, gate in gates.items()
    ]
    return {"passed": passed, "failed": failed, "ok": not failed, "gates": rows}


def compare_greedy(
    engine: Engine, model: LaneformerForCausalLM, options: Options, tie: float
) -> dict[str, Any]:
    """Continuations of random prompts, short ones and some beyond the window; where they part,
    and by what lead.
    """
    config, parted, leads = engine.config, [], []
    lengths = (1, 5, 11, min(config.sliding_window + 3, 200))
    for index, prompt in enumerate(random_prompts(config, options.prompts, lengths, options.new_tokens)):
        ours = engine.generate(prompt, max_new_tokens=options.new_tokens, ignore_eos=True)
        theirs, lead = hf_greedy(model, prompt, len(ours))
        leads.append(min(lead))
        if (first := first_difference(ours, theirs)) is not None:
            parted.append({"prompt": index, "token": first, "lead": lead[first]})
    return {
        "prompts": options.prompts, "new_tokens": options.new_tokens, "same": options.prompts - len(parted),
        "parted": parted, "tie": tie, "smallest_lead": min(leads, default=None),
        "unexplained": sum(p["lead"] > tie for p in parted),
    }  # fmt: skip
