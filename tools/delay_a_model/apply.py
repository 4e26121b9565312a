"""`python -m tools.delay_a_model.apply ADAPTER MODEL --out DIR`: the late model of an adapter and its dense model, as a
folder that `laneformer chat` and Transformers run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tyro

from laneformer.hf.export import DType
from records.files import file_sha256, model_sha256

from .adapter import merged, read
from .folder import write_folder
from .lanes import cut
from .layout import laid_out


def sha256_of(model: Path) -> str:
    return model_sha256(model) if model.is_dir() else file_sha256(model)


def apply(adapter: Path, model: Path, out: Path, dtype: DType = "bfloat16") -> dict[str, Any]:
    """Write `out`; returns what `write_folder` does. ValueError for another model than the adapter's.

    adapter: folder of adapter.safetensors, adapter.json and README.md, which becomes the model card.
    """
    changes, layout, late, about = read(adapter, sha256_of(model))
    dense, checkpoint = cut(model, about["lanes"])
    weights = merged(laid_out(dense.state_dict(), layout), changes)
    card = (adapter / "README.md").read_text(encoding="utf-8")
    return write_folder(late, checkpoint, weights, out, card, dtype)


def main(adapter: tyro.conf.Positional[Path], model: tyro.conf.Positional[Path], out: Path) -> None:
    """Merge an adapter into its dense model.

    Args:
        adapter: folder that a recovery with --lora-rank left.
        model: the dense model's folder or GGUF file.
        out: folder of the late model.
    """
    print(json.dumps(apply(adapter, model, out)))


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m tools.delay_a_model.apply")
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.delay_a_model.apply: {error}") from None
