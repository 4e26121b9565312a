"""Restart a job: start the workers, see how they end, start them again from the newest checkpoint.

It holds no state of the job, so it may be killed and started again.
"""

from __future__ import annotations

import re
import subprocess
import textwrap
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from records.checkpoints import newest_saved_step
from records.events import (
    BAD_STEP,
    CRASHED,
    DONE,
    REFUSED,
    STOPPED,
    STOPPED_UNSAVED,
    next_attempt,
    record_event,
)
from records.files import read_lines
from records.job import JobSections

from .alerts import Alerts
from .attempt import Attempt, Ended, list_full_disks
from .preflight import check_nodes, find_exchange_problem
from .signals import StopSignals

MEANING = {
    DONE: "done",
    STOPPED: "stopped",
    STOPPED_UNSAVED: "stopped, not saved,",
    BAD_STEP: "bad step",
    REFUSED: "refused",
}
ALERTED = ("give_up", "bad_node")
# crashes of a node in the life of a run, after which it is chosen last
SUSPECT_CRASHES = 2
# what differs between two ends for the same reason: ranks, addresses, paths, numbers
VARYING = re.compile(
    r"rank \d+ on \S+|0x[0-9a-f]+|(?:/[\w.+-]+)+|\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE
)
# the whole text is in events.jsonl
CONSOLE_CHARS = 300
console = Console(highlight=False)


@dataclass(frozen=True)
class Options:
    nproc_per_node: int = 0
    """Workers per node; 0: one per GPU of this machine, or one without GPUs"""
    nodes: str | None = None
    """Comma-separated nodes of this Slurm job; default: this machine"""
    spares: int = 0
    """Number of these nodes that are spares"""


