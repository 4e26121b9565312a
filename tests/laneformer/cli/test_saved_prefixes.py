"""laneformer serve --cache-dir: a server that is started again goes on where the one before it has ended."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROMPT = np.random.default_rng(0).integers(3, 260, 1500).tolist()


class Server:
    """A server in a process of its own."""

    def __init__(self, folder: Path, kept: Path, *flags: str):
        command = [
            "-m",
            "laneformer.cli",
            "serve",
            str(folder),
            "--port=0",
            "--threads=1",
            f"--cache-dir={kept}",
        ]
        self.process = subprocess.Popen(
            [sys.executable, *command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("laneformer serves"), self.process.communicate()[1]
        self.address = line.split()[-1]

    def get(self, path: str, body: Any = None) -> str:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=300) as answer:
            return str(answer.read().decode())

    def complete(self, prompt: list[int], tokens: int = 20) -> tuple[str, int]:
        """Text, and how many ids of the prompt were not read."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        answer = json.loads(self.get("/v1/completions", body))
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def end(self, how: signal.Signals) -> str:
        """What it has said."""
        self.process.send_signal(how)
        said = self.process.communicate(timeout=300)[1]
        assert self.process.returncode == (0 if how == signal.SIGTERM else -how), said
        return said


@contextlib.contextmanager
def server(folder: Path, kept: Path, *flags: str) -> Iterator[Server]:
    running = Server(folder, kept, *flags)
    try:
        yield running
    finally:
        running.process.kill()
        running.process.communicate()


@pytest.mark.job
def test_a_server_goes_on_after_sigterm(folder: Path, tmp_path: Path) -> None:
    with server(folder, tmp_path) as first:
        text, cached = first.complete(PROMPT)
        assert cached == 0
        assert json.loads(first.get("/props"))["saved_prefixes"]["files"] == 0
        assert "warning" not in first.end(signal.SIGTERM).lower()
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    with server(folder, tmp_path, "--cache-dir-bytes=12345678") as second:
        assert second.complete(PROMPT) == (text, len(PROMPT) - 1)
        facts = json.loads(second.get("/props"))["saved_prefixes"]
        assert facts == {
            "files": 1,
            "bytes": path.stat().st_size,
            "limit_bytes": 12345678,
            "hits": 1,
            "hit_tokens": len(PROMPT) - 1,
        }
        metrics = second.get("/metrics")
        for name, value in facts.items():
            (said,) = re.findall(rf"^laneformer_saved_{name}(?:_total)? (\S+)$", metrics, re.MULTILINE)
            assert float(said) == value
        second.end(signal.SIGTERM)


@pytest.mark.rotate
def test_a_server_that_is_killed_at_any_time_leaves_nothing_wrong(folder: Path, tmp_path: Path) -> None:
    """The pool is too small for three prompts, so that one leaves at each request, and is written beside it."""
    prompts = [[int(i) for i in np.random.default_rng(seed).integers(3, 260, 1500)] for seed in range(3)]
    with server(folder, tmp_path / "none") as fresh:
        expected = [fresh.complete(prompt)[0] for prompt in prompts]
    hits = 0
    for delay_s in np.linspace(0, 0.5, 4):
        with server(folder, tmp_path / "kept", "--cache-bytes=5000000") as running:
            for prompt, text in zip(prompts, expected, strict=True):
                said, cached = running.complete(prompt)
                assert said == text
                hits += cached > 0
            time.sleep(delay_s)
            assert "is removed" not in running.end(signal.SIGKILL)
    assert hits > 0
