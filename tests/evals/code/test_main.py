"""pass@k, and the command from an endpoint's answers to the record and the dashboard."""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from pathlib import Path

import pytest

from evals.code.__main__ import Scoring, main, pass_at_k
from evals.code.sandbox import find_sandbox
from evals.code.score import open_dataset
from evals.scorer import Source
from records.evals import About
from records.run import read_run
from tests.evals.code.code_assets import needs_evalplus, needs_sandbox, write_dataset
from tests.evals.code.test_answers import Endpoint, endpoint  # noqa: F401
from tools.dashboard.scores import code_table


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (5, 2), (6, 6), (20, 10)])
def test_pass_at_k_is_the_mean_over_all_choices(n: int, k: int) -> None:
    for passed in range(n + 1):
        if n > 6:
            continue
        choices = list(itertools.combinations([i < passed for i in range(n)], k))
        exact = Fraction(sum(map(any, choices)), len(choices))
        # one division and one subtraction of numbers up to 1
        assert pass_at_k([(n, passed)], k) == pytest.approx(float(exact), abs=2**-52)
    assert pass_at_k([(n, n), (n, 0)], k) == 0.5


@needs_evalplus
@needs_sandbox
def test_the_command(endpoint: Endpoint, tmp_path: Path) -> None:  # noqa: F811
    """Chat answers of an endpoint, in two calls: the second one finds its answers and its expected outputs."""
    path = write_dataset(tmp_path / "d.jsonl")
    out = tmp_path / "evals.jsonl"
    for step in (1, 2):
        source, scoring = Source(base_url=endpoint.url), Scoring(cache=tmp_path / "cache")
        returned = main(dataset=path, results=tmp_path / "r", source=source, scoring=scoring, about=About(out, step))
    assert len(endpoint.seen) == 3
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert returned == records[1]
    record = records[1]
    assert (record["kind"], record["step"], record["dataset"]) == ("code", 2, "humaneval+")
    assert (record["backend"], record["device"], record["model_sha256"]) == ("endpoint", endpoint.url, None)
    assert (record["pass@1_base"], record["pass@1_plus"]) == (1, 1)
    assert record["control"] == {"passed": 3, "total": 3, "known_failures": {}, "unexpected_failures": []}
    assert (record["protocol"], record["n"], record["sandbox"]) == ("greedy", 1, find_sandbox())
    (outputs,) = (tmp_path / "cache/evalplus").iterdir()
    assert outputs.name == f"{open_dataset(path).md5}.pkl"
    (tmp_path / "metrics.jsonl").touch()  # which makes it a run's folder
    shown = code_table(read_run(tmp_path))
    for told in (
        f"<td>humaneval+ {record['version']}</td><td>greedy, chat</td><td>3 × 1</td>",
        "3 / 3",
        find_sandbox(),
    ):
        assert told in shown, "the dashboard reads the record"
    samples = [json.loads(line) for line in (tmp_path / "r/samples.jsonl").read_text().splitlines()]
    assert all(s["selected"].startswith("def ") and s["sanitized"] for s in samples)
    assert (tmp_path / "r/samples_eval_results.json").exists()
