"""The GPU benchmark on a machine without one: its time budget, its steps, and what it imports."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.bench import cuda, cuda_report, cuda_steps
from tools.bench.cuda_report import STEPS, Step
from tools.bench.harness import NoAnswer
from tools.check.imports import imported, modules

ROOT = Path(__file__).resolve().parents[3]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedWorker:
    """Answers every step after its seconds, or is cut off: with `error`."""

    error: type[RuntimeError] = RuntimeError

    def __init__(self, clock: Clock, seconds: dict[str, float]):
        self.clock, self.seconds, self.asked = clock, seconds, dict[str, float]()
        self.command = list[str]()

    def ask(self, step: str, timeout_s: float, seconds: float) -> dict[str, Any]:
        assert timeout_s == seconds
        self.asked[step] = seconds
        self.clock.now += min(seconds, self.seconds[step])
        if self.seconds[step] > seconds:
            raise self.error("cut off")
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


def test_an_interrupted_run_goes_on() -> None:
    """What failed is tried again; the time of what is there is for the others."""
    worker = TimedWorker(clock := Clock(), {"b": 1, "c": 1})
    steps = [Step("a", 1, 30), Step("b", 1, 20), Step("c", 1, 10)]
    kept = {"a": {"result": {"x": 1}}, "b": {"error": "killed"}}
    done = cuda.measure(steps, worker, 60 + cuda.RESERVE_S, lambda d: None, clock, kept)
    assert done["a"] == kept["a"]
    assert worker.asked == {"b": 50, "c": 30}  # not of the last one's 10; no more than three times its own
    assert "result" in done["b"]


def test_the_limits_are_those_of_the_run() -> None:
    assert sum(step.max_s for step in STEPS) + cuda.RESERVE_S <= 60 * cuda_report.RUN_MINUTES
    names = [step.name for step in STEPS]
    order = ["prepare", "tiny", "300m", "sanitizer", "load", "correctness", "decode"]
    assert sorted(order, key=names.index) == order


def test_what_is_kept_is_of_the_same_run(tmp_path: Path) -> None:
    report = {
        "command": "x",
        "commit": "abc",
        "gpu": "H200",
        "steps": {"a": {"result": 1}},
        "finished": False,
    }
    path = tmp_path / "kept.json"
    assert cuda.kept_steps(path, report) == {}
    path.write_text(json.dumps(report))
    assert cuda.kept_steps(path, report) == report["steps"]
    assert all(cuda.kept_steps(path, {**report, key: "other"}) == {} for key in ("command", "commit", "gpu"))
    path.write_text(json.dumps({**report, "finished": True}))
    assert cuda.kept_steps(path, report) == {}, "a run that has everything is measured anew"
    path.write_text(json.dumps({**report, "finished": True, "steps": {"a": {"error": "hang"}}}))
    assert cuda.kept_steps(path, report) == {"a": {"error": "hang"}}
    path.write_text("half a fi")
    assert cuda.kept_steps(path, report) == {}


def test_one_command_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run of a command whose first was killed in a step asks for the rest alone."""
    asked: list[str] = []

    class Worker:
        def __init__(self, *given: Any, **options: Any):
            self.command = list[str]()

        def ask(self, step: str, timeout_s: float, seconds: float) -> dict[str, Any]:
            asked.append(step)
            if asked == ["prepare", "tiny_graph"]:
                raise KeyboardInterrupt
            return {"units": 1}

        def close(self) -> None:
            pass

    monkeypatch.setattr(cuda, "why_no_cuda", lambda: None)
    monkeypatch.setattr(cuda, "gpu_name", lambda: "H200")
    monkeypatch.setattr(cuda, "Candidate", Worker)
    monkeypatch.chdir(tmp_path)
    command = ["--out", "page.md", "--steps", "prepare,tiny_graph", "--commit", "abc"]
    with pytest.raises(KeyboardInterrupt):
        cuda.main(command)
    assert "| units | 1 |" in Path("page.md").read_text()
    cuda.main(command)
    assert asked == ["prepare", "tiny_graph", "tiny_graph"]
    assert "going on with what build/bench-cuda.json has" in capsys.readouterr().err
    cuda.main(command)
    assert asked[3:] == ["prepare", "tiny_graph"]


def test_a_version_whose_first_tokens_fail_is_left_out() -> None:
    worker = TimedWorker(clock := Clock(), {"first": 100})
    cuda.measure([Step("first", 1, 20, arguments={"version": "graph"})], worker, 60, lambda d: None, clock)
    assert worker.command == ["graph"]
    assert worker.closed, "the next step starts a process with the longer command"


