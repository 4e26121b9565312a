"""Pre-flight: a good node passes, every planted fault is named, a check that never answers is given up."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.train.runs import forked
from train.supervise import preflight as preflight_module
from train.supervise.preflight import _follow, healthy_nodes


def preflight(data: Path, run: Path, *options: str) -> dict:
    status, said = forked(
        run.parent, "train.supervise.preflight", *options, "--job.config_file", "configs/debug_phase1.toml",
        "--job.dump_folder", str(run), "--mixture.lock", str(data / "phase1.lock.json"),
    )  # fmt: skip
    (record,) = [json.loads(line) for line in said.splitlines() if line.startswith('{"node"')]
    assert status == (0 if record["ok"] else 1)
    return record


@pytest.mark.rotate
def test_good_node(prepared_data: Path, tmp_path: Path) -> None:
    record = preflight(prepared_data, tmp_path / "run")
    assert record["ok"], record
    assert list(record["checks"]) == ["gpus", "memory", "settings", "matmul", "collective", "mixture", "disk"]
    shards = sum(len(json.loads(p.read_text())["shards"]) for p in prepared_data.glob("*/source.json"))
    assert 0 < record["checks"]["mixture"]["shards"] <= shards
    assert not list((tmp_path / "run").iterdir()), "nothing is left in the run folder"


@pytest.mark.rotate
def test_missing_gpus_and_a_full_disk(prepared_data: Path, tmp_path: Path) -> None:
    reason = preflight(prepared_data, tmp_path / "run", "--gpus", "4096")["reason"]
    assert reason.startswith("gpus: ValueError:")
    assert "where 4096 are needed" in reason
    assert (
        "GiB free where 1000000000.0 are needed"
        in preflight(prepared_data, tmp_path / "run", "--free-disk-gib", "1e9")["reason"]
    )


@pytest.mark.rotate
def test_unreadable_mixture(prepared_data: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(prepared_data, data)
    hashed = Path(preflight(data, tmp_path / "run")["checks"]["mixture"]["hashed"])
    content = bytearray(hashed.read_bytes())
    content[-1] ^= 1
    hashed.write_bytes(content)
    assert "another sha256" in preflight(data, tmp_path / "run")["reason"]
    hashed.unlink()
    assert f"{hashed} is missing" in preflight(data, tmp_path / "run")["reason"]


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([{"found": 8}], "disk: no answer within its deadline"),
        ([{"found": 8}, "end"], "disk: the process ended"),
        (["end"], "gpus: the process ended"),
        ([{"error": "E"}], "gpus: E"),
        ([{"found": 8}, {"free_gib": 1}], None),
    ],
)
def test_reports_are_followed(reports: list, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent check runs into its deadline; a process that dies between two checks is no good node."""
    monkeypatch.setattr(preflight_module, "CHECKS", {"gpus": 60.0, "disk": 0.2})
    read, write = os.pipe()
    with open(read, "rb", buffering=0) as source, open(write, "w", buffering=1) as sink:
        for report in reports:
            if report == "end":
                sink.close()
            else:
                sink.write(json.dumps(report) + "\n")
        facts, found = _follow(source)
        assert found == reason if reason is None else found.startswith(reason)
        assert (
            list(facts)
            == ["gpus", "disk"][: sum(report not in ("end", {"error": "E"}) for report in reports)]
        )
        sink.close()


SRUN = """#!{python}
import json, sys
(node,) = [a.removeprefix("--nodelist=") for a in sys.argv if a.startswith("--nodelist=")]
assert sys.argv[-2:] == ["--job.config_file", "x.toml"] and "--overlap" in sys.argv
if node == "n2":
    sys.exit("srun: error: Task launch failed on node n2: Communication connection failure")
seconds = 0.09 if node == "n4" else 0.01
reason = "disk: full" if node == "n5" else None
print("a library's greeting")
print(json.dumps({{"node": node, "ok": reason is None, "reason": reason, "gpus": 8,
                   "checks": {{"matmul": {{"matmul_s": seconds}}}}}}))
"""


def test_bad_nodes_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    good, bad = healthy_nodes(["n6", "n1", "n2", "n3", "n4", "n5"], ["--job.config_file", "x.toml"])
    assert good == ["n6", "n1", "n3"], "in the order of the candidates"
    assert bad.keys() == {"n2", "n4", "n5"}
    assert "Communication connection failure" in bad["n2"]
    assert bad["n4"].startswith("matmul: 0.0900 s where the median node needs 0.0100 s")
    assert bad["n5"] == "disk: full"
