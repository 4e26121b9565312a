"""The server's benchmark: its client on a real server at toy size, its arithmetic, and what it
says of missing ones.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest
from rich.console import Console

from laneformer import LaneformerConfig
from tools.bench import llamacpp, serve, serve_client
from tools.bench.serve import Options
from tools.bench.serve_client import Server

SILENT = Console(quiet=True)
SMALL = {"num_hidden_layers": 1, "swa_layers": (), "vocab_size": 512, "max_position_embeddings": 128}


@pytest.fixture
def model(tmp_path):
    return llamacpp.random_gguf(LaneformerConfig.from_flavor("tiny", **SMALL), "bf16", tmp_path)


@pytest.mark.rotate
def test_what_a_token_costs_is_measured_on_real_processes(model, monkeypatch):
    monkeypatch.setattr(serve, "random_gguf", lambda config, dtype: model)
    options = Options(workloads=("cost",), pairs=1, new_tokens=16, threads=1)
    result = serve.measure(options, SILENT)
    (figures,) = result["workloads"]["cost"]["rounds"]
    assert set(figures) == {"laneformer", "engine", "null"}
    assert all(value["us/token"] > 0 for value in figures.values())
    _, body = serve.section(options, result)
    assert "| cost: us/token | laneformer |" in body
    assert "1 of 1" in body or "0 of 1" in body


def test_the_client_sees_when_each_text_comes():
    with Server("null", [sys.executable, "-m", "tools.bench.serve_client"]) as server:
        answer = server.ask("/v1/completions", prompt="x", max_tokens=50)
    assert answer.tokens == len(answer.arrivals_s) == 50
    assert (np.diff(answer.arrivals_s) >= 0).all()
    assert 0 < answer.ttft_s == answer.arrivals_s[0]


def test_ratios_above_one_are_ours():
    assert serve.summary([(20.0, 10.0), (30.0, 10.0), (5.0, 10.0)], "tokens/s")["better"] == 2
    seconds = serve.summary([(0.1, 0.4), (0.2, 0.4), (0.8, 0.4)], "ttft, s")
    assert (seconds["better"], seconds["ahead"], seconds["median"]) == (2, 2, 0.4)


@pytest.mark.rotate
def test_what_is_not_installed_is_said_and_the_rest_is_measured(model, monkeypatch, tmp_path):
    monkeypatch.setattr(serve_client, "FOLDER", tmp_path)
    monkeypatch.setattr(serve_client.shutil, "which", lambda *arguments, **options: None)
    own = Server("laneformer", [sys.executable, "-m", "tools.bench.serve_client"])
    monkeypatch.setattr(serve, "ours", lambda *arguments: own)
    options = Options(model=model, pairs=1, new_tokens=8, workloads=("single", "ttft"), lengths=(4,))
    result = serve.measure(options, SILENT)
    assert set(result["missing"]) == {"llama-server", "llama_cpp.server"}
    assert "pip install" in result["missing"]["llama_cpp.server"]
    assert "- llama-server: left out; put it on the PATH" in serve.section(options, result)[1]
    assert set(result["workloads"]["ttft"]["rows"]) == {"4 words, s"}


@pytest.mark.rotate
@pytest.mark.parametrize("workload", ["together", "long", "edited"])
def test_workloads_give_figures(workload):
    with Server("null", [sys.executable, "-m", "tools.bench.serve_client"]) as server:
        options = Options(new_tokens=2000, lengths=(4,))
        if workload == "long":
            server.several = False  # a server that only writes is done before the prompt comes
            assert serve.Trial(server, options, random.Random(0)).long() == {}
        else:
            found = getattr(serve.Trial(server, options, random.Random(0)), workload)()
            assert all(value > 0 for name, value in found.items() if "gap" not in name)


@pytest.mark.parametrize(
    ("values", "message"),
    [({"pairs": 0}, "pairs = 0"), ({"workloads": ("cost", "single")}, "a model of its own; give it alone")],
)
def test_bad_options(values, message):
    with pytest.raises(ValueError, match=message):
        serve.measure(Options(**values), SILENT)
