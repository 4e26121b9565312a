"""Solutions that are right, wrong and hostile, each in its sandbox."""

from __future__ import annotations

import gzip
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evals.code import score
from evals.code.__main__ import figures_of
from evals.code.sandbox import find_sandbox
from evals.code.score import LIMITS, Judge, numpy_folder, open_dataset, reference
from tests.evals.code.code_assets import (
    ANSWER,
    EQUAL,
    FLOAT_LIES,
    HOSTILE,
    LIES,
    PROBLEMS,
    UNEQUAL,
    connects,
    deletes,
    finds,
    needs_sandbox,
    problem,
    reads,
    write_dataset,
    writes,
)


def test_a_data_set_is_known_by_its_content(tmp_path: Path) -> None:
    dataset = open_dataset(write_dataset(tmp_path / "d.jsonl"))
    assert (dataset.name, len(dataset.problems)) == ("humaneval", 3)
    assert dataset.version == f"unknown, 3 problems, md5 {dataset.md5}"
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(dataset.content))
    assert open_dataset(tmp_path / "d.jsonl.gz").md5 == dataset.md5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no data set at .*HumanEvalPlus.jsonl.gz of release v0.1.10"),
        ("no json", "is not a data set in EvalPlus's format"),
        (json.dumps({"task_id": "HumanEval/1"}), r"fields \['atol', 'base_input'"),
        ("", "is not a data set"),
        ("\n".join(json.dumps(p) for p in [PROBLEMS[0]] * 2), "not distinct"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "d.jsonl").write_text(content)
    with pytest.raises(ValueError, match=message):
        open_dataset(tmp_path / "d.jsonl")


def judge_of(folder: Path, kind: str, problems: Sequence[dict[str, Any]] = PROBLEMS) -> Judge:
    dataset = open_dataset(write_dataset(folder / "d.jsonl", problems))
    return Judge(dataset, kind, folder, folder / "cache", 2, min_time_limit_s=1.0)


@needs_sandbox
def test_a_sandbox_that_does_not_start_ends_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score, "sandbox_options", lambda readable: ["/bin/false"])
    with pytest.raises(ValueError, match=r"a sandbox did not start: /bin/false"):
        judge_of(tmp_path, "bubblewrap").control()
    monkeypatch.setattr(
        score, "sandbox_options", lambda readable: ["sh", "-c", 'shift; shift; exec "$@"', "0"]
    )
    monkeypatch.setattr(score, "as_nobody", list)
    with pytest.raises(ValueError, match="the sandbox of a solution does not hold"):
        judge_of(tmp_path, "bubblewrap").control()


@needs_sandbox
def test_a_reference_solution_that_fails_is_named_and_nothing_is_kept(tmp_path: Path) -> None:
    broken = problem(906, "broken", "return x[0]", [[[1]], [[]]], [[[2]]])
    judge = judge_of(tmp_path, find_sandbox(), [PROBLEMS[0], broken])
    with pytest.raises(
        ValueError, match=r"the reference solution of HumanEval/906, input 1 of 2 gives no output"
    ):
        judge.control()
    assert not list((tmp_path / "cache/expected").iterdir())


@pytest.mark.job
@needs_sandbox
def test_hostile_solutions_fail_and_harm_nobody(tmp_path: Path) -> None:
    """All in one evaluation with right solutions, which must still be found right."""
    judge = judge_of(tmp_path, find_sandbox())
    assert judge.control()["passed"] == 3  # also makes the expected outputs
    victim = tmp_path / "victim"
    victim.write_text("whole")
    victim.chmod(0o666)
    tmp_path.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as server:
        hostile = {
            **HOSTILE,
            "delete a file": deletes(victim),
            "find the results": finds(tmp_path, numpy_folder() / "numpy"),
            "write a file": writes(tmp_path / "new"),
            "write to the system": writes(Path("/usr/new")),
            "connect": connects(server.getsockname()[1]),
            "read a file": reads(victim),
        }
        solutions = [*hostile.values(), ANSWER, "def double(x):\n    return 0", "def double(x):"]
        rows = [{"task_id": "HumanEval/900", "solution": text} for text in solutions]
        rows += [{"task_id": p["task_id"], "solution": reference(p)} for p in PROBLEMS[1:]]
        scored = judge.evaluate(rows, "samples")
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    got = dict(zip([*hostile, "right", "wrong", "no code"], scored["HumanEval/900"], strict=True))
    assert got == {name: (name == "right",) * 2 for name in got}
    assert scored["HumanEval/901"] == scored["HumanEval/902"] == [(True, True)]
    assert victim.read_text() == "whole"
    assert not (tmp_path / "new").exists()
    assert not Path("/usr/new").exists()
    assert not list(tmp_path.glob(".work-*"))


