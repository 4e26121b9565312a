"""Shared parts of the baselines of `tools.bench decode`, and Transformers as one of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laneformer import LaneformerConfig
from tools.bench.harness import Result

CHOICE_TRIALS, CHOICE_TOKENS = 2, 12  # of each way to run, the first time that a workload is seen


class Baseline(ABC):
    """Another engine; each workload runs in the way that was fastest in its trials."""

    version: str
    about: str
    ways: tuple[str, ...]
    weight_bytes: int

    def __init__(self) -> None:
        self.chosen: dict[str, str] = {}  # by workload
        self.prompts: dict[str, list[int]] = {}  # by way: what its cache begins with

    @abstractmethod
    def rewind(self, way: str, length: int) -> None:
        """Forget what was appended after the first `length` ids of the sequence."""

    @abstractmethod
    def evaluate(self, way: str, ids: list[int]) -> int:
        """Append ids; the likeliest next id."""

    @abstractmethod
    def count_cached_bytes(self, positions: int) -> int:
        """Count bytes of keys and values that a token reads."""

    def decode(self, prompt: list[int], new_tokens: int) -> tuple[float, float]:
        """Return tokens/s after the prompt, and the bytes that a token reads."""

        def run(way: str, tokens: int) -> float:
            cached = len(prompt) - 1 if self.prompts.get(way) == prompt else 0
            self.rewind(way, cached)
            token, self.prompts[way] = self.evaluate(way, prompt[cached:]), prompt
            start = time.perf_counter()
            for _ in range(tokens):
                token = self.evaluate(way, [token])
            return tokens / (time.perf_counter() - start)

        speed = self.fastest(f"depth {len(prompt)}", run, new_tokens)
        return speed, self.weight_bytes + self.count_cached_bytes(len(prompt) + new_tokens // 2)

    def prefill(self, prompt: list[int]) -> tuple[float, float]:
        def run(way: str, tokens: int) -> float:
            self.prompts.pop(way, None)
            self.rewind(way, 0)
            start = time.perf_counter()
            self.evaluate(way, prompt)
            return len(prompt) / (time.perf_counter() - start)

        return self.fastest(f"prompt {len(prompt)}", run, 0), 0

    def fastest(self, workload: str, run: Callable[[str, int], float], tokens: int) -> float:
        """Return tokens/s of run(way, tokens) in the way that is fastest at this workload."""
        # the first time alternating trials choose it; the best of each counts
        if workload not in self.chosen:
            speeds = dict.fromkeys(self.ways, 0.0)
            for way in self.ways * CHOICE_TRIALS:
                speeds[way] = max(speeds[way], run(way, CHOICE_TOKENS))
            self.chosen[workload] = max(speeds, key=speeds.__getitem__)
        return run(self.chosen[workload], tokens)

    def facts(self) -> Result:
        """Return what runs, and which way each workload took."""
        chosen = [f"{workload}: {way}" for workload, way in self.chosen.items()]
        return {"version": self.version, "about": "; ".join([self.about, *chosen])}


class TransformersLlama(Baseline):
    """LlamaForCausalLM with SDPA attention: a plain loop over forward with a growing cache."""

    ways = ("growing cache",)

    def __init__(self, source: LaneformerConfig | Path, dtype: str, threads: int):
        import torch
        import transformers

        super().__init__()
        self.torch, self.new_cache = torch, transformers.DynamicCache
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.bfloat16)
        self.model: Any
        if isinstance(source, Path):
            self.model = transformers.AutoModelForCausalLM.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.get_default_dtype()
            )
        else:
            # it takes the fields that it knows: a Llama whose matrices have as many numbers
            config = transformers.LlamaConfig(**source.to_dict(), rms_norm_eps=source.norm_eps)
            self.model = transformers.LlamaForCausalLM(config)
        self.model.eval()
        read = sum(p.numel() for p in self.model.parameters())
        if not self.model.config.tie_word_embeddings:
            read -= self.model.get_input_embeddings().weight.numel()
        self.weight_bytes = 2 * read
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.about = f"attention {self.model.config._attn_implementation}"

    def rewind(self, way: str, length: int) -> None:
        if length == 0:
            self.cache = self.new_cache(config=self.model.config)
        else:
            self.cache.crop(length - self.cache.get_seq_length())  # negative: how many to remove

    def evaluate(self, way: str, ids: list[int]) -> int:
        inputs = self.torch.tensor([ids])
        out = self.model(
            input_ids=inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1
        )
        return int(out.logits[0, -1].argmax())

    def count_cached_bytes(self, positions: int) -> int:
        c = self.model.config
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * dim * positions