def test_a_version_that_is_late_is_tried_again() -> None:
    """Its kernels may not be compiled yet: without it the page would be empty."""
    worker = TimedWorker(Clock(), {"first": 100})
    worker.error = NoAnswer
    step = Step("first", 1, 20, arguments={"version": "passes"})
    done = cuda.measure([step], worker, 60, lambda d: None, worker.clock)
    assert done["first"]["error"] == "cut off"
    assert worker.command == []


def test_steps_have_a_function_and_a_section() -> None:
    assert all(callable(getattr(cuda_steps, step.function or step.name)) for step in STEPS)
    assert [step.name for step in STEPS if not step.title] == ["machine"]
    with pytest.raises(ValueError, match="unknown step 'deocde'"):
        cuda.chosen_steps("probe,deocde")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cuda.main(["--out", str(tmp_path / "report.md")])
    assert stopped.value.code == 2
    assert "tools.bench decode measures the CPU engine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def reached(*names: str) -> set[str]:
    """What importing these modules imports at once, through all modules of ours."""
    ours, seen, left = modules(ROOT), set[str](), [*names]
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        left += [parent] if parent else []
        if name in ours:
            tree = ast.parse(ours[name].read_text())
            tree.body = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            package = name if ours[name].name == "__init__.py" else parent
            for module, each in imported(tree, package):
                left += [module, f"{module}.{each}"]
    return seen


def test_a_machine_with_torch_and_transformers_alone_has_all_that_is_imported() -> None:
    """No package of the command line, and no C++ build."""
    seen = reached("tools.bench.__main__", "tools.bench.cuda", "tools.bench.cuda_steps")
    assert {
        "laneformer.engine.cuda.passes",
        "laneformer.engine.folder",
        "tools.check.cuda",
        "transformers",
    } <= seen
    assert not [
        name for name in seen if name.split(".")[0] in ("tyro", "rich") or name.endswith("engine._core")
    ]
    assert {"tyro", "rich.markdown"} <= reached("tools.check.engine")  # which needs both


# --- the report
# ---------------------------------------------------------------------------------------------------

HEAD = {"date": "2026-01-01 00:00 UTC", "command": "x", "commit": "abc", "flavor": "2b", "dtype": "bf16"}
DEPTH = {
    "depth": 0, "tokens_per_s": 900.0, "first_tokens_per_s": 910.0, "last_tokens_per_s": 890.0,
    "bytes_per_token": 4_443_340_800, "percent_of_probe": 91.0, "percent_of_datasheet": 83.3,
    "exposed_us_per_layer": 7.1, "prefill_tokens_per_s": 50_000.0, "ttft_s": 0.04, "version": "passes",
}  # fmt: skip
GREEDY = {"prompts": 8, "same": 7, "diverged": [{"prompt": 3, "token": 9, "lead": 1e-4, "tie": 2e-3}]}
VERSION = {
    "relative_error": 1e-3,
    "kl": 1e-6,
    "worst": 1e-3,
    "holds": True,
    "greedy": GREEDY,
    "differing_runs": 0,
}
RECORDED: dict[str, Any] = {
    "machine": {"gpu": "NVIDIA H200", "multiprocessors": 132, "l2_bytes": 50 << 20, "memory_bytes": 141 << 30},
    "probe": {
        "stream_bytes_per_s": 4.4e12, "loads_bytes_per_s": 4.3e12, "torch_copy_bytes_per_s": 4.2e12,
        "bytes_per_s": 4.4e12, "weight_bytes": 4_443_340_800, "tape_bytes": 4_445_437_952, "layers": 15,
    },
    "correctness": {
        "hf_bf16": {"relative_error": 0.02, "kl": 1e-4}, "passes": VERSION, "graph": VERSION, "holds": True,
        "failed": [], "passed": {"greedy": True},
        "faults": {"none": VERSION, "delay one more": {**VERSION, "holds": False}},
    },
    "decode": {"depths": {"0": DEPTH}},
    "baselines": {
        "tokens": 128, "tokens_per_s": {"passes": [900.0, 920.0, 910.0], "graph": [800.0, 820.0, 810.0]},
        "failed": {"hf_generate": "OutOfMemoryError"},
    },
    "lane_alone": {
        "rows": [{"blocks": 128, "tokens_per_s": 4000.0}], "lanes": 8, "layers": 15, "bytes_per_token": 555e6,
        "blocking_exchanges": 5,
    },
}  # fmt: skip


def page(**steps: Any) -> str:
    return cuda_report.markdown({**HEAD, "steps": {name: {"result": step} for name, step in steps.items()}})


