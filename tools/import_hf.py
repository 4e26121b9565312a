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

if __name__ == "__main__":
    try:
        result = tyro.cli(import_folder, prog="python -m tools.import_hf")
    except (ValueError, OSError) as error:
        raise SystemExit(f"tools.import_hf: {error}") from None
    write_checksums(Path(result["checkpoint"]))
    print(json.dumps(result))
