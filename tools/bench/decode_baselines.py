"""The candidates of `tools.bench decode`: our engine, llama.cpp and Transformers, each in a process of its own.

All hold random weights of the same shape and element type, so a token costs each the same bytes; none tokenizes. A
baseline with two ways to run takes the one that is faster on this machine and reports which.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from laneformer import LaneformerConfig
from tools.bench.harness import Result, serve, version

Name = Literal["laneformer", "llamacpp", "transformers"]
Dtype = Literal["bf16", "fp16"]
LLAMACPP_FOLDER = Path(sys.prefix) / "llama-cpp"  # beside the environment, so that none of its packages changes
CACHE_FOLDER = Path.home() / ".cache" / "laneformer"
INSTALL = {
    "laneformer": "make setup",
    "llamacpp": f'CMAKE_ARGS="-DGGML_NATIVE=on -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF" {sys.executable} -m pip install '
    f"--target {LLAMACPP_FOLDER} llama-cpp-python gguf",
    "transformers": f'{sys.executable} -m pip install "torch>=2.11,<2.14" "transformers>=4.57,<6"',
}
CHOICE_TOKENS = 12  # per trial of the choice between two ways


def main(name: Name, flavor: str, dtype: Dtype = "bf16", threads: int = 2) -> None:
    """Answer commands until stdin ends: facts (version, settings, weight_bytes_per_token), decode, prefill, bench.

    Speeds are tokens/s; the first token is not counted. Started by `tools.bench decode`.
    """
    made = functools.cache(lambda: CANDIDATES[name](LaneformerConfig.from_flavor(flavor), dtype, threads))

    def answer(do: str, **arguments: Any) -> Any:
        if do != "facts":
            return getattr(made(), do)(**arguments)
        try:
            return made().facts
        except ImportError as error:
            return {"missing": f"{error}; {INSTALL[name]}"}

    serve(answer)


class OurEngine:
    """Our engine through its public interface: the stream a user would read."""

    def __init__(self, config: LaneformerConfig, dtype: Dtype, threads: int):
        from laneformer import Engine

        self.random = functools.partial(Engine.random, device="cpu", threads=threads)
        self.engine = self.random(config, dtype)
        self.facts = {
            "version": f"laneformer {version('laneformer')}",
            "settings": f"isa {self.engine.isa}, math {self.engine.math}",
            "weight_bytes_per_token": self.engine.weight_bytes,
        }

    def decode(self, prompt: list[int], new_tokens: int) -> float:
        stream = self.engine.stream(prompt, max_new_tokens=new_tokens + 1, ignore_eos=True)
        arrivals = [time.perf_counter() for _ in stream]
        assert len(arrivals) == new_tokens + 1, f"{len(arrivals)} tokens instead of {new_tokens + 1}"
        return new_tokens / (arrivals[-1] - arrivals[0])

    def prefill(self, prompt: list[int]) -> float:
        start = time.perf_counter()
        self.engine.generate(prompt, max_new_tokens=1, ignore_eos=True)
        return len(prompt) / (time.perf_counter() - start)

    def bench(self, flavor: str) -> Result:
        """The figures of `laneformer bench`, whose probe reads with the engine's own threads."""
        from laneformer.engine.bench import benchmark

        with self.random(flavor) as engine:
            return benchmark(engine, progress=lambda text: None)


class Baseline(ABC):
    """Another engine; `way` is the one of its ways to run that is in use."""

    facts: Result
    way: Any

    @abstractmethod
    def reset(self, length: int) -> None:
        """Start an empty sequence of at most `length` ids."""

    @abstractmethod
    def evaluate(self, ids: list[int]) -> int:
        """Append ids; the likeliest next id."""

    def decode(self, prompt: list[int], new_tokens: int) -> float:
        self.reset(len(prompt) + new_tokens)
        token, start = self.evaluate(prompt), time.perf_counter()
        for _ in range(new_tokens):
            token = self.evaluate([token])
        return new_tokens / (time.perf_counter() - start)

    def prefill(self, prompt: list[int]) -> float:
        self.reset(len(prompt))
        start = time.perf_counter()
        self.evaluate(prompt)
        return len(prompt) / (time.perf_counter() - start)

    def choose(self, ways: dict[str, Any]) -> str:
        """Keep the fastest way and return its name; three alternating trials each, the best counts."""
        speeds = dict.fromkeys(ways, 0.0)
        for name in [*ways] * 3:
            self.way = ways[name]
            speeds[name] = max(speeds[name], self.decode([5], CHOICE_TOKENS))
        best = max(speeds, key=speeds.__getitem__)
        self.way = ways[best]
        return best


