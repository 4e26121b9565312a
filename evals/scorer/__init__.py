"""One way to ask a model: the engine, Transformers or an OpenAI-compatible server, by the same calls."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, get_args

import tyro

from evals.scorer.base import (  # noqa: F401 - all that evaluations use stands here
    Answer,
    AnyPrompt,
    Encoder,
    Kind,
    Prompt,
    Scorer,
    Scores,
    Source,
    common_prefix,
    fast_tokenizer,
    read_config,
)  # fmt: skip
from evals.tables import console
from records.files import JsonObject, file_sha256, model_sha256

SourceFlags = Annotated[  # --backend, --device, ... as flags of the command itself
    Source,
    tyro.conf.arg(name="model", help="what runs the model: a library in this process, or a server"),
]  # fmt: skip
LOCAL = Source()


def devices_of(device: str) -> list[str]:
    """The devices of --device, auto and cuda resolved. Raises ValueError for a GPU that is not there."""
    from laneformer.engine.device import has_driver

    gpus: list[str] = []
    if has_driver():  # otherwise torch need not be imported to know
        import torch

        if torch.cuda.is_available():
            gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if "cuda" in device and not gpus:
        raise ValueError(
            f"device = {device!r}: no GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES, --gpu of the watcher); "
            "use device = 'auto' to fall back to the CPU"
        )
    if device in ("auto", "cuda"):
        return gpus or ["cpu"]
    names, known = device.split(","), ["cpu", *gpus]
    if not set(names) <= set(known):
        raise ValueError(f"device = {device!r} is unknown; choose auto, or a list of {', '.join(known)}")
    return names


def choose(folder: Path, source: Source = LOCAL) -> tuple[str, list[str], str]:
    """(backend, devices, why) for a model folder. Raises ValueError for a backend that cannot run it."""
    from laneformer.llama.config import FAMILIES

    model_type = read_config(folder).get("model_type")
    if source.backend == "engine" and model_type not in ("laneformer", *FAMILIES):
        raise ValueError(
            f"backend = 'engine': {folder} is of model_type {model_type!r}; use 'transformers' or 'auto' for all but "
            f"laneformer, {', '.join(FAMILIES)}"
        )
    if source.backend not in get_args(Kind):
        raise ValueError(f"backend = {source.backend!r} is unknown; choose from {get_args(Kind)}")
    asked = f"--backend {source.backend}"
    if source.backend == "engine":  # its auto is the CPU, and a list of GPUs shares the model's lanes
        return "engine", [source.device], asked
    devices = devices_of(source.device)
    if source.backend == "transformers":
        return "transformers", devices, asked
    if devices[0].startswith("cuda"):
        return "transformers", devices, "a GPU is visible, on which the engine is not measured yet"
    if model_type != "laneformer":
        return "transformers", devices, f"its model_type is {model_type}"
    where = "no GPU is visible" if source.device == "auto" else "--device"
    return "engine", devices, f"a Laneformer, {where}"


def open_scorer(folder: Path | None, source: Source = LOCAL) -> Scorer:
    """Open a model to ask it; ValueError if it cannot be. None: no folder, only a server.
    Call `close` when done.
    """
    if source.base_url is not None:
        from evals.scorer.endpoint import EndpointScorer

        if source.dtype != "auto":
            raise ValueError(
                f"dtype = {source.dtype!r}: a server has its own; leave --dtype or --base-url out"
            )
        return EndpointScorer(source.base_url, folder, source)
    if folder is None:
        raise ValueError("nothing to ask: give a model folder, or the --base-url of a server")
    backend, devices, why = choose(folder, source)
    if backend != "engine" and source.dtype != "auto":
        raise ValueError(
            f"dtype = {source.dtype!r} is for the engine, not {backend} ({why}); use --backend engine"
        )
    openers = [functools.partial(open_local, backend, folder, device, source) for device in devices]
    if len(devices) > 1:
        from evals.scorer.several import SeveralScorers

        scorer: Scorer = SeveralScorers(folder, openers)
    else:
        scorer = openers[0]()
    console.print(f"{scorer.backend} on {scorer.device} in {scorer.dtype} ({why})", highlight=False)
    return scorer


def open_local(backend: str, folder: Path, device: str, source: Source = LOCAL) -> Scorer:
    """A model on one device of this process."""
    if backend == "engine":
        from evals.scorer.engine import EngineScorer

        return EngineScorer(folder, device, source.max_length, dtype=source.dtype)
    from evals.scorer.hf import TransformersScorer

    return TransformersScorer(folder, device, source.max_length)


def origin(folder: Path | None, scorer: Scorer) -> JsonObject:
    """What a record says about who answered: hashes of model and tokenizer, backend, device, dtype."""
    tokenizer = folder and folder / "tokenizer.json"
    return {
        "model_sha256": model_sha256(folder) if folder else None,
        "tokenizer_sha256": file_sha256(tokenizer) if tokenizer and tokenizer.is_file() else None,
        "backend": scorer.backend,
        "device": scorer.device,
        "dtype": scorer.dtype,
    }
