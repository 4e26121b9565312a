"""llama.cpp and ik_llama.cpp through their C interfaces, and GGUF files for it: random weights, converted types."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from laneformer import LaneformerConfig
from tools.bench.baselines import Baseline

# beside the environment, so that none of its packages changes
FOLDER = Path(sys.prefix) / "llama-cpp"
IK_FOLDER = Path(sys.prefix) / "ik-llama-cpp"
CACHE_FOLDER = Path.home() / ".cache" / "laneformer"
MAX_CONTEXT = 8192  # its keys and values are allocated at once


@functools.cache
def library() -> Any:
    """Return the module `llama_cpp`, silent; ImportError where it is not installed."""
    sys.path.append(str(FOLDER))
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    llama_cpp.kept_alive = silent  # C holds only its address
    return llama_cpp


class LlamaCpp(Baseline):
    """One llama_decode per token, the largest logit found by NumPy; flash attention on or off."""

    ways = ("flash attention", "plain attention")

    def __init__(
        self, source: LaneformerConfig | Path, kind: str, threads: int, context: int | None
    ):
        super().__init__()
        self.api, self.threads, self.length = self.load_library(), threads, 0
        self.path = as_gguf(source, kind)
        self.vocab_size, self.cache_width, self.weight_bytes, trained = sizes_of(self.path)
        self.context_tokens = context or min(trained, MAX_CONTEXT)
        self.context = functools.cache(self.make_context)
        self.about = f"{self.path.name}; {self.api.llama_print_system_info().decode().strip()}"

    def load_library(self) -> Any:
        api = library()
        self.version = f"llama-cpp-python {api.__version__}"
        return api

    def make_context(self, way: str) -> Any:
        options = self.api.llama_context_default_params()
        model_options = self.api.llama_model_default_params()
        options.n_ctx = self.context_tokens
        options.n_threads = options.n_threads_batch = self.threads
        self.set_way(way, options, model_options)
        model = self.api.llama_model_load_from_file(str(self.path).encode(), model_options)
        assert model, f"{self.version} cannot load {self.path}; delete it to write it again"
        return self.api.llama_init_from_model(model, options)

    def set_way(self, way: str, options: Any, model_options: Any) -> None:
        model_options.load_mode = self.api.LLAMA_LOAD_MODE_NONE  # its memory may have huge pages
        options.flash_attn_type = int(way == "flash attention")

    def rewind(self, way: str, length: int) -> None:
        memory = self.api.llama_get_memory(self.context(way))
        removed = self.api.llama_memory_seq_rm(memory, 0, length, -1)
        assert removed, f"{self.version} cannot forget what follows {length} ids"
        self.length = length

    def evaluate(self, way: str, ids: list[int]) -> int:
        """In batches as large as llama.cpp takes them."""
        context = self.context(way)
        step = self.api.llama_n_batch(context)
        for first in range(0, len(ids), step):
            part = ids[first : first + step]
            tokens = (ctypes.c_int32 * len(part))(*part)  # the batch holds only its address
            status = self.api.llama_decode(context, self.api.llama_batch_get_one(tokens, len(part)))
            assert status == 0, f"llama_decode failed with status {status}"
            self.length += len(part)
        logits = self.api.llama_get_logits_ith(context, -1)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def count_cached_bytes(self, positions: int) -> int:
        return 2 * self.cache_width * positions


class IkLlama(LlamaCpp):
    """ik_llama.cpp, whose C interface is llama.cpp's of 2024; tensors repacked for this CPU or as they are."""

    ways = ("repacked", "as they are")

    def load_library(self) -> Any:
        sys.path.append(str(IK_FOLDER))
        import ik_llama_cpp
        from ik_llama_cpp import _ctypes_api as api

        # what the package does not declare, under llama.cpp's names
        library, pointer = api._lib, ctypes.c_void_p
        library.llama_print_system_info.restype = ctypes.c_char_p
        library.llama_batch_get_one.restype = api.llama_batch
        api.llama_print_system_info = library.llama_print_system_info
        api.llama_n_batch = lambda context: library.llama_n_batch(pointer(context))
        api.llama_get_memory = pointer
        api.llama_memory_seq_rm = library.llama_kv_cache_seq_rm
        api.llama_batch_get_one = lambda tokens, n: library.llama_batch_get_one(
            tokens, n, self.length, 0
        )
        self.version = f"ik-llama-cpp-python {ik_llama_cpp.__version__}"
        return api

    def set_way(self, way: str, options: Any, model_options: Any) -> None:
        model_options.repack_tensors = way == "repacked"
        options.flash_attn = True


