"""Read a Hugging Face folder or a GGUF file as memory-mapped tensors; compute rotary tables."""

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
from ..llama.vocabulary import NORMAL, Vocabulary
from ..old_spellings import MODEL_TYPES, modern_spelling
from ..ropes import plain, stretch_llama3
from ..tensors import AS_IN_FILE, STORED_TYPES, Tensor, check_shapes, weight_files
from .decoder import KV_BYTES
from .machine import memory_bytes, this_machine
from .options import CONVERSATION_SAMPLING, GenerationOptions
from .text_files import TextFiles, read_json, read_optional, read_texts, refuse_pointer

if TYPE_CHECKING:
    from tokenizers import Tokenizer


MAX_CONTEXT = 2**31 - 1  # positions are 32-bit


@dataclass(frozen=True)
class Checkpoint:
    """Everything that the engine takes from a folder; tensor names have no prefix."""

    config: LaneformerConfig
    tensors: Mapping[str, Tensor]
    eos_ids: tuple[int, ...]
    files: list[Path]  # the files that the tensors are mapped from
    tokenizer: Tokenizer | None
    tokenizer_config: dict[str, Any]  # Hugging Face's, with the chat template
    sampling_defaults: dict[str, Any]  # recommended by the model's makers
    dtype: str = "auto"  # what "auto" means for this checkpoint


def is_gguf(path: Path) -> bool:
    # Ollama's files have no suffix
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def read_checkpoint(
    folder: Path,
    lanes: int | None = None,
    threads: int | None = None,
    dtype: str = "auto",
    gpus: int = 0,
) -> Checkpoint:
    """Read a folder with `config.json` and `model*.safetensors`, or a GGUF file; ValueError for a bad one.

    lanes: of a Llama-family model (llama/); None: as many as suit `threads` (default all cores) or `gpus`.
    dtype: the engine's option, to which a GGUF file's tensors are widened.
    """
    if is_gguf(folder):
        return read_gguf(folder, lanes, threads, dtype, gpus)
    refuse_adapter(folder)
    if not folder.is_dir():
        if folder.is_file():
            refuse_pointer(folder)
        raise ValueError(
            f"{folder} is not a folder with config.json and model*.safetensors, nor a GGUF file"
        )
    values = read_json(folder / "config.json")
    files = weight_files(folder)
    stored = {name: tensor for path in files for name, tensor in read_safetensors(path)}
    if values.get("model_type") not in MODEL_TYPES:
        lanes = default_lanes(values, threads, gpus) if lanes is None else lanes
        config, tensors = laneformer_of(values, stored, lanes)
        kind = AS_IN_FILE if tensors.has_blocks else "auto"
        return Checkpoint(
            config, tensors, eos_ids(folder, values, config), files, *read_texts(folder), dtype=kind
        )
    config = config_of(values)
    if lanes not in (None, config.num_lanes):
        raise ValueError(
            f"lanes = {lanes}: this model was trained with {config.num_lanes}; leave the option out"
        )
    weights = {plain_name(name): tensor for name, tensor in stored.items()}
    check_shapes(
        "the checkpoint", {n: w.values.shape for n, w in weights.items()}, config.tensor_shapes()
    )
    return Checkpoint(config, weights, eos_ids(folder, values, config), files, *read_texts(folder))


def refuse_adapter(folder: Path) -> None:
    """Raise ValueError for a LoRA adapter, alone or beside a model's weights."""
    # Transformers would add it to the weights, so ignoring it would give other outputs
    if not (folder / "adapter_config.json").is_file():
        return
    base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
    kind = (
        "an adapter beside a model"
        if (folder / "config.json").is_file()
        else "an adapter, no model"
    )
    raise ValueError(
        f"{folder} holds {kind} (adapter_config.json, of {base!r}), and adapters are not read; merge it into its model "
        "(PEFT's merge_and_unload), or remove it"
    )


def check_tables(config: LaneformerConfig) -> None:
    """Raise ValueError for a context whose rotary tables do not fit into memory."""
    tokens = config.max_position_embeddings
    needed = 24 * config.head_dim * tokens  # and the values they are computed from
    if tokens > MAX_CONTEXT or needed > memory_bytes():
        raise ValueError(
            f"a context of {tokens} tokens, as the model's files say, needs {needed / 1e9:,.1f} GB of rotary tables; "
            f"this machine has {memory_bytes() / 1e9:,.1f} GB. Give a smaller one as context_tokens"
        )


def with_context(config: LaneformerConfig, tokens: int, kv_dtype: str = "auto") -> LaneformerConfig:
    """Return the config with this context; ValueError where it does not fit into memory."""
    draft_bytes = (
        4 * config.num_nextn_predict_layers * config.head_dim * config.num_key_value_heads * tokens
    )
    needed_bytes = (
        config.cached_bytes(tokens, *KV_BYTES.get(kv_dtype, KV_BYTES["fp16"]))
        + draft_bytes
        + 4 * config.head_dim * tokens
    )
    if needed_bytes > (available_bytes := memory_bytes()):
        raise ValueError(
            f"context_tokens = {tokens} needs {needed_bytes / 1e9:,.1f} GB of keys, values, rotary tables; "
            f"this machine has {available_bytes / 1e9:,.1f} GB"
        )
    return dataclasses.replace(config, max_position_embeddings=tokens)


