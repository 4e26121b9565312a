"""Read a GGUF file as a Hugging Face folder: config, tensors by name, tokenizer, chat template.

The file is mapped, and tensors are read or widened one at a time: a model is never whole in memory
twice. Names, shapes and order of rows are those of Transformers.
"""

from __future__ import annotations

import functools
import os
import re
import struct
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tensors import AS_IN_FILE, LazyTensors, Tensor, TensorSource
from .config import why_not
from .gguf_values import ARCHITECTURES, LONGROPE, ROPE_FACTORS, config_values
from .vocabulary import Vocabulary

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from gguf.gguf_reader import ReaderField

# whose rows of queries and keys the converter permutes
PERMUTED = ("llama", "smollm3", "granite", "mistral3")
STORED = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
QUANTIZED = (
    "Q8_0",
    "Q6_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
)
GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WIDENED_BYTES = 1 << 18  # of blocks at a time: with what comes of them they stay in a core's cache
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
}
OWN_NAMES: dict[str, dict[str, str]] = {  # of an architecture
    "olmo2": POST_NORMS,
    "gemma3": {**POST_NORMS, "ffn_norm": "pre_feedforward_layernorm"},
    "qwen3moe": EXPERTS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt-oss": {
        **EXPERTS,
        "attn_sinks": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    },
}
NO_WEIGHTS = (ROPE_FACTORS, *LONGROPE.values())


