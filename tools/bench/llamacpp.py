"""llama.cpp through its C interface, and the GGUF files that it reads: random weights, and other
types of a model's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from laneformer import LaneformerConfig
from tools.bench.decode_baselines import CHOICE_TOKENS, Baseline
from tools.bench.harness import version

FOLDER = Path(sys.prefix) / "llama-cpp"  # beside the environment, so that none of its packages changes
CACHE_FOLDER = Path.home() / ".cache" / "laneformer"
BATCH_POSITIONS = 512  # of each sequence
MAX_SEQUENCES = 8
DEVIATION = 0.02  # of random weights, as at the start of training
MAX_CONTEXT = 8192  # its keys and values are allocated at once


@functools.cache
def library() -> Any:
    """The module `llama_cpp`, silent. ImportError where it is not installed."""
    sys.path.append(str(FOLDER))
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    llama_cpp.kept_alive = silent  # C holds only its address
    return llama_cpp


class LlamaCpp(Baseline):
    """One llama_decode per token, the largest logit found by NumPy; flash attention on or off."""

    def __init__(self, source: LaneformerConfig | Path, kind: str, threads: int, context: int | None = None):
        super().__init__()
        self.api, self.threads = library(), threads
        if isinstance(source, LaneformerConfig):
            source = random_gguf(source, "fp16" if kind == "fp16" else "bf16")
        path = as_gguf(source, kind)
        self.vocab_size, self.cache_width, self.weight_bytes, trained = sizes_of(path)
        self.context_tokens = context or min(trained, MAX_CONTEXT)
        self.contexts: dict[bool, dict[str, Any]] = {}
        mode = self.load(path)
        self.facts = {
            "version": f"llama-cpp-python {version('llama-cpp-python')}",
            "about": f"{path.name}, load mode {mode}; {self.api.llama_print_system_info().decode().strip()}",
        }

    def load(self, path: Path) -> str:
        """Open the file in the faster load mode: a mapped file has small pages, memory of its own
        may get huge ones.
        """
        modes = {"mmap": self.api.LLAMA_LOAD_MODE_MMAP, "none": self.api.LLAMA_LOAD_MODE_NONE}
        opened, speeds = dict[str, Any](), dict[str, float]()
        for name, mode in modes.items():
            options = self.api.llama_model_default_params()
            options.load_mode = mode
            opened[name] = self.api.llama_model_load_from_file(str(path).encode(), options)
            if not opened[name]:
                raise RuntimeError(f"llama.cpp cannot load {path}; delete it, and it will be written again")
        for name in [*modes] * 3:
            self.model = opened[name]
            speeds[name] = max(speeds.get(name, 0.0), self.decode([5], CHOICE_TOKENS)["tokens_per_s"])
            self.forget()
        best = max(speeds, key=speeds.__getitem__)
        self.model = opened.pop(best)
        for other in opened.values():
            self.api.llama_model_free(other)
        return best

    def forget(self) -> None:
        for context in itertools.chain.from_iterable(ways.values() for ways in self.contexts.values()):
            self.api.llama_free(context)
        self.contexts, self.held, self.chosen = {}, {}, {}

    def ways(self, sequences: int) -> dict[str, Any]:
        several = sequences > 1
        if several not in self.contexts:
            self.contexts[several] = {
                "flash attention": self.context(self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED, several),
                "no flash attention": self.context(self.api.LLAMA_FLASH_ATTN_TYPE_DISABLED, several),
            }
        return self.contexts[several]

    def context(self, flash_attention: int, several: bool) -> Any:
        options = self.api.llama_context_default_params()
        options.n_ctx = MAX_SEQUENCES * BATCH_POSITIONS if several else self.context_tokens
        options.n_seq_max = MAX_SEQUENCES if several else 1
        options.n_threads = options.n_threads_batch = self.threads
        options.flash_attn_type = flash_attention
        return self.api.llama_init_from_model(self.model, options)

    def reset(self, way: Any, length: int) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(way), True)

    def rewind(self, way: Any, length: int) -> bool:
        return bool(self.api.llama_memory_seq_rm(self.api.llama_get_memory(way), 0, length, -1))

    def evaluate(self, way: Any, ids: list[int]) -> int:
        """In batches as large as llama.cpp takes them."""
        step = self.api.llama_n_batch(way)
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            tokens = (ctypes.c_int32 * len(part))(*part)  # the batch holds only its address
            self.check(self.api.llama_decode(way, self.api.llama_batch_get_one(tokens, len(part))))
        return int(self._logits(way, -1).argmax())

    def evaluate_each(self, way: Any, ids: list[int], position: int) -> list[int]:
        if position == 0:
            self.reset(way, BATCH_POSITIONS)
        rows = self.decode_batch(way, [(token, position, sequence) for sequence, token in enumerate(ids)])
        return [int(row.argmax()) for row in rows]

    def decode_batch(self, way: Any, tokens: list[tuple[int, int, int]]) -> list[np.ndarray]:
        """Of (id, position, sequence): the logits after each, float32 (V,), in llama.cpp's own memory."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, 1
            batch.seq_id[i][0] = sequence
        self.check(self.api.llama_decode(way, batch))
        self.api.llama_batch_free(batch)
        return [self._logits(way, i) for i in range(len(tokens))]

    def _logits(self, way: Any, index: int) -> np.ndarray:
        return np.ctypeslib.as_array(self.api.llama_get_logits_ith(way, index), (self.vocab_size,))

    def logits(self, ids: list[int]) -> np.ndarray:
        """After every position, float32 (len(ids), V), by its automatic choice of attention."""
        way = self.context(self.api.LLAMA_FLASH_ATTN_TYPE_AUTO, several=False)
        found = np.stack(self.decode_batch(way, [(token, i, 0) for i, token in enumerate(ids)]))
        self.api.llama_free(way)
        return found

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"llama_decode failed with status {status}")

    def cached_bytes(self, positions: int) -> int:
        return 2 * self.cache_width * positions


