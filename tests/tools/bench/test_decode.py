"""Tests of the decode benchmark: arithmetic on known speeds, a missing baseline, real processes."""

from __future__ import annotations

import json
import math
import re
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

from laneformer import LaneformerConfig
from tools.bench import baselines, decode, decode_candidates, llamacpp
from tools.bench.__main__ import main
from tools.bench.decode import OURS, Options, candidate

SILENT = Console(quiet=True)
CONFIG = LaneformerConfig.from_flavor("tiny")


class FakeCandidate:
    """Known speeds in tokens/s: ours 40, 41, ..., llama.cpp 20; Transformers is missing."""

    log: list[tuple[str, str]] = []  # noqa: RUF012  (one for all, emptied by the fixture)

    def __init__(self, name: str, options: Options):
        self.name, self.trials = name, -1  # the first trial warms up

    def ask(self, do: str, **command: Any) -> Any:
        if do == "facts":
            if self.name == "transformers":
                return {"missing": "No module named 'torch'; pip install torch"}
            return {
                "version": f"{self.name} 1",
                "about": "fake",
                "context_tokens": 4096,
                "vocab_size": 100,
            }
        self.log.append((self.name, do))
        if do == "probe":
            return 2e9
        if do == "prefill":
            return 10.0 * len(command["prompt"]), 0
        self.trials += 1
        return 20.0 if self.name.startswith("llamacpp") else 39.0 + self.trials, 10**7

    def close(self) -> None:
        self.log.append((self.name, "close"))


@pytest.fixture
def fake(monkeypatch):
    FakeCandidate.log.clear()
    monkeypatch.setattr(decode, "candidate", FakeCandidate)
    return FakeCandidate


def run(**values: Any) -> dict[str, Any]:
    return decode.measure(Options(**values), SILENT)


def test_figures_of_known_speeds(fake):
    # trials alternate between probes, and every process is closed
    result = run(pairs=3)
    assert [each["order"][0] for each in result["workloads"][0]["rounds"]] == [
        OURS,
        "llamacpp",
        OURS,
    ]
    # after the two warm-ups
    measured = [entry for entry in fake.log if entry[1] in ("decode", "probe")][2:]
    assert [do for _, do in measured[:10]] == ["probe", "decode", "probe", "decode", "probe"] * 2
    assert [name for name, do in measured if do == "decode"][:4] == [
        OURS,
        "llamacpp",
        "llamacpp",
        OURS,
    ]
    assert [name for name, do in fake.log if do == "close"] == [OURS, "llamacpp", "transformers"]
    decoding, short, _ = result["workloads"]
    assert decoding["ratios"] == [
        {
            "workload": "decode at depth 0",
            "ours": OURS,
            "over": "llamacpp",
            "median": 2.05,
            "min": 2.0,
            "max": 2.1,
            "ahead": "3 of 3",
        }
    ]
    ours, llamacpp_row = decoding["rows"]
    speeds = {name: ours[name] for name in ("tokens_per_s", "p10", "p90")}
    assert speeds == pytest.approx({"tokens_per_s": 41, "p10": 40.2, "p90": 41.8})
    assert ours["percent_of_probe"] == pytest.approx(100 * 41 * 1e7 / 2e9)
    assert (llamacpp_row["tokens_per_s"], llamacpp_row["first_token_s"]) == (20, None)
    assert (short["rows"][0]["tokens_per_s"], short["rows"][0]["first_token_s"]) == (1280, 0.1)
    assert result["missing"] == {"transformers": "No module named 'torch'; pip install torch"}
    assert set(result["candidates"]) == {OURS, "llamacpp"}
    rounds = [{"tokens_per_s": {OURS: ours, "llamacpp": 30.0}} for ours in (29.0, 30.0, 31.0, 60.0)]
    assert decode.ratio(rounds, OURS, "llamacpp")["ahead"] == "2 of 4", "as fast is not ahead"
    title, body = decode.section(Options(pairs=3), result)
    assert title == "`300m` in bf16, 2 threads"
    assert "| decode at depth 0 | laneformer | 41 | 40.2 | 41.8 | 20.5 | - |" in body
    assert "| decode at depth 0 | laneformer | llamacpp | 2.05 | 2 | 2.1 | 3 of 3 |" in body
    assert "- transformers: left out, No module named 'torch'" in body


