"""Tests of a GPU that does not answer: the server says so and ends with a status of its own."""

import threading
import time

import httpx
import pytest

from laneformer.engine import Engine
from laneformer.engine.decoder import Unanswered
from laneformer.serve import app
from laneformer.serve.options import ServerOptions
from tests.laneformer.cuda.harness import random_model, small_config, tensors_of
from tests.laneformer.cuda.stand_ins import LoopPasses, pretend_gpu
from tests.laneformer.engine.assets import byte_tokenizer

CONFIG = small_config(vocab_size=264, max_position_embeddings=48)


class Left(BaseException):
    """Raised instead of ending the process."""


@pytest.mark.parametrize(
    ("error", "status"), [(Unanswered("it has not ended"), 70), (RuntimeError("700"), None)]
)
def test_the_server_ends_with_its_status(error, status, monkeypatch, capsys):
    # at its start it prints how many requests share passes

    def fails(*_):
        raise error

    def leave(code):
        statuses.append(code)
        raise Left

    statuses, address, ready = [], [], threading.Event()
    servers, make = [], app.Server
    pretend_gpu(monkeypatch, LoopPasses)
    monkeypatch.setattr(app, "UNANSWERED_S", 600.0)  # over when the test says so
    monkeypatch.setattr(app.os, "_exit", leave)
    monkeypatch.setattr(
        app, "Server", lambda *arguments: servers.append(make(*arguments)) or servers[-1]
    )
    tensors = tensors_of(random_model(CONFIG), "bf16")
    with Engine(CONFIG, tensors, device="cuda", tokenizer=byte_tokenizer()) as engine:
        monkeypatch.setattr(LoopPasses, "run", fails)

        def serve():
            with pytest.raises(Left) if status else pytest.MonkeyPatch.context():
                app.run(
                    engine,
                    ServerOptions("tiny", port=0),
                    lambda url: (address.append(url), ready.set()),
                )

        thread = threading.Thread(target=serve)
        thread.start()
        assert ready.wait(30)
        assert "up to 5 requests decode side by side" in capsys.readouterr().err
        answer = httpx.post(
            f"{address[0]}/v1/completions", json={"prompt": [5], "max_tokens": 4}, timeout=30
        )
        assert (answer.status_code, str(error) in answer.text) == (500, True)
        health = httpx.get(f"{address[0]}/health", timeout=30)
        assert (health.status_code, health.json()) == (503, {"status": "failed"})
        if status is None:
            servers[0].should_exit = True
        else:
            while servers[0]._last_s is None:
                time.sleep(0.01)
            servers[0]._last_s -= app.UNANSWERED_S
        thread.join(30)
    assert statuses == ([status] if status else [])
