"""Decode speed of a model as an evaluation record: `laneformer bench` in its own process, so
that caches start cold.

python -m evals.decode_speed runs/demo/hf --out runs/demo/evals.jsonl --step 200 --phase phase2
"""

from __future__ import annotations

import json
import subprocess
import sys

from records.evals import NOWHERE, AboutFlags, EvalCommand, ModelFolder
from records.files import JsonObject, model_sha256


def main(hf_dir: ModelFolder, about: AboutFlags = NOWHERE, device: str = "auto") -> JsonObject:
    """Measure decode speed and the machine's read bandwidth. The last line on stdout is the record, JSON.

    Args:
        device: device that runs the engine: auto, cpu or cuda
    """
    command = [
        sys.executable,
        "-m",
        "laneformer.cli",
        "bench",
        str(hf_dir),
        "--device",
        device,
        "--json",
    ]
    bench = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if bench.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed with exit status {bench.returncode}")
    figures = json.loads(bench.stdout.rstrip("\n").split("\n")[-1])
    return about.append(
        "decode_speed",
        figures,
        tokenizer_sha256=None,  # the speed does not depend on the text
        data_sha256=None,
        model_sha256=model_sha256(hf_dir),
        backend="engine",
        device=figures.pop("device", "cpu"),
        dtype=figures.pop("dtype", None),
    )


COMMAND = EvalCommand("decode_speed", main)


if __name__ == "__main__":
    COMMAND.run()
