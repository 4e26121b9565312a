"""The rival benchmark: what it computes from known speeds, what it says of a missing rival, and real processes."""

from __future__ import annotations

import json
import math
import os
import time

import numpy as np
import pytest
from rich.console import Console

from laneformer import LaneformerConfig
from tools.bench import decode as bench_decode
from tools.bench import decode_rivals as bench_rivals
from tools.bench.decode import OURS, Options
from tools.bench.decode_rivals import ContestantProcess

SILENT = Console(quiet=True)
BENCH = {
    "tokens_per_s": 50.0, "probe_bytes_per_s": 2e9, "percent_of_probe": 90.0, "percent_of_probe_p10": 80.0,
    "percent_of_probe_p90": 95.0, "token_s_p50": 0.02, "token_s_p99": 0.03,
}  # fmt: skip


class FakeContestant:
    """Known speeds instead of a process: ours makes 40, 41, ... tokens/s, llama.cpp 20; Transformers is not there."""

    log: list[tuple[str, str]] = []  # noqa: RUF012  (one for all, emptied by the fixture)

    def __init__(self, name, flavor, dtype, threads):
        self.name, self.turns = name, -1  # the first turn warms up
        self.missing = "No module named 'torch'; pip install torch" if name == "transformers" else None
        self.facts = {"version": f"{name} 1", "settings": "none", "weight_bytes_per_token": 10**7}

    def ask(self, do, **command):
        self.log.append((self.name, do))
        if do == "bench":
            return BENCH
        if do == "prefill":
            return 10.0 * len(command["prompt"])
        self.turns += 1
        return 20.0 if self.name == "llamacpp" else 39.0 + self.turns

    def cpu_clocks(self):
        return time.perf_counter(), 0.0, 0.0

    def close(self):
        self.log.append((self.name, "close"))


@pytest.fixture
def fake(monkeypatch):
    FakeContestant.log.clear()
    monkeypatch.setattr(bench_decode, "ContestantProcess", FakeContestant)
    return FakeContestant


def run(**values) -> dict:
    options = Options(**values)
    options.check()
    return {**bench_decode.compare(options, options.names(), SILENT), "command": "the command"}


def test_figures_of_known_speeds(fake):
    result = run(pairs=3)
    assert result["ratios"] == {"llamacpp": {"median": 2.05, "min": 2.0, "max": 2.1, "ahead": 3, "pairs": 3}}
    ours = result["contestants"][OURS]
    assert ours["tokens_per_s"] == pytest.approx({"median": 41, "p10": 40.2, "p90": 41.8})
    assert ours["percent_of_probe"]["median"] == pytest.approx(100 * 41 * 1e7 / 2e9)
    assert ours["prefill_tokens_per_s"] == {"128": 1280.0, "512": 5120.0}
    assert result["missing"] == {"transformers": "No module named 'torch'; pip install torch"}
    assert set(result["contestants"]) == {OURS, "llamacpp"}
    json.dumps(result)


def test_a_round_behind_is_not_counted_as_ahead(fake):
    rounds = [{"tokens_per_s": {OURS: ours, "llamacpp": 30.0}} for ours in (29.0, 30.0, 31.0, 60.0)]
    assert bench_decode.ratio(rounds, "llamacpp")["ahead"] == 2


def test_turns_alternate_between_probes_and_everyone_is_closed(fake):
    result = run(pairs=4, against="llamacpp")
    assert [r["order"][0] for r in result["rounds"]] == [OURS, "llamacpp", OURS, "llamacpp"]
    measured = [entry for entry in fake.log if entry[1] in ("decode", "bench")][2:]  # after the two warm turns
    assert [do for _, do in measured[:10]] == ["bench", "decode", "bench", "decode", "bench"] * 2
    assert [name for name, do in measured if do == "decode"][:4] == [OURS, "llamacpp", "llamacpp", OURS]
    assert [entry for entry in fake.log if entry[1] == "close"] == [(OURS, "close"), ("llamacpp", "close")]


