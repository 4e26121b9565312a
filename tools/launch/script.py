"""Write the batch script of a job, submit it, and ask for the state of a Slurm job."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from records.command import Natural, check_ranges
from records.events import STOPPED, STOPPED_UNSAVED

TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
# in the name of an environment variable
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH|WEBHOOK", re.IGNORECASE)
# the states of a job that has ended; any other counts as alive
STATES = "COMPLETED FAILED CANCELLED TIMEOUT NODE_FAIL OUT_OF_MEMORY BOOT_FAIL DEADLINE PREEMPTED REVOKED"
# None: Slurm no longer knows the job
ENDED = {None, *STATES.split()}

# on the first node, also without Slurm (`--local`): checks the snapshot, starts the supervisor
# (train.supervise), forwards Slurm's signals to it, and requeues the job if the supervisor was stopped
# before the run was done (exit status 85 or 84)
SCRIPT = """#!/bin/bash
{directives}
#SBATCH --ntasks-per-node=1
#SBATCH --mem=0
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --open-mode=append
# Written by tools.launch. {nodes} nodes x {gpus} ranks, {spares} spare
set -u
snapshot={snapshot} run={run}
cd "$snapshot"
sha256sum --quiet --check SHA256SUMS || {{ echo "$snapshot was changed after it was made; launch again"; exit 1; }}
cd code
unset PYTHONPATH PYTHONHOME PYTHON_EXEC
export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
{exports}
nodes=
if [ -n "${{SLURM_JOB_ID:-}}" ]; then
  names=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
  nodes="--nodes $names --spares {spares}"
  if {requeue} && [ "${{names##*,}}" != "$names" ]; then
    pulse=$run/.pulse-$SLURM_JOB_ID every=${{PULSE_S:-20}}
    while touch "$pulse"; do sleep "$every"; done &
    last=(--nodelist="${{names##*,}}" --nodes=1 --ntasks=1 --overlap --cpu-bind=none)
    srun "${{last[@]}}" bash -c {watcher} "$pulse" "$every" &
    trap 'kill $(jobs -p); rm -f "$pulse"' EXIT
  fi
fi
"$snapshot/env/bin/python" -P -m train.supervise --nproc-per-node {gpus} $nodes --job.config_file "$snapshot/job.toml" &
supervisor=$!
signalled=
trap 'signalled=yes; kill -USR1 $supervisor 2>/dev/null' USR1
trap 'signalled=yes; kill -TERM $supervisor 2>/dev/null' TERM
# a signal ends `wait` early, with its own status: wait again until the status is the supervisor's
while :; do
  wait $supervisor; code=$?
  [ -n "$signalled" ] || break
  signalled=
done
[ $code != 138 ] || code={stopped}  # USR1 came before the supervisor had begun to listen
echo "supervisor ended with $code"
if [[ $code =~ ^({stopped}|{unsaved})$ ]] && [ -n "${{SLURM_JOB_ID:-}}" ] && {requeue}; then
  for _ in {{1..60}}; do  # the controller may be away for minutes
    scontrol requeue $SLURM_JOB_ID && sleep 600  # Slurm ends this script
    sleep ${{RETRY_S:-10}}
  done
fi
exit $code
"""

# With --no-kill a job survives the loss of any node. If it is the first one, nothing leads the job
# any more, and Slurm keeps it until its time limit (seen with 22.05). So the last node watches a
# heartbeat file, $0, that the first one touches; its time is only compared for changes, as clocks
# may differ.
WATCHER = """last= still=0
while sleep "$1"; do
  now=$(stat -c %y "$0") || continue
  [ "$now" = "$last" ] && still=$((still + 1)) || still=0
  last=$now
  [ $still -lt 9 ] || { scontrol requeue $SLURM_JOB_ID && exit; }
done"""


@dataclass(frozen=True)
class Cluster:
    """Slurm options of the job; None: the cluster's default."""

    nodes: Natural = 0
    """Number of nodes that train; required, unless the run starts from another one"""
    gpus_per_node: Natural = 0
    """GPUs (and ranks) per node; required, unless the run starts from another one"""
    spares: Natural = 0
    """Additional nodes that replace lost or bad ones"""
    cpu: bool = False
    """Run the ranks on CPUs, for nodes without GPUs (tests)"""
    partition: str | None = None
    """Slurm's --partition"""
    time: str | None = None
    """Slurm's time limit of one job, e.g. 2-00:00:00; the run continues in the next job"""
    account: str | None = None
    """Slurm's --account"""
    qos: str | None = None
    """Slurm's --qos"""
    requeue: bool = True
    """Requeue the job when its time ends or its first node dies"""
    signal_before_s: Annotated[int, Field(ge=1, le=65_535)] = 600
    """Seconds before the time limit at which a checkpoint is written; must exceed the time of writing one"""
    env: tuple[str, ...] = ()
    """KEY=VALUE pairs for the job's environment; no secrets: sbatch inherits those from the shell"""


