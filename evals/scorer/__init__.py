"""One way to ask a model: the engine, Transformers or an OpenAI-compatible server behind the same few calls."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console

from evals.scorer.base import (  # noqa: F401 - all that evaluations use stands here
    Answer,
    AnyPrompt,
    Encoder,
    Prompt,
    Scorer,
    Scores,
    common_prefix,
    fast_tokenizer,
    read_config,
)  # fmt: skip
from records.evals import optional
from records.files import file_sha256, model_sha256

Kind = Literal["auto", "engine", "transformers"]


@dataclass(frozen=True)
class Source:
    """What answers: the model folder in this process, or an OpenAI-compatible server if --base-url is given."""

    backend: Kind = "auto"
    """library that runs the model: auto is Transformers where a GPU is visible, else the
    engine for a Laneformer
    """
    device: str = "auto"
    """device that runs the model: auto, cpu, cuda (all visible GPUs share the items),
    or a list: cuda:0,cuda:1
    """
    dtype: str = "auto"
    """type of the engine's weights: auto (that of the folder), fp32, bf16, fp16, int8, int4"""
    max_length: Annotated[int | None, optional("INT", "that of its config.json")] = None
    """context of the model in tokens"""
    base_url: Annotated[str | None, optional("URL", "the model runs here")] = None
    """OpenAI-compatible server that runs the model instead, such as http://127.0.0.1:8000/v1"""
    model: Annotated[str | None, optional("NAME", "the name of the model folder")] = None
    """name of the model at the server of --base-url"""
    concurrency: int = 4
    """number of concurrent requests to the server of --base-url"""
    timeout_s: float = 600.0
    """timeout of one request to the server of --base-url, in seconds"""


SourceFlags = Annotated[  # --backend, --device, ... as flags of the command itself
    Source, tyro.conf.OmitArgPrefixes,
    tyro.conf.arg(name="model", help="what runs the model: a library in this process, or a server"),
]  # fmt: skip
LOCAL = Source()


def devices_of(device: str) -> list[str]:
    """The devices of --device, auto and cuda resolved. Raises ValueError for a GPU that is not there."""
    from laneformer.engine.device import has_driver

    gpus = 0
    if has_driver():  # otherwise torch need not be imported to know
        import torch

        gpus = max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 0
    if any(name.startswith("cuda") for name in device.split(",")) and not gpus:
        raise ValueError(
            f"device = {device!r}: no GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES, --gpu of the watcher); "
            "use device = 'auto' to fall back to the CPU"
        )
    if device in ("auto", "cuda"):
        return [f"cuda:{i}" for i in range(gpus)] or ["cpu"]
    names = device.split(",")
    known = {"cpu", *(f"cuda:{i}" for i in range(gpus))}
    if not set(names) <= known:
        raise ValueError(
            f"device = {device!r} is unknown; choose auto, or a list of {', '.join(sorted(known))}"
        )
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
    if source.backend not in ("auto", "engine", "transformers"):
        raise ValueError(
            f"backend = {source.backend!r} is unknown; choose 'auto', 'engine' or 'transformers'"
        )
    if (
        source.backend == "engine"
    ):  # one engine; its auto is the CPU, and a list of GPUs shares the model's lanes
        return "engine", [source.device], "--backend engine"
    devices = devices_of(source.device)
    if source.backend == "transformers":
        return "transformers", devices, "--backend transformers"
    if devices[0].startswith("cuda"):
        return "transformers", devices, "a GPU is visible, on which the engine is not measured yet"
    if model_type == "laneformer":
        return (
            "engine",
            devices,
            f"a Laneformer, {'no GPU is visible' if source.device == 'auto' else '--device'}",
        )
    return "transformers", devices, f"its model_type is {model_type}"


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
        name = source.model or (folder.resolve().name if folder else "laneformer")
        return EndpointScorer(
            source.base_url, folder, name, source.concurrency, source.timeout_s, source.max_length
        )
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
    Console(stderr=True).print(
        f"{scorer.backend} on {scorer.device} in {scorer.dtype} ({why})", highlight=False
    )
    return scorer


def open_local(backend: str, folder: Path, device: str, source: Source = LOCAL) -> Scorer:
    """A model on one device of this process."""
    if backend == "engine":
        from evals.scorer.engine import EngineScorer

        return EngineScorer(folder, device, source.max_length, dtype=source.dtype)
    from evals.scorer.hf import TransformersScorer

    return TransformersScorer(folder, device, source.max_length)


def origin(folder: Path | None, scorer: Scorer) -> dict[str, Any]:
    """What a record says about who answered: hashes of model and tokenizer, backend, device, dtype."""
    tokenizer = folder and folder / "tokenizer.json"
    return {
        "model_sha256": model_sha256(folder) if folder else None,
        "tokenizer_sha256": file_sha256(tokenizer) if tokenizer and tokenizer.is_file() else None,
        "backend": scorer.backend,
        "device": scorer.device,
        "dtype": scorer.dtype,
    }
