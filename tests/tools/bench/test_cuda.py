"""The GPU benchmark on a machine without one: budget, worker, gate, arithmetic, report; its probe in the emulator."""

from __future__ import annotations

import ast
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laneformer import LaneformerConfig
from laneformer.engine.cuda import bench
from laneformer.engine.cuda.geometry import Machine, plan
from laneformer.engine.cuda.memory import DeviceMemory
from tools.bench import cuda as bench_cuda
from tools.bench import cuda_check as bench_cuda_check
from tools.bench import cuda_report as bench_cuda_report
from tools.bench.cuda import Step, Worker
from tools.bench.cuda_alone import first_lane, one_lane
from tools.bench.cuda_check import check, check_faults, reference
from tools.bench.cuda_rivals import alternate
from tools.bench.cuda_steps import STEPS
from tools.check.reference import plain_model, random_weights, tensors_of

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "num_lanes": 2, "broadcast_delay": 1, "sliding_window": 6, "swa_layers": (0, 1),
    "max_position_embeddings": 96, "vocab_size": 96,
}  # fmt: skip
CONFIG = LaneformerConfig(**SMALL)
ROOT = Path(__file__).resolve().parents[3]


# --- time and processes ------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedWorker:
    """Answers every step after its seconds, or is cut off."""

    def __init__(self, clock: Clock, seconds: dict[str, float]):
        self.clock, self.seconds, self.asked = clock, seconds, dict[str, float]()

    def leave_out(self, version: str) -> None:
        self.left_out = version

    def ask(self, step: str, seconds: float) -> dict[str, Any]:
        self.asked[step] = seconds
        self.clock.now += min(seconds, self.seconds[step])
        return {"result": {}} if self.seconds[step] <= seconds else {"error": "cut off"}


def test_every_step_gets_its_time_and_the_last_ones_what_is_left() -> None:
    clock, saved = Clock(), list[list[str]]()
    worker = TimedWorker(clock, {"a": 10, "b": 100, "c": 5, "d": 1})
    steps = [Step("a", 1, 50), Step("b", 1, 20), Step("c", 30, 60), Step("d", 1, 60)]
    done = bench_cuda.measure(steps, worker, 60 + bench_cuda.RESERVE_S, lambda d: saved.append(list(d)), clock)
    assert worker.asked == {"a": 50, "b": 20, "c": 30, "d": 25}
    assert [next(iter(done[name])) for name in "abcd"] == ["result", "error", "result", "result"]
    assert saved == [["a"], ["a", "b"], ["a", "b", "c"], ["a", "b", "c", "d"]]
    late = TimedWorker(clock := Clock(), {"a": 45, "c": 5})
    done = bench_cuda.measure([steps[0], steps[2]], late, 60 + bench_cuda.RESERVE_S, lambda d: None, clock)
    assert done["c"] == {"not_measured": "15 s were left, it needs 30"}
    assert "c" not in late.asked


def test_a_version_whose_first_tokens_fail_is_left_out() -> None:
    worker = TimedWorker(clock := Clock(), {"first": 100})
    bench_cuda.measure([Step("first", 1, 20, "graph")], worker, 60, lambda d: None, clock)
    assert worker.left_out == "graph"


CHILD = """
import sys, time
for line in sys.stdin:
    name, seconds = line.split()
    if name == "crash": sys.exit(7)
    if name == "hang": time.sleep(60)
    print('{"result": "%s"}' % name, flush=True)
"""


def test_a_worker_that_crashes_or_hangs_costs_its_step_alone() -> None:
    worker = Worker([sys.executable, "-c", CHILD])
    try:
        assert worker.ask("one", 60) == {"result": "one"}
        assert worker.ask("crash", 60) == {"error": "its process ended with status 7"}
        assert worker.ask("two", 60) == {"result": "two"}
        start = time.monotonic()
        assert worker.ask("hang", 0.2) == {"error": "no answer within 0 s; its process was ended"}
        assert time.monotonic() - start < 30
        assert worker.ask("three", 60) == {"result": "three"}
    finally:
        worker.close()


