"""Import a Hugging Face folder of a Laneformer as a run folder with a model-only DCP checkpoint at step 0.

    python -m tools.import_hf --hf runs/demo/hf --out runs/imported

Training starts from it with `--checkpoint.initial_load_path RUN/checkpoint/step-0`.
"""

from __future__ import annotations

import json
from pathlib import Path

import tyro

from laneformer.hf.load_folder import import_folder
from records.checkpoints import write_checksums
from records.command import run_command


def main() -> None:
    result = tyro.cli(import_folder, prog="python -m tools.import_hf")
    write_checksums(Path(result["checkpoint"]))
    print(json.dumps(result))


if __name__ == "__main__":
    run_command("tools.import_hf", main)