def test_everyone_meets_every_format_of_about_that_size_and_our_options_the_plain_engine(fake):
    own = "math=exact,isa=avx2"
    (load,) = run(pairs=1, dtype="int4", ours=(own,), depth=(9,), prefill=())["workloads"]
    ours, formats = [OURS, f"{OURS} {own}"], ["llamacpp q4_0", "llamacpp q4_k_m"]
    assert [row["candidate"] for row in load["rows"]] == [*ours, *formats], (
        "Transformers has no such weights"
    )
    pairs = [(row["ours"], row["over"]) for row in load["ratios"]]
    assert pairs == [*((name, other) for name in ours for other in formats), (OURS, ours[1])]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"against": "llama.cpp"}, "unknown baseline 'llama.cpp'; choose from"),
        ({"depth": (4090,)}, "the workloads need 4155 positions, the context has 4096"),
        ({"depth": (), "prefill": ()}, "nothing to measure"),
        ({"dtype": "gguf"}, "'gguf' takes a file as it is; give --model"),
    ],
)
def test_bad_options(values, message, fake):
    with pytest.raises(ValueError, match=message):
        run(**values)


def test_the_random_gguf_holds_the_same_matrices_and_a_token_reads_them_once(tmp_path):
    # of experts those that a token takes; norms in 32 bits, all else in 16; one embedding row
    gguf = pytest.importorskip("gguf")
    for flavor in ("2b", "300m", "tiny"):
        config = LaneformerConfig.from_flavor(flavor)
        shapes = llamacpp.gguf_shapes(config).values()
        assert sum(math.prod(shape) for shape in shapes) == config.parameter_count()["total"]
    config = LaneformerConfig.from_flavor("tiny", num_hidden_layers=1, swa_layers=())
    path = llamacpp.random_gguf(config, tmp_path)
    reader = gguf.GGUFReader(path)
    shapes = {t.name: tuple(int(n) for n in t.shape[::-1]) for t in reader.tensors}
    assert shapes == llamacpp.gguf_shapes(config)
    written = path.stat().st_mtime_ns
    assert llamacpp.random_gguf(config, tmp_path).stat().st_mtime_ns == written, "once"
    count, cache_width = config.parameter_count(), 2 * config.num_key_value_heads * config.head_dim
    read = 2 * (count["total"] - count["embedding"]) + 2 * count["norms"]
    sizes = config.vocab_size, cache_width, read, config.max_position_embeddings
    assert llamacpp.sizes_of(path) == sizes
    writer = gguf.GGUFWriter(tmp_path / "experts.gguf", "qwen3moe")
    for name, value in (("context_length", 64), ("expert_count", 8), ("expert_used_count", 2)):
        writer.add_uint32(f"qwen3moe.{name}", value)
    for name, size in {
        "token_embd": (320, 4),
        "blk.0.ffn_up_exps": (8, 4, 4),
        "output": (320, 4),
    }.items():
        writer.add_tensor(f"{name}.weight", np.zeros(size, np.float32))
    llamacpp.write_file(writer)
    assert llamacpp.sizes_of(tmp_path / "experts.gguf") == (320, 0, 4 * (2 * 16 + 320 * 4), 64)


@pytest.mark.rotate
def test_ours_alone_from_the_command_line(capsys, tmp_path):
    out = tmp_path / "decode.md"
    words = "decode --flavor tiny --against= --pairs 1 --new-tokens 8 --threads 1 --prefill 16 --ours kv_dtype=int8"
    # the flavor has 512
    main([*words.split(), "--depth", "600", "--context-tokens", "700", "--out", str(out)])
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    for workload in result["workloads"]:
        assert len(workload["rows"]) == 2
        assert all(row["tokens_per_s"] > 0 for row in workload["rows"])
        assert min(workload["rounds"][0]["probes"]) > 1e6
    page = out.read_text()
    title = f"## {result['date']}: `tiny` in bf16, 1 threads"
    assert page.startswith(f"{decode.FILE_START}\n\n{title}\n\n    {result['command']}")
    assert f"Commit {result['commit']}." in page
    assert "keys and values in int8" in page
    assert re.search("round 1 of 1: laneformer .*, laneformer kv_dtype=int8 ", captured.err)


