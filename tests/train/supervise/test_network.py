"""The network between nodes is tried and measured by real processes; who is slow or apart is told from the others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from records.job import Resilience
from train.supervise import connections, preflight
from train.supervise.attempt import hold_port, start_workers
from train.supervise.network import ROUNDS, partner
from train.supervise.preflight import judge_network

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("nodes", range(2, 26))
def test_everybody_meets_somebody_else_in_every_round(nodes: int) -> None:
    rounds = range(nodes - 1 + nodes % 2)
    for turn in rounds:
        met = [partner(node, turn, nodes) for node in range(nodes)]
        assert met.count(None) == nodes % 2
        assert all(
            other != node and met[other] == node for node, other in enumerate(met) if other is not None
        )
    for node in range(nodes):
        others = {partner(node, turn, nodes) for turn in rounds} - {None}
        assert others == set(range(nodes)) - {node}


def rows(slow: dict[int, float], nodes: int, gpus: int = 1) -> list[dict]:
    """What is measured where the connections of some ranks are slower by these factors."""
    found = []
    for turn in range(min(ROUNDS, nodes - 1 + nodes % 2)):
        for rank in range(nodes * gpus):
            other = partner(rank // gpus, turn, nodes)
            if other is not None:
                peer = other * gpus + rank % gpus
                factor = max(slow.get(rank, 1.0), slow.get(peer, 1.0))
                found.append(
                    {"rank": rank, "peer": peer, "latency_s": 2e-5 * factor, "bytes_per_s": 4e10 / factor}
                )
    return found


def judged(slow: dict[int, float], nodes: int, gpus: int = 1, **limits: float) -> dict[str, str]:
    names = [f"n{number}" for number in range(nodes)]
    return judge_network(rows(slow, nodes, gpus), names, gpus, Resilience(**limits))


def test_a_slow_node_is_told_from_its_partners() -> None:
    assert judged({}, 24) == {}
    assert list(judged({17: 3.0}, 24)) == ["n17"]
    assert set(judged({2: 3.0, 3: 9.0}, 5)) == {"n2", "n3"}
    assert list(judged({2: 3.0}, 3)) == ["n2"]
    assert judged({1: 3.0}, 2) == {}, "of two, neither can be blamed"
    assert judged({17: 1.5}, 24) == {}
    assert list(judged({17: 1.5}, 24, min_network_share=0.9)) == ["n17"]


def test_one_gpu_with_a_slow_way_out_names_its_node() -> None:
    (reason,) = judged({8 * 3 + 5: 4.0}, 24, gpus=8).values()
    assert reason == "network of rank 5 of the node: 10 GB/s where the median is 40"
    assert list(judged({8 * 3 + 5: 4.0}, 24, gpus=8)) == ["n3"]


def test_latency_alone_names_a_node() -> None:
    measured = [
        {**row, "latency_s": 3e-4 if 1 in (row["rank"], row["peer"]) else 2e-5} for row in rows({}, 4)
    ]
    assert judge_network(measured, ["a", "b", "c", "d"], 1, Resilience()) == {
        "b": "network of rank 0 of the node: 300 us latency where the median is 20"
    }


def planted(out: Path, ranks: int, faults: dict[str, str], apart: int | None = None) -> Any:
    """What processes on gloo, each a node, leave in `out`. apart: a rank in a network of its own, which meets the
    others through a file.
    """
    env = {**os.environ, "WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", **faults}
    command = [sys.executable, "-m", "tests.train.supervise.planted_network", str(out)]
    with hold_port() as holder:
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(holder.getsockname()[1])}
        processes = [
            subprocess.Popen(
                [*(ALONE if rank == apart else ()), *command], cwd=ROOT, env={**env, "RANK": str(rank)}
            )
            for rank in range(ranks)
        ]
        assert [process.wait(120) for process in processes] == [0] * ranks
    return json.loads(out.read_text())


@pytest.mark.rotate
def test_a_planted_slow_rank_is_named(tmp_path: Path) -> None:
    """Three processes on gloo, each a node: 3 rounds, 26 exchanges a round; a sleep is slower
    than any noise here.
    """
    measured = planted(tmp_path / "network.json", 3, {"SLOW_RANK": "1", "SLOW_S": "0.05"})["rows"]
    assert [row["rank"] for row in measured] == [0, 0, 1, 1, 2, 2], "one round without a partner for each"
    assert list(judge_network(measured, ["n0", "n1", "n2"], 1, Resilience())) == ["n1"]


ALONE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"')
needs_namespaces = pytest.mark.skipif(
    not (shutil.which("unshare") and shutil.which("ip"))
    or subprocess.run([*ALONE, "true"], capture_output=True).returncode != 0,
    reason="a node apart needs `unshare --net` and `ip`",
)


@pytest.mark.job
@needs_namespaces
@pytest.mark.rotate
@pytest.mark.parametrize("sockets", [True, False], ids=["sockets", "gloo"])
def test_a_node_that_the_others_do_not_reach_is_named(
    sockets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a network of its own. Of gloo's own failure, if sockets are not tried before, nobody can be blamed."""
    logs = tmp_path / "network"
    faults = {"MEET": str(tmp_path / "store"), "GLOO_SOCKET_IFNAME": "lo", "SOCKETS": str(int(sockets))}

    def workers(nodes: list[str], _: int, program: list[str], *__: Any) -> subprocess.Popen:
        logs.mkdir()
        planted(Path(program[1]), len(nodes), faults, apart=2)
        return subprocess.Popen(["true"])

    monkeypatch.setattr(preflight, "start_workers", workers)
    found = preflight.network(["n0", "n1", "n2"], 1, Resilience(), logs)
    if sockets:
        assert (found.problem, found.slow, list(found.unreachable)) == ("", {}, ["n2"])
        said = found.unreachable["n2"]
        assert (
            "n0 does not reach n2 at 127.0.0.1: Connection refused, 4 such pairs; export GLOO_SOCKET_IFNAME"
            in said
        )
    else:
        assert found.problem.startswith("gloo does not connect these nodes (")
        assert "no answer" not in found.problem, "gloo's own words"
        assert "export GLOO_SOCKET_IFNAME" in found.problem