SERVE = """
from types import SimpleNamespace
from tools.bench_cuda_worker import serve
def good(session): print("noise of a library"); return {"x": 1}
def bad(session): raise RuntimeError("broken")
def deadly(session): global alive; alive = False; raise RuntimeError("illegal access")
alive = True
serve(SimpleNamespace(), {"good": good, "bad": bad, "deadly": deadly}, lambda: alive)
"""


def test_the_real_worker_answers_in_json_whatever_is_printed() -> None:
    worker = Worker([sys.executable, "-c", SERVE])
    try:
        assert worker.ask("good", 100) == {"result": {"x": 1}}
        assert worker.ask("bad", 100) == {"error": "RuntimeError: broken"}
        assert worker.ask("deadly", 100) == {"error": "RuntimeError: illegal access"}
        assert worker.ask("good", 100) == {"result": {"x": 1}}, "the next step is not asked of a dying process"
    finally:
        worker.close()


def test_steps_have_a_function_and_a_section() -> None:
    names = [step.name for step in bench_cuda.STEPS]
    assert sorted(names) == sorted(STEPS)
    assert sorted(names) == sorted([*bench_cuda_report.SECTIONS, "machine"])
    with pytest.raises(ValueError, match="unknown step 'deocde'"):
        bench_cuda.chosen_steps("probe,deocde")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_cuda.main(["--out", str(tmp_path / "report.md")])
    assert stopped.value.code == 2
    assert "bench_decode measures the CPU engine" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# --- the gate ----------------------------------------------------------------------------------------------------


class PlainDecoder:
    """The decoder's interface over model.py in float64."""

    devices = (torch.device("cpu"),)

    def __init__(self, config: LaneformerConfig, weights: dict[str, torch.Tensor]):
        self.config, self.model, self.noise = config, plain_model(config, weights), 0.0
        self.known = dict[tuple[int, ...], torch.Tensor]()

    def start(self, ids: list[int], tokens: int, logits: torch.Tensor | None = None, **options: Any) -> None:
        text = list(ids)
        for _ in range(tokens):
            scores = self.scores(tuple(text))
            text.append(int(scores[-1].argmax()))
        if logits is not None:
            logits.copy_(scores + self.noise * torch.randn(scores.shape))
        self.tokens = text[len(ids) :]

    @torch.no_grad()
    def scores(self, text: tuple[int, ...]) -> torch.Tensor:
        if text not in self.known:
            self.known[text] = self.model(torch.tensor([text]))[0].float()
        return self.known[text]

    def wait(self) -> list[int]:
        return self.tokens


class Unsteady(PlainDecoder):
    """Right within every tolerance, but never twice the same."""

    def __init__(self, config: LaneformerConfig, weights: dict[str, torch.Tensor]):
        super().__init__(config, weights)
        self.noise = 1e-6


class Hanging(PlainDecoder):
    def wait(self) -> list[int]:
        raise RuntimeError("waited in vain")


def test_the_verdict_holds_for_a_sound_engine_and_for_no_other() -> None:
    weights = random_weights(CONFIG)
    truth = reference(CONFIG, weights, 12)
    sound = PlainDecoder(CONFIG, weights)
    report = check({"persistent": lambda: sound, "graph": lambda: sound}, truth, 2, 3, lambda text: None)
    assert all(report["passed"].values()), report["passed"]
    assert len(report["passed"]) == 10

    broken = {"persistent": lambda: Hanging(CONFIG, weights), "graph": lambda: Unsteady(CONFIG, weights)}
    passed = check(broken, truth, 1, 3, lambda text: None)["passed"]
    assert not passed["persistent: runs"]
    assert passed["graph: greedy tokens"]
    assert not passed["graph: 3 equal runs"]
    assert not any(name.startswith("both") for name in passed)


def test_planted_faults_are_refused_and_a_deaf_gate_is_noticed() -> None:
    weights = random_weights(CONFIG)

    def weights_of(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(t.values).view(torch.bfloat16) for name, t in tensors.items()}

    report = check_faults(CONFIG, weights, lambda config, tensors: PlainDecoder(config, weights_of(tensors)))
    assert report["holds"]
    assert len(report["faults"]) == 4
    deaf = check_faults(CONFIG, weights, lambda config, tensors: PlainDecoder(CONFIG, weights))
    assert not deaf["holds"]


