"""Data sets in EvalPlus's format, and what solutions of them score: every solution in a sandbox of its own.

The rules are EvalPlus's (evals/code/oracle.py, evals/code/judge.py), the code is ours. The expected outputs of a
data set are computed once, in the run of the reference solutions, and cached.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
from rich.progress import track

from evals.code.sandbox import as_nobody, sandbox_options, system_call_filter
from evals.tables import console
from records.files import JsonObject, json_lines, write_atomically

EVALPLUS = "0.3.1"  # whose rules decide
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8",
}  # fmt: skip
RUNNER, ROOT = Path(__file__).with_name("runner.py"), Path(__file__).resolve().parents[2]
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
    """A data set in EvalPlus's format; `content` is the uncompressed file."""

    name: str
    version: str
    md5: str
    content: bytes
    problems: list[JsonObject]


def open_dataset(path: Path) -> Dataset:
    """Read a .jsonl or .jsonl.gz file, whose md5 gives the version. ValueError if it is missing or
    not a data set.
    """
    if not path.is_file():
        raise ValueError(f"no data set at {path}; {DOWNLOADS}: download it and pass its path as --dataset")
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        problems = [problem for _, problem in json_lines(content.splitlines(), path)]
        lacking = sorted({field for problem in problems for field in FIELDS if field not in problem})
        prefixes = {problem["task_id"].partition("/")[0] for problem in problems}
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a data set in EvalPlus's format ({error!r}); {DOWNLOADS}") from None
    distinct = len({problem["task_id"] for problem in problems}) == len(problems)
    if lacking or len(prefixes) != 1 or not prefixes <= set(PREFIXES) or not distinct:
        raise ValueError(
            f"{path} is not a data set in EvalPlus's format: fields {lacking} are missing, or its task ids are not "
            f"distinct and all of one of {PREFIXES}; {DOWNLOADS}"
        )
    md5 = hashlib.md5(content).hexdigest()
    name, version = VERSIONS.get(
        md5, (prefixes.pop().lower(), f"unknown, {len(problems)} problems, md5 {md5}")
    )
    return Dataset(name, version, md5, content, problems)


def numpy_folder() -> Path:
    """Where NumPy lies, the one package that solutions may import beside the standard library."""
    return Path(numpy.__file__).parents[1]


@dataclass(frozen=True)
class Judge:
    """Scores solutions of one data set. folder: for logs and work files. cache: keeps expected outputs between runs."""

    dataset: Dataset
    sandbox: str
    folder: Path
    cache: Path
    parallel: int = 1
    min_time_limit_s: float = (
        10.0  # of a test; EvalPlus's default of 1 s fails right solutions on slow machines
    )

    def control(self) -> JsonObject:
        """Score the reference solutions: passed, total, known_failures {task:
        reason}, unexpected_failures [task].
        """
        rows = [{"task_id": p["task_id"], "solution": reference(p)} for p in self.dataset.problems]
        scored = self.evaluate(rows, "control")
        failed = [task for task, samples in scored.items() if samples[0] != (True, True)]
        return {
            "passed": len(scored) - len(failed),
            "total": len(scored),
            "known_failures": {task: KNOWN_FAILURES[task] for task in failed if task in KNOWN_FAILURES},
            "unexpected_failures": [task for task in failed if task not in KNOWN_FAILURES],
        }

    def evaluate(self, rows: Iterable[JsonObject], name: str) -> dict[str, list[tuple[bool, bool]]]:
        """Score {"task_id", "solution"} rows; by task, for each sample, whether (base, base
        and plus) tests pass.

        Writes `name`.jsonl, the rows with "base" and "plus" ("pass", "fail" or "timeout"), and judge.log to the
        folder. ValueError if the rows could not be scored.
        """
        listed = list(rows)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".work-") as work:
            request = self._request(Path(work), [(row["task_id"], row["solution"]) for row in listed])
            for found in track(self._judge(request), name, 2 * len(listed), console=console):
                listed[found["row"]] |= {found["tests"]: found["status"]}
        write_atomically(self.folder / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in listed))
        scored: dict[str, list[tuple[bool, bool]]] = {}
        for row in listed:
            base, plus = (row[tests] == "pass" for tests in ("base", "plus"))
            scored.setdefault(row["task_id"], []).append((base, base and plus))
        return scored

    def _request(self, work: Path, samples: list[tuple[str, str]]) -> Path:
        """The file that judge.py reads, with what it names."""
        options, command = self._sandboxed()
        (work / "filter.bpf").write_bytes(system_call_filter(platform.machine()) if options else b"")
        (work / "problems.jsonl").write_bytes(self.dataset.content)
        request = {
            "sandbox": options, "runner": command, "filter": str(work / "filter.bpf"), "limits": LIMITS,
            "dataset": self.dataset.name, "problems": str(work / "problems.jsonl"), "samples": samples,
            "expected": str(self.cache / "expected" / f"{self.dataset.md5}.jsonl"),
            "parallel": self.parallel, "min_time_limit_s": self.min_time_limit_s,
        }  # fmt: skip
        (work / "request.json").write_text(json.dumps(request))
        return work / "request.json"

    def _sandboxed(self) -> tuple[list[str], list[str]]:
        """(bubblewrap with its options, the command inside it) that runs the runner."""
        python, packages = Path(sys.executable).resolve(), numpy_folder()
        command = [str(python), "-I", "-S", "-B", "-c", RUNNER.read_text(), str(packages)]
        if self.sandbox == "none":  # all the same a solution ends with its judge
            return [], ["setpriv", "--pdeathsig", "KILL", *command]
        # the standard library is in the first
        readable = [Path(sys.base_prefix).resolve(), *packages.glob("numpy"), *packages.glob("numpy.libs")]
        return sandbox_options(readable), as_nobody(command)

    def _judge(self, request: Path) -> Iterator[JsonObject]:
        """What judge.py finds, as it finds it; its stderr goes to judge.log. ValueError if it fails."""
        log, env = self.folder / "judge.log", {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "evals.code.judge", str(request)]
        with open(log, "a") as errors:
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True, start_new_session=True
            )
        try:
            assert process.stdout is not None
            yield from map(json.loads, process.stdout)
            process.wait()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # sandboxes end with the process that made them
            process.wait()
        if process.returncode:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ValueError(
                f"judging ended with exit status {process.returncode} (sandbox: {self.sandbox}); "
                f"the end of {log}:\n{end}"
            )


def reference(problem: JsonObject) -> str:
    """The complete reference solution of a problem."""
    return problem["prompt"] + problem["canonical_solution"]
