"""Tests that laneformer serve --cache-dir reuses prefixes after a restart."""

import re

import httpx
import numpy as np
import pytest

from tests.laneformer.serve.conftest import launch


def complete(server, prompt) -> tuple[str, int]:
    """Return the text and the number of reused prompt ids."""
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture
def serve(folder):
    """Yield `serve(cache_dir, *flags)`, which runs the command in a process."""
    servers = []

    def begin(cache_dir, *flags):
        command = ["-m", "laneformer.cli", "serve", str(folder), "--port=0", "--threads=1"]
        servers.append(launch(*command, f"--cache-dir={cache_dir}", *flags))
        return servers[-1]

    yield begin
    for server in servers:
        server.kill()


@pytest.mark.job
def test_a_server_goes_on_after_sigterm(serve, tmp_path):
    first = serve(tmp_path)
    prompt = np.random.default_rng(0).integers(3, 260, 1500).tolist()
    text, cached = complete(first, prompt)
    assert cached == 0
    assert httpx.get(f"{first.url}/props").json()["saved_prefixes"]["files"] == 0
    assert first.stop(timeout_s=300) == 0
    assert "warning" not in first.output().lower()
    (path,) = tmp_path.iterdir()
    # other users may not read what was asked
    assert path.stat().st_mode & 0o777 == 0o600
    # all but the prompt's last id are reused: reading that one gives the next token's logits
    second = serve(tmp_path, "--cache-dir-bytes=12345678")
    assert complete(second, prompt) == (text, len(prompt) - 1)
    facts = httpx.get(f"{second.url}/props").json()["saved_prefixes"]
    counts = {"files": 1, "limit_bytes": 12345678, "hits": 1, "hit_tokens": len(prompt) - 1}
    assert facts == {"bytes": path.stat().st_size, **counts}
    metrics = httpx.get(f"{second.url}/metrics").text
    for name, value in facts.items():
        (number,) = re.findall(
            rf"^laneformer_saved_{name}(?:_total)? (\S+)$", metrics, re.MULTILINE
        )
        assert float(number) == value
    assert second.stop(timeout_s=300) == 0
