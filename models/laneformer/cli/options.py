"""Options that several commands share: how a model is loaded, and how its tokens are chosen."""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ..config import LaneformerConfig
from ..engine import Engine, GenerationOptions
from ..engine.options import conversation_defaults
from ..tensors import MatrixDtype
from .names import locate_model

FOLDERS_ALONE = "lanes", "cache", "context_tokens"  # random weights have those of their flavor


@dataclass(frozen=True)
class ModelOptions:
    device: str = "auto"
    """auto, cpu, cuda, or several GPUs: cuda:0,cuda:1."""
    dtype: Literal["auto"] | MatrixDtype = "auto"
    """Weight type; auto: that of the checkpoint, bf16 for random weights.
    int8 reads half the bytes of 16 bits, int4 (CPU only) little more than a quarter; the output may change.
    gguf: the blocks of a GGUF file as they are, which auto means on the CPU.
    """
    math: Literal["fast", "exact", "auto", "bf16", "int8"] = "fast"
    """Type of the activations in matrix products; bf16 and int8 speed up prefill. CPU only.
    fast: int8 for int8, int4 and gguf weights, bf16 for bf16 weights if the CPU has bf16 products, else exact.
    exact: fp32; not for int4 and gguf. auto: exact where the weights permit it.
    """
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Type of cached keys and values; auto: fp32 for fp32 weights, else fp16. CPU only.
    int8 takes about half the memory of fp16, with a scale for each head and position.
    """
    threads: int | None = None
    """Threads of the CPU engine; default: all cores that make a pass faster."""
    pin: bool | None = None
    """Pin each thread to a CPU; default: on machines with several NUMA nodes."""
    lanes: int | None = None
    """Lanes of a Llama-family model; default: chosen for the threads. A Laneformer has a fixed number."""
    cache: bool = True
    """Keep the packed weights for the next start, beside the model or in the user's cache directory."""
    context_tokens: int | None = None
    """Maximum length of prompt and answer together; default: the model's."""
    cache_bytes: int | None = None
    """Size of the prefix cache (keys and values) on each device; default: a quarter of the free memory."""
    cache_dir: Path | None = None
    """Directory that keeps the prefix cache over restarts. CPU only.
    Its files contain the prompts' token ids; only their owner can read them.
    """
    cache_dir_bytes: int | None = None
    """Size limit of --cache-dir; the least recently used files are deleted first. Default: 10 GB."""

    draft: Path | None = None
    """Draft model with the same tokenizer: folder, GGUF file or name. CPU only; the output stays the same.
    Default: the model's own multi-token prediction head, if it has one. Drafts are used where that is faster.
    """

    def load(self, path: Path, **others: Any) -> Engine:
        draft = {"draft": locate_model(self.draft)} if self.draft else {}
        return Engine.from_pretrained(locate_model(path), **self._list_flags() | draft, **others)

    def random(self, flavor: str) -> Engine:
        """Open an engine with random weights."""
        options = self._list_flags()
        if self.draft is not None:
            raise ValueError(
                f"--draft {self.draft} drafts for a model folder; random weights have no text in common"
            )
        for name in FOLDERS_ALONE:
            options.pop(name, None)
        dtype = "bf16" if self.dtype == "auto" else self.dtype
        return Engine.random(LaneformerConfig.from_flavor(flavor), **options | {"dtype": dtype})

    def _list_flags(self) -> dict[str, Any]:
        return {
            name: value for name, value in dataclasses.asdict(self).items() if value is not None
        }


@dataclass(frozen=True)
class SamplingOptions:
    """Temperature, top-k, top-p, min-p and repetition penalty default to the model's generation_config.json;
    without one, conversations are sampled as llama.cpp samples and all else is greedy.
    """

    greedy: bool = False
    """Take the most likely token, whatever the model's generation_config.json says."""
    temperature: float | None = None
    """Sampling temperature; 0 is greedy."""
    top_k: int | None = None
    """Sample from this many most likely tokens; 0 is off."""
    top_p: float | None = None
    """Nucleus sampling: from the most likely tokens that together reach this probability; 1 is off."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the highest probability; 0 is off."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens in the prompt or the output; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output."""
    seed: int = 0
    """The same seed and prompt give the same text."""
    speculate: int = GenerationOptions.speculate
    """Maximum number of draft tokens per pass, taken from earlier text; 0: none. The output stays the same."""

    def check_options(self) -> dict[str, Any]:
        """Return the options that were given; ValueError for values out of range."""
        options = {
            n: value
            for n, value in dataclasses.asdict(self).items()
            if n != "greedy" and value is not None
        }
        GenerationOptions(**options)
        if self.greedy and self.temperature:
            raise ValueError(
                f"--greedy and --temperature {self.temperature} contradict each other; give one of them"
            )
        return options

    def resolve_options(self, engine: Engine, conversation: bool) -> dict[str, Any]:
        """Return the options for this model: its defaults, printed to stderr, and what was given."""
        options = self.check_options()
        defaults = engine.sampling_defaults
        source = "from the model's generation_config.json"
        if not defaults:
            source = "as the model has no generation_config.json"
        if conversation:
            defaults = conversation_defaults(defaults)
        defaults = {} if self.greedy else {n: v for n, v in defaults.items() if n not in options}
        if defaults:
            listing = ", ".join(f"{name} {value}" for name, value in defaults.items())
            print(f"{source}: {listing} (--greedy turns it off)", file=sys.stderr)
        return defaults | options


ModelName = Annotated[
    tyro.conf.Positional[Path],
    tyro.conf.arg(
        help="Folder with config.json, model*.safetensors and tokenizer.json, a GGUF file, or a model's name: "
        "HuggingFaceTB/SmolLM2-135M-Instruct, owner/name:Q4_K_M, or one that `laneformer models` lists."
    ),
]
