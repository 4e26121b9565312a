"""Tests of solutions that are right, wrong and hostile, each in its sandbox."""

import gzip
import json
import math
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest

from evals.code import score
from evals.code.__main__ import figures_of
from evals.code.judge import judge
from evals.code.sandbox import find_sandbox
from evals.code.score import LIMITS, Judge, Verdict, open_dataset, reference
from evals.code.solution import SandboxError
from tests.evals.code.code_assets import (
    ANSWER,
    EQUAL,
    FLOAT_LIES,
    HOSTILE,
    LIES,
    PROBLEMS,
    UNEQUAL,
    escapes,
    needs_sandbox,
    problem,
    write_dataset,
)

Verdicts = dict[str, list[tuple[bool, bool]]]


def test_a_data_set_is_known_by_its_content(tmp_path):
    path = write_dataset(
        tmp_path / "d.jsonl", [*PROBLEMS, problem(903, "minus", "return -x", [[math.inf]], [])]
    )
    dataset = open_dataset(path)
    assert (dataset.name, len(dataset.problems)) == ("humaneval", 4)
    assert dataset.version == f"unknown, 4 problems, md5 {dataset.md5}"
    # as in MBPP+
    assert dataset.problems[3]["base_input"] == [[math.inf]]
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert open_dataset(tmp_path / "d.jsonl.gz") == dataset


