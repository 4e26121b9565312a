"""Servers on one GPU with random weights of one shape: ours, and SGLang with a plain Llama of the same matrices.

    python -m tools.bench.cuda_server FLAVOR DTYPE --port PORT

is ours: `laneformer serve` without a folder. Both stream over the same API; the tokens are of a made-up vocabulary.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models

from laneformer import Engine, LaneformerConfig
from laneformer.serve.app import run
from laneformer.serve.options import ServerOptions
from tools.bench.harness import ROOT, version
from train.supervise.attempt import free_port

SGLANG = "pip install 'sglang==0.5.18'"
START_S, TIMEOUT_S = 120.0, 300.0
EVENT = re.compile(rb"data: (\{.*?\})\r?\n\r?\n", re.DOTALL)
LLAMA = Path("build/llama-of-the-same-matrices")


class Answer(NamedTuple):
    sent_s: float  # time.perf_counter()
    arrivals_s: np.ndarray  # of each text, from then on
    tokens: int  # texts, where the answer ended before its limit
    ttft_s: float
    tokens_per_s: float


@dataclass
class Server:
    """A server process, started by `with`."""

    name: str
    command: Sequence[str]
    about: str = ""
    missing: str = ""  # how to install it

    def __enter__(self) -> Server:
        """RuntimeError with its last lines where it does not come up."""
        self.port, self.log, end_s = free_port(), tempfile.TemporaryFile("w+"), time.monotonic() + START_S
        command = [*self.command, "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, cwd=ROOT)
        while not self._answers():
            if self.process.poll() is not None or time.monotonic() > end_s:
                self.log.seek(0)
                self.process.kill()
                raise RuntimeError(f"{self.name} did not start: {self.log.read()[-1500:]}")
            time.sleep(0.1)
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait()

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models"):
            return True
        return False

    def ask(self, path: str, **body: Any) -> Answer:
        """Stream one greedy answer; what came is parsed after the last byte."""
        payload = json.dumps({"model": "model", "stream": True, "temperature": 0, **body})
        pieces, times, finish_reason = list[tuple[float, bytes]](), list[float](), None
        sent_s = time.perf_counter()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request("POST", path, payload, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(
                    f"{self.name}: status {response.status} of {path}: {response.read()[:500]!r}"
                )
            while piece := response.read1(65536):
                pieces.append((time.perf_counter() - sent_s, piece))
        ends = np.cumsum([len(piece) for _, piece in pieces])
        for found in EVENT.finditer(b"".join(piece for _, piece in pieces)):
            for choice in json.loads(found[1]).get("choices", []):
                if choice.get("text") or choice.get("delta", {}).get("content"):
                    times.append(pieces[int(np.searchsorted(ends, found.end()))][0])
                finish_reason = choice["finish_reason"] or finish_reason
        if not times:
            raise RuntimeError(f"{self.name}: an answer without text: {pieces[-3:]}")
        tokens = body["max_tokens"] if finish_reason == "length" else len(times)
        return Answer(
            sent_s, np.array(times), tokens, times[0], (tokens - 1) / max(times[-1] - times[0], 1e-9)
        )


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