def check_cluster(cluster: Cluster) -> None:
    """Raise ValueError for numbers of nodes or times with which nothing trains."""
    check_ranges(Cluster, vars(cluster))
    for name in ("nodes", "gpus_per_node"):
        if not getattr(cluster, name):
            raise ValueError(f"--{name.replace('_', '-')} is required, and must be at least 1")
    limit_s, lead_s = parse_time_s(cluster.time or "UNLIMITED"), cluster.signal_before_s
    if limit_s <= lead_s:
        raise ValueError(
            f"--time {cluster.time} is {limit_s:.0f} s, but the job is to stop {lead_s} s before its end; give it a "
            "longer --time, or a smaller --signal-before-s"
        )


def parse_time_s(text: str) -> float:
    """Return seconds of Slurm's M, M:S, H:M:S, D-H, D-H:M or D-H:M:S; infinity for no limit."""
    match = TIME.fullmatch(text)
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return math.inf
    if match is None:
        raise ValueError(
            f"--time {text} is none of Slurm's forms, such as 90 (minutes) or 2-00:00:00"
        )
    days, *parts = match.groups()
    first, second, third = (int(part or 0) for part in parts)
    if days is None and parts[2] is None:
        seconds = 60 * first + second
    else:
        seconds = ((24 * int(days or 0) + first) * 60 + second) * 60 + third
    # Slurm takes 0 for no limit
    return seconds or math.inf


def batch_script(snapshot: Path, run: Path, cluster: Cluster, dependency: str | None) -> str:
    """Return the text of submit.sbatch; ValueError for a bad --env."""
    options = {
        "job-name": run.name,
        "nodes": cluster.nodes + cluster.spares,
        "gpus-per-node": None if cluster.cpu else cluster.gpus_per_node,
        **{name: getattr(cluster, name) for name in ("partition", "time", "account", "qos")},
        "dependency": dependency,
        "signal": f"B:USR1@{cluster.signal_before_s}",
        # Slurm replaces %j and its kin, so a percent sign of the path is doubled
        "output": f"{str(run).replace('%', '%%')}/slurm-%j.log",
    }
    # sbatch takes the words of its directives apart as a shell does
    directives = [f"--{k}={shlex.quote(str(v))}" for k, v in options.items() if v is not None]
    directives.append("--requeue" if cluster.requeue else "--no-requeue")
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {d}" for d in directives),
        nodes=cluster.nodes,
        gpus=cluster.gpus_per_node,
        spares=cluster.spares,
        snapshot=shlex.quote(str(snapshot)),
        exports="\n".join(f"export {quote_pair(pair)}" for pair in cluster.env),
        run=shlex.quote(str(run)),
        watcher=shlex.quote(WATCHER),
        stopped=STOPPED,
        unsaved=STOPPED_UNSAVED,
        requeue="true" if cluster.requeue else "false",
    )


def quote_pair(pair: str) -> str:
    """Quote KEY=VALUE for a shell; ValueError for other forms and what looks like a secret."""
    key, separator, value = pair.partition("=")
    if not separator or not key.isidentifier():
        raise ValueError(f"--env {pair!r} is not KEY=VALUE")
    if SECRET.search(key):
        raise ValueError(
            f"--env {key}=... sounds like a secret and would be written to the run folder; export it in the shell "
            "instead: the job inherits the environment of sbatch"
        )
    return f"{key}={shlex.quote(value)}"


def run_slurm(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def submit(script: Path) -> int:
    """Submit with sbatch; return the job id, or raise ValueError with Slurm's message."""
    outcome = run_slurm("sbatch", "--parsable", str(script))
    if outcome.returncode:
        raise ValueError(f"sbatch refused {script}: {outcome.stderr.strip()}")
    # --parsable prints JOB or JOB;CLUSTER
    return int(outcome.stdout.strip().split(";")[0])


def job_state(job_id: int) -> str | None:
    """Return PENDING, RUNNING, COMPLETED, ...; None for a job that Slurm does not know."""
    outcome = run_slurm("scontrol", "show", "job", "-o", str(job_id))
    state = re.search(r"\bJobState=(\S+)", outcome.stdout)
    if outcome.returncode and "Invalid job id" not in outcome.stderr:
        raise ValueError(f"{' '.join(outcome.args)} failed: {outcome.stderr.strip()}")
    return state[1] if state else None