# --- files
# --------------------------------------------------------------------------------------------------------


def sizes_of(path: Path) -> tuple[int, int, int, int]:
    """Vocabulary, elements of keys and values a position (all layers), bytes of weights a
    token reads, and context.
    """
    import gguf

    reader = gguf.GGUFReader(path)
    tensors = {t.name: t for t in reader.tensors}
    tied = "output.weight" not in tensors
    said = {name.partition(".")[2]: f for name, f in reader.fields.items()}
    taken = (
        said["expert_used_count"].contents() / said["expert_count"].contents()
        if "expert_count" in said
        else 1
    )
    read = sum(
        int(t.n_bytes) * (taken if "_exps." in name else 1)
        for name, t in tensors.items()
        if tied or name != "token_embd.weight"
    )
    width = sum(
        int(t.shape[1]) for name, t in tensors.items() if name.endswith(("attn_k.weight", "attn_v.weight"))
    )
    context = said["context_length"].contents()
    return int(tensors["token_embd.weight"].shape[1]), width, int(read), int(context)


def as_gguf(path: Path, kind: str, folder: Path = CACHE_FOLDER) -> Path:
    """The model in this type of weights: the file itself, always with "gguf", or a copy that llama.cpp converts
    once and keeps.

    Others than 16-bit files go through bf16, so that every type is made of the same weights.
    """
    if kind == "gguf":
        return path
    import gguf

    wanted = "F16" if kind == "fp16" else kind.upper()
    matrices = [t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1 and t.name.endswith(".weight")]
    types = {t.tensor_type.name for t in matrices if ".ffn_gate_inp." not in t.name}  # a router stays in F32
    if kind in ("bf16", "fp16") and types == {wanted}:
        return path
    if types != {"BF16"} and kind != "bf16":
        return as_gguf(as_gguf(path, "bf16", folder), kind, folder)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    out = folder / f"{path.stem.removesuffix('-bf16')}-{digest}-{kind}.gguf"

    def convert(temporary: Path) -> None:
        api = library()
        options = api.llama_model_quantize_default_params()
        options.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{wanted}")
        options.allow_requantize, options.nthread = True, os.cpu_count() or 1
        status = api.llama_model_quantize(str(path).encode(), str(temporary).encode(), ctypes.byref(options))
        if status:
            raise RuntimeError(f"llama.cpp cannot convert {path} to {kind}: status {status}")

    return written_once(out, convert)


def written_once(path: Path, write: Callable[[Path], None]) -> Path:
    """The file, written under another name first; nothing to do where it exists."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    print(f"writing {path}", file=sys.stderr)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    write(temporary)
    temporary.rename(path)
    return path


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


def random_gguf(config: LaneformerConfig, dtype: str, folder: Path = CACHE_FOLDER) -> Path:
    """A GGUF file, written once and kept: random matrices in 16 bits, norms of one, a
    vocabulary of dummy pieces.
    """
    c = config
    layout = f"{c.num_hidden_layers}x{c.hidden_size}x{c.intermediate_size}-{c.num_attention_heads}"
    path = folder / f"llama-{layout}-{c.num_key_value_heads}-{c.vocab_size}-{dtype}.gguf"
    fields = {
        "context_length": c.max_position_embeddings, "embedding_length": c.hidden_size,
        "block_count": c.num_hidden_layers, "feed_forward_length": c.intermediate_size,
        "head_count": c.num_attention_heads, "head_count_kv": c.num_key_value_heads,
        "layer_norm_rms_eps": c.norm_eps, "rope_dimension_count": c.head_dim, "vocab_size": c.vocab_size,
    }  # fmt: skip
    return written_once(
        path, lambda temporary: write_random_gguf(temporary, "llama", fields, gguf_shapes(c), dtype)
    )


def write_random_gguf(
    path: Path, architecture: str, fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], dtype: str
) -> None:
    """fields: by names of GGUFWriter's methods, without `add_`. Biases, sinks and routers are float32, as in
    converted files.
    """
    import gguf

    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    add_dummy_vocabulary(writer, fields["vocab_size"])
    rng = np.random.default_rng(0)
    for name, size in shapes.items():
        values = rng.standard_normal(size, np.float32) * np.float32(DEVIATION)
        if name.endswith("norm.weight"):
            writer.add_tensor(name, np.ones(size, np.float32))
        elif len(size) == 1 or name.endswith(".bias") or ".ffn_gate_inp." in name:
            writer.add_tensor(name, values)
        elif dtype == "fp16":
            writer.add_tensor(name, values.astype(np.float16))
        else:  # the upper half of a float32; truncation instead of rounding does not matter here
            upper = np.ascontiguousarray(values.view(np.uint16).reshape(*size, 2)[..., 1])
            writer.add_tensor(name, upper.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    for step in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
        writer.close,
    ):
        step()


def add_dummy_vocabulary(writer: Any, vocab_size: int) -> None:
    """The least that llama.cpp loads as a SentencePiece vocabulary: control ids, 256 bytes, then pieces."""
    from gguf import TokenType

    kinds = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    kinds |= {f"<0x{value:02X}>": TokenType.BYTE for value in range(256)}
    kinds |= {f"piece{i}": TokenType.NORMAL for i in range(vocab_size - len(kinds))}
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(kinds))
    writer.add_token_scores([-float(i) for i in range(vocab_size)])
    writer.add_token_types(list(kinds.values()))
