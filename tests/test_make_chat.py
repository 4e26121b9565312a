"""Test of `make chat`: a model from PyPI, its server, the playground in a browser, Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.job
def test_make_chat(tmp_path):
    if not (ROOT / ".venv" / ".engine-ready").exists():
        pytest.skip("this checkout was not set up by make, which would begin with that")
    browser = tmp_path / "browser"
    browser.write_text(
        f'#!/bin/sh\necho "$1" > {tmp_path}/part; mv {tmp_path}/part {tmp_path}/opened\n'
    )
    browser.chmod(0o755)
    make = subprocess.Popen(
        ["make", "chat"],
        cwd=ROOT,
        env={**os.environ, "BROWSER": f"{browser} %s"},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert make.stdout is not None
        address = next(
            line.split()[-1] for line in make.stdout if line.startswith("laneformer serves ")
        )
        until = time.monotonic() + 20
        while not (tmp_path / "opened").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert (tmp_path / "opened").read_text().strip() == address
        with urllib.request.urlopen(address) as page:
            assert b"<script" in page.read()
        messages = [{"role": "user", "content": "Where is the Eiffel Tower?"}]
        body = {"messages": messages, "max_tokens": 16, "temperature": 0}
        request = urllib.request.Request(
            f"{address}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert "Paris" in json.load(answer)["choices"][0]["message"]["content"]
        children = subprocess.run(
            ["pgrep", "-g", str(make.pid), "-f", "laneformer serve"], capture_output=True, text=True
        )
        server = next(int(pid) for pid in children.stdout.split() if int(pid) != make.pid)
        # to all of the group, make itself would end by the signal
        os.kill(server, signal.SIGINT)
        assert make.wait(60) == 0
        assert "Traceback" not in make.stdout.read()
    finally:
        if make.poll() is None:
            os.killpg(make.pid, signal.SIGKILL)