class LlamaCpp(Baseline):
    """llama.cpp on a random GGUF: its C interface, one llama_decode per token, the largest logit found by NumPy."""

    def __init__(self, config: LaneformerConfig, dtype: Dtype, threads: int):
        sys.path.append(str(LLAMACPP_FOLDER))
        import llama_cpp

        self.api, self.config, self.threads = llama_cpp, config, threads
        self.silent = llama_cpp.llama_log_callback(lambda level, text, data: None)  # kept: C holds only its address
        llama_cpp.llama_log_set(self.silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        path = random_gguf(config, dtype)
        # a mapped file has small pages; memory of its own may get huge ones
        modes = {"mmap": llama_cpp.LLAMA_LOAD_MODE_MMAP, "none": llama_cpp.LLAMA_LOAD_MODE_NONE}
        opened = {name: self.open(path, mode) for name, mode in modes.items()}
        best = self.choose(opened)
        for model, context in (pair for pair in opened.values() if pair is not self.way):
            llama_cpp.llama_free(context)
            llama_cpp.llama_model_free(model)
        read = [shape for name, shape in gguf_shapes(config).items() if name != "token_embd.weight"]
        self.facts = {
            "version": f"llama-cpp-python {version('llama-cpp-python')}",
            "settings": f"load mode {best}; {llama_cpp.llama_print_system_info().decode().strip()}",
            "weight_bytes_per_token": sum(int(np.prod(shape)) * (2 if len(shape) == 2 else 4) for shape in read),
        }

    def open(self, path: Path, load_mode: int) -> tuple[Any, Any]:
        model_options = self.api.llama_model_default_params()
        model_options.load_mode = load_mode
        model = self.api.llama_model_load_from_file(str(path).encode(), model_options)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {path}; delete it, and it will be written again")
        options = self.api.llama_context_default_params()
        options.n_ctx = self.config.max_position_embeddings
        options.n_threads = options.n_threads_batch = self.threads
        return model, self.api.llama_init_from_model(model, options)

    def reset(self, length: int) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.way[1]), True)

    def evaluate(self, ids: list[int]) -> int:
        """In batches as large as llama.cpp takes them."""
        context = self.way[1]
        step = self.api.llama_n_batch(context)
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            tokens = (ctypes.c_int32 * len(part))(*part)  # the batch holds only its address
            status = self.api.llama_decode(context, self.api.llama_batch_get_one(tokens, len(part)))
            if status:
                raise RuntimeError(f"llama_decode failed with status {status}")
        logits = self.api.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (self.config.vocab_size,)).argmax())


