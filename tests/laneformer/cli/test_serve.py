"""laneformer serve as a command: its flags reach the server, the page is opened, Ctrl-C is an orderly end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from laneformer.cli import main
from laneformer.serve.loading import Loading
from laneformer.serve.options import ServerOptions


def test_serve_opens_the_page_and_ends_with_ctrl_c(folder: Path, tmp_path: Path) -> None:
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$1" > {tmp_path}/opened.part; mv {tmp_path}/opened.part {tmp_path}/opened\n'
    )
    browser.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "laneformer.cli", "serve", str(folder), "--port=0", "--threads=1", "--open",
         "--model-name=talker", "--api-key=key"],
        env={**os.environ, "BROWSER": f"{browser} %s"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("laneformer serves talker at http://127.0.0.1:")
        address, until = line.split()[-1], time.monotonic() + 20
        while not (tmp_path / "opened").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert (tmp_path / "opened").read_text().strip() == address
        asked = urllib.request.Request(f"{address}/v1/models", headers={"Authorization": "Bearer key"})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert [model["id"] for model in json.load(answer)["data"]] == ["talker"]
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert not {"Traceback", "leaked"} & set(process.communicate()[1].split())
    finally:
        process.kill()


def test_sigterm_while_weights_load() -> None:
    code = """
import time
from laneformer.cli import main
from laneformer.cli.options import ModelOptions
# short pauses: a signal just before one is handled behind it
ModelOptions.load = lambda *_: print("loading", flush=True) or [time.sleep(0.05) for _ in range(1200)]
main(["serve", ".", "--port=0"])
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    process.terminate()
    assert process.wait(20) == 0


def test_mistakes_are_told_before_the_weights_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "/nowhere", "--port", "70000"])
    assert "port = 70000 is outside 0 to 65535" in capsys.readouterr().err


def test_the_port_is_taken_and_health_answers_while_weights_load() -> None:
    options = ServerOptions("m", port=0)
    with options.listen() as listening:
        host, port = listening.getsockname()
        with Loading(listening):
            for _ in range(2):
                with pytest.raises(urllib.error.HTTPError) as told:
                    urllib.request.urlopen(f"http://{host}:{port}/health", timeout=20)
                assert (told.value.code, json.load(told.value)) == (503, {"status": "loading"})
        taken = ServerOptions("m", port=port)
        with pytest.raises(ValueError, match="choose another --port"):
            taken.listen()
        with taken.listen(or_next=True) as other:
            assert port < other.getsockname()[1] < port + 100
