"""The servers that `tools.bench cuda` measures: ours as a process of its own, on a CPU; SGLang's folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from laneformer import LaneformerConfig
from tools.bench import cuda_server

TINY = LaneformerConfig.from_flavor("tiny")


@pytest.mark.rotate
def test_our_server_streams_random_weights() -> None:
    """Greedy tokens of the random model: the client sees as many as it asked for, some in one text, which
    thousands a second make long.
    """
    ours = cuda_server.servers("tiny", "bf16")[0]
    ours.command = [*ours.command, "--device", "cpu"]
    with ours:
        answer = ours.ask("/v1/completions", prompt=[5], max_tokens=400, ignore_eos=True)
    assert answer.tokens == 400
    assert 2 <= len(answer.arrivals_s) <= 400
    assert answer.tokens_per_s > 1


def test_sglang_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ours, other = cuda_server.servers("tiny", "bf16")
    assert "laneformer[serve]" in ours.missing
    assert other.missing == "not installed: pip install 'sglang==0.5.18'"


def test_sglang_has_a_llama_of_the_same_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec  # transformers asks it, too
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: name == "sglang" or real(name, *of))
    monkeypatch.setattr(cuda_server, "LLAMA", tmp_path)
    command = cuda_server.sglang("tiny", "bf16").command
    assert command[1:3] == ["-m", "sglang.launch_server"]
    assert {"--load-format", "dummy", "bfloat16"} <= set(command)
    config = AutoConfig.from_pretrained(tmp_path)
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == ("llama", 128, 6)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode([5, 6]).split() == ["w5", "w6"]