def test_logits_that_are_no_numbers_are_refused() -> None:
    truth = reference(CONFIG, random_weights(CONFIG), 4)
    wrong = truth.logits.copy()
    wrong[2, 5] = np.nan
    assert bench_cuda_check.compare(truth.logits, truth)["holds"]
    assert not bench_cuda_check.compare(wrong, truth)["holds"]


# --- arithmetic --------------------------------------------------------------------------------------------------


def test_a_lane_alone_is_packed_like_any_model() -> None:
    """Its tapes hold the first lane's weights, whatever the number of splits."""
    config, tensors = one_lane(CONFIG), tensors_of(random_weights(CONFIG))
    geometry = plan(config, "bf16", Machine(8, 32 * 1024, 90), warps=2, chunk_bytes=512)
    memory = DeviceMemory(geometry, {name: first_lane(name, t) for name, t in tensors.items()}, 0, "cpu")
    lanes = sum(np.abs(t.values[0].astype(np.int64)).sum() for name, t in tensors.items() if t.values.ndim == 3)
    assert int(memory.tapes.view(torch.uint16).long().sum()) == lanes
    assert geometry.blocks == 8
    assert 2 * bench.weight_bytes(geometry) == bench.weight_bytes(
        plan(CONFIG, "bf16", Machine(8, 32 * 1024, 90), warps=2)
    )


def test_projection_by_hand() -> None:
    """500 us alone (480 of them the stream), and five trips of 2 us."""
    result = {"rows": [{"tokens_per_s": 1900.0}, {"tokens_per_s": 2000.0}], "blocking_exchanges": 5,
              "bytes_per_token": 480e6, "layers": 10}  # fmt: skip
    found = bench_cuda_report.projection(result, 1e12)
    assert found["tokens_per_s"] == pytest.approx(1e6 / 510)
    assert found["exposed_us_per_layer"] == pytest.approx(2)


def test_contestants_alternate_and_a_failing_one_drops_out() -> None:
    order = list[str]()

    def turn(name: str, fails: bool = False) -> Any:
        def run(tokens: int) -> float:
            order.append(name)
            if fails:
                raise RuntimeError("no")
            return float(tokens)

        return run

    found = alternate({"a": turn("a"), "b": turn("b"), "c": turn("c", True)}, 2, 8, lambda: 100.0)
    assert order == ["a", "b", "c", "a", "b", "b", "a"]
    assert found["tokens_per_s"] == {"a": [8.0, 8.0], "b": [8.0, 8.0]}
    assert found["failed"] == {"c": "RuntimeError: no"}


# --- the report --------------------------------------------------------------------------------------------------

HEAD = {"date": "2026-01-01 00:00 UTC", "command": "x", "commit": "abc", "flavor": "2b", "dtype": "bf16"}
DEPTH = {
    "depth": 0, "tokens_per_s": 900.0, "first_tokens_per_s": 910.0, "last_tokens_per_s": 890.0,
    "bytes_per_token": 4_443_340_800, "percent_of_probe": 91.0, "percent_of_datasheet": 83.3,
    "exposed_us_per_layer": 7.1, "version": "persistent",
}  # fmt: skip
GREEDY = {"prompts": 8, "same": 7, "parted": [{"prompt": 3, "token": 9, "lead": 1e-4, "tie": 2e-3}]}
VERSION = {"relative_error": 1e-3, "kl": 1e-6, "worst": 1e-3, "holds": True, "greedy": GREEDY, "differing_runs": 0}
RECORDED: dict[str, Any] = {
    "machine": {"gpu": "NVIDIA H200", "multiprocessors": 132, "l2_bytes": 50 << 20, "memory_bytes": 141 << 30},
    "probe": {
        "stream_bytes_per_s": 4.4e12, "loads_bytes_per_s": 4.3e12, "torch_copy_bytes_per_s": 4.2e12,
        "bytes_per_s": 4.4e12, "weight_bytes": 4_443_340_800, "tape_bytes": 4_445_437_952, "layers": 15,
    },
    "correctness": {
        "hf_bf16": {"relative_error": 0.02, "kl": 1e-4}, "persistent": VERSION, "graph": VERSION, "holds": True,
        "failed": [], "passed": {"greedy": True},
        "faults": {"none": VERSION, "delay one more": {**VERSION, "holds": False}},
    },
    "decode": {"depths": {"0": DEPTH}},
    "rivals": {
        "tokens": 128, "tokens_per_s": {"persistent": [900.0, 920.0, 910.0], "graph": [800.0, 820.0, 810.0]},
        "failed": {"hf_generate": "OutOfMemoryError"},
    },
    "lane_alone": {
        "rows": [{"blocks": 128, "tokens_per_s": 4000.0}], "lanes": 8, "layers": 15, "bytes_per_token": 555e6,
        "blocking_exchanges": 5,
    },
    "sweep": {"rows": [{"shape": {"warps": 8}, "chunks": 12, "tokens_per_s": 880.0, "same_tokens": False}]},
}  # fmt: skip


