"""The `openai` packages against a real server: Python's with strict validation, its last major, and Node's."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.laneformer.serve.clients import openai_checks
from tests.laneformer.serve.clients.conftest import NODE_CLIENTS, output
from tests.laneformer.serve.clients.openai_checks import CHECKS, LONG, Asked, refused
from tests.laneformer.serve.conftest import Server

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_openai(asked: Asked, check: Callable[[Asked], None]) -> None:
    check(asked)


def test_a_full_queue_is_429_and_the_client_tries_again(
    server: Callable[..., Server], model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(server(model_folder, max_waiting=0).url, "tiny", "none")
    held: list[Any] = []
    with asked.sync() as client, asked.sync(max_retries=400) as patient:

        def fill() -> None:
            while len(held) < 100:  # nobody reads them, so they run on
                held.append(asked.chat(client, **LONG, stream=True))

        error = refused(openai.RateLimitError, fill)
        assert int(error.response.headers["retry-after"]) >= 1
        assert error.body["message"]
        retries: list[int] = []

        def leave(**_: Any) -> None:
            retries.append(1)
            for stream in held:
                stream.close()
            time.sleep(0.02)  # each retry asks whether the server has seen it

        monkeypatch.setattr(patient, "_sleep_for_retry", leave)
        assert asked.chat(patient).choices
        assert retries, "the queue was full"


@pytest.mark.rotate
def test_the_previous_major(asked: Asked, other_python: Callable[..., str]) -> None:
    printed = other_python(openai_checks.__file__, asked.url, asked.model, asked.key)
    assert printed.split()[-1].startswith("2.")


@pytest.mark.rotate
def test_node(asked: Asked) -> None:
    if shutil.which("node") is None or not NODE_CLIENTS.is_dir():
        pytest.skip(f"no Node.js, or no {NODE_CLIENTS.name}: make .venv/{NODE_CLIENTS.name}")
    program = NODE_CLIENTS / "openai_session.mjs"  # where node finds the package
    shutil.copy(FOLDER / "openai_session.mjs", program)
    told = json.loads(output(["node", str(program), asked.url, asked.model, asked.key], timeout_s=60))
    with asked.sync() as client:
        content = asked.chat(client).choices[0].message.content
    assert told["models"] == ["tiny"]
    assert told["content"] == told["streamed"] == told["helper"] == content
    assert told["usage"]["completion_tokens"] <= 24
    assert told["refused"] == {"status": 400, "param": "temprature"}
    assert told["unauthorised"] == 401
    assert told["aborted"] == 3
    assert told["after"] == content