def test_the_file_grows_by_sections_that_hold_the_figures(fake, tmp_path):
    path = tmp_path / "new" / "decode.md"
    for _ in range(2):
        bench_decode.append_section(path, bench_decode.markdown(run(pairs=2)))
    text = path.read_text()
    assert text.count("# Decode speed on CPU, in paired runs\n") == 1
    assert text.count("\n    the command\n") == text.count("\n## ") == 2
    assert "| llamacpp | 2.02 | 2.00 | 2.05 | 2 of 2 |" in text
    assert "- transformers: left out, No module named 'torch'" in text
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"against": "llama.cpp"}, "unknown rival 'llama.cpp'; choose from"),
        ({"against": OURS}, "unknown rival"),
        ({"pairs": 0}, "pairs = 0 must be at least 1"),
        ({"flavor": "tiny", "depth": 448}, "depth = 448 is outside 0 to 447"),
    ],
)
def test_bad_options(values, message):
    with pytest.raises(ValueError, match=message):
        run(**values)


def test_the_rivals_shape_holds_the_same_matrices():
    for flavor in ("2b", "300m", "tiny"):
        config = LaneformerConfig.from_flavor(flavor)
        shapes = bench_rivals.gguf_shapes(config).values()
        count = config.parameter_count()
        assert sum(math.prod(s) for s in shapes) == count["total"]
        assert sum(math.prod(s) for s in shapes if len(s) == 1) == count["norms"]


def test_the_random_gguf_is_read_back_and_written_once(tmp_path):
    gguf = pytest.importorskip("gguf")
    config = LaneformerConfig.from_flavor("tiny", num_hidden_layers=1, swa_layers=())
    path = bench_rivals.random_gguf(config, "bf16", tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    reader = gguf.GGUFReader(path)
    shapes = {t.name: tuple(int(n) for n in t.shape[::-1]) for t in reader.tensors}
    assert shapes == bench_rivals.gguf_shapes(config)
    assert len(reader.fields["tokenizer.ggml.tokens"].data) == config.vocab_size
    matrix = next(t for t in reader.tensors if t.name == "blk.0.ffn_up.weight")
    values = (np.asarray(matrix.data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    # 65536 draws: the deviation's own error is 0.3% of it, five of those are allowed; cutting to bf16 takes up to 0.4%
    assert values.std() == pytest.approx(config.initializer_range, rel=0.02)
    written = path.stat().st_mtime_ns
    assert bench_rivals.random_gguf(config, "bf16", tmp_path).stat().st_mtime_ns == written


def test_ours_alone_from_the_command_line(capsys):
    arguments = ["--flavor", "tiny", "--against", "", "--pairs", "1", "--new-tokens", "8", "--threads", "1", "--json"]
    bench_decode.main(arguments)
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["contestants"][OURS]["tokens_per_s"]["median"] > 0
    assert result["probe_bytes_per_s"]["median"] > 1e6
    assert result["command"] == "python -m tools.bench.decode --flavor tiny --against '' " + " ".join(arguments[4:])


def test_a_contestant_sleeps_between_its_turns_and_a_dead_one_says_why():
    process = ContestantProcess(OURS, "tiny", "bf16", 1)
    process.ask("decode", prompt=[5], new_tokens=4)
    before = process.cpu_clocks()
    time.sleep(0.5)
    after = process.cpu_clocks()
    assert after[1] - before[1] <= 0.05 * (after[0] - before[0]), "an idle contestant takes CPU from the others"
    with pytest.raises(RuntimeError, match="no attribute 'juggle'"):
        process.ask("juggle")
    assert process.process.returncode is not None


def test_what_a_rival_lacks_is_said_with_the_line_that_installs_it(monkeypatch, tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('planted')\n")
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    process = ContestantProcess("transformers", "tiny", "bf16", 1)
    assert process.missing is not None
    assert process.missing.startswith("planted; ")
    assert "pip install" in process.missing
    process.close()


@pytest.mark.slow
def test_transformers_runs():
    process = ContestantProcess("transformers", "tiny", "bf16", 1)
    assert process.missing is None
    assert process.ask("decode", prompt=[5, 6, 7], new_tokens=4) > 0
    assert process.ask("prefill", prompt=[5] * 20) > 0
    config = LaneformerConfig.from_flavor("tiny")
    count = config.parameter_count()
    assert process.facts["weight_bytes_per_token"] == 2 * (count["total"] - count["embedding"])
    process.close()