def test_who_is_left_out() -> None:
    """The fewest nodes; of two, or if most are lost, nobody: it is a setting."""
    nodes, refused = ["a", "b", "c", "d"], "10.0.0.1: Connection refused"
    assert connections.judge([{}, {}, {}, {}], nodes) == ("", {})
    lost = [{"2": refused}, {"2": refused}, {"0": refused}, {"2": refused}]
    problem, left_out = connections.judge(lost, nodes)
    assert (problem, list(left_out)) == ("", ["c"])
    assert left_out["c"].startswith(
        "network: a does not reach c at 10.0.0.1: Connection refused, 4 such pairs; export"
    )
    assert len(connections.judge([{}, {"3": refused}, {}, {}], nodes)[1]) == 1, "one of two"
    problem, left_out = connections.judge([{"1": refused}, {}], ["a", "b"])
    assert left_out == {}
    assert "(a does not reach b at 10.0.0.1: Connection refused); export GLOO_SOCKET_IFNAME" in problem
    all_lost = [{str(b): "127.0.1.1: Connection refused" for b in range(4) if b != a} for a in range(4)]
    assert connections.judge(all_lost, nodes)[0].startswith("gloo does not connect these nodes")


def test_a_network_that_cannot_be_measured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "start_workers", lambda *_: subprocess.Popen(["sleep", "60"]))
    monkeypatch.setattr(preflight, "NETWORK_DEADLINE_S", 0.2)
    with pytest.raises(ValueError, match="no result within"):
        preflight.network(["a", "b"], 1, Resilience(), tmp_path)


def test_what_hangs_is_what_rank_0_said_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog ends a process without an exception; a result of an earlier choice of nodes is none."""
    result = tmp_path / "network.json"

    def workers(*_: Any) -> subprocess.Popen:
        assert not result.exists()
        result.write_text(json.dumps({"problem": connections.problem("nccl", "no answer")}))
        return subprocess.Popen(["sleep", "60"])

    result.write_text('{"rows": []}')
    monkeypatch.setattr(preflight, "start_workers", workers)
    monkeypatch.setattr(preflight, "NETWORK_DEADLINE_S", 0.2)
    said = preflight.network(["a", "b"], 1, Resilience(), tmp_path).problem
    assert said.startswith(
        "nccl does not connect these nodes (no answer); export NCCL_SOCKET_IFNAME and NCCL_IB_HCA"
    )


@pytest.mark.rotate
def test_the_measurement_runs_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "start_workers", lambda nodes, *rest: start_workers(None, *rest))
    assert preflight.network(["n0"], 2, Resilience(), tmp_path) == preflight.Network()
    assert json.loads((tmp_path / "network.json").read_text()) == {"rows": []}, "one node has no partner"
