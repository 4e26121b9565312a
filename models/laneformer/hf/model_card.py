"""README.md of an exported folder: what the model is and how to run it; unknown values are left out."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import LaneformerConfig


@dataclass(frozen=True)
class Progress:
    """How far the exported checkpoint was trained; None where it is not known."""

    step: int | None = None
    """training step"""
    phase: str | None = None
    """name of the training phase"""
    tokens_total: int | None = None
    """training tokens, earlier phases included"""
    loss: float | None = None
    """training loss at that step, nats per token"""


CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
license: apache-2.0
tags:
- laneformer
- custom_code
---

# Laneformer {size}

A Laneformer with {total:,} parameters in {dtype}: a Llama-like Transformer in {num_lanes} lanes. Each lane keeps a
residual stream of its own and owns a slice of every matrix; with Delayed Tensor Parallelism the other lanes' outputs
arrive {broadcast_delay} layers late, so that on parallel hardware their exchange never blocks.

| | |
|---|---|
{rows}

## Use

The architecture is not part of Transformers, so loading runs the four Python files of this folder. They
need `torch` and `transformers` (4.57 or 5.x).

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # or wherever this folder is
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.{dtype})
inputs = tokenizer("def fibonacci(n):", return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=64, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

Fast decoding on one request, without Transformers: `laneformer generate FOLDER --prompt "def fibonacci(n):"`.

## Details

- Attention runs through PyTorch's scaled dot product attention; other implementations are refused.
- Tokenizer: SentencePiece BPE with byte fallback, as `tokenizer.json` with the same ids; `<s>` is prepended, padding
  is `<unk>`. Text that spells `<s>` or `</s>` becomes that token.
- Chat template: only `user` and `assistant` messages; system messages are ignored. It writes no `<s>`: the tokenizer
  prepends it when it encodes the rendered text.
"""


def render(config: LaneformerConfig, dtype: str, progress: Progress) -> str:
    """The model card of a checkpoint whose weights were exported as `dtype`."""
    c = config
    full = [str(i) for i in range(c.num_hidden_layers) if c.window(i) is None]
    table = {
        "Layers, hidden size, intermediate size": f"{c.num_hidden_layers}, {c.hidden_size}, {c.intermediate_size}",
        "Attention heads, KV heads": f"{c.num_attention_heads}, {c.num_key_value_heads}",
        "Lanes, broadcast delay": f"{c.num_lanes}, {c.broadcast_delay} layers",
        "Context": f"{c.max_position_embeddings} tokens",
        "Sliding window": f"{c.sliding_window} tokens; full attention in layers: {', '.join(full) or 'none'}",
        "Vocabulary": f"{c.vocab_size}, head `{c.lm_head_type}`",
    }
    if progress.step is not None:
        table["Checkpoint"] = f"step {progress.step:,}" + (f" of {progress.phase}" if progress.phase else "")
    if progress.tokens_total is not None:
        table["Training tokens"] = f"{progress.tokens_total:,}"
    if progress.loss is not None:
        table["Training loss at that step"] = f"{progress.loss:.4f}"
    total = c.parameter_count()["total"]
    size = f"{total / 1e9:.1f}B" if total >= 1e9 else f"{total / 1e6:.1f}M"
    rows = "\n".join(f"| {key} | {value} |" for key, value in table.items())
    return CARD.format(size=size, total=total, rows=rows, dtype=dtype, **c.to_dict())