def test_what_is_no_data_set_is_refused(tmp_path):
    path = tmp_path / "d.jsonl"
    with pytest.raises(
        ValueError, match=r"no data set at .*HumanEvalPlus.jsonl.gz of release v0.1.10"
    ):
        open_dataset(path)
    for content, reason in (
        ("no json", "is not a data set in EvalPlus's format"),
        (json.dumps({"task_id": "HumanEval/1"}), r"fields \['atol', 'base_input'"),
        ("", "is not a data set"),
        ("\n".join(json.dumps(p) for p in [PROBLEMS[0]] * 2), "not distinct"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=reason):
            open_dataset(path)


def judge_of(folder: Path, problems: Sequence[dict[str, Any]] = PROBLEMS, **options) -> Judge:
    dataset = open_dataset(write_dataset(folder / "d.jsonl", problems))
    return Judge(dataset, find_sandbox(), folder, folder / "cache", 2, **options)


def scores_of(judge: Judge, solutions: Mapping[int, Sequence[str]]) -> Verdicts:
    """Score solutions by problem number, and the reference solutions of other problems."""
    rows = []
    for each in judge.dataset.problems:
        texts = solutions.get(int(each["task_id"].partition("/")[2]), [reference(each)])
        rows += [{"task_id": each["task_id"], "solution": text} for text in texts]
    scored = judge.evaluate(rows, "samples")
    assert not any("base" in row for row in rows), "the rows are the caller's"
    return scored


@needs_sandbox
def test_a_reference_solution_that_fails_is_named(tmp_path):
    broken = problem(906, "broken", "return x[0]", [[[1]], [[]]], [[[2]]])
    reason = r"the reference solution of HumanEval/906, input 1 of 2 gives no output"
    with pytest.raises(ValueError, match=reason):
        judge_of(tmp_path, problems=[PROBLEMS[0], broken]).control()


def test_a_check_that_breaks_is_no_verdict():
    with pytest.raises(SandboxError, match="a check could not be made; its reason stands above"):
        list(judge({"limits": LIMITS}, [(PROBLEMS[0], "base", ANSWER)], 1))


@pytest.mark.job
@needs_sandbox
def test_hostile_solutions_fail_and_harm_nobody(tmp_path, monkeypatch):
    # one evaluation with right solutions, which must still be found right
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    # endless solutions run for this long
    judge = judge_of(tmp_path, min_time_limit_s=1.0)
    # this also makes the expected outputs
    assert judge.control()["passed"] == 3
    victim = tmp_path / "victim"
    new = tmp_path / "new"
    victim.write_text("whole")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    above = [*reversed(tmp_path.parents), tmp_path]
    packages = Path(numpy.__file__).parents[1]
    hidden = next(folder for folder in above if not packages.is_relative_to(folder))
    with socket.create_server(("127.0.0.1", 0)) as server:
        hostile = HOSTILE | escapes(victim, new, hidden, server.getsockname()[1])
        others = {
            "right": ANSWER,
            "wrong": "def double(x):\n    return 0",
            "no code": "def double(x):",
        }
        scored = scores_of(judge, {900: [*hostile.values(), *others.values()]})
        # no solution has connected: accept would block
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    verdicts = dict(zip([*hostile, *others], scored["HumanEval/900"], strict=True))
    assert verdicts == {name: (name == "right",) * 2 for name in verdicts}
    assert scored["HumanEval/901"] == scored["HumanEval/902"] == [(True, True)]
    assert victim.read_text() == "whole"
    assert not new.exists()
    assert not list(tmp_path.glob(".work-*"))


@needs_sandbox
def test_solutions_that_lie_about_their_tests_are_wrong(tmp_path):
    # a value equal to the expected one is right whatever its type
    third = problem(904, "third", "return x / 3", [[1]], [[2]])
    counts = problem(905, "counts", "return {c: x.count(c) for c in x}", [["aab"]], [["b"], [""]])
    wrong = {900: LIES, 904: FLOAT_LIES, 905: UNEQUAL}
    right = {
        900: {"before what raises": f"{ANSWER}\nimport sys, unittest\nsys.exit(unittest.main())"},
        904: {"it": reference(third), "near": "def third(x):\n    return x / 3 + 1e-9\n"},
        905: {"it": reference(counts), **EQUAL},
    }
    judge = judge_of(tmp_path, problems=[PROBLEMS[0], third, counts])
    scored = scores_of(judge, {n: [*wrong[n].values(), *right[n].values()] for n in wrong})
    for number in wrong:
        names = [*wrong[number], *right[number]]
        verdicts = scored[f"HumanEval/{number}"]
        passed = {name for name, (_, plus) in zip(names, verdicts, strict=True) if plus}
        assert passed == {*right[number]}


@needs_sandbox
def test_solutions_that_pass_the_base_tests_only(tmp_path):
    judge = judge_of(tmp_path)
    scored = scores_of(judge, {901: ["def absolute(x):\n    return x", reference(PROBLEMS[1])]})
    assert scored["HumanEval/901"] == [(True, False), (True, True)]
    figures = figures_of(
        {"HumanEval/901": scored["HumanEval/901"][:1], "b": [Verdict(True, True)]}, 1
    )
    assert (figures["pass@1_base"], figures["pass@1_plus"]) == (1, 0.5)


@needs_sandbox
def test_the_limit_on_memory_is_for_what_a_solution_adds(tmp_path, monkeypatch):
    # Python and the answer, 16 MiB with its text, fit; expected outputs are not in the sandbox
    monkeypatch.setattr(score, "LIMITS", {**LIMITS, "memory_bytes": 2**27})
    zeros = problem(903, "zeros", "return bytes(x)", [[2**24]], [[1]])
    once = "def zeros(x):\n    return bytes(x)"
    twice = "def zeros(x):\n    held = bytes(8 * x)\n    return bytes(x)"
    scored = scores_of(judge_of(tmp_path, [zeros]), {903: [once, twice]})
    assert scored == {"HumanEval/903": [(True, True), (False, False)]}


@needs_sandbox
@pytest.mark.rotate
@pytest.mark.skipif(
    "LANEFORMER_EVAL_DATA" not in os.environ, reason="LANEFORMER_EVAL_DATA names no folder"
)
@pytest.mark.parametrize(
    ("file", "version", "total", "failing"),
    [
        ("HumanEvalPlus.jsonl.gz", ("humaneval", "v0.1.10"), 164, ["HumanEval/32"]),
        ("MbppPlus.jsonl.gz", ("mbpp", "v0.2.0"), 378, []),
    ],
)
def test_the_reference_solutions(tmp_path, file, version, total, failing):
    dataset = open_dataset(Path(os.environ["LANEFORMER_EVAL_DATA"]) / "code" / file)
    assert (dataset.name, dataset.version) == version
    control = Judge(dataset, find_sandbox(), tmp_path, tmp_path / "cache", 2).control()
    assert (control["passed"], control["total"]) == (total - len(failing), total)
    assert list(control["known_failures"]) == failing
