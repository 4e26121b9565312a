"""Fine-tune an exported folder with TRL: `python -m examples.sft_trl MODEL CONVERSATIONS.jsonl --out FOLDER`.

CONVERSATIONS holds one {"messages": [{"role": ..., "content": ...}, ...]} a line. Only the assistant's
tokens are trained: the folder's chat template marks them. One conversation is one row: TRL packs safely
with FlashAttention alone, which this model refuses, and with any other attention packed conversations
would see each other.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import SFTConfig, SFTTrainer

Argument = Annotated[Path, tyro.conf.Positional]


class LaneTrainer(SFTTrainer):
    """Takes the loss from the model."""

    # TRL's own multiplies by `lm_head.weight`, whose rows here belong to lanes
    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super(SFTTrainer, self).compute_loss(
            model, {**inputs, "use_cache": False}, *args, **kwargs
        )


def main(
    model: Argument,
    conversations: Argument,
    out: Path,
    steps: int = 200,
    batch: int = 8,
    lr: float = 2e-5,
) -> None:
    """Fine-tune all weights on conversations with TRL.

    Args:
        model: exported Hugging Face folder
        conversations: JSON lines with messages
        out: folder to write
        steps: optimizer steps
        batch: conversations per step; longer ones than the context are cut
        lr: learning rate
    """
    save(train(model, conversations, out, steps, batch, lr), model, out)


def train(
    folder: Path,
    conversations: Path,
    out: Path,
    steps: int,
    batch: int,
    lr: float,
    peft_config: Any = None,
) -> Any:
    """Return the trained network, in float32; with `peft_config` only an adapter is trained."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    settings = SFTConfig(
        output_dir=str(out),
        assistant_only_loss=True,
        packing=False,
        max_length=tokenizer.model_max_length,
        max_steps=steps,
        per_device_train_batch_size=batch,
        learning_rate=lr,
        warmup_steps=steps // 20,
        logging_steps=max(1, steps // 20),
        # products alone: the weights stay float32
        bf16=torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
    )
    trainer = LaneTrainer(
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32),
        settings,
        train_dataset=load_dataset("json", data_files=str(conversations), split="train"),
        processing_class=tokenizer,
        peft_config=peft_config,
    )
    trainer.train()
    return trainer.model


def save(network: PreTrainedModel, folder: Path, out: Path) -> None:
    """Write the trained network in the dtype of `folder`, and that folder's tokenizer files as they are."""
    dtype = AutoConfig.from_pretrained(folder, trust_remote_code=True).dtype
    network.to(dtype).save_pretrained(out)
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "chat_template.jinja",
    ):
        # a tokenizer.json may stand without a tokenizer.model
        if (folder / name).is_file():
            shutil.copy(folder / name, out)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m examples.sft_trl")
