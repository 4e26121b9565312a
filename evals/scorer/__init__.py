"""One way to ask a model: the engine, Transformers or an OpenAI-compatible server, by the same calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro

from evals.scorer.base import (  # noqa: F401 - all that evaluations use stands here
    Answer,
    Answerer,
    AnyPrompt,
    Encoder,
    Prompt,
    Scorer,
    Scores,
    common_prefix,
    load_tokenizer,
    read_config,
    score_each,
)
from evals.tables import console
from records.files import JsonObject, file_sha256, model_sha256

AnswererFlags = Annotated[  # --backend, --device, ... as flags of the command itself
    Answerer,
    tyro.conf.arg(name="model", help="what runs the model: a library in this process, or a server"),
]
LOCAL = Answerer()


def resolve_device(device: str) -> str:
    """Resolve auto and cuda of --device; ValueError for a GPU that is not there."""
    from laneformer.engine.device import has_driver

    gpus: list[str] = []
    # importing torch takes seconds: without a driver there is no GPU
    if has_driver():
        import torch

        if torch.cuda.is_available():
            gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if "cuda" in device and not gpus:
        raise ValueError(
            f"device = {device!r}: no GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES, --gpu of the watcher); "
            "use device = 'auto' to fall back to the CPU"
        )
    devices = ["cpu", *gpus]
    if device in ("auto", "cuda"):
        return gpus[0] if gpus else "cpu"
    if not set(device.split(",")) <= set(devices):
        raise ValueError(f"device = {device!r} is unknown; choose auto, {', '.join(devices)}")
    return device


def choose(folder: Path, answerer: Answerer = LOCAL) -> tuple[str, str, str]:
    """Return (backend, device, why) for a model folder."""
    from laneformer.llama.families import FAMILIES

    model_type = read_config(folder).get("model_type")
    reason = f"--backend {answerer.backend}"
    if (
        answerer.backend == "engine"
    ):  # its auto is the CPU, and a list of GPUs shares the model's lanes
        if model_type not in ("laneformer", *FAMILIES):
            raise ValueError(
                f"backend = 'engine': {folder} is of model_type {model_type!r}; use 'transformers' or 'auto' for all "
                f"but laneformer, {', '.join(FAMILIES)}"
            )
        return "engine", answerer.device, reason
    device = resolve_device(answerer.device)
    if "," in device:
        raise ValueError(
            f"device = {device!r}: Transformers runs on one device; --backend engine shares lanes"
        )
    if answerer.backend == "transformers":
        return "transformers", device, reason
    if device.startswith("cuda"):
        return "transformers", device, "a GPU is visible, on which the engine is not measured yet"
    if model_type != "laneformer":
        return "transformers", device, f"its model_type is {model_type}"
    where = "no GPU is visible" if answerer.device == "auto" else "--device"
    return "engine", device, f"a Laneformer, {where}"


def open_scorer(folder: Path | None, answerer: Answerer = LOCAL) -> Scorer:
    """Open a model to ask it; `close` it when done.

    Args:
        folder: None: only a server.
    """
    if answerer.base_url is not None:
        from evals.scorer.endpoint import EndpointScorer

        if answerer.dtype != "auto":
            raise ValueError(
                f"dtype = {answerer.dtype!r}: a server has its own; leave --dtype or --base-url out"
            )
        return EndpointScorer(answerer.base_url, folder, answerer)
    if folder is None:
        raise ValueError("nothing to ask: give a model folder, or the --base-url of a server")
    backend, device, why = choose(folder, answerer)
    scorer: Scorer
    if backend == "engine":
        from evals.scorer.engine import EngineScorer

        scorer = EngineScorer(folder, device, answerer.max_length, dtype=answerer.dtype)
    else:
        from evals.scorer.hf import TransformersScorer

        if answerer.dtype != "auto":
            raise ValueError(
                f"dtype = {answerer.dtype!r} is for the engine, not {backend} ({why}); use --backend engine"
            )
        scorer = TransformersScorer(folder, device, answerer.max_length)
    console.print(f"{scorer.backend} on {scorer.device} in {scorer.dtype} ({why})", highlight=False)
    return scorer


def identify_model(folder: Path | None, scorer: Scorer) -> JsonObject:
    """Return what a record says about the model that answered: hashes, backend, device, dtype."""
    tokenizer = folder and folder / "tokenizer.json"
    return {
        "model_sha256": model_sha256(folder) if folder else None,
        "tokenizer_sha256": file_sha256(tokenizer) if tokenizer and tokenizer.is_file() else None,
        "backend": scorer.backend,
        "device": scorer.device,
        "dtype": scorer.dtype,
    }
