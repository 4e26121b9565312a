"""The steps of [filter]: filters and formatters of datatrove by name.

A step is a name, or a table { name = ..., argument = ... } with the arguments of datatrove's class.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from data_mixtures.recipe import Recipe, check_known
from data_mixtures.shards import Json
from data_mixtures.stages import stage

# name -> class in datatrove.pipeline, and whether it may change the text;
# of datatrove 0.10 those that need only the text: none that downloads word lists (C4 bad words,
# unigrams), looks at the URL, or draws at random; datatrove has no filters for code
CLASSES = {
    "language": ("filters.LanguageFilter", False),
    "fasttext": ("filters.FastTextClassifierFilter", True),
    "gopher_quality": ("filters.GopherQualityFilter", False),
    "gopher_repetition": ("filters.GopherRepetitionFilter", False),
    "c4_quality": ("filters.C4QualityFilter", True),
    "c4_paragraphs": ("filters.C4ParagraphFilter", False),
    "fineweb_quality": ("filters.FineWebQualityFilter", False),
    "regex": ("filters.RegexFilter", False),
    "pii": ("formatters.PIIFormatter", True),
    "ftfy": ("formatters.FTFYFormatter", True),
    "symbol_lines": ("formatters.SymbolLinesFormatter", True),
}
# steps with a fastText model, a file that is given as `model`, and where to find one
MODELS = {
    "language": "lid.176.bin, from the page 'Language identification' of fasttext.cc",
    "fasttext": "a classifier trained with fastText",
}
# whose versions may change what a step does
PACKAGES = "datatrove", "spacy", "fasttext-numpy2-wheel", "ftfy"
_NOT_OFFERED = (
    "self",
    "exclusion_writer",
    "backend",
    "model_url",
    "label_only",
    "save_labels_in_metadata",
)
_TRIAL = "A text to try the step with, so that what it needs is missed before the first document and not after hours."


@dataclass(frozen=True)
class Step:
    """run: text -> (the text after the step, None or the reason why it is dropped)."""

    name: str
    changes: bool
    run: Callable[[str], tuple[str, str | None]]

    def __call__(self, text: str) -> tuple[str, str | None]:
        try:
            return self.run(text)
        except Exception as error:
            raise ValueError(
                f"filter step {self.name!r} fails at {text[:80]!r}: {error}"
            ) from error


def steps_of(recipe: Recipe, source: str) -> list[Json]:
    """Return a source's steps as tables; model paths are relative to the recipe's folder."""
    override = recipe.source(source).steps
    steps = recipe.filter.steps if override is None else override
    tables = [{"name": step} if isinstance(step, str) else dict(step) for step in steps]
    return [
        {**step, "model": str(recipe.folder / Path(step["model"]).expanduser())}
        if "model" in step
        else step
        for step in tables
    ]


def load(steps: Iterable[Json]) -> tuple[Step, ...]:
    """Load the steps; ValueError for an unknown name or argument, a missing package or model."""
    return tuple(_load(dict(table)) for table in steps)


def _load(arguments: Json) -> Step:
    name = arguments.pop("name", None)
    check_known("filter step", [name], CLASSES)
    class_path, changes = CLASSES[name]
    module, _, kind = class_path.partition(".")
    step_class = getattr(importlib.import_module(f"datatrove.pipeline.{module}"), kind)
    parameters = [
        parameter
        for parameter in inspect.signature(step_class.__init__).parameters
        if parameter not in _NOT_OFFERED
    ]
    check_known(
        f"argument of filter step {name!r}:", arguments, parameters + ["model"] * (name in MODELS)
    )
    try:
        step = Step(name, changes, _runner(name, step_class, arguments))
        step.run(_TRIAL)
    except ImportError as error:
        raise ValueError(
            f"filter step {name!r}: {error}; pip install 'laneformer[quality]'"
        ) from error
    except Exception as error:
        # datatrove's classes check little, so wrong values fail in many ways
        raise ValueError(f"filter step {name!r} with {arguments}: {error}") from error
    return step


def _runner(name: str, step_class: Any, arguments: Json) -> Callable[[str], tuple[str, str | None]]:
    from datatrove.data import Document

    if CLASSES[name][0].startswith("formatters."):
        # a new one for each text: that of PII takes its replacements in turn, over all texts that
        # it sees
        return lambda text: (step_class(**arguments).format(text), None)
    step = _with_model(name, step_class, arguments) if name in MODELS else step_class(**arguments)

    def run(text: str) -> tuple[str, str | None]:
        document = Document(text, id="")
        result = step.filter(document)
        keeps, reason = result if isinstance(result, tuple) else (result, None)
        full_reason = f"{name}:{reason}" if reason else name
        return document.text, None if keeps else full_reason

    return run


def _with_model(name: str, step_class: Any, arguments: Json) -> Any:
    path = arguments.get("model")
    if path is None or not Path(path).is_file():
        raise ValueError(f"model = {path!r} must be the path of a file: {MODELS[name]}")
    options = {key: value for key, value in arguments.items() if key != "model"}
    step = step_class(**options, model_url="") if name == "fasttext" else step_class(**options)
    # datatrove would download the model, and cache it by its name alone
    from fasttext.FastText import _FastText

    model = _FastText(str(path))
    if name == "fasttext":
        step._model = model
        labels = [label for label, _ in step.keep_labels or step.remove_labels or ()]
    else:
        step.model._model = model
        labels = step.languages or []
    check_known(
        f"label of {path}", labels, [label.removeprefix("__label__") for label in model.labels]
    )
    return step


def identity(steps: list[Json]) -> Any:
    """Return what keys say about the steps."""
    models = [Path(step["model"]) for step in steps if "model" in step]
    hashes = [stage.sha256_of(path) for path in models if path.is_file()]
    # names and arguments, hashes of models, package versions
    return [steps, hashes, versions(PACKAGES)] if steps else []


def versions(packages: Iterable[str]) -> list[str | None]:
    return [
        next((distribution.version for distribution in metadata.distributions(name=name)), None)
        for name in packages
    ]
