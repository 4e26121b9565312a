"""Tests of the command laneformer serve: flags reach the server, the page opens, Ctrl-C ends it."""

import signal
import subprocess
import sys

import httpx
import pytest

from laneformer.cli import main
from laneformer.serve.loading import answer_loading
from laneformer.serve.options import ServerOptions
from tests.laneformer.serve.conftest import launch, wait_until


@pytest.mark.job
def test_serve_opens_the_page_and_ends_with_ctrl_c(folder, tmp_path, monkeypatch):
    browser = tmp_path / "browser"
    opened = tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part; mv {opened}.part {opened}\n')
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    flags = ["--port=0", "--threads=1", "--open", "--model-name=talker", "--api-key=key"]
    server = launch("-m", "laneformer.cli", "serve", str(folder), *flags)
    try:
        assert "laneformer serves talker at http://127.0.0.1:" in server.output()
        wait_until(opened.exists)
        assert opened.read_text().strip() == server.url
        key = {"Authorization": "Bearer key"}
        models = httpx.get(f"{server.url}/v1/models", headers=key).json()["data"]
        assert [model["id"] for model in models] == ["talker"]
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        assert not {"Traceback", "leaked"} & set(server.output().split())
    finally:
        server.kill()


@pytest.mark.job
def test_sigterm_while_weights_load():
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
    assert process.wait(50) == 0


def test_mistakes_are_told_before_the_weights_are_loaded(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "/nowhere", "--port", "70000"])
    assert "port = 70000 is outside 0 to 65535" in capsys.readouterr().err


def test_the_port_is_taken_and_health_answers_while_weights_load():
    # weights may load for minutes: who asks then gets an answer, and a second server another port
    options = ServerOptions("m", port=0)
    with options.listen() as listening:
        host, port = listening.getsockname()
        with answer_loading(listening):
            for _ in range(2):
                health = httpx.get(f"http://{host}:{port}/health")
                assert health.status_code == 503
                assert health.json() == {"status": "loading"}
        second_options = ServerOptions("m", port=port)
        refusal = f"cannot listen on port {port} of 127.0.0.1: Address already in use; choose another --port"
        with pytest.raises(ValueError, match=refusal):
            second_options.listen()
        with second_options.listen(or_next=True) as other:
            assert port < other.getsockname()[1] < port + 100
