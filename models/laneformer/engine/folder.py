"""A Hugging Face folder as memory-mapped tensors: read, named, and checked before anything is computed.

safetensors is a length, a JSON header and raw bytes, so it is mapped directly: numpy has no bfloat16, and the
engine needs the bits as they are, without a copy and without torch. The rotary tables are computed here, too.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open

from ..config import LaneformerConfig, plain_name
from ..llama.config import lanes_for, lanes_for_gpus
from ..llama.gguf import GgufFile
from ..llama.tensors import laneformer_of
from ..llama.tokenizer import tokenizer_of
from ..llama.variant import variant_of
from ..old_spellings import MODEL_TYPES, modern_spelling
from ..ropes import plain, stretch_llama3
from ..tensors import AS_IN_FILE, STORED_TYPES, Tensor, check_shapes, weight_files
from .decoder import KV_BYTES
from .machine import memory_bytes, this_machine
from .options import sampling_defaults

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """Everything the engine takes from a folder; tensor names are those of the plain model, without prefix."""

    config: LaneformerConfig
    tensors: Mapping[str, Tensor]
    eos_ids: tuple[int, ...]
    files: list[Path]  # where the tensors are mapped from
    tokenizer: Tokenizer | None
    tokenizer_config: dict[str, Any]  # Hugging Face's, with the chat template
    sampling_defaults: dict[str, Any]  # options of the model's makers
    dtype: str = "auto"  # what "auto" means for this checkpoint


def is_gguf(path: Path) -> bool:
    """Whether it is a GGUF file by its first bytes: Ollama's have no suffix."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_checkpoint(
    folder: Path, lanes: int | None = None, threads: int | None = None, dtype: str = "auto", gpus: int = 0
) -> Checkpoint:
    """Read and check a folder with `config.json` and `model*.safetensors`, or a GGUF file;
    ValueError for bad ones.

    lanes: of a model that has none of its own (llama/); None: as many as suit `threads` threads, default all
    cores, or `gpus`. dtype: the engine's option; a GGUF file's tensors are widened for it.
    """
    if is_gguf(folder):
        return read_gguf(folder, lanes, threads, dtype, gpus)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder with config.json and model*.safetensors, nor a GGUF file")
    values = read_json(folder / "config.json")
    files = weight_files(folder)
    stored = {name: tensor for path in files for name, tensor in read_safetensors(path)}
    if values.get("model_type") not in MODEL_TYPES:
        lanes = default_lanes(values, threads, gpus) if lanes is None else lanes
        config, tensors = laneformer_of(values, stored, lanes)
        kind = AS_IN_FILE if tensors.has_blocks else "auto"
        return Checkpoint(
            config, tensors, eos_ids(folder, values, config), files, *text_files(folder), dtype=kind
        )
    config = config_of(values)
    if lanes not in (None, config.num_lanes):
        raise ValueError(
            f"lanes = {lanes}: this model was trained with {config.num_lanes}; leave the option out"
        )
    own = {plain_name(name): tensor for name, tensor in stored.items()}
    check_shapes("the checkpoint", {name: t.values.shape for name, t in own.items()}, config.tensor_shapes())
    return Checkpoint(config, own, eos_ids(folder, values, config), files, *text_files(folder))


def with_context(config: LaneformerConfig, tokens: int, kv_dtype: str = "auto") -> LaneformerConfig:
    """The config with this context; ValueError where the machine has no memory for it."""
    drafts = 4 * config.num_nextn_predict_layers * config.head_dim * config.num_key_value_heads * tokens
    needed = (
        config.cached_bytes(tokens, *KV_BYTES.get(kv_dtype, KV_BYTES["fp16"]))
        + drafts
        + 4 * config.head_dim * tokens
    )
    if needed > (there := memory_bytes()):
        raise ValueError(
            f"context_tokens = {tokens} needs {needed / 1e9:,.1f} GB of keys, values, rotary tables; "
            f"this machine has {there / 1e9:,.1f} GB"
        )
    return dataclasses.replace(config, max_position_embeddings=tokens)


def default_lanes(values: Mapping[str, Any], threads: int | None, gpus: int) -> int:
    return lanes_for_gpus(values, gpus) if gpus else lanes_for(values, threads or this_machine().threads)


def read_gguf(path: Path, lanes: int | None, threads: int | None, dtype: str, gpus: int) -> Checkpoint:
    """A GGUF file; a tokenizer.json beside it, with what belongs to it, goes before the
    tokenizer in the file.
    """
    file = GgufFile(path, dtype, blocks=not gpus)
    lanes = default_lanes(file.config, threads, gpus) if lanes is None else lanes
    config, tensors = laneformer_of(file.config, file, lanes, from_gguf=True)
    tokenizer, tokenizer_config, sampling = text_files(path.parent)
    if tokenizer is None:
        tokenizer, tokenizer_config, sampling = tokenizer_of(file.metadata), file.tokenizer_config(), {}
    return Checkpoint(
        config,
        tensors,
        tuple(file.eos_ids()),
        file.files,
        tokenizer,
        tokenizer_config,
        sampling,
        file.dtype,
    )