def default_lanes(values: Mapping[str, Any], threads: int | None, gpus: int) -> int:
    return (
        lanes_for_gpus(values, gpus)
        if gpus
        else lanes_for(values, threads or this_machine().threads)
    )


def read_gguf(
    path: Path, lanes: int | None, threads: int | None, dtype: str, gpus: int
) -> Checkpoint:
    file = GgufFile(path, dtype, blocks=not gpus)
    vocabulary = file.vocabulary
    lanes = default_lanes(file.config, threads, gpus) if lanes is None else lanes
    config, tensors = laneformer_of(file.config, file, lanes, from_gguf=True)
    # a tokenizer.json and its companions beside the file replace the file's own
    texts = read_texts(path.parent)
    sampling = {**CONVERSATION_SAMPLING, **file.sampling} if file.sampling else {}
    try:
        GenerationOptions(**sampling)
    except ValueError as error:
        raise ValueError(f"{path}: general.sampling says {error}") from None
    file_texts = TextFiles(texts.tokenizer, vocabulary.tokenizer_config(), sampling)
    if texts.tokenizer is None:
        texts = file_texts._replace(tokenizer=tokenizer_of(vocabulary))
    else:
        check_pieces(path, texts.tokenizer, vocabulary)
        texts = texts.fill_from(file_texts)
    return Checkpoint(
        config, tensors, tuple(vocabulary.eos_ids()), file.files, *texts, dtype=file.dtype
    )


def check_pieces(path: Path, tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Raise ValueError for a tokenizer whose ordinary pieces differ from the file's."""
    for i, (piece, kind) in enumerate(zip(vocabulary.pieces, vocabulary.types, strict=False)):
        if kind == NORMAL and (other := tokenizer.id_to_token(i)) != piece:
            raise ValueError(
                f"{path.with_name('tokenizer.json')} is not the tokenizer of {path.name}: id {i} is {other!r} there, "
                f"but {piece!r} in the file; put the model's own there, or none, or the file into a folder of its own"
            )


def config_of(values: dict[str, Any]) -> LaneformerConfig:
    names = [field.name for field in dataclasses.fields(LaneformerConfig)]
    values = modern_spelling(values)
    # Transformers writes other keys, too, so only one close to a known key is an error
    for key in values:
        near = difflib.get_close_matches(key, names, n=1, cutoff=0.85)
        if key not in names and near and near[0] not in values:
            raise ValueError(f"unknown config key {key!r}; did you mean {near[0]!r}?")
    missing = [
        name
        for name in ("hidden_size", "num_hidden_layers", "num_lanes", "vocab_size")
        if name not in values
    ]
    if missing:
        raise ValueError(f"config.json lacks {missing}")
    try:
        return LaneformerConfig.from_dict({name: values[name] for name in names if name in values})
    except TypeError as error:
        raise ValueError(f"config.json holds a value of the wrong type: {error}") from None


def eos_ids(
    folder: Path, config_values: dict[str, Any], config: LaneformerConfig
) -> tuple[int, ...]:
    """Return the end-of-text ids of `generation_config.json`, else of `config.json`."""
    ids = read_optional(folder / "generation_config.json").get("eos_token_id")
    if ids is None:
        ids = config_values.get("eos_token_id")
    if not isinstance(ids, list):
        ids = [] if ids is None else [ids]
    for token in ids:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise ValueError(
                f"eos_token_id {token!r} is not a token id between 0 and {config.vocab_size - 1}"
            )
    return tuple(ids)


def read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield names and mapped tensors of one file; ValueError for a truncated file or another element type."""
    refuse_pointer(path)
    try:
        # checks the header, and that every tensor's bytes follow those of the one before
        safe_open(path, "np")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{path} is truncated, or has no valid safetensors header: {error}"
        ) from None
    # a length, a JSON header, raw bytes: mapped here and not by the library, because numpy has no
    # bfloat16 and the engine needs the bits unchanged, without a copy
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
        # copies only where the file is not aligned
        yield name, Tensor(dtype, np.require(values, requirements="A"))


def rope_tables(config: LaneformerConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, float32 (context, d/2), or (ropes, context, d/2) with `config.ropes`."""
    # bit for bit those of model.py: each float32 step is rounded once
    context = config.max_position_embeddings
    if config.ropes:
        pairs = [rope.of_pairs(context, config.head_dim // 2) for rope in config.ropes]
        tables = [cos_and_sin(np.array(pair[0], np.float32), context) for pair in pairs]
        scales = [np.array(pair[1], np.float32) for pair in pairs]
        cosine, sine = (
            np.stack([table[i] * scale for table, scale in zip(tables, scales, strict=True)])
            for i in (0, 1)
        )
        return cosine, sine
    frequency = np.array(plain(config.rope_theta, config.head_dim).frequencies, np.float32)
    return cos_and_sin(stretch_llama3(frequency, config.rope_scaling), context)


def cos_and_sin(frequency: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    positions = np.arange(context, dtype=np.float32)
    angle = (positions[:, None] * frequency).astype(np.float32).astype(np.float64)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def query_scales(config: LaneformerConfig) -> np.ndarray | None:
    """Return the factor of queries at each position, float32 (context,); None where it is 1."""
    growth = variant_of(config).query_growth
    if growth is None:
        return None
    grows, length = growth
    turns = np.floor(
        np.arange(config.max_position_embeddings, dtype=np.float32) / np.float32(length)
    )
    return (1 + np.float32(grows) * np.log(1 + turns)).astype(np.float32)
