"""What the baselines of `tools.bench decode` share, and Transformers as one of them."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laneformer import LaneformerConfig
from tools.bench.harness import Result

CHOICE_TOKENS = 12  # per trial of the choice between ways to run
CHOICE_TRIALS = 3
LONG_PROMPT = 1024  # of longer ones one trial says enough, and half the rounds


class Baseline(ABC):
    """Another engine. It may have several ways to run; each workload takes the one that was fastest
    in trials of it.
    """

    facts: Result
    weight_bytes: int

    def __init__(self) -> None:
        self.chosen: dict[str, str] = {}  # by workload
        self.held: dict[str, list[int]] = {}  # by way: the prompt that its cache holds

    @abstractmethod
    def ways(self, sequences: int) -> Result:
        """Ways to run this many sequences, by name."""

    @abstractmethod
    def reset(self, way: Any, length: int) -> None:
        """Start an empty sequence of at most `length` ids."""

    @abstractmethod
    def rewind(self, way: Any, length: int) -> bool:
        """Forget what was appended after the first `length` ids; False where that is not possible."""

    @abstractmethod
    def evaluate(self, way: Any, ids: list[int]) -> int:
        """Append ids; the likeliest next id."""

    @abstractmethod
    def evaluate_each(self, way: Any, ids: list[int], position: int) -> list[int]:
        """Append one id to each of several sequences; the likeliest next id of each. Position 0 starts them."""

    @abstractmethod
    def cached_bytes(self, positions: int) -> int:
        """Bytes of keys and values that a token reads."""

    def decode(self, prompt: list[int], new_tokens: int) -> Result:
        def run(name: str, way: Any, tokens: int) -> float:
            if self.held.get(name) == prompt and self.rewind(way, len(prompt) - 1):
                token = self.evaluate(way, prompt[-1:])
            else:
                self.reset(way, len(prompt) + max(new_tokens, CHOICE_TOKENS))
                token, self.held[name] = self.evaluate(way, prompt), prompt
            start = time.perf_counter()
            for _ in range(tokens):
                token = self.evaluate(way, [token])
            return tokens / (time.perf_counter() - start)

        speed = self.fastest(f"depth {len(prompt)}", 1, run, new_tokens)
        read = self.weight_bytes + self.cached_bytes(len(prompt) + new_tokens // 2)
        return {"tokens_per_s": speed, "bytes_per_token": read}

    def prefill(self, prompt: list[int]) -> float:
        def run(name: str, way: Any, tokens: int) -> float:
            self.reset(way, len(prompt))
            self.held.pop(name, None)
            start = time.perf_counter()
            self.evaluate(way, prompt)
            return len(prompt) / (time.perf_counter() - start)

        trials = 1 if len(prompt) > LONG_PROMPT else CHOICE_TRIALS
        return self.fastest(f"prompt {len(prompt)}", 1, run, 0, trials)

    def batch(self, sequences: int, new_tokens: int) -> Result:
        def run(name: str, way: Any, tokens: int) -> float:
            ids, start = list(range(5, 5 + sequences)), time.perf_counter()
            for position in range(tokens):
                ids = self.evaluate_each(way, ids, position)
            return sequences * tokens / (time.perf_counter() - start)

        speed = self.fastest(f"batch {sequences}", sequences, run, new_tokens)
        return {"tokens_per_s": speed, "bytes_per_token": self.weight_bytes / sequences}

    def fastest(
        self, workload: str, sequences: int, run: Callable[[str, Any, int], float], tokens: int,
        trials: int = CHOICE_TRIALS,
    ) -> float:  # fmt: skip
        """Tokens/s of run(name, way, tokens) in the way that is fastest at this workload.

        The first time alternating trials choose it; the best of each counts.
        """
        ways = self.ways(sequences)
        if workload not in self.chosen:
            speeds = dict.fromkeys(ways, 0.0)
            for name in [*ways] * trials:
                speeds[name] = max(speeds[name], run(name, ways[name], CHOICE_TOKENS))
            self.chosen[workload] = max(speeds, key=speeds.__getitem__)
        name = self.chosen[workload]
        return run(name, ways[name], tokens)

    def settings(self) -> str:
        """Which way each workload took."""
        return "; ".join(f"{workload}: {way}" for workload, way in self.chosen.items())


class TransformersLlama(Baseline):
    """LlamaForCausalLM with SDPA attention: a plain loop over forward, static or growing cache."""

    def __init__(self, source: LaneformerConfig | Path, dtype: str, threads: int):
        import torch
        import transformers

        super().__init__()
        self.torch, self.transformers, self.caches = torch, transformers, Result()
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.bfloat16 if dtype == "bf16" else torch.float16)
        if isinstance(source, Path):
            loader = transformers.AutoModelForCausalLM
            self.model: Any = loader.from_pretrained(
                source.parent, gguf_file=source.name, dtype=torch.get_default_dtype()
            )
        else:
            names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
                     "num_key_value_heads", "vocab_size", "max_position_embeddings")  # fmt: skip
            shape = transformers.LlamaConfig(
                **{n: getattr(source, n) for n in names}, tie_word_embeddings=False
            )
            self.model = transformers.LlamaForCausalLM(shape)
        self.model.eval()
        read = sum(p.numel() for p in self.model.parameters())
        if not self.model.config.tie_word_embeddings:
            read -= self.model.get_input_embeddings().weight.numel()
        self.weight_bytes = 2 * read
        self.facts = {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "attention": self.model.config._attn_implementation,
        }

    def ways(self, sequences: int) -> Result:
        return {name: name for name in ("growing cache", "static cache")}

    def reset(self, way: str, length: int) -> None:
        config, kinds = self.model.config, self.transformers
        if way == "growing cache":
            self.caches[way] = kinds.DynamicCache(config=config)
        else:
            self.caches[way] = kinds.StaticCache(config=config, max_cache_len=length)

    def rewind(self, way: str, length: int) -> bool:
        if way == "growing cache":
            self.caches[way].crop(length - self.caches[way].get_seq_length())  # negative: how many to remove
        return way == "growing cache"

    def evaluate(self, way: str, ids: list[int]) -> int:
        return self._next(way, [ids])[0]

    def evaluate_each(self, way: str, ids: list[int], position: int) -> list[int]:
        if position == 0:
            self.reset(way, 512)
        return self._next(way, [[i] for i in ids])

    def _next(self, way: str, ids: list[list[int]]) -> list[int]:
        inputs = self.torch.tensor(ids)
        logits = self.model(
            input_ids=inputs, past_key_values=self.caches[way], use_cache=True, logits_to_keep=1
        ).logits
        return logits[:, -1].argmax(-1).tolist()

    def cached_bytes(self, positions: int) -> int:
        c = self.model.config
        dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * dim * positions