def text_files(folder: Path) -> tuple[Tokenizer | None, dict[str, Any], dict[str, Any]]:
    """The folder's tokenizer, tokenizer_config.json with the chat template, and sampling defaults."""
    values, template = read_optional(folder / "tokenizer_config.json"), folder / "chat_template.jinja"
    if template.is_file():  # where newer folders keep it
        values["chat_template"] = template.read_text()
    return read_tokenizer(folder), values, sampling_defaults(read_optional(folder / "generation_config.json"))


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    try:
        values = json.loads(path.read_text())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds a {type(values).__name__}, expected a JSON object")
    return values


def read_optional(path: Path) -> dict[str, Any]:
    """`read_json`; empty where there is no such file."""
    return read_json(path) if path.exists() else {}


def config_of(values: dict[str, Any]) -> LaneformerConfig:
    """The architecture in a `config.json`; other keys are Transformers' bookkeeping,
    unless they look misspelt.
    """
    known = [field.name for field in dataclasses.fields(LaneformerConfig)]
    values = modern_spelling(values)
    for key in values:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
        if key not in known and near and near[0] not in values:
            raise ValueError(f"unknown config key {key!r}; did you mean {near[0]!r}?")
    missing = [
        name for name in ("hidden_size", "num_hidden_layers", "num_lanes", "vocab_size") if name not in values
    ]
    if missing:
        raise ValueError(f"config.json lacks {missing}")
    try:
        return LaneformerConfig.from_dict({name: values[name] for name in known if name in values})
    except TypeError as error:
        raise ValueError(f"config.json holds a value of the wrong type: {error}") from None


def eos_ids(folder: Path, config_values: dict[str, Any], config: LaneformerConfig) -> tuple[int, ...]:
    """Where generation stops by itself: `generation_config.json`, else `config.json`; one id or a list."""
    found = read_optional(folder / "generation_config.json").get("eos_token_id")
    found = config_values.get("eos_token_id") if found is None else found
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise ValueError(
                f"eos_token_id {token!r} is not a token id between 0 and {config.vocab_size - 1}"
            )
    return tuple(ids)


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Names and mapped tensors of one file; ValueError when it is cut short or holds another element type."""
    try:
        safe_open(path, "np")  # checks the header: every tensor's bytes follow those of the one before
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated, or has no valid safetensors header: {error}") from None
    raw = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    types = {stored.safetensors: (dtype, stored.element) for dtype, stored in STORED_TYPES.items()}
    for name, entry in json.loads(raw[8:start].tobytes()).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in types:
            raise ValueError(
                f"{path}: tensor {name} has type {entry['dtype']}; the engine reads {sorted(types)}"
            )
        dtype, element = types[entry["dtype"]]
        begin, end = entry["data_offsets"]
        values = raw[start + begin : start + end].view(element).reshape(entry["shape"])
        yield (
            name,
            Tensor(dtype, np.require(values, requirements="A")),
        )  # a copy where the file is not aligned


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer.json; None where there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from None
    tokenizer.no_truncation()  # many published files keep that of their training
    tokenizer.no_padding()
    return tokenizer


def rope_tables(config: LaneformerConfig) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin (context, d/2) float32, bit for bit those of model.py (each float32 step rounded once);
    of `config.ropes` one table after the other, (ropes, context, d/2).
    """
    context = config.max_position_embeddings
    if config.ropes:
        pairs = [rope.of_pairs(context, config.head_dim // 2) for rope in config.ropes]
        tables = [cos_and_sin(np.array(pair[0], np.float32), context) for pair in pairs]
        scales = [np.array(pair[1], np.float32) for pair in pairs]
        cosine, sine = (
            np.stack([table[i] * scale for table, scale in zip(tables, scales, strict=True)]) for i in (0, 1)
        )
        return cosine, sine
    frequency = np.array(plain(config.rope_theta, config.head_dim).frequencies, np.float32)
    return cos_and_sin(stretch_llama3(frequency, config.rope_scaling), context)


def cos_and_sin(frequency: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    positions = np.arange(context, dtype=np.float32)
    angle = (positions[:, None] * frequency).astype(np.float32).astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def query_scales(config: LaneformerConfig) -> np.ndarray | None:
    """What queries are multiplied with by position, (context,) float32; None where that is 1."""
    growth = variant_of(config).query_growth
    if growth is None:
        return None
    grows, length = growth
    turns = np.floor(np.arange(config.max_position_embeddings, dtype=np.float32) / np.float32(length))
    return (1 + np.float32(grows) * np.log(1 + turns)).astype(np.float32)