class Supervisor:
    def __init__(self, job: JobSections, options: Options, train_arguments: list[str]):
        self.job, self.options, self.train_arguments = job, options, train_arguments
        self.stop = StopSignals(on_force=lambda: None)  # the attempt polls `forced`
        self.stop.deadline_s = job.resilience.stop_deadline_s
        self.attempt = self.fruitless = self.same_reason = 0
        self.alerts = Alerts(job)
        # of the last end, without what varies
        self.reason = ""

    def run(self) -> int:
        """Restart until the job is done, stopped, or hopeless; return the exit status."""
        self.stop.install()
        if problem := self.alerts.find_problem():
            self.say("alerts", f"{problem}: no webhook will be called")
        try:
            return self.restart()
        finally:
            self.alerts.close()

    def restart(self) -> int:
        """Start attempts until one ends the job; return the exit status."""
        while True:
            began_s, progress = time.monotonic(), False
            try:
                before = newest_saved_step(self.job.checkpoints)
                ended = self.run_attempt(before)
                progress = newest_saved_step(self.job.checkpoints) > before
            except (OSError, subprocess.TimeoutExpired) as problem:
                # a file system or scheduler that does not answer
                ended = Ended(CRASHED, 0, f"the attempt cannot be made: {problem}")
                self.say("end", ended.reason, code=CRASHED, what="crash")
            self.count_reason(ended, time.monotonic() - began_s)
            self.fruitless = 0 if progress or ended.code == STOPPED else self.fruitless + 1
            if ended.code == DONE:
                return DONE
            if self.stop.request:
                return STOPPED if ended.code == STOPPED else STOPPED_UNSAVED
            if ended.code == BAD_STEP and self.job.resilience.on_bad_step == "stop":
                return BAD_STEP
            if words := self.explain_give_up(ended):
                self.say("give_up", words)
                return CRASHED
            self.pause()

    def run_attempt(self, checkpoint_step: int) -> Ended:
        self.attempt = next_attempt(self.job.run)
        attempt = Attempt(self.job, self.attempt, self.stop, self.look)
        names = self.options.nodes
        nodes = self.choose_nodes(names.split(","), attempt.logs) if names else None
        if isinstance(nodes, Ended):
            return nodes
        origin = f"from step {checkpoint_step}" if checkpoint_step >= 0 else "from the beginning"
        where = f"on {','.join(nodes)}" if nodes else "on this machine"
        self.say(
            "start",
            f"{origin} {where}, log in {attempt.logs}",
            step=max(checkpoint_step, 0),
            nodes=nodes,
        )
        attempt.start(nodes, self.options.nproc_per_node, self.train_arguments)
        ended = attempt.watch()
        self.look()
        what, step = MEANING.get(ended.code, ended.what), max(ended.step, checkpoint_step)
        facts = {"what": what, "suspects": ended.suspects, "failed_node": ended.failed_node}
        self.say(
            "end", f"{what} at step {step}: {ended.reason}", step=step, code=ended.code, **facts
        )
        return ended

    def look(self) -> None:
        """Alert on what the workers report, and on a full disk."""
        with suppress(OSError):
            self.alerts.follow()
        for words in list_full_disks([self.job.run]):
            self.alerts.send("disk_full", words)

    def count_reason(self, ended: Ended, lasted_s: float) -> None:
        """Count the ends in a row that differ in nothing but numbers and paths."""
        reason, before = VARYING.sub("#", f"{ended.code} {ended.reason}"), self.reason
        again = reason == before and lasted_s < 3600 * self.job.resilience.same_reason_hours
        self.reason, self.same_reason = reason, self.same_reason + 1 if again else 1

    def list_suspects(self) -> set[str]:
        """List the nodes that a hang pointed at, or on which the first rank failed twice."""
        ends = [
            event
            for event in read_lines(self.job.run / "events.jsonl")
            if event.get("kind") == "supervisor_end"
        ]
        crashes = Counter(end.get("failed_node") for end in ends)
        hangs = {node for end in ends for node in end.get("suspects", ())}
        return hangs | {
            node for node, count in crashes.items() if node and count >= SUSPECT_CRASHES
        }

    def choose_nodes(self, names: list[str], logs: Path) -> list[str] | Ended:
        """Choose as many healthy nodes as the job needs, suspects last."""
        suspects = self.list_suspects()
        # stable: nodes keep their order, which is that of ranks, unless one is a suspect
        candidates = sorted(names, key=lambda node: node in suspects)
        good, bad = check_nodes(candidates, self.train_arguments)
        for node, reason in bad.items():
            self.say("bad_node", f"{node}: {reason}", node=node)
        needed = len(candidates) - self.options.spares
        if len(good) < needed:
            return Ended(CRASHED, 0, f"{len(good)} healthy nodes, {needed} are needed")
        chosen = good[:needed]
        try:
            problem = find_exchange_problem(chosen, self.options.nproc_per_node, logs / "network")
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self.say("network", f"not tried: {error}")
            return chosen
        if not problem:
            return chosen
        self.say("network", problem)
        # a network that has carried this run may come back; one that never has is a setting
        never = newest_saved_step(self.job.checkpoints) < 0
        return Ended(REFUSED if never else CRASHED, 0, problem)

    def explain_give_up(self, ended: Ended) -> str:
        """Say why restarting cannot help; "" if it may."""
        if ended.code == REFUSED:
            return f"the job cannot start: {ended.reason}. Restarting would not change that"
        if self.fruitless >= self.job.resilience.max_fruitless_starts:
            return (
                f"{self.fruitless} attempts in a row without a newer checkpoint, last: {ended.reason}. See "
                "events.jsonl and logs/; if the newest checkpoint itself is bad, move it out of "
                f"{self.job.checkpoints}"
            )
        if 0 < self.job.resilience.max_same_reason <= self.same_reason and ended.code != STOPPED:
            return (
                f"{self.same_reason} attempts in a row ended for the same reason, last at step {ended.step}: "
                f"{ended.reason}. Newer checkpoints or not, restarting does not help (resilience.max_same_reason)"
            )
        return ""

    def pause(self) -> None:
        """Wait, exponentially longer without progress, until a stop request."""
        section, until = self.job.resilience, time.monotonic()
        if self.fruitless:
            until += min(section.max_backoff_s, section.backoff_s * 2 ** (self.fruitless - 1))
        while time.monotonic() < until and not self.stop.request:
            time.sleep(0.2)

    def say(self, kind: str, text: str, **facts: Any) -> None:
        """Print one line on the console, and record one event."""
        # Slurm's log lies in the run folder, whose disk may be full
        with suppress(OSError):
            now, short = (
                time.strftime("%H:%M:%S"),
                textwrap.shorten(text, CONSOLE_CHARS, placeholder=" ..."),
            )
            line = f"{now}  attempt {self.attempt:<3} [bold]{kind:<8}[/bold]  {escape(short)}"
            console.print(line, soft_wrap=True)
        record_event(self.job.run, f"supervisor_{kind}", attempt=self.attempt, text=text, **facts)
        if kind in ALERTED or facts.get("code") == CRASHED:
            self.alerts.send(
                facts.get("what", kind), text, step=facts.get("step"), attempt=self.attempt
            )