def sizes_of(path: Path) -> tuple[int, int, int, int]:
    """Return vocabulary, K and V elements a position, weight bytes a token reads, context."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}
    expert_share = 1.0  # of all experts
    if "expert_count" in fields:
        expert_share = fields["expert_used_count"].contents() / fields["expert_count"].contents()
    read: dict[str, float] = {}
    width = 0
    for t in reader.tensors:
        read[t.name] = int(t.n_bytes) * (expert_share if "_exps." in t.name else 1)
        width += int(t.shape[1]) if t.name.endswith(("attn_k.weight", "attn_v.weight")) else 0
        if t.name == "token_embd.weight":
            vocab_size = int(t.shape[1])
    if "output.weight" in read:
        del read["token_embd.weight"]
    return vocab_size, width, int(sum(read.values())), int(fields["context_length"].contents())


def as_gguf(path: Path | LaneformerConfig, kind: str, folder: Path = CACHE_FOLDER) -> Path:
    """Return the model as GGUF in this type of weights; "gguf" is the file itself.

    llama.cpp converts a copy once. Types beyond 16 bits go through bf16: all have the same weights.
    """
    if isinstance(path, LaneformerConfig):
        path = random_gguf(path, folder)
    if kind == "gguf":
        return path
    import gguf

    matrices = [
        t for t in gguf.GGUFReader(path).tensors if len(t.shape) > 1 and t.name.endswith(".weight")
    ]
    # a router stays in F32
    types = {t.tensor_type.name for t in matrices if ".ffn_gate_inp." not in t.name}
    if kind == "bf16" and types == {"BF16"}:
        return path
    if types != {"BF16"} and kind != "bf16":
        return as_gguf(as_gguf(path, "bf16", folder), kind, folder)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]

    def convert(temporary: Path) -> None:
        api = library()
        options = api.llama_model_quantize_default_params()
        options.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind.upper()}")
        options.allow_requantize, options.nthread = True, os.cpu_count() or 1
        status = api.llama_model_quantize(
            str(path).encode(), str(temporary).encode(), ctypes.byref(options)
        )
        if status:
            raise RuntimeError(f"llama.cpp cannot convert {path} to {kind}: status {status}")

    return write_once(folder / f"{path.stem.removesuffix('-bf16')}-{digest}-{kind}.gguf", convert)


def write_once(path: Path, write: Callable[[Path], None]) -> Path:
    """Return the file; if missing, write it under another name first."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        print(f"writing {path}", file=sys.stderr)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        write(temporary)
        temporary.rename(path)
    return path


def gguf_shapes(config: LaneformerConfig) -> dict[str, tuple[int, ...]]:
    """Return tensor shapes of a Llama with this Laneformer's matrices, by llama.cpp's names."""
    d, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    kv = config.num_key_value_heads * config.head_dim
    layer = {
        "attn_norm": (d,),
        "attn_q": (d, d),
        "attn_k": (kv, d),
        "attn_v": (kv, d),
        "attn_output": (d, d),
        "ffn_norm": (d,),
        "ffn_gate": (f, d),
        "ffn_up": (f, d),
        "ffn_down": (d, f),
    }
    layers = range(config.num_hidden_layers)
    blocks = {f"blk.{i}.{name}.weight": shape for i in layers for name, shape in layer.items()}
    return {
        "token_embd.weight": (v, d),
        "output_norm.weight": (d,),
        **blocks,
        "output.weight": (v, d),
    }


def random_gguf(config: LaneformerConfig, folder: Path = CACHE_FOLDER) -> Path:
    """Return a cached GGUF file: random bf16 matrices, norms of one, dummy pieces."""
    c = config
    layout = f"{c.num_hidden_layers}x{c.hidden_size}x{c.intermediate_size}-{c.num_attention_heads}"
    name = f"llama-{layout}-{c.num_key_value_heads}-{c.vocab_size}-bf16.gguf"
    return write_once(folder / name, lambda temporary: write_random(temporary, config))


def write_random(path: Path, config: LaneformerConfig) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.dimension_count": config.head_dim,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"llama.{name}", size)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    add_dummy_vocabulary(writer, config.vocab_size)
    rng = np.random.default_rng(0)
    for name, shape in gguf_shapes(config).items():
        if len(shape) == 1:
            writer.add_tensor(name, np.ones(shape, np.float32))
            continue
        values = rng.standard_normal(shape, np.float32) * np.float32(config.initializer_range)
        # the upper half of a float32; truncation instead of rounding does not matter here
        upper = np.ascontiguousarray(values.view(np.uint16).reshape(*shape, 2)[..., 1])
        writer.add_tensor(name, upper.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    write_file(writer)


def write_file(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_dummy_vocabulary(writer: Any, vocab_size: int) -> None:
    """Add the least SentencePiece vocabulary that llama.cpp loads: control ids, bytes, pieces."""
    from gguf import TokenType

    kinds = {"<unk>": TokenType.UNKNOWN, "<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL}
    kinds |= {f"<0x{value:02X}>": TokenType.BYTE for value in range(256)}
    kinds |= {f"piece{i}": TokenType.NORMAL for i in range(vocab_size - len(kinds))}
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(list(kinds))
    writer.add_token_scores([-float(i) for i in range(vocab_size)])
    writer.add_token_types(list(kinds.values()))