def page(**steps: Any) -> str:
    return bench_cuda_report.markdown({**HEAD, "steps": {name: {"result": step} for name, step in steps.items()}})


def test_the_report_shows_every_figure_and_names_what_is_missing() -> None:
    text = page(**RECORDED)
    for column in bench_cuda_report.DECODE_COLUMNS.values():
        assert f"| {column} |" in text
    assert "| 0 | 900 | 910 | 890 | 4443 | 91 | 83.3 | 7.1 | persistent |" in text
    assert "| our ring of bulk copies | 4400 | 91.7 |" in text
    assert "4.443 GB a token; 4.445 GB with" in text
    assert "**Correctness: all checks hold.**" in text
    assert text.index("**Correctness") < text.index("tokens/s")
    assert "prompt 3 parts at token 9 where the lead is 1.00e-04" in text
    assert "| graph | 810 | 800 | 820 | 81.8 | 75 | 15 | 1.12 |" in text  # 910/810; (1/810 - 1009.85 us)/15
    assert "hf_generate: not measured, OutOfMemoryError" in text
    assert "**A projection, not a measurement**: 8 GPUs" in text
    assert "| warps 8 | 12 | 880 | NO |" in text
    for title in ("Prompt", "fp16", "compute-sanitizer", "Transformers, compiled"):
        assert f"### {title}\n\nnot measured: its turn has not come" in text


def test_no_speed_without_a_verdict() -> None:
    """Whatever became of the check stands above the speeds."""
    unproven = page(decode=RECORDED["decode"])
    assert "**Correctness: not proven (not measured).**" in unproven
    wrong = {**RECORDED["correctness"], "holds": False, "failed": ["graph: greedy tokens"]}
    assert "**Correctness: FAILED: graph: greedy tokens.**" in page(correctness=wrong, decode=RECORDED["decode"])
    steps = {"correctness": {"error": "its process ended with status -11"}, "decode": {"not_measured": "0 s were left"}}
    text = bench_cuda_report.markdown({**HEAD, "steps": steps})
    assert "not proven (its process ended with status -11)" in text
    assert "### Decode\n\nnot measured: 0 s were left" in text


def test_the_recorded_report_is_json() -> None:
    steps = {name: {"result": step} for name, step in RECORDED.items()}
    again = json.loads(json.dumps({**HEAD, "steps": steps}))
    assert bench_cuda_report.markdown(again) == page(**RECORDED)


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
    for name in ("bench_cuda", "bench_cuda_worker", "bench_cuda_steps", "bench_cuda_sanitize"):
        imported(f"tools.{name}", seen)
    assert {"laneformer.engine.cuda.decoder", "laneformer.engine.rope", "tools.check.reference", "transformers"} <= seen
    assert not [name for name in seen if name.split(".")[0] in ("tyro", "rich") or name.endswith("engine._core")]
    imported("tools.check.engine", seen)  # which needs both
    assert {"tyro", "rich.table"} <= seen
