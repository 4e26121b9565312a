"""Fixtures for clients: one server with an API key, and clients in separate environments."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.laneformer.serve.clients.openai_checks import Target
from tests.laneformer.serve.conftest import start

KEY = "key-of-the-tests"
PYTHON_CLIENTS = Path(sys.prefix) / "clients"  # the last major of openai, litellm, schemathesis
API_CLIENTS = Path(sys.prefix) / "api-clients"  # anthropic, ollama, openai-agents
NODE_CLIENTS = Path(sys.prefix) / "node-clients"
AGENTS = Path(sys.prefix) / "agents" / "node_modules" / ".bin"  # codex, claude


@pytest.fixture(scope="module")
def endpoint(model_folder):
    server = start(model_folder, engine={"context_tokens": 1024}, api_key=KEY)  # room for tools
    yield Target(server.url, "tiny", KEY)
    assert server.stop() == 0, server.output()


@pytest.fixture(scope="session")
def other_python():
    """Return `other_python(*arguments, cwd)`, which runs Python with .venv/clients first and gives stdout."""
    if not PYTHON_CLIENTS.is_dir():
        pytest.skip(f"no {PYTHON_CLIENTS}: make {PYTHON_CLIENTS.relative_to(Path.cwd())}")

    def run(*arguments, cwd=None):
        return output([sys.executable, *arguments], cwd, PYTHONPATH=str(PYTHON_CLIENTS))

    return run


def output(
    command: list[str], cwd: Path | None = None, timeout_s: float = 240, **environment: str
) -> str:
    process = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=cwd,
        env={**os.environ, **environment},
    )
    assert process.returncode == 0, f"{process.stdout[-6000:]}\n{process.stderr[-6000:]}"
    return process.stdout
