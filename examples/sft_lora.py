"""Fine-tune an exported folder with LoRA.

    python -m examples.sft_lora MODEL CONVERSATIONS.jsonl --out FOLDER

A matrix of this model is one (lanes, out, in) parameter, no nn.Linear, so it is named in `target_parameters`;
PEFT reads the first axis as experts and gives every lane its own pair of factors. FOLDER gets the merged
model, which the engine loads, and FOLDER/adapter the adapter alone, for PeftModel.from_pretrained.
"""

from __future__ import annotations

from pathlib import Path

import tyro
from peft import LoraConfig

from examples.sft_trl import Argument, save, train

MATRICES = ("wq", "wk", "wv", "wo", "w1", "w2", "w3")


def main(
    model: Argument,
    conversations: Argument,
    out: Path,
    steps: int = 200,
    batch: int = 8,
    lr: float = 2e-4,
    rank: int = 4,
) -> None:
    """Fine-tune LoRA factors of every lane of every matrix with PEFT, and merge them.

    Args:
        model: exported Hugging Face folder
        conversations: JSON lines with messages
        out: folder to write
        steps: optimizer steps
        batch: conversations per step
        lr: learning rate
        rank: rank of the factors, per lane
    """
    lora = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=[],
        target_parameters=[f"{name}.weight" for name in MATRICES],
        task_type="CAUSAL_LM",
    )
    adapted = train(model, conversations, out, steps, batch, lr, peft_config=lora)
    adapted.print_trainable_parameters()
    adapted.save_pretrained(out / "adapter")
    save(adapted.merge_and_unload(), model, out)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.sft_lora")
