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
    """Type of the matrices; auto: the checkpoint's, or bf16 for random weights. int8 reads half the bytes of
    16 bits, int4 not much more than a quarter, on the CPU alone; the output may change. gguf: a GGUF file's
    blocks as they are, which auto means on the CPU.
    """
    math: Literal["fast", "exact", "auto", "bf16", "int8"] = "fast"
    """bf16 and int8 round activations before every matrix product, which reads prompts faster. fast: int8 for int8,
    int4 and gguf weights, bf16 for bf16 ones where the CPU multiplies bf16, else exact. exact: keeps fp32
    activations; not for int4 and gguf. auto: exact where the weights permit it. CPU only.
    """
    kv_dtype: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """Type of cached keys and values; auto: fp32 for fp32 weights, else fp16. int8 takes nearly half of it, with
    a scale for each head and position. CPU only.
    """
    threads: int | None = None
    """Threads of the CPU engine; default: all cores, in equal groups where they outnumber the lanes."""
    pin: bool | None = None
    """Keep each thread on a CPU of its own; default: where the machine has several memory nodes."""
    lanes: int | None = None
    """Lanes of a Llama-family model; default: as suit the threads. A Laneformer has its own."""
    cache: bool = True
    """Keep the packed weights on disk, beside the model or in the user's cache directory, for the next start.
    """
    context_tokens: int | None = None
    """Longest prompt and answer together; default: as the model says."""
    cache_bytes: int | None = None
    """Memory for keys and values of earlier requests, on each device; default: a quarter of what is free."""
    cache_dir: Path | None = None
    """Directory for keys and values that survive a restart: of a prompt that begins like an earlier one, only the
    rest is read. Its files, which only their owner can read, hold the prompts' ids. CPU only.
    """
    cache_dir_bytes: int | None = None
    """Most bytes of all files there; those used longest ago are deleted first. Default: 10 GB."""

    draft: Path | None = None
    """A small model with the same tokenizer, folder, GGUF file or name: its drafts are verified where that is faster,
    and the output stays the same. CPU only. Without it, those of the model's own head, if it has one.
    """

    def load(self, path: Path, **others: Any) -> Engine:
        draft = {"draft": locate_model(self.draft)} if self.draft else {}
        return Engine.from_pretrained(locate_model(path), **self._list_flags() | draft, **others)

    def random(self, flavor: str, draft_head: int | None = None) -> Engine:
        """Open an engine with random weights; `draft_head`: ids of a head that drafts, 0 for all."""
        options = self._list_flags()
        if self.draft is not None:
            raise ValueError(
                f"--draft {self.draft} drafts for a model folder; random weights have no text in common"
            )
        if draft_head is not None and self.device.startswith("cuda"):
            raise ValueError(
                f"--draft-head {draft_head} with --device {self.device}: the model's own head drafts on the CPU "
                "alone; use --device cpu, or leave it out: GPUs verify drafts from the text's own repetitions"
            )
        for name in FOLDERS_ALONE:
            options.pop(name, None)
        head = {
            "num_nextn_predict_layers": int(draft_head is not None),
            "draft_vocab_size": draft_head or 0,
        }
        config = LaneformerConfig.from_flavor(flavor, **head)
        return Engine.random(
            config, **options | {"dtype": "bf16" if self.dtype == "auto" else self.dtype}
        )

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
    """Always the likeliest token, whatever the model's generation_config.json says."""
    temperature: float | None = None
    """0 is greedy."""
    top_k: int | None = None
    """0 is off."""
    top_p: float | None = None
    """Draw from the fewest likely tokens that reach this probability; 1 is off."""
    min_p: float | None = None
    """Draw from tokens at least this many times as likely as the likeliest; 0 is off."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens in the prompt or the output; 1 is off."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it is in the output."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output."""
    seed: int = 0
    """The same seed and prompt give the same text."""
    speculate: int = GenerationOptions.speculate
    """Most draft tokens, taken from earlier text, to verify in one pass; the output stays the same. 0: none."""

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
