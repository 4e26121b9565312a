"""The GPU benchmark on a machine without one: its time budget, its steps, and what it imports."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import cuda, cuda_report
from tools.bench.cuda import Step
from tools.bench.cuda_steps import STEPS

ROOT = Path(__file__).resolve().parents[3]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedWorker:
    """Answers every step after its seconds, or is cut off."""

    def __init__(self, clock: Clock, seconds: dict[str, float]):
        self.clock, self.seconds, self.asked = clock, seconds, dict[str, float]()
        self.command = list[str]()

    def ask(self, step: str, timeout_s: float, seconds: float) -> dict[str, Any]:
        assert timeout_s == seconds
        self.asked[step] = seconds
        self.clock.now += min(seconds, self.seconds[step])
        if self.seconds[step] > seconds:
            raise RuntimeError("cut off")
        return {}

    def close(self) -> None:
        self.closed = True


def test_every_step_gets_its_time_and_the_last_ones_what_is_left() -> None:
    clock, saved = Clock(), list[list[str]]()
    worker = TimedWorker(clock, {"a": 10, "b": 100, "c": 5, "d": 1})
    steps = [Step("a", 1, 50), Step("b", 1, 20), Step("c", 30, 60), Step("d", 1, 60)]
    done = cuda.measure(steps, worker, 60 + cuda.RESERVE_S, lambda d: saved.append(list(d)), clock)
    assert worker.asked == {"a": 50, "b": 20, "c": 30, "d": 25}
    assert [next(iter(done[name])) for name in "abcd"] == ["result", "error", "result", "result"]
    assert saved == [["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    late = TimedWorker(clock := Clock(), {"a": 45, "c": 5})
    done = cuda.measure([steps[0], steps[2]], late, 60 + cuda.RESERVE_S, lambda d: None, clock)
    assert done["c"] == {"not_measured": "15 s were left, it needs 30"}
    assert "c" not in late.asked


def test_a_version_whose_first_tokens_fail_is_left_out() -> None:
    worker = TimedWorker(clock := Clock(), {"first": 100})
    cuda.measure([Step("first", 1, 20, "graph")], worker, 60, lambda d: None, clock)
    assert worker.command == ["--without", "graph"]
    assert worker.closed, "the next step starts a process with the longer command"


def test_steps_have_a_function_and_a_section() -> None:
    names = [step.name for step in cuda.STEPS]
    assert sorted(names) == sorted(STEPS)
    assert sorted(names) == sorted([*cuda_report.SECTIONS, "machine"])
    with pytest.raises(ValueError, match="unknown step 'deocde'"):
        cuda.chosen_steps("probe,deocde")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cuda.main(["--out", str(tmp_path / "report.md")])
    assert stopped.value.code == 2
    assert "tools.bench decode measures the CPU engine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def imported(name: str, seen: set[str]) -> None:
    """Collects what importing `name` imports, through all modules of ours."""
    if name in seen:
        return
    seen.add(name)
    stems = [root / name.replace(".", "/") for root in (ROOT / "models", ROOT)]
    files = [path for stem in stems for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()]
    if not files:
        return
    parts = name.split(".") if files[0].name == "__init__.py" else name.split(".")[:-1]
    imported(name.rpartition(".")[0], seen)
    for node in ast.parse(files[0].read_text()).body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported(alias.name, seen)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for each in (module, *(f"{module}.{alias.name}" for alias in node.names)):
                imported(each, seen)


def test_a_machine_with_torch_and_transformers_alone_has_all_that_is_imported() -> None:
    """No package of the command line, and no C++ build."""
    seen = set[str]()
    for name in ("__main__", "cuda", "cuda_steps"):
        imported(f"tools.bench.{name}", seen)
    assert {"laneformer.engine.cuda.sequence", "laneformer.engine.folder", "tools.check.cuda", "transformers"} <= seen
    assert not [name for name in seen if name.split(".")[0] in ("tyro", "rich") or name.endswith("engine._core")]
    imported("tools.check.engine", seen)  # which needs both
    assert {"tyro", "rich.table"} <= seen
