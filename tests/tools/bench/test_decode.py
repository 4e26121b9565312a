"""The decode benchmark: its arithmetic on known speeds, its report of a missing baseline, and real processes."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from laneformer import LaneformerConfig
from tools.bench import decode, decode_baselines, decode_candidates, llamacpp
from tools.bench.__main__ import main
from tools.bench.decode import OURS, Options, candidate

SILENT = Console(quiet=True)
BENCH = {
    "tokens_per_s": 50.0, "probe_bytes_per_s": 2e9, "percent_of_probe": 90.0, "percent_of_probe_p10": 80.0,
    "percent_of_probe_p90": 95.0, "token_s_p50": 0.02, "token_s_p99": 0.03,
}  # fmt: skip


class FakeCandidate:
    """Known speeds instead of a process: ours makes 40, 41, ... tokens/s, llama.cpp 20;
    Transformers is not there.
    """

    log: list[tuple[str, str]] = []  # noqa: RUF012  (one for all, emptied by the fixture)

    def __init__(self, name, options):
        self.name, self.trials = name, -1  # the first trial warms up

    def ask(self, do, **command):
        if do == "facts":
            if self.name == "transformers":
                return {"missing": "No module named 'torch'; pip install torch"}
            return {"version": f"{self.name} 1", "context_tokens": 4096, "vocab_size": 100}
        self.log.append((self.name, do))
        if do in ("bench", "settings", "probe"):
            return {"bench": BENCH, "settings": "none", "probe": 2e9}[do]
        if do == "prefill":
            return 10.0 * len(command["prompt"])
        self.trials += 1
        speed = 20.0 if self.name.startswith("llamacpp") else 39.0 + self.trials
        return {"tokens_per_s": speed, "bytes_per_token": 10**7}

    def cpu_clocks(self):
        return np.array([time.perf_counter(), 0.0, 0.0])

    def close(self):
        self.log.append((self.name, "close"))


@pytest.fixture
def fake(monkeypatch):
    FakeCandidate.log.clear()
    monkeypatch.setattr(decode, "candidate", FakeCandidate)
    return FakeCandidate


def run(**values) -> dict:
    return decode.measure(Options(**values), SILENT)


def test_figures_of_known_speeds(fake):
    result = run(pairs=3)
    decoding, short, _ = result["workloads"]
    assert decoding["ratios"] == [
        {"ours": OURS, "over": "llamacpp", "median": 2.05, "min": 2.0, "max": 2.1, "ahead": 3, "pairs": 3}
    ]
    ours = decoding["candidates"][OURS]
    assert ours["tokens_per_s"] == pytest.approx({"median": 41, "p10": 40.2, "p90": 41.8})
    assert ours["percent_of_probe"]["median"] == pytest.approx(100 * 41 * 1e7 / 2e9)
    assert short["candidates"][OURS]["tokens_per_s"]["median"] == 1280.0
    assert result["missing"] == {"transformers": "No module named 'torch'; pip install torch"}
    assert set(result["candidates"]) == {OURS, "llamacpp"}
    json.dumps(result)


def test_a_round_behind_is_not_counted_as_ahead(fake):
    speeds = [{OURS: ours, "llamacpp": 30.0} for ours in (29.0, 30.0, 31.0, 60.0)]
    rounds = [{"figures": {name: {"tokens_per_s": speed} for name, speed in each.items()}} for each in speeds]
    assert decode.ratio(rounds, OURS, "llamacpp")["ahead"] == 2


def test_trials_alternate_between_probes_and_everyone_is_closed(fake):
    result = run(pairs=4, against="llamacpp", prefill=())
    assert [r["order"][0] for r in result["workloads"][0]["rounds"]] == [OURS, "llamacpp", OURS, "llamacpp"]
    measured = [entry for entry in fake.log if entry[1] in ("decode", "probe")][2:]  # after the two warm-ups
    assert [do for _, do in measured[:10]] == ["probe", "decode", "probe", "decode", "probe"] * 2
    assert [name for name, do in measured if do == "decode"][:4] == [OURS, "llamacpp", "llamacpp", OURS]
    assert [entry for entry in fake.log if entry[1] == "close"] == [(OURS, "close"), ("llamacpp", "close")]


def test_four_bits_meet_every_format_of_about_that_size_and_each_math_is_a_candidate(fake):
    result = run(pairs=1, dtype="int4", math=("int8", "exact"), depth=(), prefill=(), batch=(2,))
    (batch,) = result["workloads"]
    ours, formats = [OURS, "laneformer math=exact"], ["llamacpp q4_0", "llamacpp q4_k_m"]
    assert list(batch["candidates"]) == [*ours, *formats], "Transformers has no such weights"
    assert [(r["ours"], r["over"]) for r in batch["ratios"]] == [(o, f) for o in ours for f in formats]


def test_each_type_of_keys_is_a_candidate_compared_with_the_first(fake):
    result = run(
        pairs=1, kv_dtype=("fp16", "int8"), isa=("avx2", "avx512"), against="", depth=(9,), prefill=()
    )
    (behind,) = result["workloads"]
    others = ["kv_dtype=int8", "isa=avx512", "isa=avx512 kv_dtype=int8"]
    assert [(r["ours"], r["over"]) for r in behind["ratios"]] == [
        (OURS, f"{OURS} {other}") for other in others
    ]


def test_long_prompts_get_half_the_rounds_and_are_new_every_time(fake):
    long, short = run(pairs=4, depth=(), prefill=(2000, 500), against="llamacpp")["workloads"]
    assert [len(load["rounds"]) for load in (long, short)] == [2, 4]


def test_the_section_holds_the_figures(fake):
    title, body = decode.section(Options(pairs=2), run(pairs=2))
    assert title == "`300m` in bf16, 2 threads"
    assert "| decode at depth 0 | laneformer | 40.5 | 40.1 | 40.9 | 20 | 20 | 20 |  |" in body
    assert "| prompt of 128 | llamacpp | 1280.0 | 1280.0 | 1280.0 |  |  |  | 0.1 |" in body
    assert "| decode at depth 0 | laneformer | llamacpp | 2.02 | 2.00 | 2.05 | 2 of 2 |" in body
    assert "- transformers: left out, No module named 'torch'" in body


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"against": "llama.cpp"}, "unknown baseline 'llama.cpp'; choose from"),
        ({"against": OURS}, "unknown baseline"),
        ({"pairs": 0}, "pairs = 0 must be at least 1"),
        ({"context_tokens": 0}, "context_tokens = 0 must be at least 1"),
        ({"flavor": "tiny", "depth": (448,)}, "decode: 448 is outside 0 to 447"),
        ({"batch": (9,)}, "batch: 9 is outside 2 to 8"),
        ({"depth": (), "prefill": ()}, "nothing to measure"),
        ({"model": Path("nowhere.gguf")}, "nowhere.gguf is not a file"),
    ],
)
def test_bad_options(values, message):
    with pytest.raises(ValueError, match=message):
        run(**values)


def test_the_baselines_shape_holds_the_same_matrices():
    for flavor in ("2b", "300m", "tiny"):
        config = LaneformerConfig.from_flavor(flavor)
        shapes = llamacpp.gguf_shapes(config).values()
        count = config.parameter_count()
        assert sum(math.prod(s) for s in shapes) == count["total"]
        assert sum(math.prod(s) for s in shapes if len(s) == 1) == count["norms"]


def test_the_random_gguf_is_read_back_and_written_once(tmp_path):
    gguf = pytest.importorskip("gguf")
    config = LaneformerConfig.from_flavor("tiny", num_hidden_layers=1, swa_layers=())
    path = llamacpp.random_gguf(config, "bf16", tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    reader = gguf.GGUFReader(path)
    shapes = {t.name: tuple(int(n) for n in t.shape[::-1]) for t in reader.tensors}
    assert shapes == llamacpp.gguf_shapes(config)
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == config.vocab_size
    matrix = next(t for t in reader.tensors if t.name == "blk.0.ffn_up.weight")
    values = (np.asarray(matrix.data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    # 65536 draws: the deviation's own error is 0.3% of it, five of those are allowed; cutting to bf16 takes
    # up to 0.4%
    assert values.std() == pytest.approx(config.initializer_range, rel=0.02)
    written = path.stat().st_mtime_ns
    assert llamacpp.random_gguf(config, "bf16", tmp_path).stat().st_mtime_ns == written


@pytest.mark.rotate
def test_ours_alone_from_the_command_line(capsys, tmp_path):
    out = tmp_path / "decode.md"
    arguments = ["--flavor", "tiny", "--against", "", "--pairs", "1", "--new-tokens", "8", "--threads", "1"]
    arguments += ["--prefill", "16", "--batch", "2", "--beside", "1"]
    arguments += ["--depth", "600", "--context-tokens", "700"]  # the flavor has 512
    main(["decode", *arguments, "--out", str(out)])
    captured = capsys.readouterr()
    result = json.loads(captured.out.splitlines()[-1])
    assert [load["kind"] for load in result["workloads"]] == ["decode", "prefill", "batch"]
    for workload in result["workloads"]:
        assert workload["candidates"][OURS]["tokens_per_s"]["median"] > 0
        assert min(workload["rounds"][0]["probes"]) > 1e6
    assert (
        result["command"]
        == f"python -m tools.bench decode --flavor tiny --against '' {' '.join(arguments[4:])} --out {out}"
    )
    page = out.read_text()
    assert page.startswith(
        f"{decode.FILE_START}\n\n## {result['date']}: `tiny` in bf16, 1 threads, beside 1 busy programs\n\n    python"
    )
    assert f"{result['machine']['cpu']}, {result['machine']['cpus']} CPUs (" in page
    assert f"Commit {result['commit']}." in page
    assert "round 1 of 1: laneformer" in captured.err


def test_wrong_options_are_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["decode", "--pairs", "0"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "decode: pairs = 0 must be at least 1\n"


def test_a_candidate_sleeps_between_its_trials_and_refuses_unknown_commands():
    process = candidate(OURS, Options(flavor="tiny", threads=1))
    process.ask("decode", prompt=[5], new_tokens=4)
    # in processor time, which waits for nobody: one that spins never stands still
    used_s = [process.cpu_clocks()[1]]
    while len(used_s) < 100 and used_s[-3:] != 3 * used_s[-1:]:
        time.sleep(0.1)
        used_s.append(process.cpu_clocks()[1])
    assert used_s[-3:] == 3 * used_s[-1:], "an idle candidate takes CPU from the others"
    with pytest.raises(RuntimeError, match="no attribute 'juggle'"):
        process.ask("juggle")
    process.close()


def test_a_candidates_name_says_what_it_has_of_its_own():
    options, read = Options(flavor="tiny", threads=1, kv_dtype=("fp16", "int8")), {}
    for name in options.names()[:2]:
        process = candidate(name, options)
        read[name] = process.ask("decode", prompt=[5] * 100, new_tokens=4)["bytes_per_token"]
        process.close()
    assert read[f"{OURS} kv_dtype=int8"] < read[OURS]


@pytest.mark.rotate
def test_what_a_baseline_lacks_is_reported_with_the_line_that_installs_it(monkeypatch, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('planted')\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    process = candidate("transformers", Options(flavor="tiny", threads=1))
    missing = process.ask("facts")["missing"]
    assert missing.startswith("planted; ")
    assert "pip install" in missing
    process.close()


class TwoWays(decode_baselines.Baseline):
    """One way is faster at the start, the other at a depth; a clock that only evaluations move."""

    weight_bytes, clock, cached = 1000, 0.0, 0

    def ways(self, sequences):
        return {"short": (1.0, 0.01), "long": (2.0, 0.0)}  # s a token, and a cached position more

    def reset(self, way, length):
        self.cached = 0

    def rewind(self, way, length):
        self.cached = length
        return True

    def evaluate(self, way, ids):
        self.cached += len(ids)
        self.clock += len(ids) * (way[0] + way[1] * self.cached)
        return 5

    def evaluate_each(self, way, ids, position):
        self.cached = len(ids) * position
        return [self.evaluate(way, [i]) for i in ids]

    def cached_bytes(self, positions):
        return positions


def test_a_baseline_runs_each_workload_in_the_way_that_is_fastest_for_it(monkeypatch):
    baseline = TwoWays()
    monkeypatch.setattr(decode_baselines, "time", SimpleNamespace(perf_counter=lambda: baseline.clock))
    for depth in (1, 4000):
        baseline.decode([5] * depth, 8)
    baseline.prefill([5] * 9000)
    baseline.batch(2, 8)
    assert baseline.settings() == "depth 1: short; depth 4000: long; prompt 9000: long; batch 2: short"


@pytest.mark.rotate
def test_transformers_runs():
    process = candidate("transformers", Options(flavor="tiny", threads=1))
    assert "transformers" in process.ask("facts")["version"]
    again = [
        process.ask("decode", prompt=[5, 6, 7], new_tokens=4) for _ in range(2)
    ]  # the second keeps its prompt
    assert process.ask("prefill", prompt=[5] * 20) > 0
    assert process.ask("batch", sequences=3, new_tokens=4)["tokens_per_s"] > 0
    config = LaneformerConfig.from_flavor("tiny")
    count = config.parameter_count()
    cached = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 5
    for answer in again:
        assert answer["tokens_per_s"] > 0
        assert answer["bytes_per_token"] == 2 * (count["total"] - count["embedding"]) + cached
    assert "depth 3: " in process.ask("settings")
    process.close()


@pytest.mark.rotate
def test_llama_cpp_runs_every_type_of_weights_made_from_the_same_file(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    try:
        llamacpp.library()
    except ImportError as error:
        pytest.skip(f"{error}: {decode_candidates.INSTALL['llamacpp']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    config = LaneformerConfig.from_flavor("tiny", num_hidden_layers=2, swa_layers=(), hidden_size=256)
    path = llamacpp.random_gguf(config, "bf16", tmp_path)
    sizes = {}
    for kind in ("bf16", "fp16", "q8_0", "q4_0", "q4_k_m"):
        process = candidate(f"llamacpp {kind}", Options(model=path, threads=1))
        assert "llama-cpp-python" in process.ask("facts")["version"]
        again = [process.ask("decode", prompt=[5, 6, 7], new_tokens=4) for _ in range(2)]
        assert process.ask("prefill", prompt=[5] * 20) > 0
        assert process.ask("batch", sequences=3, new_tokens=4)["tokens_per_s"] > 0
        sizes[kind] = again[0]["bytes_per_token"]
        process.close()
    assert sizes["bf16"] == sizes["fp16"] > sizes["q8_0"] > sizes["q4_k_m"] > sizes["q4_0"]
