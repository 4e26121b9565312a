"""The network between nodes is measured by real processes, and a slow node is told from its partners."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from records.job import Resilience
from train.supervise import preflight
from train.supervise.attempt import free_port, start_workers
from train.supervise.network import ROUNDS, partner
from train.supervise.preflight import judge_network, slow_nodes

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


@pytest.mark.slow
def test_a_planted_slow_rank_is_named(tmp_path: Path) -> None:
    """Three processes on gloo, each a node: 3 rounds, 26 exchanges a round; a sleep is slower
    than any noise here.
    """
    out, port = tmp_path / "network.json", str(free_port())
    env = {
        **os.environ,
        "WORLD_SIZE": "3",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
    }
    env |= {"SLOW_RANK": "1", "SLOW_S": "0.05"}
    command = [sys.executable, "-m", "tests.train.supervise.slow_network", str(out)]
    ranks = [subprocess.Popen(command, cwd=ROOT, env={**env, "RANK": str(rank)}) for rank in range(3)]
    assert [process.wait(120) for process in ranks] == [0, 0, 0]
    measured = json.loads(out.read_text())
    assert [row["rank"] for row in measured] == [0, 0, 1, 1, 2, 2], "one round without a partner for each"
    assert list(judge_network(measured, ["n0", "n1", "n2"], 1, Resilience())) == ["n1"]


def test_a_network_that_cannot_be_measured_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "start_workers", lambda *_: subprocess.Popen(["sleep", "60"]))
    monkeypatch.setattr(preflight, "NETWORK_DEADLINE_S", 0.2)
    with pytest.raises(ValueError, match="no result within"):
        slow_nodes(["a", "b"], 1, Resilience(), tmp_path)


def test_what_gloo_cannot_do_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 leaves a sentence in place of the figures."""
    monkeypatch.setattr(preflight, "start_workers", lambda *_: subprocess.Popen(["true"]))
    (tmp_path / "network.json").write_text('"gloo does not connect these nodes"')
    with pytest.raises(ValueError, match="gloo does not connect these nodes"):
        slow_nodes(["a", "b"], 1, Resilience(), tmp_path)


@pytest.mark.slow
def test_the_measurement_runs_under_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "start_workers", lambda nodes, *rest: start_workers(None, *rest))
    assert slow_nodes(["n0"], 2, Resilience(), tmp_path) == {}
    assert json.loads((tmp_path / "network.json").read_text()) == [], "one node has no partner"
