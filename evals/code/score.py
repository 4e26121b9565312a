"""EvalPlus in its own virtual environment, every solution in a sandbox: data sets, sanitize, test results.

EvalPlus needs library versions that conflict with ours, so it has its own environment, with only the packages
that sanitize and evaluate import. The expected outputs of a data set are computed once, in the run of the
reference solutions, and cached.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from evals.code.sandbox import as_nobody, sandbox_options, system_call_filter
from records.files import JsonObject, json_lines, write_atomically

EVALPLUS = "0.3.1"
REQUIREMENTS = Path(__file__).with_name("evalplus.txt")
INSTALL = ["-q", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "LANG": "C.UTF-8",
}  # fmt: skip
RUNNER, JUDGE = (Path(__file__).with_name(name) for name in ("runner.py", "judge.py"))
UNUSED = ("datasets", "tempdir", "wget")  # EvalPlus imports them for downloads, which are not used here
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
SANITIZE_S = 20.0
LONGEST_CHECK_S = 65.0  # of one solution on one list of inputs: EvalPlus's limit of 60 s and its overhead
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


def evalplus_environment() -> Path:
    """The folder of EvalPlus's environment, inside this Python's."""
    return Path(sys.prefix) / f"evalplus-{EVALPLUS}"


def set_up(environment: Path) -> None:
    """Create EvalPlus's environment with this Python and pip; an existing folder is complete and is kept."""
    if environment.exists():
        return
    part = environment.with_name(f"{environment.name}.{os.getpid()}")
    try:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(part)], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(part), "install", *INSTALL]
        subprocess.run([*pip, f"evalplus=={EVALPLUS}", "-r", str(REQUIREMENTS)], check=True)
        (packages,) = part.glob("lib/python*/site-packages")
        for module in UNUSED:
            (packages / f"{module}.py").write_text(
                "load_dataset = None  # EvalPlus imports it for downloads only\n"
            )
        subprocess.run([part / "bin/python", "-c", "import evalplus.evaluate, evalplus.sanitize"], check=True)
        part.rename(environment)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@dataclass(frozen=True)
class EvalPlus:
    """EvalPlus on one data set. folder: for logs and work files. cache: keeps expected outputs between runs."""

    dataset: Dataset
    environment: Path
    sandbox: str
    folder: Path
    cache: Path
    parallel: int = 1
    min_time_limit_s: float = 10.0  # EvalPlus's default of 1 s fails correct solutions on a slow machine

    def __post_init__(self) -> None:
        if not (self.environment / "bin/python").exists():
            raise ValueError(
                f"EvalPlus is not at {self.environment}; install it with: python -m evals.code --setup"
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

    def sanitize(self, selected: list[dict[str, str]]) -> list[str | None]:
        """EvalPlus's sanitize of each {"text", "entry_point"}; None if it exceeds SANITIZE_S."""
        request = json.dumps({"selected": selected, "sanitize_s": SANITIZE_S})
        options, command = self._sandboxed("sanitize")
        return json.loads(
            self._run([*options, *command], ENVIRONMENT, request, 60 + SANITIZE_S * len(selected))
        )

    def evaluate(self, rows: Iterable[JsonObject], name: str) -> dict[str, list[tuple[bool, bool]]]:
        """Score {"task_id", "solution"} rows; by task, for each sample, whether (base, base
        and plus) tests pass.

        Writes `name`.jsonl, `name`_eval_results.json and evalplus.log to the folder.
        """
        listed = list(rows)
        text = "".join(json.dumps(row) + "\n" for row in listed)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".work-") as work_name:
            work = Path(work_name)
            (work / f"{name}.jsonl").write_text(text)
            (work / "cache/evalplus").mkdir(parents=True)
            outputs = Path("evalplus") / f"{self.dataset.md5}.pkl"
            if (self.cache / outputs).exists():
                shutil.copy(self.cache / outputs, work / "cache" / outputs)
            options, command = self._sandboxed("solve")
            request = {
                "sandbox": options, "runner": command, "filter": str(work / "filter.bpf"), "limits": LIMITS,
                "dataset": self.dataset.name, "samples": str(work / f"{name}.jsonl"),
                "parallel": self.parallel, "min_time_limit_s": self.min_time_limit_s,
            }  # fmt: skip
            (work / "request.json").write_text(json.dumps(request))
            (work / "filter.bpf").write_bytes(system_call_filter(platform.machine()) if options else b"")
            (work / "dataset.jsonl").write_bytes(self.dataset.content)
            env = {
                **ENVIRONMENT, "HOME": str(work), "TMPDIR": str(work), "XDG_CACHE_HOME": str(work / "cache"),
                f"{self.dataset.name.upper()}_OVERRIDE_PATH": str(work / "dataset.jsonl"),
            }  # fmt: skip
            judge = [str(self.environment / "bin/python"), str(JUDGE), str(work / "request.json")]
            self._run(judge, env, "", 600 + 2 * LONGEST_CHECK_S * len(listed) / self.parallel)
            if name == "control" and not (self.cache / outputs).exists():
                (self.cache / outputs).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(self.cache / outputs, (work / "cache" / outputs).read_bytes())
            results = (work / f"{name}_eval_results.json").read_text()
        write_atomically(self.folder / f"{name}.jsonl", text)
        write_atomically(self.folder / f"{name}_eval_results.json", results)
        return {
            task: [
                (s["base_status"] == "pass", s["base_status"] == s["plus_status"] == "pass") for s in samples
            ]
            for task, samples in json.loads(results)["eval"].items()
        }

    def _sandboxed(self, verb: str) -> tuple[list[str], list[str]]:
        """(bubblewrap with its options, the command inside it) that runs the runner."""
        command = [str(self.environment / "bin/python"), "-I", "-c", RUNNER.read_text(), verb]
        if self.sandbox == "none":  # all the same a solution ends with its judge
            return [], ["setpriv", "--pdeathsig", "KILL", *command]
        readable = [
            self.environment,
            Path(sys.base_prefix).resolve(),
        ]  # the standard library is in the latter
        return sandbox_options(readable), as_nobody(command)

    def _run(self, command: list[str], env: dict[str, str], text: str, timeout_s: float) -> str:
        """Run a command; its stdout, and stderr to evalplus.log. ValueError if it
        fails or outlives timeout_s.
        """
        log = self.folder / "evalplus.log"
        with open(log, "a") as errors:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env, text=True,
                cwd=self.folder, start_new_session=True,
            )  # fmt: skip
            try:
                reply, _ = process.communicate(text, timeout_s)
                what = f"ended with exit status {process.returncode}" if process.returncode else ""
            except subprocess.TimeoutExpired:
                what = f"did not end within {timeout_s:.0f} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # sandboxes end with the process that made them
                process.wait()
        if what:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ValueError(f"EvalPlus {what} (sandbox: {self.sandbox}); the end of {log}:\n{end}")
        return reply


def reference(problem: JsonObject) -> str:
    """The complete reference solution of a problem."""
    return problem["prompt"] + problem["canonical_solution"]
