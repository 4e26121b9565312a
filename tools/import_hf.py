"""Import a Hugging Face folder of a Laneformer as a run folder with a model-only DCP checkpoint at step 0.

    python -m tools.import_hf --hf runs/demo/hf --out runs/imported

Training starts from it with `--checkpoint.initial_load_path RUN/checkpoint/step-0`.
"""

from __future__ import annotations

import json
from pathlib import Path

import tyro

from laneformer.hf.load_folder import import_folder


def main(hf: Path, out: Path, overwrite: bool = False) -> None:
    """Write the run folder `out`; the last line of stdout is JSON.

    Args:
        hf: exported folder with config.json, model*.safetensors, tokenizer.model.
        out: run folder to create, with model.json, tokenizer.model, checkpoint/step-0.
        overwrite: replace `out` if it is not empty.
    """
    print(json.dumps(import_folder(hf, out, overwrite)))


if __name__ == "__main__":
    tyro.cli(main)
