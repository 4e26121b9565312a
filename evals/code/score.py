"""Data sets in EvalPlus's format, and what solutions of them score: every solution in a sandbox of its own.

The rules are EvalPlus's, the code is ours.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import itertools
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy
from rich.progress import track

from evals.code.judge import TESTS, judge, make_expected, reference
from evals.code.sandbox import PYTHON, build_filter, build_sandbox, wrap_as_nobody
from evals.code.solution import SandboxError
from evals.tables import console
from records.files import JsonObject, write_atomically

EVALPLUS = "0.3.1"  # whose rules decide
RUNNER = Path(__file__).with_name("runner.py")
# md5 of the uncompressed file, as in EvalPlus itself: name, version
VERSIONS = {
    "fe585eb4df8c88d844eeb463ea4d0302": ("humaneval", "v0.1.10"),
    "ee43ecabebf20deef4bb776a405ac5b1": ("mbpp", "v0.2.0"),
}
PREFIXES = ("HumanEval", "Mbpp")  # of task ids, such as HumanEval/0
FIELDS = (
    "task_id",
    "prompt",
    "entry_point",
    "canonical_solution",
    "base_input",
    "plus_input",
    "contract",
    "atol",
)
KNOWN_FAILURES = {
    "HumanEval/32": "EvalPlus 0.3.1 checks find_zero without counting its tests, so no solution can pass"
}
LIMITS = {"memory_bytes": 4 * 2**30, "threads": 64, "cpu_s": 300}  # of one solution
DOWNLOADS = (
    "HumanEval+ is HumanEvalPlus.jsonl.gz of release v0.1.10 of evalplus/humanevalplus_release on GitHub, MBPP+ is "
    "MbppPlus.jsonl.gz of release v0.2.0 of evalplus/mbppplus_release"
)


@dataclass(frozen=True)
class Dataset:
    """A data set in EvalPlus's format. md5: of the uncompressed file."""

    name: str
    version: str
    md5: str
    problems: list[JsonObject]

    @property
    def by_task(self) -> dict[str, JsonObject]:
        return {problem["task_id"]: problem for problem in self.problems}


def open_dataset(path: Path) -> Dataset:
    """Read a .jsonl or .jsonl.gz file, whose md5 gives the version."""
    if not path.is_file():
        raise ValueError(
            f"no data set at {path}; {DOWNLOADS}: download it and pass its path as --dataset"
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        # not json_objects: NaN and infinity are inputs of some problems
        lines = content.removeprefix(codecs.BOM_UTF8).split(b"\n")
        problems = [json.loads(line) for line in lines if line.strip()]
        tasks = {problem["task_id"] for problem in problems}
        prefixes = {task.partition("/")[0] for task in tasks}
        absent = [set(FIELDS) - problem.keys() for problem in problems]
        if lacking := sorted(set().union(*absent)):
            raise ValueError(f"fields {lacking} are missing")
        if len(tasks) < len(problems) or len(prefixes) != 1 or not prefixes <= set(PREFIXES):
            raise ValueError(f"its task ids are not distinct and all of one of {PREFIXES}")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a data set in EvalPlus's format ({error!r}); {DOWNLOADS}"
        ) from None
    md5 = hashlib.md5(content).hexdigest()
    unknown = (prefixes.pop().lower(), f"unknown, {len(problems)} problems, md5 {md5}")
    name, version = VERSIONS.get(md5, unknown)
    return Dataset(name, version, md5, problems)


class Verdict(NamedTuple):
    """Whether a sample passes the base tests, and whether it passes base and plus tests both."""

    base: bool
    plus: bool


@dataclass(frozen=True)
class Judge:
    """Scores solutions of one data set.

    Attributes:
        folder: for results and work files.
        cache: keeps expected outputs.
    """

    dataset: Dataset
    sandbox: str
    folder: Path
    cache: Path
    parallel: int = 1
    # of a test; EvalPlus's 1 s fails right solutions on slow machines
    min_time_limit_s: float = 10.0

    def control(self) -> JsonObject:
        rows = [{"task_id": p["task_id"], "solution": reference(p)} for p in self.dataset.problems]
        scored = self.evaluate(rows, "control")
        failed = [task for task, samples in scored.items() if not samples[0].plus]
        return {
            "passed": len(scored) - len(failed),
            "total": len(scored),
            "known_failures": {
                task: KNOWN_FAILURES[task] for task in failed if task in KNOWN_FAILURES
            },
            "unexpected_failures": [task for task in failed if task not in KNOWN_FAILURES],
        }

    def evaluate(self, rows: Sequence[JsonObject], name: str) -> dict[str, list[Verdict]]:
        """Test {"task_id", "solution"} rows and write them with their verdicts to `name`.jsonl.

        Returns:
            By task, the verdict on each sample. In the file, `base` and `plus` are the statuses of the two
            kinds of tests, each alone.
        """
        problems, rows = self.dataset.by_task, [dict(row) for row in rows]
        keys = list(itertools.product(rows, TESTS))
        checks = [(problems[row["task_id"]], which, row["solution"]) for row, which in keys]
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".work-") as work:
            request = self._request(Path(work))
            try:
                for problem, which in itertools.product(problems.values(), TESTS):
                    make_expected(request, problem, which)
                statuses = judge(request, checks, self.parallel)
                for place, status in track(statuses, name, len(checks), console=console):
                    row, which = keys[place]
                    row[which] = status
            except SandboxError as error:
                raise ValueError(
                    f"the solutions cannot be judged (sandbox: {self.sandbox}): {error}"
                ) from None
        write_atomically(
            self.folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
        )
        scored: dict[str, list[Verdict]] = {}
        for row in rows:
            base, plus = (row[which] == "pass" for which in TESTS)
            scored.setdefault(row["task_id"], []).append(Verdict(base, base and plus))
        return scored

    def _request(self, work: Path) -> JsonObject:
        """Return what a check needs beside the problem and the solution."""
        # NumPy is the one package that solutions may import beside the standard library
        packages = Path(numpy.__file__).parents[1]
        command = [str(PYTHON), "-I", "-S", "-B", "-c", RUNNER.read_text(), str(packages)]
        # without a sandbox, too, a solution ends with its judge
        if self.sandbox == "none":
            options = []
            command = ["setpriv", "--pdeathsig", "KILL", *command]
        else:
            # Python's own prefix, which holds the standard library
            readable = [Path(sys.base_prefix).resolve()]
            readable += [*packages.glob("numpy"), *packages.glob("numpy.libs")]
            options = build_sandbox(readable)
            command = wrap_as_nobody(command)
        (work / "filter.bpf").write_bytes(build_filter(platform.machine()) if options else b"")
        expected = self.cache / "expected" / self.dataset.md5
        expected.mkdir(parents=True, exist_ok=True)
        return {
            "sandbox": options,
            "runner": command,
            "filter": str(work / "filter.bpf"),
            "limits": LIMITS,
            "dataset": self.dataset.name,
            "expected": str(expected),
            "min_time_limit_s": self.min_time_limit_s,
        }
