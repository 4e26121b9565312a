"""Tests of pre-flight: good nodes pass, faults are named with a remedy, silence is given up."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from records.job import read_job
from tests.train.runs import run_forked
from train.supervise import preflight
from train.supervise.preflight import GIB, Needs, check_nodes, find_exchange_problem
from train.supervise.workers import start_workers

Address = namedtuple("Address", "family address")
Usage = namedtuple("Usage", "free")
JOB = read_job(["--job.config_file", "configs/phase1.toml"])


@pytest.mark.rotate
def test_a_node_says_what_it_has_and_what_it_lacks(data_folder, tmp_path):
    run, data = tmp_path / "run", shutil.copytree(data_folder, tmp_path / "data")

    def ask(*options):
        status, output = run_forked(
            tmp_path,
            "train.supervise.preflight",
            *options,
            "--job.config_file",
            "configs/debug_phase1.toml",
            "--job.dump_folder",
            str(run),
            "--mixture.lock",
            str(data / "phase1.lock.json"),
        )
        (record,) = [json.loads(line) for line in output.splitlines() if line.startswith('{"node"')]
        assert status == (0 if record["ok"] else 1)
        return record

    record = ask()
    assert record["ok"], record
    assert list(record["checks"]) == ["gpus", "memory", "names", "matmul", "collective", "disk"]
    # nothing is left in the run folder
    assert not list(run.iterdir())
    assert ask("--gpus", "4096")["reason"] == "gpus: ValueError: 0 GPUs where 4096 are needed"
    assert "GiB free where 1000000000.0 are needed" in ask("--free-disk-gib", "1e9")["reason"]
    missing = data / "web/shard-00001.bin"
    missing.unlink()
    assert f"{missing} is missing" in ask()["reason"]


@pytest.mark.parametrize(
    ("gpus", "free_gib", "refused"),
    [(8, 1 / 16, True), (8, 14, True), (8, 30, False), (4, 14, False)],
)
def test_shared_memory_holds_the_nodes_part_of_what_a_save_stages(
    gpus, free_gib, refused, phase1, tmp_path, monkeypatch
):
    # A container has 64 MB, in which the saves of the 2B end with SIGBUS; two nodes stage half
    # each.
    JOB.job.dump_folder = str(tmp_path / "run")
    JOB.mixture.lock = str(phase1)
    free = {preflight.SHARED_MEMORY: free_gib}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(free.get(Path(path), 1000) * GIB))
    if refused:
        output = r"^/dev/shm has [\d.]+ GiB free where 2\d\.\d are needed; enlarge it, or set checkpoint\.async_mode"
        with pytest.raises(ValueError, match=output):
            preflight.check_disk(JOB, Needs(gpus))
    else:
        assert preflight.check_disk(JOB, Needs(gpus))["free_gib"]["/dev/shm"] == free_gib


@pytest.mark.parametrize(
    ("interfaces", "nodes", "name_means", "says"),
    [
        # one node may call itself what it likes
        ("", "1", ["127.0.1.1"], "any"),
        # the first that it can bind
        ("", "2", ["198.51.100.4", "10.0.0.7"], "10.0.0.7"),
        ("eth0", "2", ["127.0.1.1"], "eth0"),
        # Debian's, at which every node would look for all others
        (
            "",
            "2",
            ["127.0.1.1"],
            r"^n1 is 127\.0\.1\.1 on this node.*one of eth0, ib0, or mend /etc/hosts",
        ),
        ("", "2", [], "cannot look up its own name n1"),
        (
            "eth0,eth1",
            "1",
            ["10.0.0.7"],
            r"but eth1 has no address on this node; export .* one of eth0, ib0",
        ),
    ],
)
def test_other_nodes_must_reach_this_one_where_gloo_listens(
    interfaces, nodes, name_means, says, monkeypatch
):
    interfaces_of_node = {
        "lo": [Address(socket.AF_INET, "127.0.0.1"), Address(socket.AF_INET6, "::1")],
        "eth0": [Address(psutil.AF_LINK, "00:00"), Address(socket.AF_INET, "10.0.0.7")],
        "ib0": [Address(socket.AF_INET6, "fe80::1%ib0")],
        "eth1": [Address(psutil.AF_LINK, "00:01")],
    }

    def lookup(host, *_, **__):
        if not name_means:
            raise socket.gaierror("Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in name_means]

    monkeypatch.setattr(psutil, "net_if_addrs", lambda: interfaces_of_node)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(socket, "gethostname", lambda: "n1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interfaces)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    if len(says) < 10:
        assert preflight.check_names(JOB, Needs(0)) == {"interface": says}
    else:
        with pytest.raises(ValueError, match=says):
            preflight.check_names(JOB, Needs(0))


SRUN = """#!{python}
import json, sys, time
(node,) = [a.removeprefix("--nodelist=") for a in sys.argv if a.startswith("--nodelist=")]
assert sys.argv[-2:] == ["--job.config_file", "x.toml"] and "--overlap" in sys.argv
if node == "n2":
    sys.exit("srun: error: Task launch failed on node n2: Communication connection failure")
