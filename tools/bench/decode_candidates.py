"""The candidates of `tools.bench decode`: our engine, llama.cpp and Transformers, each in a
process of its own.

All hold the same weights, or random ones of the same shape, so a token costs each the
same bytes; none tokenizes.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from pathlib import Path
from typing import Any, Literal

from laneformer import LaneformerConfig
from laneformer.config import FLAVORS
from tools.bench.decode_baselines import Baseline, TransformersLlama
from tools.bench.harness import Result, serve, version
from tools.bench.llamacpp import FOLDER, LlamaCpp, as_gguf

Dtype = Literal["bf16", "fp16", "int8", "int4", "gguf"]
Math = Literal["auto", "exact", "bf16", "int8"]
QUANTISED = {  # llama.cpp's types of about the same size, or both on the file as it is
    "int8": ["q8_0"], "int4": ["q4_0", "q4_k_m"], "gguf": ["gguf"],
}  # fmt: skip
INSTALL = {
    "laneformer": "make setup",
    "llamacpp": f'CMAKE_ARGS="-DGGML_NATIVE=on -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF" {sys.executable} -m pip install '
    f"--target {FOLDER} llama-cpp-python gguf",
    "transformers": f'{sys.executable} -m pip install "torch>=2.11,<2.16" "transformers>=4.57,<6"',
}


def names_of(baseline: str, dtype: Dtype) -> list[str]:
    """A candidate for each way in which the baseline stores weights of about this size; none where
    it has no way.
    """
    if baseline == "llamacpp":
        return [f"{baseline} {kind}" for kind in QUANTISED[dtype]] if dtype in QUANTISED else [baseline]
    return [] if dtype in QUANTISED else [baseline]


def main(name: str, model: str, dtype: str, first: dict[str, str], threads: int, context: int | None) -> None:
    """Answer commands until stdin ends: facts, settings, decode, prefill, batch; ours also probe and bench.

    model: a flavor or a GGUF file; first: options of our engine that its name does not change; context: None for the
    model's. Speeds are tokens/s; the first token is not counted.
    """
    engine, _, variant = name.partition(" ")
    longer = {"max_position_embeddings": context} if context else {}

    @functools.cache
    def made() -> OurEngine | Baseline:
        source = LaneformerConfig.from_flavor(model, **longer) if model in FLAVORS else Path(model)
        if engine == "laneformer":
            own = dict(part.split("=") for part in variant.split())
            return OurEngine(source, dtype, first | own, threads, context)
        if engine == "llamacpp":
            return LlamaCpp(source, variant or dtype, threads, context)
        return TransformersLlama(
            as_gguf(source, dtype) if isinstance(source, Path) else source, dtype, threads
        )

    def answer(do: str, **arguments: Any) -> Any:
        if do != "facts":
            return getattr(made(), do)(**arguments)
        try:
            return made().facts
        except ImportError as error:
            return {"missing": f"{error}; {INSTALL[engine]}"}

    serve(answer)


class OurEngine:
    """Our engine through its public interface: the stream a user would read."""

    def __init__(
        self, source: LaneformerConfig | Path, dtype: str, own: dict[str, str], threads: int, context: int | None
    ):  # fmt: skip
        from laneformer import Engine

        options: Result = {"device": "cpu", "threads": threads, **own}
        if isinstance(source, Path):
            path = as_gguf(source, dtype if dtype in ("fp16", "gguf") else "bf16")
            self.engine = Engine.from_pretrained(
                path, dtype=dtype, cache=False, context_tokens=context, **options
            )
        else:
            self.engine = Engine.random(source, dtype, **options)
        self.facts: Result = {
            "version": f"laneformer {version('laneformer')}",
            "about": f"isa {self.engine.isa}, math {self.engine.math}, keys and values in {self.engine.kv_dtype}, "
            f"{self.engine.config.num_lanes} lanes",
            "context_tokens": self.engine.config.max_position_embeddings,
            "vocab_size": self.engine.config.vocab_size,
        }

    def decode(self, prompt: list[int], new_tokens: int) -> Result:
        from laneformer.engine.bench import bytes_per_token

        stream = self.engine.stream(prompt, max_new_tokens=new_tokens + 1, ignore_eos=True, speculate=0)
        arrivals = [time.perf_counter() for _ in stream]
        assert len(arrivals) == new_tokens + 1, f"{len(arrivals)} tokens instead of {new_tokens + 1}"
        read = bytes_per_token(self.engine, len(prompt) + new_tokens / 2)
        return {"tokens_per_s": new_tokens / (arrivals[-1] - arrivals[0]), "bytes_per_token": read}

    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self.engine.generate(prompt, max_new_tokens=1, ignore_eos=True)
        return len(prompt) / (time.perf_counter() - start)

    def batch(self, sequences: int, new_tokens: int) -> Result:
        prompts, start = [[5 + i] for i in range(sequences)], time.perf_counter()
        options = {"ignore_eos": True, "reuse_prefix": False, "speculate": 0}
        self.engine.generate_batch(prompts, max_new_tokens=new_tokens, **options)
        speed = sequences * new_tokens / (time.perf_counter() - start)
        return {"tokens_per_s": speed, "bytes_per_token": self.engine.weight_bytes / sequences}

    def probe(self) -> float:
        """Bytes/s that the engine's own threads read, now."""
        from laneformer.engine.bench import probe

        return probe(self.engine)

    def bench(self) -> Result:
        """The figures of `laneformer bench`, whose probe reads between its segments."""
        from laneformer.engine.bench import benchmark

        return benchmark(self.engine, progress=lambda text: None)

    def settings(self) -> str:
        return str(self.facts["about"])


if __name__ == "__main__":
    _, own_name, source, weights, own, count, positions = sys.argv
    main(own_name, source, weights, json.loads(own), int(count), int(positions or 0) or None)
