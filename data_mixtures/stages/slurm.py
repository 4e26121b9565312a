"""Units as array jobs of Slurm: the watcher, and `python -m data_mixtures.stages.slurm FOLDER RANK`,
which is a task.

The queue knows what is where: a job's name says stage, data folder and number of the array, whose units are
listed in DIR/.logs/<stage>/<number>/. So the watcher may be killed: the next start adopts what is queued and
submits the rest. Nothing here cancels jobs.
"""

from __future__ import annotations

import json
import pickle
import re
import shlex
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Protocol

from data_mixtures import shards
from data_mixtures.stages.stage import Stage, Unit, attempt, is_done, raise_failure, remove_partial
from records.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
UNITS = "units.pickle"  # (stage, what each task does: {unit: the key that its result will have})
RETRY_S = 600.0  # a controller that is busy, or restarts, is asked again for so long
POLL_S = (1.0, 10.0)  # between two looks at the queue, at first and later: every look loads the controller
SETTLE_S = 60.0  # a shared file system may show results, and a cached squeue jobs, that late
TASKS_PER_WORKER = 4  # starting Python takes seconds, but the last task should be short
BUSY = re.compile(
    "timed out|contact|connect|temporar|zero bytes", re.IGNORECASE
)  # what sbatch says of a controller


class Tell(Protocol):
    def __call__(self, finished: int | None = None, news: str = "") -> None:
        """Report how many units are finished, or a line for the terminal."""


class Task(NamedTuple):
    """A task in the queue: the number of its array, its rank there, Slurm's number of the job."""

    array: int
    rank: int
    job: str
    running: bool