class GgufFile(LazyTensors):
    """Tensors by their Hugging Face names, made on access; `metadata` is the file's.

    Args:
        dtype: Type that the engine holds matrices in, "gguf" for their blocks; decides how the embedding
            of a quantised file is widened.
        blocks: Whether "auto" may mean "gguf".
    """

    def __init__(self, path: Path, dtype: str = "auto", blocks: bool = False):
        """Open the file.

        Raises:
            ValueError: It is no GGUF file, or has types or tensors that the engine cannot read.
        """
        reader, self.files = open_file(path), [path]
        self.metadata = {name: contents_of(f) for name, f in reader.fields.items() if f.types}
        self.architecture = self.metadata.get("general.architecture")
        tensors = list(reader.tensors)
        # the metadata of a split model is the first part's
        if (count := self.metadata.get("split.count", 1)) > 1:
            self.files = parts_of(path, count)
            tensors += [tensor for part in self.files[1:] for tensor in open_file(part).tensors]
        if self.metadata.get("general.type") == "adapter":
            raise ValueError(
                f"{path} is an adapter (LoRA), no model; merge it into its model, as llama.cpp's llama-export-lora does"
            )
        if self.architecture not in ARCHITECTURES:
            raise ValueError(
                f"{path}: architecture {self.architecture!r} is not read"
                f"{why_not(str(self.architecture), ARCHITECTURES, {})}; {tuple(ARCHITECTURES)} are"
            )
        stored: dict[str, ReaderTensor] = {hf_name(t.name, self.architecture): t for t in tensors}
        for tensor in tensors:
            if (kind := tensor.tensor_type.name) not in (*STORED, *QUANTIZED):
                raise ValueError(
                    f"{path}: {tensor.name} is {kind}; the engine reads {[*STORED, *QUANTIZED]}. Of the smallest files "
                    "of a model take Q4_K_M or IQ4_XS"
                )
        self.dtype = best_dtype(stored, blocks) if dtype == "auto" else dtype
        try:
            self.config = config_values(self.metadata, stored)
            self.vocabulary = Vocabulary(self.metadata, self.config["vocab_size"])
        except (TypeError, ZeroDivisionError) as error:
            raise ValueError(f"{path}: a field holds a value of the wrong type: {error}") from None
        self.sources = {
            name: self._source(name, tensor)
            for name, tensor in stored.items()
            if name not in NO_WEIGHTS
        }

    def _source(self, name: str, stored: ReaderTensor) -> TensorSource:
        kind = stored.tensor_type.name
        if kind in STORED or self.dtype == AS_IN_FILE:
            dtype = STORED.get(kind, kind.lower())
        else:  # an embedding is held as it comes
            half = name.startswith("model.embed") and self.dtype not in ("bf16", "fp32")
            dtype = "fp16" if half else "fp32"
        shape = tuple(int(n) for n in reversed(stored.shape))
        return TensorSource(dtype, shape, functools.partial(self._load, name, stored, dtype))

    def _load(self, name: str, stored: ReaderTensor, kind: str) -> Tensor:
        data = stored.data
        if self.architecture in PERMUTED and (heads := self._heads(name)):
            # llama.cpp's converter made pairs of a head's two halves, for its own RoPE
            rows = data.reshape(heads, -1, 2, *data.shape[1:])
            data = rows.swapaxes(1, 2).reshape(data.shape)
        if stored.tensor_type.name in STORED:
            return Tensor(kind, data if kind == "fp32" else data.view(np.uint16))
        # the engine holds blocks, and widens those of an embedding apart
        if self.dtype == AS_IN_FILE:
            return Tensor(kind, data)
        return Tensor(kind, widen(data, stored.tensor_type, kind))

    @property
    def sampling(self) -> dict[str, Any]:
        names = {
            "temp": "temperature",
            "top_k": "top_k",
            "top_p": "top_p",
            "min_p": "min_p",
            "penalty_repeat": "repetition_penalty",
        }
        values = {name: self.metadata.get(f"general.sampling.{key}") for key, name in names.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _heads(self, name: str) -> int:
        key = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(
            name.split(".")[-2], ""
        )
        return int(self.config.get(key, 0))


def best_dtype(stored: dict[str, ReaderTensor], blocks: bool) -> str:
    """Return the type of most weights, for dtype="auto"."""
    sizes: Counter[str] = Counter()
    for name, tensor in stored.items():
        # embedding and head do not count
        sizes[tensor.tensor_type.name] += int(tensor.n_elements) if ".layers." in name else 0
    # quantised weights become int8 where the engine does not hold blocks
    return STORED.get(sizes.most_common(1)[0][0], AS_IN_FILE if blocks else "int8")


def widen(data: np.ndarray, kind: Any, dtype: str) -> np.ndarray:
    from gguf.quants import dequantize

    def widen(rows: np.ndarray) -> np.ndarray:
        wide = dequantize(rows, kind)
        return wide if dtype == "fp32" else wide.astype(np.float16).view(np.uint16)

    # a few rows at a time, on all cores
    whole = data.reshape(-1, data.shape[-1])
    cuts = range(
        WIDENED_BYTES // whole.shape[1] + 1, len(whole), WIDENED_BYTES // whole.shape[1] + 1
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = np.concatenate(list(pool.map(widen, np.split(whole, cuts))))
    return rows.reshape(*data.shape[:-1], rows.shape[1])


def parts_of(path: Path, count: int) -> list[Path]:
    """Return the files of a model in `count` parts, from the path of the first.

    Raises:
        ValueError: The path is another part's, or parts are missing.
    """
    match = re.fullmatch(r"(.*)-00001-of-\d{5}\.gguf", path.name)
    if not match:
        raise ValueError(
            f"{path} is one of {count} parts; give the first, NAME-00001-of-{count:05}.gguf"
        )
    files = [path.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(
            f"{path} is one of {count} parts, of which {', '.join(missing)} are missing beside it"
        )
    return files


def open_file(path: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader, GGUFValueType
    except ModuleNotFoundError:
        raise ValueError(
            f"{path.name} needs the package gguf: pip install 'laneformer[gguf]'"
        ) from None

    class Reader(GGUFReader):
        """Vocabularies, which are arrays of a hundred thousand strings, in a tenth of the time."""

        def __setattr__(self, name: str, value: Any) -> None:
            # each access to a np.memmap takes microseconds, to a plain array less
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            item = GGUFValueType(self._get(orig_offs, np.uint32)[0])
            count, at = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
            if (
                item == GGUFValueType.ARRAY or self.byte_order == "S"
            ):  # nested, or of the other byte order
                return super()._get_field_parts(orig_offs, raw_type)
            parts: list[Any]
            if item == GGUFValueType.STRING:
                parts, at = find_strings(self.data, at, count)
            else:
                values = self._get(at, self.gguf_scalar_to_np[item], count)
                if len(values) < count:
                    raise ValueError(f"an array of {count} values goes beyond the file's end")
                # all in one part: a part for each would take a microsecond each
                parts, at = [values], at + values.nbytes
            types = [GGUFValueType(raw_type), *[item] * bool(count)]
            return at - orig_offs, parts, list(range(len(parts))), types

    try:
        return Reader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a GGUF file: {error}") from None


def contents_of(field: ReaderField) -> Any:
    parts: list[Any] = [field.parts[i] for i in field.data]
    if not parts or not isinstance(parts[0], bytes):
        return field.contents()
    return [part.decode() for part in parts]


def find_strings(data: np.ndarray, at: int, count: int) -> tuple[list[bytes], int]:
    """Return the bytes of `count` strings from `at` on, each after its length of 8 bytes; and their end."""
    strings, content, read_length = [], data.data, struct.Struct("<Q").unpack_from
    for i in range(count):
        try:
            (length,) = read_length(content, at)
        except struct.error:
            length = len(content)
        begin, at = at + 8, at + 8 + length
        if at > len(content):
            raise ValueError(f"string {i} of {count} goes beyond the file's end")
        # bytes, which the garbage collector does not visit: views double the time
        strings.append(bytes(content[begin:at]))
    return strings, at


def hf_name(name: str, architecture: str | None = None) -> str:
    """Return a GGUF tensor's name in Transformers; raise ValueError where no supported model has it."""
    if name in NO_WEIGHTS:
        return name
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    layer, part, kind = match.groups() if match else (None, "", "")
    names = GLOBAL_NAMES if layer is None else LAYER_NAMES | OWN_NAMES.get(str(architecture), {})
    if part not in names:
        raise ValueError(f"the file holds the tensor {name}, which no supported architecture has")
    return (
        f"{names[part]}.{kind}" if layer is None else f"model.layers.{layer}.{names[part]}.{kind}"
    )
