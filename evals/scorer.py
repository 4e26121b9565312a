"""Log-probabilities and texts from a model folder: a Laneformer on the CPU through the engine, others in Transformers.

Evaluations score the same prompt with several continuations, so both backends keep the KV cache of the last prompt and
skip the prefix that the next one shares with it. Texts are encoded by the folder's own tokenizer.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from laneformer import Engine

Kind = Literal["auto", "engine", "transformers"]


class Scores(NamedTuple):
    """Scores of ids[start:]: logprobs float64 (n,) in nats; greedy bool (n,), True where the id is the argmax."""

    logprobs: np.ndarray
    greedy: np.ndarray


class EngineEncoder:
    """The tokenizer.json of a Laneformer folder, read as the engine reads it.

    `bos_id`: the first id of a prompt; EOS if the model has no BOS (GPT-2), None if it has neither.
    """

    def __init__(self, folder: Path):
        from tokenizers import Tokenizer

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path} is missing; evaluations of text need the tokenizer: export the model with it")
        self._tokenizer = Tokenizer.from_file(str(path))
        config = read_config(folder)
        eos = config.get("eos_token_id")
        self.eos_id: int | None = eos[0] if isinstance(eos, list) else eos
        bos_id = config.get("bos_token_id")
        self.bos_id: int | None = self.eos_id if bos_id is None else bos_id

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        """The ids of a text; with `special_tokens` also those that the tokenizer adds around it."""
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self._tokenizer.decode(list(ids), skip_special_tokens)

    def id_to_token(self, token: int) -> str | None:
        """The piece of the vocabulary, as the tokenizer writes it."""
        return self._tokenizer.id_to_token(token)


def open_engine(folder: Path, device: str = "auto", **options: Any) -> Engine:
    """The engine as evaluations use it: on the CPU with keys and values in fp32, so that figures are the model's."""
    from laneformer import Engine
    from laneformer.engine.device import cuda_devices

    exact = {} if cuda_devices(device) else {"kv_dtype": "fp32"}
    return Engine.from_pretrained(folder, device=device, **{**exact, **options})


class EngineScorer(EngineEncoder):
    """`laneformer.Engine` with prefix reuse, `max_length` tokens of context.

    options: those of `Engine.from_pretrained`.
    """

    def __init__(self, folder: Path, **options: Any):
        super().__init__(folder)
        self.engine = open_engine(folder, **options)
        self.name = f"engine {self.engine.dtype}"
        self.max_length = self.engine.config.max_position_embeddings

    def score(self, ids: Sequence[int], start: int) -> Scores:
        """Scores of each of ids[start:] given all ids before it; 1 <= start < len(ids) <= max_length + 1.

        The last id is only predicted, so one more than the context fits.
        """
        found = self.engine.logprobs(ids, top=1, start=start)
        return Scores(found.logprobs.astype(np.float64), found.is_greedy)

    def generate(self, ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> list[int]:
        """New ids after a prompt, an end-of-text id included; temperature 0 is greedy."""
        return self.engine.generate(ids, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)

    def close(self) -> None:
        self.engine.close()


class TransformersEncoder:
    """The tokenizer that Transformers loads from a folder; attributes and `encode` as in EngineEncoder."""

    def __init__(self, folder: Path):
        from transformers import AutoTokenizer

        # False: the folder's code does not run, and Transformers does not prompt for consent, which would hang a job
        self._tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        bos_id = self._tokenizer.bos_token_id
        self.bos_id: int | None = self.eos_id if bos_id is None else bos_id

    def encode(self, text: str, special_tokens: bool = False) -> list[int]:
        return self._tokenizer(text, add_special_tokens=special_tokens)["input_ids"]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def id_to_token(self, token: int) -> str | None:
        return str(self._tokenizer.convert_ids_to_tokens(token))


class TransformersScorer(TransformersEncoder):
    """Any causal language model of Transformers: as EngineScorer; the cache is cropped to what two prompts share."""

    def __init__(self, folder: Path, device: str = "auto", dtype: Any = "auto"):
        super().__init__(folder)
        import torch
        from transformers import AutoModelForCausalLM

        model_class: Any = AutoModelForCausalLM
        if read_config(folder).get("model_type") == "laneformer":  # the installed class: the folder's code does not run
            from laneformer.hf.modeling_laneformer import LaneformerForCausalLM as model_class
        self._device = torch.device(visible_device(device))
        model = model_class.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        self._model = model.to(self._device).eval()
        self.name = f"transformers {str(self._model.dtype).removeprefix('torch.')}"
        config = self._model.config.get_text_config()
        self.max_length = int(getattr(config, "max_position_embeddings", None) or self._tokenizer.model_max_length)
        # a recurrent state cannot be cropped
        self._keeps_prefix = not getattr(self._model, "_is_stateful", False)
        self._few_logits = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._read: list[int] = []  # ids whose keys and values are in the cache
        self._cache: Any = None

    def score(self, ids: Sequence[int], start: int) -> Scores:
        import torch

        ids = [int(i) for i in ids]
        most = self.max_length + 1
        if not 1 <= start < len(ids) <= most:
            raise ValueError(f"start = {start} of {len(ids)} ids: 1 <= start < ids <= {most} is required")
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

    def generate(self, ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int) -> list[int]:
        import torch

        torch.manual_seed(seed)
        sampling: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:  # from the whole distribution, as the engine: its defaults are no top-k and no top-p
            sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
        prompt = torch.tensor([list(ids)], device=self._device)
        given: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "pad_token_id": self.eos_id}
        with torch.inference_mode():
            out = self._model.generate(prompt, max_new_tokens=max_new_tokens, **given, **sampling)
        return out[0, len(ids) :].tolist()

    def _cut_cache(self, length: int) -> int:
        """Crop the cache to the first `length` positions of the last prompt, or empty it; returns how many it holds."""
        from transformers import DynamicCache

        if not length or not self._keeps_prefix:
            # without the config every layer keeps all positions, so that sliding-window layers can be cropped, too
            self._cache = DynamicCache()
            return 0
        surplus = self._cache.get_seq_length() - length
        if surplus:
            self._cache.crop(-surplus)  # 5.x only accepts the number of positions to remove
        return length

    def close(self) -> None:
        del self._model, self._cache