def test_a_candidate_has_its_options_and_sleeps_between_its_trials():
    options, read = Options(flavor="tiny", threads=1), {}
    for name in (OURS, f"{OURS} kv_dtype=int8"):
        process = candidate(name, options)
        speed, read[name] = process.ask("decode", prompt=[5] * 100, new_tokens=4)
        assert speed > 0
        if name == OURS:
            # in processor time, which waits for nobody: one that spins never stands still
            clock, used_s = psutil.Process(process.process.pid), [0.0]
            while len(used_s) < 100 and used_s[-3:] != 3 * used_s[-1:]:
                time.sleep(0.1)
                used_s.append(sum(clock.cpu_times()[:2]))
            assert used_s[-3:] == 3 * used_s[-1:], "an idle candidate takes CPU from the others"
        process.close()
    assert read[f"{OURS} kv_dtype=int8"] < read[OURS]


def test_what_a_baseline_lacks_is_reported_with_the_line_that_installs_it(monkeypatch):
    def fail(*_: Any) -> None:
        raise ImportError("planted")

    monkeypatch.setattr(decode_candidates, "TransformersLlama", fail)
    facts = decode_candidates.load_candidate("transformers", CONFIG, "bf16", 1, None).facts()
    assert re.match("planted; .*pip install", facts["missing"])


class TwoWays(baselines.Baseline):
    """One way is faster at the start, the other at a depth; only evaluations move the clock."""

    weight_bytes, clock, cached, version, about = 1000, 0.0, 0, "1", "fake"
    ways = ("short", "long")
    costs = {"short": (1.0, 0.01), "long": (2.0, 0.0)}  # noqa: RUF012  (s a token, and a cached position more)

    def rewind(self, way: str, length: int) -> None:
        self.cached = length

    def evaluate(self, way: str, ids: list[int]) -> int:
        token_s, position_s = self.costs[way]
        self.cached += len(ids)
        self.clock += len(ids) * (token_s + position_s * self.cached)
        return 5

    def count_cached_bytes(self, positions: int) -> int:
        return positions


def test_a_baseline_runs_each_workload_in_the_way_that_is_fastest_for_it(monkeypatch):
    baseline = TwoWays()
    monkeypatch.setattr(baselines, "time", SimpleNamespace(perf_counter=lambda: baseline.clock))
    speed, read = baseline.decode([5], 8)
    # eight tokens behind 1 to 8 others
    assert (speed, read) == (
        pytest.approx(8 / sum(1 + 0.01 * n for n in range(2, 10))),
        1000 + 1 + 4,
    )
    assert baseline.decode([5] * 4000, 8)[0] == pytest.approx(0.5)
    baseline.prefill([5] * 9000)
    assert baseline.facts()["about"] == "fake; depth 1: short; depth 4000: long; prompt 9000: long"


def bytes_read(name: str, version: str, **options: Any) -> float:
    """Return the bytes that a real candidate reads for a token."""
    process = candidate(name, Options(threads=1, **options))
    assert version in process.ask("facts")["version"]
    (speed, read), again = (process.ask("decode", prompt=[5, 6, 7], new_tokens=4) for _ in range(2))
    assert min(speed, again[0], process.ask("prefill", prompt=[5] * 20)[0]) > 0
    # the second time it decodes behind its prompt
    assert again[1] == read
    process.close()
    return read


@pytest.mark.rotate
def test_transformers_runs():
    count = CONFIG.parameter_count()
    cached = 2 * 2 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * CONFIG.head_dim * 5
    read = bytes_read("transformers", "transformers", flavor="tiny")
    assert read == 2 * (count["total"] - count["embedding"]) + cached


@pytest.mark.rotate
def test_llama_cpp_runs_every_type_of_weights_made_from_the_same_file(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    try:
        llamacpp.library()
    except ImportError as error:
        pytest.skip(f"{error}: {decode_candidates.INSTALL['llamacpp']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = LaneformerConfig.from_flavor(
        "tiny", num_hidden_layers=2, swa_layers=(), hidden_size=256
    )
    path, kinds = llamacpp.random_gguf(config, tmp_path), ("bf16", "q8_0", "q4_0", "q4_k_m")
    sizes = {kind: bytes_read(f"llamacpp {kind}", "llama-cpp-python", model=path) for kind in kinds}
    assert sizes["bf16"] > sizes["q8_0"] > sizes["q4_k_m"] > sizes["q4_0"]