class Watch:
    """The arrays of one stage in one folder. ValueError when queued tasks do what is not wanted any more."""

    def __init__(self, stage: Stage, tell: Tell) -> None:
        self.stage, self.tell = stage, tell
        self.logs = stage.out / ".logs" / stage.name
        self.name = f"data-{stage.name}-{zlib.crc32(str(stage.out.resolve()).encode()):08x}"
        self.parts: dict[int, list[dict[Unit, str]]] = {}  # by array, for each task
        self.tasks: list[Task] = []  # that Slurm still has
        self.submitted: dict[Unit, Path] = {}  # by this process: the log of its task
        self.done: set[Unit] = set()
        if any(self.logs.glob(f"*/{UNITS}")) and self.look():
            known = set(stage.units())
            queued = [item for task in self.tasks for item in self._part(task).items()]
            if not all(unit in known and stage.key(unit) == key for unit, key in queued):
                raise ValueError(
                    f"{stage.name}: {len(self.tasks)} tasks are queued from before recipe, text or code have changed; "
                    f"scancel {self.jobs()}, and start again"
                )

    def run(self, units: list[Unit], workers: int, options: Mapping[str, str]) -> None:
        """Wait for what is queued, submit the rest, wait. Returns when all units are done."""
        if self.tasks:
            self.tell(news=f"waits for {len(self.tasks)} tasks of an earlier start, jobs {self.jobs()}")
            for path in self.logs.glob("*/failed/*.json"):
                path.unlink()
        else:
            shutil.rmtree(self.logs, ignore_errors=True)
            remove_partial(self.stage.out, self.stage.name)
        pause_s, lost_since = POLL_S[0], 0.0
        while True:
            queued = {unit for task in self.tasks for unit in self._part(task)}
            for task in self.tasks:
                all(task.running and self._is_done(unit) for unit in self._part(task))  # one after the other
            rest = [unit for unit in units if unit not in queued and not self._is_done(unit)]
            self.tell(sum(unit in self.done for unit in units))
            for path in sorted(self.logs.glob("*/failed/*.json")):
                raise_failure(json.loads(path.read_text(encoding="utf-8")))
            if self.done.issuperset(units):
                return
            lost = [unit for unit in rest if unit in self.submitted]
            lost_since = (lost_since or time.monotonic()) if lost else 0.0
            if lost and time.monotonic() - lost_since >= SETTLE_S:
                self._raise_lost(lost)
            if rest and not lost and len(self.tasks) < workers:
                self._submit(rest, workers, options)
                pause_s = POLL_S[0]
            time.sleep(POLL_S[0] if lost else pause_s)
            pause_s = min(1.3 * pause_s, POLL_S[1])
            self.look()

    def look(self) -> list[Task]:
        """Ask Slurm which tasks it has."""
        form = re.compile(rf"(\d+)_(\d+) (\w+) {re.escape(self.name)}\.(\d+)\s*")
        lines = self._ask("squeue", "--me", "--noheader", "--array", "--format=%i %t %j").splitlines()
        self.tasks = [Task(int(m[4]), int(m[2]), m[1], m[3] == "R") for m in map(form.fullmatch, lines) if m]
        return self.tasks

    def jobs(self) -> str:
        return " ".join(sorted({task.job for task in self.tasks}))

    def _part(self, task: Task) -> dict[Unit, str]:
        if task.array not in self.parts:
            self.parts[task.array] = pickle.loads((self.logs / str(task.array) / UNITS).read_bytes())[1]
        return self.parts[task.array][task.rank]

    def _is_done(self, unit: Unit) -> bool:
        if unit not in self.done and is_done(self.stage, unit):
            self.done.add(unit)
        return unit in self.done

    def _submit(self, units: list[Unit], workers: int, options: Mapping[str, str]) -> None:
        """One array, not larger than Slurm takes, with as many tasks at a time as are free."""
        limits = re.findall(
            r"(?:MaxArraySize\s*=\s*|max_array_tasks=)(\d+)", self._ask("scontrol", "show", "config")
        )
        tasks = max(1, min(len(units), TASKS_PER_WORKER * workers, *map(int, limits)))
        parts = [{unit: self.stage.key(unit) for unit in units[rank::tasks]} for rank in range(tasks)]
        number = time.time_ns() // 1_000_000
        folder = (self.logs / str(number)).resolve()
        (folder / "failed").mkdir(parents=True)
        write_atomically(folder / UNITS, pickle.dumps((self.stage, parts)))
        root, python, place = map(shlex.quote, (str(ROOT), sys.executable, str(folder)))
        given = {"time": "24:00:00", "cpus-per-task": "1", **options,
                 "job-name": f"{self.name}.{number}", "array": f"0-{tasks - 1}%{workers - len(self.tasks)}",
                 "output": f"{folder}/%a.log", "open-mode": "append",
                 "wrap": f"PYTHONPATH={root}:$PYTHONPATH {python} -m {__name__} {place} $SLURM_ARRAY_TASK_ID",
                 }  # fmt: skip
        command = [
            "sbatch",
            *(f"--{name}={value}" if value else f"--{name}" for name, value in given.items()),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        said = (done.stderr or done.stdout).strip()
        if done.returncode and not BUSY.search(said):
            raise ValueError(f"{self.stage.name}: sbatch ended with status {done.returncode}: {said}")
        self.tell(news=f"{said}: {tasks} tasks, logs in {folder}")
        if not done.returncode:  # otherwise the queue will say whether it was submitted
            self.submitted |= {
                unit: folder / f"{rank}.log" for rank, part in enumerate(parts) for unit in part
            }

    def _raise_lost(self, lost: list[Unit]) -> None:
        """Name the tasks that are gone by the first unit that each did not finish, and the end of its log."""
        begun: dict[Path, Unit] = {}
        for unit in lost:
            begun.setdefault(self.submitted[unit], unit)
        lines = []
        for log, unit in list(begun.items())[:5]:
            said = log.read_text(encoding="utf-8", errors="replace").strip() if log.is_file() else "no log"
            lines.append(f"\n  {unit}: {said.rpartition(chr(10))[2]} ({log})")
        raise ValueError(
            f"{self.stage.name}: {len(lost)} units are not finished and Slurm no longer has their {len(begun)} tasks: "
            f"killed, or out of memory (--mem-per-cpu) or time (--time)? They were at{''.join(lines)}"
        )

    def _ask(self, *command: str) -> str:
        """What a program of Slurm says; one that fails is asked again, with growing pauses."""
        deadline, pause_s = time.monotonic() + RETRY_S, POLL_S[0]
        while True:
            try:
                return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
            except FileNotFoundError:
                raise ValueError(
                    f"{command[0]} is not installed here; start this where Slurm is. If no job is left of those in "
                    f"{self.logs}, delete that folder"
                ) from None
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                said = f"{command[0]}: {str(error.stderr or error).strip()}"
            if time.monotonic() + pause_s > deadline:
                raise ValueError(f"{self.stage.name}: for {RETRY_S:.0f} s Slurm has not answered: {said}")
            self.tell(news=f"{said}; asking again in {pause_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 60.0)


def run(watch: Watch, units: list[Unit], workers: int, options: Mapping[str, str]) -> None:
    """Do all the units. Whatever ends the watching, jobs go on; ValueError for what a user can fix."""
    try:
        watch.run(units, workers, options)
    except (ValueError, RuntimeError, KeyboardInterrupt) as stop:
        if not watch.tasks:
            raise
        go_on = f"{len(watch.tasks)} tasks go on; the same command waits for them, scancel {watch.jobs()} ends them"
        stop.args = (f"{stop}; {go_on}" if str(stop) else go_on,)
        raise
    if not watch.look():
        for path in watch.logs.glob(f"*/{UNITS}"):
            path.unlink()


def work(folder: Path, rank: int) -> int:
    """One task; the exit status. The end of its log names the unit at which it is, or what went wrong."""
    stage, parts = pickle.loads((folder / UNITS).read_bytes())
    status = 0
    for unit in parts[rank]:
        print(unit, flush=True)
        if not is_done(stage, unit) and (failure := attempt(stage, unit)):
            print(failure["message"], flush=True)
            shards.write_json(folder / "failed" / f"{rank}-{unit.number}.json", failure)
            status = 1  # the others do not depend on it
    return status


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1]), int(sys.argv[2])))