@needs_sandbox
def test_solutions_that_lie_about_their_tests_are_wrong(tmp_path: Path) -> None:
    """All in one evaluation; what is equal to the expected value is right all the same, whatever its type."""
    third = problem(904, "third", "return x / 3", [[1]], [[2]])
    counts = problem(905, "counts", "return {c: x.count(c) for c in x}", [["aab"]], [["b"], [""]])
    judge = judge_of(tmp_path, find_sandbox(), [PROBLEMS[0], third, counts])
    near = "def third(x):\n    return x / 3 + 1e-9\n"
    texts = {
        "HumanEval/900": [*LIES.values(), reference(PROBLEMS[0])],
        "HumanEval/904": [*FLOAT_LIES.values(), near, reference(third)],
        "HumanEval/905": [*UNEQUAL.values(), *EQUAL.values(), reference(counts)],
    }
    rows = [{"task_id": task, "solution": text} for task, listed in texts.items() for text in listed]
    scored = {
        task: [both[1] for both in samples] for task, samples in judge.evaluate(rows, "samples").items()
    }
    assert dict(zip([*LIES, "right"], scored["HumanEval/900"], strict=True)) == dict.fromkeys(LIES, False) | {
        "right": True
    }
    assert scored["HumanEval/904"] == [False, False, True, True]
    got = dict(zip([*UNEQUAL, *EQUAL, "right"], scored["HumanEval/905"], strict=True))
    assert got == dict.fromkeys(UNEQUAL, False) | dict.fromkeys(EQUAL, True) | {"right": True}


@needs_sandbox
def test_solutions_that_pass_the_base_tests_only(tmp_path: Path) -> None:
    judge = judge_of(tmp_path, find_sandbox())
    judge.control()
    solutions = ["def absolute(x):\n    return x", reference(PROBLEMS[1])]
    rows = [{"task_id": "HumanEval/901", "solution": text} for text in solutions]
    rows += [{"task_id": PROBLEMS[i]["task_id"], "solution": reference(PROBLEMS[i])} for i in (0, 2)]
    scored = judge.evaluate(rows, "samples")
    assert scored["HumanEval/901"] == [(True, False), (True, True)]
    figures = figures_of(scored, 1)
    assert figures["pass@1_base"] == 1
    # 1/2, 1 and 1 of three problems: one rounding each in the sum and in the mean
    assert figures["pass@1_plus"] == pytest.approx(2.5 / 3, rel=2**-51)


@needs_sandbox
def test_the_limit_on_memory_is_for_what_a_solution_adds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python and the answer, here 16 MiB with its text, are within the limit; the expected outputs are not in the
    sandbox.
    """
    size, limit = 2**24, 2**27
    monkeypatch.setattr("evals.code.score.LIMITS", {**LIMITS, "memory_bytes": limit})
    (tmp_path / "d.jsonl").write_text(json.dumps(problem(903, "zeros", "return bytes(x)", [[size]], [[1]])))
    dataset = open_dataset(tmp_path / "d.jsonl")
    judge = Judge(dataset, find_sandbox(), tmp_path, tmp_path / "cache")
    once, twice = (
        "def zeros(x):\n    return bytes(x)",
        "def zeros(x):\n    held = bytes(8 * x)\n    return bytes(x)",
    )
    rows = [{"task_id": "HumanEval/903", "solution": solution} for solution in (once, twice)]
    assert judge.evaluate(rows, "memory") == {"HumanEval/903": [(True, True), (False, False)]}


@needs_sandbox
@pytest.mark.rotate
@pytest.mark.skipif(
    "LANEFORMER_EVAL_DATA" not in os.environ, reason="LANEFORMER_EVAL_DATA names no folder of data"
)
@pytest.mark.parametrize(
    ("file", "known", "total", "failing"),
    [
        ("HumanEvalPlus.jsonl.gz", ("humaneval", "v0.1.10"), 164, ["HumanEval/32"]),
        ("MbppPlus.jsonl.gz", ("mbpp", "v0.2.0"), 378, []),
    ],
)
def test_the_reference_solutions(
    tmp_path: Path, file: str, known: tuple[str, str], total: int, failing: list[str]
) -> None:
    dataset = open_dataset(Path(os.environ["LANEFORMER_EVAL_DATA"]) / "code" / file)
    assert (dataset.name, dataset.version) == known
    control = Judge(dataset, find_sandbox(), tmp_path, tmp_path / "cache", 2).control()
    assert (control["passed"], control["total"]) == (total - len(failing), total)
    assert list(control["known_failures"]) == failing
