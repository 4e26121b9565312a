"""Models by name: paths, Hugging Face's repositories, and the caches of other programs."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import tyro
from huggingface_hub import constants
from rich.console import Console
from rich.table import Table

from ..engine.cpu.packed_files import BUDGET, list_packed, read_budget
from ..engine.folder import is_gguf
from ..engine.home import home

FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "tokenizer*",
    "*.model",
    "*.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
]
# The makers' own formats, which would double the download
FOREIGN = ["original/*", "*/original/*", "consolidated*"]
# Of a repository of GGUF files, where the name has no quantisation
PREFERRED = ("Q4_K_M", "Q4_0", "Q8_0", "BF16", "F16")
REPOSITORY = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PART = re.compile(r"-\d{5}-of-\d{5}(?=\.gguf$)")
FIRST = re.compile(r"-00001-of-(?=\d{5}\.gguf$)")
QUANTISED = re.compile(r"[.-](I?Q\d\w*|MXFP4|BF16|F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True)
class LocalModel:
    """A model on this machine, by the name that `laneformer chat` takes."""

    name: str
    path: Path
    keeper: str  # the program whose cache it is in

    @property
    def bytes(self) -> int:
        parts = self.path.parent.glob(FIRST.sub("-*-of-", self.path.name))
        files = self.path.glob("*") if self.path.is_dir() else parts
        return sum(file.stat().st_size for file in files if is_readable(file))


def locate_model(name: str | Path) -> Path:
    """Return the folder or GGUF file of a name, fetched from Hugging Face where it is missing."""
    path = Path(name)
    if path.exists():
        return path
    # Local models come first, so that they are not fetched again
    for model in list_models():
        if str(name) in (model.name, model.name.removesuffix(":latest")):
            return model.path
    repository, _, quantisation = str(name).partition(":")
    if not REPOSITORY.fullmatch(repository):
        raise ValueError(
            f"{name} is not a folder with config.json and model*.safetensors, a GGUF file, a model that `laneformer "
            "models` lists, or an owner/name of Hugging Face; check its spelling"
        )
    return download_model(repository, quantisation)


def download_model(repository: str, quantisation: str) -> Path:
    """Fetch a repository of Hugging Face: its folder, or its GGUF file of a quantisation."""
    with explain_failure(repository):
        names = huggingface_hub.HfApi().list_repo_files(repository)
    file = choose_gguf_file(repository, names, quantisation)
    with explain_failure(repository):
        if file is not None:
            # All parts of a split file; the engine finds the others beside the first
            parts = sorted(name for name in names if PART.sub("", name) == PART.sub("", file))
            first, *_ = [huggingface_hub.hf_hub_download(repository, part) for part in parts]
            return Path(first)
        return Path(
            huggingface_hub.snapshot_download(
                repository, allow_patterns=FILES, ignore_patterns=FOREIGN
            )
        )


@contextlib.contextmanager
def explain_failure(repository: str) -> Iterator[None]:
    """Raise ValueError with one sentence and the command that fetches the model elsewhere."""
    try:
        yield
    except Exception as error:
        # Without a network, the hub's library raises whatever its HTTP client raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        folder = repository.rpartition("/")[2]
        raise ValueError(
            f"{repository} is no file or folder here, and cannot be fetched from Hugging Face: {reason}. Where there "
            f"is access, run hf download {repository} --local-dir {folder}, then use that folder (private models: hf "
            "auth login)"
        ) from None


def choose_gguf_file(repository: str, names: list[str], quantisation: str) -> str | None:
    """Return the first part of the GGUF file to fetch; None where safetensors are fetched."""
    files = {name: PART.sub("", name) for name in names if name.endswith(".gguf")}
    if not quantisation and (not files or any(name.endswith(".safetensors") for name in names)):
        return None
    kinds = {}
    for name, whole in sorted(files.items(), reverse=True):
        if match := QUANTISED.search(whole.removesuffix(".gguf")):
            kinds[match[1].upper()] = name
    for kind in (quantisation,) if quantisation else (*PREFERRED, *kinds):
        if kind.upper() in kinds:
            return kinds[kind.upper()]
    raise ValueError(
        f"{repository} has no {quantisation or 'GGUF file'}; it has {', '.join(sorted(kinds)) or names}"
    )


def strip_suffixes(name: str) -> str:
    """Return the name of a GGUF file without its suffix and its number among several parts."""
    return PART.sub("", name).removesuffix(".gguf")


def display_name(path: Path) -> str:
    """Return the name that clients see: without suffix and type of weights."""
    name = strip_suffixes(path.name.partition(":")[0])
    return QUANTISED.sub("", name) or name


def list_models() -> list[LocalModel]:
    models = [*list_hugging_face(), *list_ollama(), *list_lm_studio()]
    return sorted(models, key=lambda model: (model.keeper, model.name))


def list_hugging_face() -> Iterator[LocalModel]:
    root = Path(constants.HF_HUB_CACHE)
    for folder in root.glob("models--*--*"):
        with skip_broken():
            name = "/".join(folder.name.split("--")[1:])
            head = folder / "refs/main"
            revision = folder / "snapshots" / (head.read_text().strip() if head.exists() else "")
            # A download that was interrupted leaves links to files that are missing
            weights = [*revision.glob("*.safetensors")]
            if weights and all(map(is_readable, [revision / "config.json", *weights])):
                yield LocalModel(name, revision, "Hugging Face")
            for file in select_first_parts(revision.glob("*.gguf")):
                stem = strip_suffixes(file.name)
                kind = QUANTISED.search(stem)
                yield LocalModel(f"{name}:{kind[1] if kind else stem}", file, "Hugging Face")


def select_first_parts(files: Iterable[Path]) -> list[Path]:
    """Return the readable files, of those in parts the first."""
    firsts = (file for file in files if FIRST.search(file.name) or not PART.search(file.name))
    return sorted(filter(is_readable, firsts))


def is_readable(path: Path) -> bool:
    return os.access(path, os.R_OK)


def skip_broken() -> contextlib.suppress:
    """Ignore what is wrong with one entry of another program's cache."""
    return contextlib.suppress(OSError, ValueError, LookupError, AttributeError, TypeError)


