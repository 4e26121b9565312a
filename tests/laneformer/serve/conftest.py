"""A real server in a process of its own, on a free port, with a tiny model with tokenizer and chat template."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.laneformer.engine.assets import random_model, small_config, write_folder
from tests.laneformer.test_chat_template import SMOLLM2
from tests.shared import Shared
from tests.tokenizer_assets import byte_level, save

ROOT = Path(__file__).resolve().parents[3]
START_S = 300.0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. ",
    "user assistant system Hello, how are you? ",
    "1 2 3 {}[]:,",
]
MAIN = """
import json, sys
from laneformer.engine import Engine
from laneformer.serve.app import ServerOptions, run
folder, engine_options, options, prelude = json.loads(sys.argv[1])
exec(prelude)
with Engine.from_pretrained(folder, **engine_options) as engine:
    engine._open().fix_cost(0.02)  # as in engine/assets.py
    run(engine, ServerOptions(**options))
"""


@dataclass
class Server:
    """url: without a slash at the end."""

    url: str
    process: subprocess.Popen[str]
    lines: queue.Queue[str]  # of stdout and stderr

    def stop(self, timeout_s: float = 30.0) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def output(self) -> str:
        return "".join(self.lines.queue)


def start(folder: Path, prelude: str = "", engine: dict[str, Any] | None = None, **options: Any) -> Server:
    """Run a server until it says where it listens; prelude: code that plants a fault in its process.

    engine: options of Engine.from_pretrained; options: of ServerOptions.
    """
    engine = {"threads": 1, "cache": False, **(engine or {})}
    arguments = [str(folder), engine, {"model": "tiny", "port": 0, **options}, prelude]
    environment = {key: value for key, value in os.environ.items() if key != "LANEFORMER_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, json.dumps(arguments)],
        cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines: queue.Queue[str] = queue.Queue()
    address: queue.Queue[str] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
            if line.startswith("laneformer serves "):
                address.put(line.split(" at ")[-1].strip())
        address.put("")

    threading.Thread(target=read, daemon=True).start()
    found = Server(address.get(timeout=START_S), process, lines)
    if not found.url:
        process.wait(START_S)
        pytest.fail(f"the server did not start: {found.output()}")
    return found


def write_model(folder: Path, **sizes: Any) -> Path:
    """A random model whose ids beyond the tokenizer's are padding, as many models have."""
    tokenizer = byte_level(TEXTS * 20, SPECIAL, vocab_size=400)
    vocab_size = tokenizer.get_vocab_size()
    config = small_config(vocab_size=vocab_size + -vocab_size % 4, **sizes)
    write_folder(folder, random_model(config), eos_token_id=tokenizer.token_to_id("<|im_end|>"))
    save(
        tokenizer, folder, chat_template=SMOLLM2, eos_token="<|im_end|>", bos_token="<|endoftext|>",
        tokenizer_class="PreTrainedTokenizerFast",
    )  # fmt: skip
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    return folder


@pytest.fixture(scope="session")
def model_folder(shared: Shared) -> Path:
    """A model of some ten thousand tokens a second, with sliding windows; its context is 512 tokens."""
    return shared("served", lambda folder: write_model(folder, max_position_embeddings=512))


@pytest.fixture(scope="session")
def slow_folder(shared: Shared) -> Path:
    """A model of a thousand tokens a second at most: its 8,192 tokens run while a test looks."""
    sizes = {
        "hidden_size": 320,
        "intermediate_size": 704,
        "num_hidden_layers": 8,
        "max_position_embeddings": 8192,
    }
    return shared("served_slowly", lambda folder: write_model(folder, **sizes))


@pytest.fixture(scope="session")
def tiny(model_folder: Path) -> Iterator[Server]:
    """One server for all tests that leave it as it was."""
    server = start(model_folder)
    yield server
    assert server.stop() == 0, server.output()


@pytest.fixture
def server() -> Iterator[Callable[..., Server]]:
    """`server(folder, prelude, engine={...}, **options)`: one for this test alone; several may run."""
    started: list[Server] = []

    def begin(folder: Path, prelude: str = "", **options: Any) -> Server:
        started.append(start(folder, prelude, **options))
        return started[-1]

    yield begin
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.process.wait()
