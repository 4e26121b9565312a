"""Checks of a server with the `openai` package, run by pytest, and as a script for another major version.

    PYTHONPATH=.venv/clients python tests/laneformer/serve/clients/openai_checks.py URL MODEL KEY

The strict clients raise on every field that breaks the typed schema, so each answer also checks its
form. test_completions and test_conversations compare the contents with the engine.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

QUESTION = [{"role": "user", "content": "def main(argv):"}]
IDLE_S = 30.0


@dataclass
class Target:
    """A server and how to reach it."""

    url: str  # without /v1
    model: str
    key: str

    def sync(self, **options):
        import openai

        defaults = {
            "base_url": f"{self.url}/v1",
            "api_key": self.key,
            # a retry would hide a failure
            "max_retries": 0,
            "timeout": 60,
        }
        return openai.OpenAI(**{**defaults, "_strict_response_validation": True, **options})

    def chat(self, client, **options):
        defaults = {"model": self.model, "messages": QUESTION, "max_tokens": 24}
        return client.chat.completions.create(**{**defaults, "temperature": 0, **options})

    def content(self) -> str:
        with self.sync() as client:
            return str(self.chat(client).choices[0].message.content)

    def metric(self, name: str) -> float:
        """Return a metric, or 0 if it has not been counted yet."""
        headers = {"Authorization": f"Bearer {self.key}"}
        metrics = httpx.get(f"{self.url}/metrics", headers=headers).text
        lines = [line.rsplit(maxsplit=1) for line in metrics.splitlines()]
        return sum(float(value) for key, value in lines if key == f"laneformer_{name}")

    def becomes_idle(self) -> bool:
        end_s = time.monotonic() + IDLE_S
        while busy := self.metric("running") + self.metric("waiting"):
            if time.monotonic() > end_s:
                break
            time.sleep(0.02)
        return not busy


def chat(a: Target):
    with a.sync() as client:
        whole = a.chat(client, logprobs=True, top_logprobs=2).choices[0]
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = a.chat(client, **options)
    assert last.usage.total_tokens > 0
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    )


def completions(a: Target):
    defaults = {
        "model": a.model,
        "prompt": "import os",
        "max_tokens": 12,
        "temperature": 0,
    }
    with a.sync() as client:
        text = client.completions.create(**defaults, logprobs=2).choices[0].text
    # OpenAI's types have no place for two nulls of its own server: an unfinished chunk's reason, a
    # first token's score
    with a.sync(_strict_response_validation=False) as client:
        parts = client.completions.create(**defaults, stream=True)
        assert "".join(part.choices[0].text for part in parts) == text


def errors(a: Target):
    import openai

    with a.sync() as client:
        assert client.models.retrieve(a.model) == client.models.list().data[0]
        expect_error(openai.NotFoundError, lambda: client.models.retrieve("another"))
        unknown = expect_error(
            openai.BadRequestError, lambda: a.chat(client, extra_body={"temprature": 1})
        )
        assert unknown.param == "temprature"
        assert "temperature" in unknown.message, "the nearest name"
    with a.sync(api_key="wrong") as client:
        expect_error(openai.AuthenticationError, lambda: a.chat(client))


def expect_error(kind: type[Exception], ask: Callable[[], Any]):
    try:
        answer = ask()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected, but there was an answer: {answer}")


CHECKS = chat, completions, errors


if __name__ == "__main__":
    import openai

    server = Target(*sys.argv[1:])
    for check in CHECKS:
        check(server)
    print(openai.__version__)
