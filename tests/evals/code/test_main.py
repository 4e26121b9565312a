"""pass@k, and the command from an endpoint's answers to the record and the dashboard."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import TextIO

import pytest
import torch

from evals.code.__main__ import Scoring, main, pass_at_k, results_of
from evals.code.sandbox import find_sandbox
from evals.code.score import open_dataset
from evals.commands import check
from evals.compare import compare
from evals.scorer import Source
from evals.watch import Watcher
from laneformer.hf.tokenizer import write_tokenizer
from records.evals import FIELDS, PROVENANCE, About
from records.run import read_run
from tests.evals.code.code_assets import needs_sandbox, write_dataset
from tests.evals.code.test_answers import Endpoint, endpoint  # noqa: F401
from tests.evals.test_watch import job_of, save
from tests.laneformer.engine.assets import random_model, small_config, write_folder
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


@needs_sandbox
def test_the_command(endpoint: Endpoint, tmp_path: Path) -> None:  # noqa: F811
    """Chat answers of an endpoint, in two calls: the second one finds its answers and its expected outputs."""
    path = write_dataset(tmp_path / "d.jsonl")
    out = tmp_path / "evals.jsonl"
    for step in (1, 2):
        source, scoring = Source(base_url=endpoint.url), Scoring(cache=tmp_path / "cache")
        returned = main(
            dataset=path, results=tmp_path / "r", source=source, scoring=scoring, about=About(out, step)
        )
    assert len(endpoint.seen) == 3
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert returned == records[1]
    record = records[1]
    assert (record["kind"], record["step"], record["dataset"]) == ("code", 2, "humaneval+")
    assert (record["backend"], record["device"], record["model_sha256"]) == ("endpoint", endpoint.url, None)
    assert (record["pass@1_base"], record["pass@1_plus"]) == (1, 1)
    assert record["control"] == {"passed": 3, "total": 3, "known_failures": {}, "unexpected_failures": []}
    assert (record["protocol"], record["n"], record["sandbox"]) == ("greedy", 1, find_sandbox())
    # Wilson's interval of 3 of 3: the lower end is 3 / (3 + z^2), z^2 = 3.8415
    assert record["pass@1_plus_interval"] == pytest.approx([3 / 6.8415, 1], abs=1e-5)
    assert record["selection"] == {"block": 3}
    assert record["results"] == str(tmp_path / "r")
    told = {name for names in FIELDS["code"] for name in names.split()}
    assert set(record) == {*PROVENANCE, *told}, "the fields that are written down"
    files = [tmp_path / each["items"] for each in records]
    found = compare(*files)["tasks"]
    assert {task: (row["n"], row["a"], row["b"]) for task, row in found.items()} == {
        "humaneval": (3, 1, 1), "humaneval+": (3, 1, 1),
    }  # fmt: skip
    (outputs,) = (tmp_path / "cache/expected").iterdir()
    assert outputs.name == f"{open_dataset(path).md5}.jsonl"
    (tmp_path / "metrics.jsonl").touch()  # which makes it a run's folder
    shown = code_table(read_run(tmp_path))
    for told in (
        f"<td>humaneval+ {record['version']}</td><td>greedy, chat</td><td>3 × 1</td>",
        "3 / 3",
        find_sandbox(),
    ):
        assert told in shown, "the dashboard reads the record"
    samples = [json.loads(line) for line in (tmp_path / "r/samples.jsonl").read_text().splitlines()]
    assert all(s["selected"].startswith("def ") and s["rule"] == "block" for s in samples)
    assert {(s["base"], s["plus"]) for s in samples} == {("pass", "pass")}


class Exported(Watcher):
    """The export of a checkpoint is a made-up model; commands run as they do."""

    def call(self, step: int, words: list[str], *locks: TextIO) -> int:
        if words[0] != "laneformer.hf.export":
            return super().call(step, words, *locks)
        config = small_config(vocab_size=512, max_position_embeddings=512)
        torch.manual_seed(step)
        folder = write_folder(Path(words[words.index("--out") + 1]), random_model(config), eos_token_id=2)
        write_tokenizer(self.tokenizer, folder, 512)
        return 0

    tokenizer: Path


@needs_sandbox
@pytest.mark.job
def test_the_watcher_gives_every_checkpoint_a_folder_of_its_own(prepared_data: Path, tmp_path: Path) -> None:
    dataset, run = write_dataset(tmp_path / "d.jsonl"), tmp_path / "run"
    command = f"code --dataset {dataset} --max-new-tokens 4 --prompt completion --cache {tmp_path / 'cache'}"
    for step in (10, 20):
        save(run, step)
    job = job_of(run, commands=[command])
    check(job)
    watcher = Exported(job)
    watcher.tokenizer = prepared_data / "tokenizer.model"
    assert watcher.watch(once=True, every_s=0.1) == 0, (run / "logs/evals/step-10.log").read_text()
    found = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    assert sorted(r["step"] for r in found) == [10, 20]
    assert len({r["results"] for r in found}) == 2
    assert all(r["control"]["passed"] == 3 and r["selection"] == {"completion": 3} for r in found)


def test_folders_of_results(tmp_path: Path) -> None:
    """One per checkpoint and setting, the same one when a command is given again."""
    asked = [(1, {"seed": 0}), (2, {"seed": 0}), (1, {"seed": 1}), (1, {"seed": 0})]
    one, two, other, again = (
        results_of(About(tmp_path / "evals.jsonl", step), settings) for step, settings in asked
    )
    assert len({one, two, other}) == 3
    assert one == again
    assert one.parent == tmp_path / "items"


def test_solutions_share_the_cores_of_their_process() -> None:
    """A watcher with --cpus 28-31 tested half a node's solutions on four cores, where right
    ones exceed their time.
    """
    code = "import os; os.sched_getaffinity, os.cpu_count = lambda _: {*range(28, 32)}, lambda: 192\n"
    code += "from evals.code.__main__ import Scoring; print(Scoring().parallel)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1] == "2"
