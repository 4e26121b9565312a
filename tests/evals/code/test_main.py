"""Tests of pass@k, and of the command from an endpoint's answers to the record."""

import itertools
import os
import runpy
from fractions import Fraction
from pathlib import Path

import pytest

from evals.code import score
from evals.code.__main__ import Scoring, figures_of, main, pass_at_k, solutions
from evals.code.sandbox import find_sandbox
from evals.code.score import Verdict, open_dataset
from evals.compare import compare
from evals.scorer import Answerer
from records.evals import About
from records.files import read_lines
from tests.evals.code.code_assets import needs_sandbox, write_dataset
from tests.records.test_fields import check as check_fields


def test_pass_at_k_is_the_mean_over_all_choices():
    for n, k in [(1, 1), (5, 1), (5, 2), (6, 6)]:
        for passed in range(n + 1):
            choices = list(itertools.combinations([i < passed for i in range(n)], k))
            exact = Fraction(sum(map(any, choices)), len(choices))
            # one division and one subtraction of numbers up to 1
            assert pass_at_k(n, passed, k) == pytest.approx(float(exact), abs=2**-52)
    scored = {"a": [Verdict(True, True)] * 20, "b": [Verdict(True, False)] * 20}
    assert figures_of(scored, 20)["pass@k"]["10"] == {"base": 1, "plus": 0.5}


@needs_sandbox
def test_the_command(endpoint, tmp_path):
    # of two calls, the second finds its answers and its expected outputs
    path = write_dataset(tmp_path / "d.jsonl")
    out = tmp_path / "evals.jsonl"
    answerer = Answerer(base_url=endpoint.url)
    scoring = Scoring(cache=tmp_path / "cache")
    records = [
        main(
            dataset=path,
            results=tmp_path / "r",
            answerer=answerer,
            scoring=scoring,
            about=About(out, step),
        )
        for step in (1, 2)
    ]
    assert len(endpoint.requests) == 3
    assert read_lines(out) == records
    record = records[1]
    check_fields(record, None)
    expected = {
        "kind": "code",
        "step": 2,
        "dataset": "humaneval+",
        "backend": "endpoint",
        "device": endpoint.url,
        "model_sha256": None,
        "pass@1_base": 1,
        "pass@1_plus": 1,
        "protocol": "greedy",
        "n": 1,
        "sandbox": find_sandbox(),
        "selection": {"block": 3},
        "results": str(tmp_path / "r"),
        "control": {"passed": 3, "total": 3, "known_failures": {}, "unexpected_failures": []},
    }
    assert {name: record[name] for name in expected} == expected
    # Wilson's interval of 3 of 3: the lower end is 3 / (3 + z^2), z^2 = 3.8415
    assert record["pass@1_plus_interval"] == pytest.approx([3 / 6.8415, 1], abs=1e-5)
    tasks = compare(*(tmp_path / record["items"] for record in records))["tasks"]
    figures = {task: (row["n"], row["a"], row["b"]) for task, row in tasks.items()}
    assert figures == dict.fromkeys(("humaneval", "humaneval+"), (3, 1, 1))
    outputs = (tmp_path / "cache/expected" / open_dataset(path).md5).iterdir()
    # of base and plus tests
    assert len([*outputs]) == 2 * 3
    for sample in read_lines(tmp_path / "r/samples.jsonl"):
        assert sample["solution"].startswith("def ")
        assert (sample["rule"], sample["base"], sample["plus"]) == ("block", "pass", "pass")


def test_a_completion_is_the_prompt_and_what_parses_of_the_answer(tmp_path):
    # an answer that Python parses but does not print harms no other
    dataset = open_dataset(write_dataset(tmp_path / "d.jsonl"))
    deep = "    raise " + "".join(f"E{i}(" for i in range(150)) + ")" * 150
    for body in (
        "    return 2 * x",
        f"    return 2 * x + 0x{'f' * 4000}",
        deep,
        "    return x" + ".y" * 1200,
    ):
        answer = {
            "task_id": "HumanEval/900",
            "sample": 0,
            "answer": f"{body}\n\nprint(1)\n\ndef cut(x, y",
        }
        (row,) = solutions([answer], chat=False, dataset=dataset)
        assert (row["task_id"], row["sample"], row["rule"]) == ("HumanEval/900", 0, "completion")
        assert row["solution"].startswith("def double(x):")
        assert row["solution"].rstrip().endswith(f"{body}\n\nprint(1)")


def test_solutions_share_the_cores_of_their_process(monkeypatch):
    # half of those that a watcher with --cpus 28-31 may use, not half of the node's
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {*range(28, 32)})
    names = runpy.run_path(
        str(Path(score.__file__).with_name("__main__.py")), run_name="started_now"
    )
    assert names["Scoring"].parallel == 2