def list_ollama() -> Iterator[LocalModel]:
    """List Ollama's models: each manifest names the layer that is a GGUF file."""
    root = Path(os.environ.get("OLLAMA_MODELS", home() / ".ollama/models"))
    for file in (root / "manifests").glob("*/*/*/*"):
        with skip_broken():
            for layer in json.loads(file.read_text())["layers"]:
                blob = root / "blobs" / layer["digest"].replace(":", "-")
                if layer["mediaType"] == "application/vnd.ollama.image.model" and is_gguf(blob):
                    yield LocalModel(f"{file.parent.name}:{file.name}", blob, "Ollama")


def list_lm_studio() -> Iterator[LocalModel]:
    for root in (".lmstudio/models", ".cache/lm-studio/models"):
        for file in select_first_parts((home() / root).glob("*/*/*.gguf")):
            yield LocalModel(
                f"{file.parent.parent.name}/{strip_suffixes(file.name)}", file, "LM Studio"
            )


@dataclass
class Models:
    """List the models in the caches of Hugging Face, Ollama and LM Studio, by the names that commands take.

    Beside each: its copies of packed weights, which make the next start fast. Together they take at
    most LANEFORMER_PACKED_BYTES (environment, default 32 GB); those used longest ago are deleted
    first.
    """

    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """One line of JSON a model, with its path."""

    def run(self) -> None:
        copies = list_packed()
        packed = Counter[Path]()
        for copy in copies:
            packed[copy.source] += copy.bytes
        models = [(model, packed[model.path.resolve()]) for model in list_models()]
        if self.json:
            for model, packed_size in models:
                values = {"name": model.name, "path": str(model.path), "keeper": model.keeper}
                print(json.dumps({**values, "packed_bytes": packed_size}))
            return
        table = Table("model", "GB", "packed GB", "cache of", box=None)
        for model, packed_size in models:
            table.add_row(
                model.name, f"{model.bytes / 1e9:.2f}", f"{packed_size / 1e9:.2f}", model.keeper
            )
        nothing = "no model in the caches of Hugging Face, Ollama or LM Studio; laneformer chat OWNER/NAME fetches one"
        Console().print(table if models else nothing)
        usage = f"{packed.total() / 1e9:.2f} of {read_budget() / 1e9:.2f} GB ({BUDGET}), {len(copies)} files"
        print(f"packed copies: {usage}")
