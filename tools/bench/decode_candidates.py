"""The candidates of `tools.bench decode`: our engine and its rivals, as processes.

All hold the same weights, or random ones of the same shape, so a token costs each the same bytes;
none tokenizes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from laneformer import LaneformerConfig, __version__
from tools.bench.baselines import TransformersLlama
from tools.bench.harness import Result
from tools.bench.llamacpp import FOLDER, IK_FOLDER, IkLlama, LlamaCpp, as_gguf
from tools.bench.openvino_genai import FOLDER as OPENVINO_FOLDER
from tools.bench.openvino_genai import OpenVino

OURS = "laneformer"
Dtype = Literal["bf16", "int8", "int4", "gguf"]
READ_GGUF: dict[str, Any] = {"llamacpp": LlamaCpp, "ik": IkLlama, "openvino": OpenVino}
# GGUF's types of about the same size, or the file as it is; Transformers has none
QUANTISED = {"int8": ["q8_0"], "int4": ["q4_0", "q4_k_m"], "gguf": ["gguf"]}
INSTALL = {
    "llamacpp": f'CMAKE_ARGS="-DGGML_NATIVE=on -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF" {sys.executable} -m pip install '
    f"--target {FOLDER} llama-cpp-python gguf",
    "ik": f"{sys.executable} -m pip install --no-deps --target {IK_FOLDER} ik-llama-cpp-python",
    "openvino": f"{sys.executable} -m pip install --target {OPENVINO_FOLDER} openvino-genai",
    "transformers": f'{sys.executable} -m pip install "torch>=2.11,<2.16" "transformers>=4.57,<6"',
}


def names_of(baseline: str, dtype: Dtype) -> list[str]:
    """Return a candidate for each way in which the baseline stores weights of this size."""
    if dtype not in QUANTISED:
        return [baseline]
    return [f"{baseline} {kind}" for kind in QUANTISED[dtype]] if baseline in READ_GGUF else []


def load_candidate(
    name: str, source: LaneformerConfig | Path, dtype: str, threads: int, context: int | None
) -> Any:
    """Load our engine or a baseline; one that is not installed, or that cannot take the file, says only that.

    Args:
        name: "laneformer OPTION=VALUE,...", "llamacpp KIND" (ik, openvino) or "transformers".
        source: a shape, or a GGUF file.
        context: None for the model's.
    """
    engine, _, variant = name.partition(" ")
    try:
        if engine == OURS:
            own = dict(part.split("=") for part in variant.split(",") if part)
            return OurEngine(source, dtype, {"threads": threads, "math": "fast", **own}, context)
        if engine in READ_GGUF:
            return READ_GGUF[engine](source, variant or dtype, threads, context)
        source = as_gguf(source, dtype) if isinstance(source, Path) else source
        return TransformersLlama(source, dtype, threads)
    except (ImportError, RuntimeError) as error:
        missing = {"missing": f"{error}; {INSTALL.get(engine, 'make setup')}"}
        return SimpleNamespace(facts=lambda: missing)


class OurEngine:
    """Our engine through its public interface: the stream a user would read."""

    def __init__(
        self, source: LaneformerConfig | Path, dtype: str, options: Result, context: int | None
    ) -> None:
        from laneformer import Engine

        if isinstance(source, Path):
            path = as_gguf(source, dtype if dtype == "gguf" else "bf16")
            self.engine = Engine.from_pretrained(
                path, "cpu", dtype, cache=False, context_tokens=context, **options
            )
        else:
            self.engine = Engine.random(source, dtype, device="cpu", **options)

    def facts(self) -> Result:
        engine, config = self.engine, self.engine.config
        return {
            "version": f"laneformer {__version__}",
            "about": f"isa {engine.isa}, math {engine.math}, keys and values in {engine.kv_dtype}, "
            f"{config.num_lanes} lanes",
            "context_tokens": config.max_position_embeddings,
            "vocab_size": config.vocab_size,
        }

    def decode(self, prompt: list[int], new_tokens: int) -> tuple[float, float]:
        from laneformer.engine.bench import bytes_per_token

        stream = self.engine.stream(
            prompt, max_new_tokens=new_tokens + 1, ignore_eos=True, speculate=0
        )
        arrivals = [time.perf_counter() for _ in stream]
        assert len(arrivals) == new_tokens + 1, (
            f"{len(arrivals)} tokens instead of {new_tokens + 1}"
        )
        read = bytes_per_token(self.engine, len(prompt) + new_tokens / 2)
        return new_tokens / (arrivals[-1] - arrivals[0]), read

    def prefill(self, prompt: list[int]) -> tuple[float, float]:
        start = time.perf_counter()
        self.engine.generate(prompt, max_new_tokens=1, ignore_eos=True)
        return len(prompt) / (time.perf_counter() - start), 0

    def probe(self) -> float:
        """Bytes/s that the engine's own threads read, now."""
        from laneformer.engine.bench import probe

        return probe(self.engine)
