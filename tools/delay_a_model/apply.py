"""Merge an adapter into its dense model, as a folder for `laneformer chat` and Transformers.

python -m tools.delay_a_model.apply ADAPTER MODEL --out DIR
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tyro

from records.command import run_function
from records.files import file_sha256, model_sha256

from .adapter import merge, read
from .export import write_folder
from .lanes import cut


def sha256_of(model: Path) -> str:
    return model_sha256(model) if model.is_dir() else file_sha256(model)


def apply(
    adapter: tyro.conf.Positional[Path], model: tyro.conf.Positional[Path], out: Path
) -> dict[str, Any]:
    """Merge an adapter into its dense model.

    Args:
        adapter: DIR/adapter of `tools.delay_a_model` with late.lora_rank; its README.md is the model card.
        model: the dense model's folder or GGUF file.
        out: folder of the late model.

    Returns what `write_folder` does. ValueError for another model than the adapter's.
    """
    changes, about = read(adapter, sha256_of(model))
    dense, checkpoint = cut(model, about["lanes"])
    card = (adapter / "README.md").read_text(encoding="utf-8")
    return write_folder(
        about["architecture"], checkpoint, merge(dense.state_dict(), changes), out, card
    )


if __name__ == "__main__":
    run_function("tools.delay_a_model.apply", apply)
