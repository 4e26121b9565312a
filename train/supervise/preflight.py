"""Pre-flight: checks whether a node is fit to train, before every attempt.

    python -m train.supervise.preflight [--gpus N] [--free-disk-gib X] --job.config_file X.toml
                                        [--section.key value ...]

prints one JSON line for the node it runs on; exit status 0 if the node is good. `healthy_nodes` checks all
candidates at once, one srun each, so that a dead node can be identified. Then `network` tries the job's groups between
the good ones and measures (train.supervise.network). What no node can be blamed for is a problem of all of them.
"""

from __future__ import annotations

import json
import math
import os
import select
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import tyro

from records.files import host_name
from records.job import Resilience

from . import connections
from .attempt import end_workers, srun, start_workers

CHECKS = {  # of train.supervise.node_checks, seconds at most: cheap ones first, each relying on those before it
    "gpus": 120.0, "memory": 30.0, "settings": 60.0, "matmul": 120.0, "collective": 180.0, "mixture": 600.0,
    "disk": 60.0,
}  # fmt: skip
START_S = 180.0  # until torch is imported, on a cold file system
NODE_DEADLINE_S = 1800.0  # for srun itself: more than all checks may take together
NETWORK_DEADLINE_S = 480.0  # torch's import and the time-outs of both groups included
SLOW_NODE = (
    1.5  # a GPU node whose matmul takes this many times the median is left out: it would slow all others
)


def healthy_nodes(candidates: list[str], train_arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Run the pre-flight on every candidate: (good ones in their order, reason of every bad one).

    train_arguments: what the workers get, `--job.config_file ...`.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(candidates))) as pool:
        answers = list(pool.map(lambda node: _ask(node, train_arguments), candidates))
    records = dict(zip(candidates, answers, strict=True))
    bad = {node: record["reason"] for node, record in records.items() if not record["ok"]}
    seconds = {
        node: r["checks"]["matmul"]["matmul_s"] for node, r in records.items() if r["ok"] and r["gpus"]
    }
    if len(seconds) > 2:
        median_s = statistics.median(seconds.values())
        slow = {node: s for node, s in seconds.items() if s > SLOW_NODE * median_s}
        bad |= {
            node: f"matmul: {s:.4f} s where the median node needs {median_s:.4f} s"
            for node, s in slow.items()
        }
    return [node for node in candidates if node not in bad], bad


