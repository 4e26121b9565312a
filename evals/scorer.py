"""Log-probabilities of given tokens from any model folder: Laneformers through the engine, others Transformers.

An evaluation asks for the same prompt with several endings, so both keep the keys and values of the last prompt and
start after the prefix that the next one shares with it. Texts become ids by the folder's own tokenizer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

Kind = Literal["auto", "engine", "transformers"]


class Scores(NamedTuple):
    """Of ids[start:]: logprobs float64 (n,), nats; greedy bool (n,), whether the id is the likeliest one there."""

    logprobs: np.ndarray
    greedy: np.ndarray


class TextEncoder(Protocol):
    """Text to ids. `bos_id`: what a prompt begins with, EOS where the model has no BOS (GPT-2), None without both."""

    bos_id: int | None
    eos_id: int | None

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """The ids of a text, without the special tokens that the tokenizer puts around it unless these are wanted."""
        ...


class Scorer(TextEncoder, Protocol):
    """A model that scores tokens. `max_length`: tokens of the longest sequence it can score."""

    name: str
    max_length: int

    def score(self, ids: Sequence[int], start: int) -> Scores:
        """Each of ids[start:] given all ids before it; 1 <= start < len(ids) <= max_length."""
        ...

    def close(self) -> None: ...


class EngineEncoder:
    """The tokenizer.json of a Laneformer folder, as the engine reads it."""

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} is missing; evaluations of texts need the tokenizer: export the model with it")
        self._tokenizer = Tokenizer.from_file(str(path))
        config = read_config(folder)
        self.eos_id: int | None = config.get("eos_token_id")
        bos_id = config.get("bos_token_id")
        self.bos_id: int | None = self.eos_id if bos_id is None else bos_id

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids


class EngineScorer(EngineEncoder):
    """`laneformer.Engine` with prefix reuse."""

    def __init__(self, folder: Path, device: str = "auto"):
        from laneformer import Engine

        super().__init__(folder)
        self._engine = Engine.from_pretrained(folder, device=device)
        self.name = f"engine {self._engine.dtype}"
        self.max_length = self._engine.config.max_position_embeddings

    def score(self, ids: Sequence[int], start: int) -> Scores:
        found = self._engine.logprobs(ids, top=1, start=start)
        return Scores(found.logprobs.astype(np.float64), found.is_greedy)

    def close(self) -> None:
        self._engine.close()


class TransformersEncoder:
    """The tokenizer that Transformers makes of a folder."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        # False: no code of the folder runs, and nobody is asked whether it may, which a job would wait for
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        bos_id = self._tokenizer.bos_token_id
        self.bos_id: int | None = self.eos_id if bos_id is None else bos_id

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=special_tokens)["input_ids"]


class TransformersScorer(TransformersEncoder):
    """Any causal language model of Transformers; the cache is cut back to the prefix that two prompts share."""

    def __init__(self, folder: Path, device: str = "auto", dtype: Any = "auto"):
        super().__init__(folder)
        import torch

        self._device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        model = causal_model_class(folder).from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        self._model = model.to(self._device).eval()
        self.name = f"transformers {str(self._model.dtype).removeprefix('torch.')}"
        config = self._model.config.get_text_config()
        self.max_length = int(getattr(config, "max_position_embeddings", None) or self._tokenizer.model_max_length)
        # a state that has read a token cannot forget it
        self._keeps_prefix = not getattr(self._model, "_is_stateful", False)
        self._few_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._read: list[int] = []  # whose keys and values are in the cache
        self._cache: Any = None

    def score(self, ids: Sequence[int], start: int) -> Scores:
        import torch

        ids = [int(i) for i in ids]
        if not 1 <= start < len(ids) <= self.max_length:
            raise ValueError(f"start = {start} of {len(ids)} ids: 1 <= start < ids <= {self.max_length} is needed")
        wanted = ids[:-1]  # the last one is only predicted
        shared = min(common_prefix(self._read, wanted), start - 1)
        inputs = torch.tensor([wanted[self._cut_cache(shared) :]], device=self._device)
        options: dict[str, Any] = {"logits_to_keep": len(ids) - start} if self._few_logits else {}
        if self._keeps_prefix:
            options |= {"past_key_values": self._cache, "use_cache": True}
        self._read = []  # an error below leaves the cache in an unknown state
        with torch.inference_mode():
            logits = self._model(input_ids=inputs, **options).logits[0, -(len(ids) - start) :].double()
        self._read = wanted if self._keeps_prefix else []
        targets = torch.tensor(ids[start:], device=self._device)
        logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return Scores(logprobs.cpu().numpy(), (logits.argmax(-1) == targets).cpu().numpy())

    def _cut_cache(self, length: int) -> int:
        """Make the cache hold the first `length` positions of the last prompt, or none; how many it holds."""
        from transformers import DynamicCache

        if not length or not self._keeps_prefix:
            # made without the config: every layer keeps all positions, so that a window's cache can be cut as well
            self._cache = DynamicCache()
            return 0
        surplus = self._cache.get_seq_length() - length
        if surplus:
            self._cache.crop(-surplus)  # 5.x takes only how much to remove
        return length

    def close(self) -> None:
        del self._model, self._cache


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many ids two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a Hugging Face model folder, such as runs/demo/hf")
    return json.loads(path.read_text(encoding="utf-8"))


def causal_model_class(folder: Path) -> Any:
    """The class to load a folder with; a Laneformer's is the installed one, so that no code of the folder runs."""
    if read_config(folder).get("model_type") == "laneformer":
        from laneformer.hf.modeling_laneformer import LaneformerForCausalLM

        return LaneformerForCausalLM
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def chosen_kind(model: Path, device: str = "auto", kind: Kind = "auto") -> Literal["engine", "transformers"]:
    """Whether `kind="auto"` means the engine: for a Laneformer, but on CUDA until that engine has run on a GPU."""
    ours = read_config(model).get("model_type") == "laneformer"
    if kind == "engine" and not ours:
        raise ValueError(f"kind = 'engine': {model} is no Laneformer; use 'transformers' or 'auto'")
    if kind == "auto":
        return "engine" if ours and not device.startswith("cuda") else "transformers"
    if kind not in ("engine", "transformers"):
        raise ValueError(f"kind = {kind!r} is unknown; choose 'auto', 'engine' or 'transformers'")
    return kind


def open_encoder(model: Path, kind: Kind = "auto") -> TextEncoder:
    """The tokenizer alone, as `open_scorer` would use it."""
    return EngineEncoder(model) if chosen_kind(model, kind=kind) == "engine" else TransformersEncoder(model)


def open_scorer(model: Path, device: str = "auto", kind: Kind = "auto") -> Scorer:
    """A Hugging Face folder ready to score; ValueError when it is not one. Call `close` at the end."""
    if chosen_kind(model, device, kind) == "engine":
        return EngineScorer(model, device)
    return TransformersScorer(model, device)
