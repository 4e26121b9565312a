"""Keeps a training job going: start the workers, see how they end, start them again from the newest checkpoint.

    python -m train.supervise --job.config_file configs/phase1.toml [--nproc-per-node N] [--nodes a,b,c --spares K]
                              [--section.key value ...]

Everything that is not its own flag goes to every start of `python -m train`. The supervisor holds no state of the job:
it may be killed and started again at any moment. It ends with 0 (training.steps reached), 85 (asked to stop: checkpoint
saved, start again), 86 (the guard refused a step and the policy is to stop), or 1 (starting again does not help).
"""

from __future__ import annotations

import argparse
import fcntl
import sys
import textwrap
import time
from typing import Any, TextIO

from rich.console import Console

from records.checkpoints import newest_saved_step
from records.events import BAD_STEP, CRASHED, DONE, STOPPED, record_event
from records.job import JobSections, read_job

from ..skips import add_windows, read_skip_list, windows_of
from .attempt import Attempt, Ended
from .signals import StopSignals

MEANING = {DONE: "done", STOPPED: "stopped", BAD_STEP: "bad step"}
CONSOLE_CHARS = 300  # the whole text is in events.jsonl
console = Console(highlight=False)


class Supervisor:
    """The restart loop of one job."""

    def __init__(self, job: JobSections, options: argparse.Namespace, train_arguments: list[str]):
        self.job, self.options, self.train_arguments = job, options, train_arguments
        self.stop = StopSignals(on_force=lambda: None)  # the attempt sees it, and kills
        self.stop.deadline_s = job.resilience.stop_deadline_s
        self.starts = self.fruitless = 0
        self.suspects: set[str] = set()  # nodes that a hang pointed at: taken last

    def run(self) -> int:
        """Until the job is done, is asked to stop, or starting again does not help; returns the exit status."""
        self.stop.install()
        while True:
            before = newest_saved_step(self.job.checkpoints)
            ended = self.start_once(before)
            progress = newest_saved_step(self.job.checkpoints) > before
            self.fruitless = 0 if progress or ended.code == STOPPED else self.fruitless + 1
            if ended.code == DONE:
                return DONE
            if self.stop.asked:
                return STOPPED
            if ended.code == BAD_STEP and not self.roll_back(ended):
                return BAD_STEP
            if self.hopeless(ended):
                return CRASHED
            self.pause()

    def start_once(self, checkpoint_step: int) -> Ended:
        """One start of the workers, to its end."""
        self.starts += 1
        attempt = Attempt(self.job, self.starts, self.stop)
        nodes = self.choose_nodes() if self.options.nodes else None
        if isinstance(nodes, Ended):
            return nodes
        whence = f"from step {checkpoint_step}" if checkpoint_step >= 0 else "from the beginning"
        where = f"on {','.join(nodes)}" if nodes else "on this machine"
        self.say("start", f"{whence} {where}, log in {attempt.logs}", step=max(checkpoint_step, 0), nodes=nodes)
        attempt.start(nodes, self.options.nproc_per_node, self.train_arguments)
        ended = attempt.watch()
        self.suspects |= set(ended.suspects)
        what, step = MEANING.get(ended.code, "crash"), max(ended.step, checkpoint_step)
        self.say("end", f"{what} at step {step}: {ended.reason}", step=step, code=ended.code)
        return ended

    def choose_nodes(self) -> list[str] | Ended:
        """As many healthy nodes as the job needs, suspects last; spares fill the gaps."""
        from .preflight import healthy_nodes

        candidates = sorted(self.options.nodes.split(","), key=lambda node: node in self.suspects)
        good, bad = healthy_nodes(candidates, self.train_arguments)
        for node, reason in bad.items():
            self.say("bad_node", f"{node}: {reason}", node=node)
        needed = len(candidates) - self.options.spares
        if len(good) < needed:
            return Ended(CRASHED, 0, f"{len(good)} healthy nodes, {needed} are needed")
        return good[:needed]

    def roll_back(self, ended: Ended) -> bool:
        """After a refused step: whether to start again, and what to leave out of the data then."""
        policy = self.job.resilience.unclean_policy
        if policy == "rollback_and_skip":
            batch, reached = self.job.training.global_batch_size, max(0, newest_saved_step(self.job.checkpoints))
            first = max(reached, ended.step - self.job.resilience.skip_steps)
            skips = read_skip_list(self.job.run, self.job.resilience.skip_sequences)
            windows = windows_of(skips.numbers(first * batch, (ended.step - first) * batch))
            add_windows(self.job.run, windows, f"step {ended.step}: {ended.reason}")
            self.say("skip", f"sequences {windows} will be left out", step=ended.step, windows=windows)
        return policy != "stop"

    def hopeless(self, ended: Ended) -> bool:
        """Whether starting again cannot help: refused settings, or several starts without a newer checkpoint."""
        if ended.code == CRASHED and ended.reason.startswith("ValueError") and ended.step == 0:
            self.say("give_up", "the job refuses to start; starting again would not change that")
            return True
        if self.fruitless >= self.job.resilience.max_fruitless_starts:
            self.say(
                "give_up",
                f"{self.fruitless} starts in a row without a newer checkpoint, last: {ended.reason}. See events.jsonl "
                f"and logs/; if the newest checkpoint itself is bad, move it out of {self.job.checkpoints}",
            )
            return True
        return False

    def pause(self) -> None:
        """Back off after starts that led nowhere; a wish to stop ends the pause."""
        section = self.job.resilience
        seconds = min(section.max_backoff_s, section.backoff_s * 2 ** (self.fruitless - 1)) if self.fruitless else 0.0
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self.stop.asked:
            time.sleep(0.2)

    def say(self, kind: str, text: str, **facts: Any) -> None:
        """One line for people, one event for programs."""
        console.print(f"{time.strftime('%H:%M:%S')}  start {self.starts:<3} [bold]{kind:<8}[/bold]  ", end="")
        console.print(textwrap.shorten(text, CONSOLE_CHARS, placeholder=" ..."), markup=False, soft_wrap=True)
        record_event(self.job.run, f"supervisor_{kind}", start=self.starts, text=text, **facts)


def main() -> int:
    """Parse the supervisor's own flags; the rest is the job's."""
    parser = argparse.ArgumentParser(prog="python -m train.supervise", allow_abbrev=False, description=__doc__)
    parser.add_argument("--nproc-per-node", type=int, default=1, help="workers on a node, one a GPU")
    parser.add_argument("--nodes", help="names within this Slurm job, with commas; default: this machine")
    parser.add_argument("--spares", type=int, default=0, help="how many of the nodes are spares")
    options, train_arguments = parser.parse_known_args()
    try:
        job = read_job(train_arguments)
        alone = only_supervisor(job)
    except ValueError as problem:
        parser.error(str(problem))
    with alone:
        return Supervisor(job, options, train_arguments).run()


def only_supervisor(job: JobSections) -> TextIO:
    """The lock of a run, held while this process lives: two jobs would delete each other's checkpoints."""
    job.run.mkdir(parents=True, exist_ok=True)
    lock = open(job.run / ".supervisor.lock", "w")  # noqa: SIM115 - stays open
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as held:
        raise ValueError(
            f"another supervisor runs {job.run}; stop it (`touch {job.run}/stop`) or choose another job.dump_folder"
        ) from held
    return lock


if __name__ == "__main__":
    sys.exit(main())
