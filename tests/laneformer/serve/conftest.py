"""Fixtures with a server for a tiny model: the application in this process, or a process on a free port."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from laneformer.engine import Engine
from tests.laneformer.engine.assets import random_model, small_config, with_fixed_cost, write_folder
from tests.tokenizer_assets import byte_level, save

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

ROOT = Path(__file__).resolve().parents[3]
START_S = 300.0
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. ",
    "user assistant system Hello, how are you? ",
    "1 2 3 {}[]:,",
]
TEMPLATE = (  # SmolLM2's
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
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


def write_model(
    folder,
    more=(),
    template=TEMPLATE,
    ends=SPECIAL[2:],
    **sizes,
) -> Path:
    """Write a random model with a tokenizer; `more` are further control tokens."""
    # ids beyond the tokenizer's are padding, as in many models
    tokenizer = byte_level(TEXTS * 20, [*SPECIAL, *more], vocab_size=400)
    vocab_size = tokenizer.get_vocab_size()
    config = small_config(vocab_size=vocab_size + -vocab_size % 4, **sizes)
    write_folder(
        folder, random_model(config), eos_token_id=[tokenizer.token_to_id(end) for end in ends]
    )
    save(
        tokenizer,
        folder,
        chat_template=template,
        eos_token="<|im_end|>",
        bos_token="<|endoftext|>",
        tokenizer_class="PreTrainedTokenizerFast",
    )
    (folder / "generation_config.json").write_text('{"do_sample": false}')
    return folder


@pytest.fixture(scope="session")
def model_folder(shared):
    """Return a model of about ten thousand tokens/s with sliding windows and a context of 512 tokens."""
    return shared("served", lambda folder: write_model(folder, max_position_embeddings=512))


@pytest.fixture(scope="session")
def slow_folder(shared):
    """Return a model of at most a thousand tokens/s."""
    # its 8,192 tokens take long enough for a test to look while it runs
    sizes = {"hidden_size": 320, "intermediate_size": 704, "num_hidden_layers": 8}
    return shared(
        "served_slowly", lambda folder: write_model(folder, max_position_embeddings=8192, **sizes)
    )


# In this process


@contextlib.contextmanager
def serving(engine, **options) -> Iterator[TestClient]:
    """Yield a client of an engine's application; `options` are those of ServerOptions."""
    from fastapi.testclient import TestClient

    from laneformer.serve.app import create_app
    from laneformer.serve.options import ServerOptions

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LANEFORMER_API_KEY", raising=False)
        app = create_app(engine, ServerOptions(**{"model_name": "tiny", **options}))
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as client:
        yield client
    # FastAPI caches endpoints as long as the process lives; the extension module calls an engine
    # there leaked
    vars(app.state.scheduler).clear()


@contextlib.contextmanager
def in_process(folder, engine=None, **options) -> Iterator[TestClient]:
    """Yield a client of a folder's application.

    Args:
        engine: options of Engine.from_pretrained.
        options: of ServerOptions.
    """
    engine_of_folder = Engine.from_pretrained(
        folder, **{"threads": 1, "cache": False, **(engine or {})}
    )
    with engine_of_folder, serving(with_fixed_cost(engine_of_folder), **options) as client:
        yield client


@pytest.fixture(scope="module")
def tiny(model_folder):
    with in_process(model_folder) as client:
        yield client


@pytest.fixture(scope="module")
def engine(model_folder):
    """Yield an engine to compare answers with."""
    with Engine.from_pretrained(model_folder, threads=1, cache=False) as engine:
        yield engine


# As a process


@dataclass
class Server:
    """A server process; `url` has no slash at the end."""

    url: str
    process: subprocess.Popen[str]
    lines: queue.Queue[str]  # of stdout and stderr

    def stop(self, timeout_s: float = 30.0) -> int:
        """Send SIGTERM and return the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        return "".join(self.lines.queue)


def start(folder, prelude="", engine=None, **options) -> Server:
    """Start a server process and wait until it listens.

    Args:
        prelude: code that plants a fault in the process.
        engine: options of Engine.from_pretrained.
        options: of ServerOptions.
    """
    engine = {"threads": 1, "cache": False, **(engine or {})}
    arguments = [str(folder), engine, {"model_name": "tiny", "port": 0, **options}, prelude]
    return launch("-c", MAIN, json.dumps(arguments))


def launch(*arguments: str) -> Server:
    """Start Python with these arguments, which must run a server, and wait until it listens."""
    environment = {key: value for key, value in os.environ.items() if key != "LANEFORMER_API_KEY"}
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = queue.Queue()
    address = queue.Queue()

    def read():
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
            if line.startswith("laneformer serves "):
                address.put(line.split(" at ")[-1].strip())
        # the output has ended without an address: the server did not start
        address.put("")

    # read in a thread, so that a full pipe never blocks the server
    threading.Thread(target=read, daemon=True).start()
    server = Server(address.get(timeout=START_S), process, lines)
    if not server.url:
        process.wait(START_S)
        pytest.fail(f"the server did not start: {server.output()}")
    return server


@pytest.fixture
def server():
    """Yield `server(folder, prelude, engine={...}, **options)`, which starts servers for one test."""
    servers = []

    def begin(folder, prelude="", **options):
        servers.append(start(folder, prelude, **options))
        return servers[-1]

    yield begin
    for process in servers:
        process.kill()


def wait_until(condition: Callable[[], object], timeout_s: float = 120.0):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.02)