def gguf_shapes(config: LaneformerConfig) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama with the same matrices as this Laneformer, under the names that llama.cpp reads."""
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    kv = config.num_key_value_heads * config.head_dim
    layer = {
        "attn_norm": (d,), "attn_q": (d, d), "attn_k": (kv, d), "attn_v": (kv, d), "attn_output": (d, d),
        "ffn_norm": (d,), "ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f),
    }  # fmt: skip
    layers = range(config.num_hidden_layers)
    blocks = {f"blk.{i}.{name}.weight": shape for i in layers for name, shape in layer.items()}
    return {"token_embd.weight": (v, d), "output_norm.weight": (d,), **blocks, "output.weight": (v, d)}


def random_gguf(config: LaneformerConfig, dtype: Dtype, folder: Path = CACHE_FOLDER) -> Path:
    """A GGUF file, written once and kept: random matrices in 16 bits, norms of one, a vocabulary of dummy pieces."""
    import gguf

    c = config
    layout = f"{c.num_hidden_layers}x{c.hidden_size}x{c.intermediate_size}-{c.num_attention_heads}"
    path = folder / f"llama-{layout}-{c.num_key_value_heads}-{c.vocab_size}-{dtype}.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    print(f"writing {path}", file=sys.stderr)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    writer = gguf.GGUFWriter(temporary, "llama")
    shape = {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers, "feed_forward_length": c.intermediate_size,
        "head_count": c.num_attention_heads, "head_count_kv": c.num_key_value_heads,
        "layer_norm_rms_eps": c.norm_eps, "rope_dimension_count": c.head_dim, "vocab_size": c.vocab_size,
    }  # fmt: skip
    for name, value in shape.items():
        getattr(writer, f"add_{name}")(value)
    add_dummy_vocabulary(writer, c.vocab_size)
    rng = np.random.default_rng(0)
    for name, size in gguf_shapes(c).items():
        values = rng.standard_normal(size, np.float32) * np.float32(c.initializer_range)
        if len(size) == 1:
            writer.add_tensor(name, np.ones(size, np.float32))
        elif dtype == "fp16":
            writer.add_tensor(name, values.astype(np.float16))
        else:  # the upper half of a float32; truncation instead of rounding does not matter here
            upper = np.ascontiguousarray(values.view(np.uint16)[:, 1::2])
            writer.add_tensor(name, upper.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    temporary.rename(path)
    return path


def add_dummy_vocabulary(writer: Any, vocab_size: int) -> None:
    """The least that llama.cpp loads as a SentencePiece vocabulary: control ids, 256 bytes, then pieces."""
    from gguf import TokenType

    control = [("<unk>", TokenType.UNKNOWN), ("<s>", TokenType.CONTROL), ("</s>", TokenType.CONTROL)]
    in_bytes = [(f"<0x{value:02X}>", TokenType.BYTE) for value in range(256)]
    pieces = ((f"piece{i}", TokenType.NORMAL) for i in itertools.count())
    tokens = list(itertools.islice(itertools.chain(control, in_bytes, pieces), vocab_size))
    writer.add_tokenizer_model("llama")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([-float(i) for i in range(vocab_size)])
    writer.add_token_types([kind for _, kind in tokens])


class TransformersLlama(Baseline):
    """LlamaForCausalLM with random weights and SDPA attention: a plain loop over forward, static or growing cache."""

    def __init__(self, config: LaneformerConfig, dtype: Dtype, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        torch.set_default_dtype(torch.bfloat16 if dtype == "bf16" else torch.float16)
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                 "vocab_size", "max_position_embeddings")  # fmt: skip
        shape = transformers.LlamaConfig(**{n: getattr(config, n) for n in names}, tie_word_embeddings=False)
        self.torch = torch
        self.model: Any = transformers.LlamaForCausalLM(shape).eval()
        best = self.choose({
            "growing": lambda length: transformers.DynamicCache(config=shape),
            "static": lambda length: transformers.StaticCache(config=shape, max_cache_len=length),
        })  # fmt: skip
        parameters = sum(p.numel() for p in self.model.parameters()) - self.model.get_input_embeddings().weight.numel()
        self.facts = {
            "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
            "settings": f"{best} cache, {self.model.config._attn_implementation} attention",
            "weight_bytes_per_token": parameters * 2,
        }

    def reset(self, length: int) -> None:
        self.cache = self.way(length)

    def evaluate(self, ids: list[int]) -> int:
        inputs = self.torch.tensor([ids])
        logits = self.model(input_ids=inputs, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        return int(logits[0, -1].argmax())


CANDIDATES: dict[str, Any] = {"laneformer": OurEngine, "llamacpp": LlamaCpp, "transformers": TransformersLlama}

if __name__ == "__main__":
    tyro.cli(main)
