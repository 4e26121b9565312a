"""The text benchmark runs to its end on little text and reports every candidate."""

import json

import pytest

from data_mixtures import tokenizer
from data_mixtures.recipe import TokenizerTraining
from tools.bench import text as benchmark
from tools.bench.__main__ import main


@pytest.mark.rotate
def test_all_candidates_have_a_figure(tmp_path, capsys):
    text = ["".join(f"word{i} def f(x): return {i}\n" for i in range(2000))]
    (tmp_path / "small.model").write_bytes(tokenizer.train(text, TokenizerTraining(300, 10**6, 0.999)))
    options = ["--megabytes", "0.02", "--rounds", "1", "--passages", "20"]
    main(["text", *options, "--tokenizer", str(tmp_path / "small.model"), "--out", str(tmp_path / "out.md")])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    for kind in benchmark.KINDS:
        assert len(report[kind]["filtering"]) == 4
        assert len(report[kind]["tokenizing"]) == 6
        assert report[kind]["shards"].keys() >= {"text to shards", "fetch", "filter", "tokenize", "shuffle"}
        parts = ("filtering", "tokenizing", "shards")
        assert all(rate > 0 for part in parts for rate in report[kind][part].values())
    assert "| datatrove, Parquet to files |" in (tmp_path / "out.md").read_text()
