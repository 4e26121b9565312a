"""Servers on one GPU with random weights of one shape: ours, and SGLang with a plain Llama of the same matrices.

    python -m tools.bench.cuda_server FLAVOR DTYPE --port PORT

is ours: `laneformer serve` without a folder. Both stream over the same API; the tokens are of a made-up vocabulary.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models

from laneformer import Engine, LaneformerConfig
from laneformer.serve.app import run
from laneformer.serve.options import ServerOptions
from tools.bench.harness import version
from tools.bench.serve_client import Server

SGLANG = "pip install 'sglang==0.5.18'"
LLAMA = Path("build/llama-of-the-same-matrices")


def made_up(vocab_size: int) -> Tokenizer:
    """A word for each id."""
    tokenizer = Tokenizer(models.WordLevel({f" w{i}": i for i in range(vocab_size)}, " w0"))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def servers(flavor: str, dtype: str) -> list[Server]:
    """Ours first; `missing` where one is not installed."""
    ours = [sys.executable, "-m", "tools.bench.cuda_server", flavor, dtype]
    missing = "" if importlib.util.find_spec("uvicorn") else "pip install 'laneformer[serve]'"
    return [
        Server("laneformer", ours, f"laneformer {version('laneformer')}", missing=missing),
        sglang(flavor, dtype),
    ]


def sglang(flavor: str, dtype: str) -> Server:
    if importlib.util.find_spec("sglang") is None:
        return Server("sglang", [], missing=f"not installed: {SGLANG}")
    write_llama(LaneformerConfig.from_flavor(flavor), LLAMA)
    names = {"bf16": "bfloat16", "fp16": "float16"}
    flags = ["--model-path", str(LLAMA), "--load-format", "dummy", "--dtype", names[dtype]]
    command = [sys.executable, "-m", "sglang.launch_server", *flags, "--served-model-name", "model"]
    return Server("sglang", command, f"sglang {version('sglang')}, random weights")


def write_llama(c: LaneformerConfig, folder: Path) -> None:
    """A folder without weights: a Llama whose matrices have as many numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size", "max_position_embeddings", "rope_theta")  # fmt: skip
    config: dict[str, Any] = {name: getattr(c, name) for name in same}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": c.norm_eps}
    config |= {"hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    made_up(c.vocab_size).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": " w2", "bos_token": " w1"}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("flavor")
    parser.add_argument("dtype")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cuda:0")
    given = parser.parse_args()
    tokenizer = made_up(LaneformerConfig.from_flavor(given.flavor).vocab_size)
    options = ServerOptions("model", port=given.port, speculate=0)
    with options.listen() as listening:
        engine = Engine.random(given.flavor, given.dtype, device=given.device, tokenizer=tokenizer)
        with engine:
            run(engine, options, None, listening)


if __name__ == "__main__":
    main()