def test_the_report_shows_every_figure_and_names_what_is_missing() -> None:
    text = page(**RECORDED)
    for column in cuda_report.DECODE_COLUMNS.values():
        assert f"| {column} |" in text
    assert "| 0 | 900 | 910 | 890 | 4443 | 91 | 83.3 | 7.1 | 50000 | 0.04 | passes |" in text
    assert "| our ring of bulk copies | 4400 | 91.7 |" in text
    assert "4.443 GB per token; 4.445 GB with" in text
    assert "**Correctness: all checks hold.**" in text
    assert text.index("**Correctness") < text.index("tokens/s")
    assert "prompt 3 diverges at token 9 where the lead is 1.00e-04" in text
    assert "| graph | 810 | 800 | 820 | 81.8 | 75 | 15 | 1.12 |" in text  # 910/810; (1/810 - 1009.85 us)/15
    assert "hf_generate: not measured, OutOfMemoryError" in text
    assert "**A projection, not a measurement**: 8 GPUs" in text
    assert "| delay one more | 0.001 | 1e-06 | NO |" in text
    for title in ("fp16", "int8", "compute-sanitizer", "Transformers, compiled"):
        assert f"### {title}\n\nnot measured: the run has not reached it" in text


def test_no_speed_without_a_verdict() -> None:
    """Whatever became of the check stands above the speeds."""
    unproven = page(decode=RECORDED["decode"])
    assert "**Correctness: not proven of `2b` (not measured).**" in unproven
    wrong = {**RECORDED["correctness"], "holds": False, "failed": ["graph: greedy tokens"]}
    assert "**Correctness: FAILED: graph: greedy tokens.**" in page(
        correctness=wrong, decode=RECORDED["decode"]
    )
    steps = {
        "correctness": {"error": "its process ended with status -11"},
        "decode": {"not_measured": "0 s were left"},
    }
    text = cuda_report.markdown({**HEAD, "steps": steps})
    assert "not proven of `2b` (its process ended with status -11)**" not in text
    assert "not proven of `2b` (its process ended with status -11)." in text
    assert "### Decode\n\nnot measured: 0 s were left" in text


def test_a_small_gpu_has_the_smaller_models_verdict_by_its_name() -> None:
    short = {"error": "RuntimeError: the GPU has 9.1 GB free, and this needs 14.0"}
    for small, said in (({"holds": True, "failed": ""}, "all checks hold"),
                        ({"holds": False, "failed": "graph: hang"}, "FAILED: graph: hang")):  # fmt: skip
        text = cuda_report.markdown({**HEAD, "steps": {"correctness": short, "300m": {"result": small}}})
        wanted = f"not proven of `2b` (RuntimeError: the GPU has 9.1 GB free, and this needs 14.0); of `300m` {said}."
        assert f"**Correctness: {wanted}**" in text


def test_percentages_need_the_gpus_name_alone() -> None:
    """Where the machine step is late, the others still say what part of the datasheet they reach."""
    steps = {name: {"result": RECORDED[name]} for name in ("probe", "decode")}
    text = cuda_report.markdown(
        {**HEAD, "gpu": "NVIDIA H200", "steps": {**steps, "machine": {"error": "late"}}}
    )
    assert "| our ring of bulk copies | 4400 | 91.7 |" in text
    assert "NVIDIA H200; commit abc. Machine: not measured." in text


def test_the_server_stands_beside_the_bar() -> None:
    server = {
        "tokens": 128,
        "tokens_per_s": {"laneformer": [790.0, 800.0, 810.0], "sglang": [600.0] * 3},
        "failed": {},
    }
    text = page(**{**RECORDED, "server": server})
    assert "| sglang | 600 | 600 | 600 |" in text
    assert "| 1.33 |" in text  # ours over it
    assert "Of the datasheet: 74.1%; the bar is 71%" in text
    missing = {
        "tokens": 128,
        "tokens_per_s": {},
        "failed": {"sglang": "not installed: pip install 'sglang==0.5.18'"},
    }
    assert "sglang: not measured, not installed: pip install" in page(**{**RECORDED, "server": missing})


def test_the_recorded_report_is_json() -> None:
    steps = {name: {"result": step} for name, step in RECORDED.items()}
    again = json.loads(json.dumps({**HEAD, "steps": steps}))
    assert cuda_report.markdown(again) == page(**RECORDED)


def test_projection_of_known_times() -> None:
    """500 us alone (480 of them the stream), and five trips of 2 us."""
    result = {"rows": [{"tokens_per_s": 1900.0}, {"tokens_per_s": 2000.0}], "blocking_exchanges": 5,
              "bytes_per_token": 480e6, "layers": 10}  # fmt: skip
    found = cuda_report.projection(result, 1e12)
    assert found["tokens_per_s"] == pytest.approx(1e6 / 510)
    assert found["exposed_us_per_layer"] == pytest.approx(2)