def _ask(node: str, arguments: list[str]) -> dict[str, Any]:
    """The node's own JSON line, or a record that says why there is none."""
    command = [*srun([node]), sys.executable, "-m", "train.supervise.preflight", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=NODE_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return {"node": node, "ok": False, "reason": f"srun: no answer within {NODE_DEADLINE_S:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"node"')]
    if not lines:
        said = done.stderr.strip().splitlines() or ["nothing"]
        said = [line for line in said if "error" in line.lower()] or said
        return {"node": node, "ok": False, "reason": f"srun: exit status {done.returncode}, said {said[0]!r}"}
    return json.loads(lines[-1])


@dataclass(frozen=True)
class Network:
    """What was found between nodes: why they cannot train together, and {node: why} of those to leave out, and
    of those that the others reach slowly.
    """

    problem: str = ""
    unreachable: dict[str, str] = field(default_factory=dict)
    slow: dict[str, str] = field(default_factory=dict)


def network(nodes: list[str], nproc_per_node: int, section: Resilience, logs: Path) -> Network:
    """Try and measure the network between nodes. Raises ValueError if that cannot be done."""
    result = logs / "network.json"
    result.unlink(missing_ok=True)  # of an earlier choice of nodes
    process = start_workers(nodes, nproc_per_node, ["train.supervise.network", str(result)], logs, {})
    with suppress(subprocess.TimeoutExpired):
        process.wait(NETWORK_DEADLINE_S)
    end_workers(process)
    if not result.is_file():
        raise ValueError(
            f"no result within {NETWORK_DEADLINE_S:.0f} s, exit status {process.returncode}, see {logs}"
        )
    found = json.loads(result.read_text())
    if "lost" in found:
        return Network(*connections.judge(found["lost"], nodes))
    if "problem" in found:
        return Network(f"{found['problem']}. See {logs}")
    return Network(slow=judge_network(found["rows"], nodes, nproc_per_node, section))


def judge_network(
    measured: list[dict[str, Any]], nodes: list[str], nproc_per_node: int, section: Resilience
) -> dict[str, str]:
    """{node: why} from what `train.supervise.network` measured: each rank's best against that
    of the median rank.
    """
    seen = {(row["rank"], row["peer"]): row for row in measured}
    best: dict[int, tuple[float, float]] = {}  # of each rank: (bytes per s, latency in s) to its best partner
    for (rank, peer), row in seen.items():
        both = row, seen.get((peer, rank), row)  # the worse of what two ranks saw counts
        rate, latency_s = best.get(rank, (0.0, math.inf))
        rate = max(rate, min(each["bytes_per_s"] for each in both))
        best[rank] = rate, min(latency_s, max(each["latency_s"] for each in both))
    if not best:
        return {}
    usual_rate, usual_s = map(statistics.median, zip(*best.values(), strict=True))
    slow: dict[str, str] = {}
    for rank, (rate, latency_s) in sorted(best.items()):
        which = f"network of rank {rank % nproc_per_node} of the node"
        node = nodes[rank // nproc_per_node]
        if rate < section.min_network_share * usual_rate:
            slow[node] = f"{which}: {rate / 1e9:.3g} GB/s where the median is {usual_rate / 1e9:.3g}"
        elif latency_s > section.max_network_latency * usual_s:
            slow[node] = f"{which}: {1e6 * latency_s:.0f} us latency where the median is {1e6 * usual_s:.0f}"
    return slow


@dataclass(frozen=True)
class Needs:
    """What the node must have, besides what the job file says."""

    gpus: int
    """GPUs that the node must have"""
    free_disk_gib: float | None = None
    """Room in the run folder; default: two checkpoints"""


def check_this_node(train_arguments: list[str], needs: Needs) -> dict[str, Any]:
    """Run `train.supervise.node_checks` in a process that can be given up, and keep to the
    deadline of every check.
    """
    asked = (",".join(CHECKS), json.dumps(vars(needs)), *train_arguments)
    command = [sys.executable, "-m", "train.supervise.node_checks", *asked]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
    assert process.stdout is not None
    checks, reason = _follow(process.stdout)
    if reason is not None and process.poll() is None:
        process.kill()  # not waited for: a process in an uninterruptible call cannot die
    return {"node": host_name(), "ok": reason is None, "reason": reason, "gpus": needs.gpus, "checks": checks}


def _follow(reports: IO[bytes]) -> tuple[dict[str, Any], str | None]:
    """(facts of the checks passed, why the node is bad or None). reports: not buffered."""
    facts: dict[str, Any] = {}
    more_s = START_S
    for name, limit_s in CHECKS.items():
        if not select.select([reports], [], [], more_s + limit_s)[0]:
            return facts, f"{name}: no answer within its deadline"
        line = reports.readline()
        if not line:
            return facts, f"{name}: the process ended without a word"
        report, more_s = json.loads(line), 0.0
        if "error" in report:
            return facts, f"{name}: {report['error']}"
        facts[name] = report
    return facts, None


def main() -> None:
    expected = os.environ.get("SLURM_GPUS_PER_NODE", "0").rpartition(":")[2]  # "8", or "h100:8"
    needs, train_arguments = tyro.cli(
        Needs,
        prog="python -m train.supervise.preflight",
        description="Is this node fit to train?",
        default=Needs(int(expected)),
        return_unknown_args=True,
    )
    record = check_this_node(train_arguments, needs)
    print(json.dumps(record), flush=True)
    sys.exit(0 if record["ok"] else 1)


if __name__ == "__main__":
    main()