TextEncoder = EngineEncoder | TransformersEncoder
Scorer = EngineScorer | TransformersScorer


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; pass a Hugging Face model folder, such as runs/demo/hf")
    return json.loads(path.read_text(encoding="utf-8"))


def visible_device(device: str) -> str:
    """ "auto" as cuda where there is a GPU to see, else cpu. Raises ValueError for cuda where there is none."""
    from laneformer.engine.device import has_driver

    found = False
    if has_driver():  # otherwise torch need not be imported to know
        import torch

        found = torch.cuda.is_available()
    if device.startswith("cuda") and not found:
        raise ValueError(
            f"device = {device!r}: no GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES, --gpu of the watcher); "
            "use device = 'auto' to fall back to the CPU"
        )
    return ("cuda" if found else "cpu") if device == "auto" else device


def uses_engine(model: Path, device: str = "auto", kind: Kind = "auto") -> bool:
    """Whether `kind` is the engine; "auto" is for a Laneformer, except on CUDA until that engine has run on one."""
    from laneformer.llama.config import FAMILIES

    model_type = read_config(model).get("model_type")
    ours = model_type == "laneformer"
    if kind == "engine" and not ours and model_type not in FAMILIES:
        raise ValueError(
            f"kind = 'engine': {model} is of model_type {model_type!r}; use 'transformers' or 'auto' for all but "
            f"laneformer, {', '.join(FAMILIES)}"
        )
    if kind not in ("auto", "engine", "transformers"):
        raise ValueError(f"kind = {kind!r} is unknown; choose 'auto', 'engine' or 'transformers'")
    return kind == "engine" or (kind == "auto" and ours and not visible_device(device).startswith("cuda"))


def open_encoder(model: Path, kind: Kind = "auto") -> TextEncoder:
    """The tokenizer that `open_scorer` would use, without the model."""
    return EngineEncoder(model) if uses_engine(model, kind=kind) else TransformersEncoder(model)


def open_scorer(model: Path, device: str = "auto", kind: Kind = "auto") -> Scorer:
    """Open a Hugging Face folder for scoring; ValueError if it is not one. Call `close` when done."""
    return EngineScorer(model, device=device) if uses_engine(model, device, kind) else TransformersScorer(model, device)
