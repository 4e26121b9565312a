"""Load a model from a path or from tensors, and choose its decoder."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..config import LaneformerConfig
from ..supports import refuse_other_layers
from ..tensors import AS_IN_FILE, MATRIX_DTYPES, Tensor, dtype_name
from .cpu.decoder import CpuDecoder
from .cpu.packed import PackedWeights
from .cpu.random_tensors import RandomTensors
from .decoder import Decoder
from .device import cuda_devices
from .draft_model import DraftSource, load_draft_model
from .folder import check_tables, read_checkpoint, with_context
from .options import one_of

log = logging.getLogger(__name__)


def read_model(
    path: str | Path,
    device: str,
    dtype: str,
    *,
    threads: int | None = None,
    cache: bool = True,
    context_tokens: int | None = None,
    lanes: int | None = None,
    draft: str | Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of `Engine` for a folder or a GGUF file; ValueError for a bad one.

    cache: keep the CPU's packed weights in `path`/.packed (or the user's cache directory) for the next start,
        for the four combinations of threads and dtype used last.
    context_tokens: replaces the config's max_position_embeddings.
    lanes: of a Llama-family model; default: as many as share threads evenly (GPUs: up to 8) and divide its
        heads and MLP rows.
    draft: a small model with the same vocabulary that drafts in place of the model's own head; the output
        stays the same.
    """
    gpus = len(cuda_devices(device))
    checkpoint = read_checkpoint(Path(path), lanes, threads, dtype, gpus)
    config = checkpoint.config
    if context_tokens is not None:
        if context_tokens > config.max_position_embeddings:
            log.warning(
                "context_tokens = %d: the model knows %d positions; what it writes beyond them may mean nothing",
                context_tokens,
                config.max_position_embeddings,
            )
        config = with_context(config, context_tokens, options.get("kv_dtype", "auto"))
    check_tables(config)
    if cache and not gpus:
        options["packed"] = PackedWeights(Path(path), checkpoint.files)
    if draft is not None:
        options["draft"] = DraftSource(Path(draft), checkpoint.tokenizer, cache)
    return {
        "config": config,
        "tensors": checkpoint.tensors,
        "device": device,
        "dtype": checkpoint.dtype if dtype == "auto" else dtype,
        "threads": threads,
        "eos_ids": checkpoint.eos_ids,
        "tokenizer": checkpoint.tokenizer,
        "tokenizer_config": checkpoint.tokenizer_config,
        "sampling_defaults": checkpoint.sampling_defaults,
        **options,
    }


def random_tensors(config: LaneformerConfig, dtype: str, seed: int) -> RandomTensors:
    # int8 and int4 are made of the bf16 weights of the same seed
    one_of("dtype of random weights", dtype, [name for name in MATRIX_DTYPES if name != AS_IN_FILE])
    return RandomTensors(config, "bf16" if dtype in ("int8", "int4") else dtype, seed)


def load_decoder(
    config: LaneformerConfig,
    tensors: Mapping[str, Tensor],
    device: str,
    dtype: str,
    *,
    draft: DraftSource | None = None,
    **options: Any,
) -> Decoder:
    """Load the model; ValueError for options that its device does not have."""
    dtype = dtype_name(dtype)
    one_of("dtype", dtype, ("auto", *MATRIX_DTYPES))
    devices = cuda_devices(device)
    if devices:
        return load_cuda_decoder(config, tensors, dtype, devices, draft, **options)
    decoder = CpuDecoder(config, tensors, dtype, **options)
    if draft is not None:
        try:
            decoder.draft_model = load_draft_model(decoder, config, draft)
        except BaseException:
            decoder.close()
            raise
    return decoder


def load_cuda_decoder(
    config: LaneformerConfig,
    tensors: Mapping[str, Tensor],
    dtype: str,
    devices: Sequence[str],
    draft: DraftSource | None,
    cache_dir: Path | None = None,
    cache_dir_bytes: int | None = None,
    math: str = "auto",
    **options: Any,
) -> Decoder:
    refuse_other_layers(config, "the CUDA engine", "use device = 'cpu'")
    if draft is not None:
        raise ValueError(
            f"draft = {str(draft.path)!r}: a draft model runs on the CPU alone; use device = 'cpu'"
        )
    if cache_dir is not None:
        raise ValueError(
            "cache_dir keeps the CPU engine's prefixes; use device = 'cpu', or no cache_dir"
        )
    from .cuda.decoder import CudaDecoder  # imports torch

    math = "exact" if math == "fast" else math
    return CudaDecoder(config, tensors, dtype, devices, math=math, **options)