print("preflight: gpus\\npreflight: matmul", file=sys.stderr, flush=True)
if node == "n7":
    time.sleep(600)
seconds = 0.09 if node == "n4" else 0.01
reason = "disk: full" if node == "n5" else None
print("a library's greeting")
print(json.dumps({{"node": node, "ok": reason is None, "reason": reason, "gpus": 8,
                   "checks": {{"matmul": {{"matmul_s": seconds}}}}}}))
"""


def test_bad_nodes_are_told_apart(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(preflight, "NODE_DEADLINE_S", 5.0)
    good, bad = check_nodes(
        ["n6", "n1", "n2", "n3", "n4", "n5", "n7"], ["--job.config_file", "x.toml"]
    )
    # in the order of the candidates
    assert good == ["n6", "n1", "n3"]
    assert bad.keys() == {"n2", "n4", "n5", "n7"}
    assert "Communication connection failure" in bad["n2"]
    assert bad["n4"].startswith("matmul: 0.0900 s where the median node needs 0.0100 s")
    assert bad["n5"] == "disk: full"
    assert bad["n7"] == "matmul: no answer within 5 s"


@pytest.mark.rotate
@pytest.mark.parametrize("interface", ["lo", "none"])
def test_ranks_count_themselves(interface, tmp_path, monkeypatch):
    # Two real ranks under torchrun; gloo's own words where it does not connect them.
    env = {"GLOO_SOCKET_IFNAME": interface}
    monkeypatch.setattr(
        preflight,
        "start_workers",
        lambda nodes, *rest: start_workers(None, *rest[:-1], {**rest[-1], **env}),
    )
    output = find_exchange_problem(["n0"], 2, tmp_path)
    if interface == "lo":
        assert output == ""
    else:
        assert output.startswith("gloo does not connect these nodes (")
        assert "no answer" not in output
        assert (
            "export GLOO_SOCKET_IFNAME, the name of the interface by which they reach each other"
            in output
        )


@pytest.mark.parametrize(
    ("notes", "says"),
    [
        ({"gloo-0": "", "nccl-0": "", "done": ""}, ""),
        (
            {"gloo-0": "", "nccl-0": ""},
            "nccl does not connect these nodes (no answer); export NCCL_SOCKET",
        ),
        (
            {"gloo-0": "", "gloo-1": "timed\nout"},
            "gloo does not connect these nodes (timed out); export GLOO",
        ),
        ({}, None),
    ],
)
def test_what_hangs_is_known_by_what_its_ranks_had_begun(notes, says, tmp_path, monkeypatch):
    # NCCL's watchdog ends a process without an exception
    monkeypatch.setattr(preflight, "start_workers", lambda *_: subprocess.Popen(["sleep", "60"]))
    monkeypatch.setattr(preflight, "EXCHANGE_DEADLINE_S", 0.2)
    for name, text in notes.items():
        (tmp_path / name).write_text(text)
    if says is None:
        with pytest.raises(ValueError, match="no result within"):
            find_exchange_problem(["a", "b"], 1, tmp_path)
    else:
        assert find_exchange_problem(["a", "b"], 1, tmp_path).startswith(says)
