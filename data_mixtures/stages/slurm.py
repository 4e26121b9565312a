"""Units as array jobs of Slurm: the watcher, and `python -m data_mixtures.stages.slurm FOLDER INDEX`, which is a task.

The queue knows what is where: a job's name says stage, data folder and number of the array, whose units are listed in
DIR/.logs/<stage>/<number>/. So the watcher may be killed; the next start adopts what is queued and submits the rest.
It cancels only tasks whose results it could not use, since recipe, text or code have changed.
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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from data_mixtures import shards
from data_mixtures.stages.stage import Stage, Unit, attempt, is_done, raise_failure, remove_partial
from records.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]
UNITS = "units.pickle"
RETRY_S = 600.0  # a controller that is busy, or restarts, is asked again for so long
POLL_S = (1.0, 10.0)  # between two looks at the queue, at first and later: every look loads the controller
SETTLE_S = 60.0  # a shared file system may show results, and a cached squeue jobs, that late
TASKS_PER_WORKER = 4  # starting Python takes seconds, but the last task should be short
BUSY = re.compile("timed out|contact|connect|temporar|zero bytes", re.IGNORECASE)  # what sbatch says of a controller


class Tell(Protocol):
    def __call__(self, finished: int | None = None, news: str = "") -> None:
        """Report how many units are finished, or a line for the terminal."""


class Task(NamedTuple):
    """A task in the queue: number of its array, rank in it, Slurm's number of the job."""

    array: int
    rank: int
    job: str
    running: bool


@dataclass(frozen=True)
class Array:
    """What was submitted, with what the result of each unit depends on; task i does units i, i + tasks, ..."""

    stage: Stage
    keys: Mapping[Unit, str]
    tasks: int

    def units(self, index: int) -> list[Unit]:
        return list(self.keys)[index :: self.tasks]


class Watch:
    """The arrays of one stage in one folder, as seen from the login node."""

    def __init__(self, stage: Stage, tell: Tell) -> None:
        self.stage, self.tell = stage, tell
        self.logs = stage.out / ".logs" / stage.name
        self.name = f"data-{stage.name}-{zlib.crc32(str(stage.out.resolve()).encode()):08x}"
        self.arrays: dict[int, Array | None] = {}  # None: nobody knows its units any more
        self.tasks: list[Task] = []  # that Slurm still has
        self.submitted: dict[Unit, Path] = {}  # by this process: the log of its task
        self.done: set[Unit] = set()

    def run(self, units: list[Unit], workers: int, options: Mapping[str, str]) -> None:
        """Wait for what is queued, submit the rest, wait. Returns when all units are done."""
        self._adopt()
        pause_s, lost_since = POLL_S[0], 0.0
        while True:
            queued = {unit for task in self.tasks for unit in self._see(task)}
            rest = [unit for unit in units if unit not in queued | self.done and not self._is_done(unit)]
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
        lines = self._ask("squeue", "--me", "--noheader", "--array", "--format=%i %t %j").splitlines()
        found = [re.fullmatch(rf"(\d+)_(\d+) (\w+) {re.escape(self.name)}\.(\d+)", line.strip()) for line in lines]
        self.tasks = [Task(int(m[4]), int(m[2]), m[1], m[3] == "R") for m in found if m]
        for number in {task.array for task in self.tasks}.difference(self.arrays):
            path = self.logs / str(number) / UNITS
            self.arrays[number] = pickle.loads(path.read_bytes()) if path.is_file() else None
        return self.tasks

    def jobs(self) -> str:
        return " ".join(sorted({task.job for task in self.tasks}))

    def _adopt(self) -> None:
        """Take over the tasks of earlier starts; cancel those that make something else by now."""
        known = set(self.stage.units())
        if stale := [task for task in self.look() if not self._is_wanted(task, known)]:
            self.tell(news=f"cancels {len(stale)} tasks in the queue: recipe, text or code have changed since")
            self._ask("scancel", *(f"{task.job}_{task.rank}" for task in stale))
            places = {(task.job, task.rank) for task in stale}
            while any((task.job, task.rank) in places for task in self.look()):
                time.sleep(POLL_S[0])
        if self.tasks:
            self.tell(news=f"waits for {len(self.tasks)} tasks of an earlier start, jobs {self.jobs()}")
            for path in self.logs.glob("*/failed/*.json"):
                path.unlink()
        else:
            shutil.rmtree(self.logs, ignore_errors=True)
            remove_partial(self.stage.out, self.stage.name)

    def _is_wanted(self, task: Task, known: set[Unit]) -> bool:
        array = self.arrays[task.array]
        units = array.units(task.rank) if array else []
        return bool(array and all(u in known and array.keys[u] == self.stage.key(u) for u in units))

    def _is_done(self, unit: Unit) -> bool:
        if unit not in self.done and is_done(self.stage, unit):
            self.done.add(unit)
        return unit in self.done

    def _see(self, task: Task) -> list[Unit]:
        """The units of a task; those that it has finished are noted."""
        array = self.arrays[task.array]
        units = array.units(task.rank) if array else []
        if task.running:
            all(self._is_done(unit) for unit in units)  # it does one after the other
        return units

    def _submit(self, units: list[Unit], workers: int, options: Mapping[str, str]) -> None:
        """One array, not larger than Slurm takes, with as many tasks at a time as are free."""
        limits = re.findall(r"(?:MaxArraySize\s*=\s*|max_array_tasks=)(\d+)", self._ask("scontrol", "show", "config"))
        array = Array(
            self.stage,
            {unit: self.stage.key(unit) for unit in units},
            max(1, min(len(units), TASKS_PER_WORKER * workers, *map(int, limits))),
        )
        number = 1 + max((int(path.name) for path in self.logs.glob("[0-9]*")), default=0)
        folder = (self.logs / str(number)).resolve()
        (folder / "failed").mkdir(parents=True)
        write_atomically(folder / UNITS, pickle.dumps(array))
        defaults = {"time": "24:00:00", "cpus-per-task": "1"}
        task = f"PYTHONPATH={shlex.quote(str(ROOT))}:$PYTHONPATH {shlex.quote(sys.executable)} -m {__name__}"
        given = [f"--{name}={value}" if value else f"--{name}" for name, value in {**defaults, **options}.items()]
        done = subprocess.run(
            ["sbatch", *given, f"--job-name={self.name}.{number}", f"--output={folder}/%a.log", "--open-mode=append",
             f"--array=0-{array.tasks - 1}%{workers - len(self.tasks)}",
             f"--wrap={task} {shlex.quote(str(folder))} $SLURM_ARRAY_TASK_ID"],
            capture_output=True, text=True,
        )  # fmt: skip
        said = (done.stderr or done.stdout).strip()
        if done.returncode and not BUSY.search(said):
            raise ValueError(f"{self.stage.name}: sbatch ended with status {done.returncode}: {said}")
        self.arrays[number] = array
        if done.returncode:  # whether it was submitted all the same, the queue will say
            self.tell(news=f"sbatch: {said}")
            return
        self.submitted |= {unit: folder / f"{i}.log" for i in range(array.tasks) for unit in array.units(i)}
        self.tell(news=f"{said}: {array.tasks} tasks, logs in {folder}")

    def _raise_lost(self, lost: list[Unit]) -> None:
        """Tasks that are gone, each with the first unit that it did not finish."""
        begun: dict[Path, Unit] = {}
        for unit in lost:
            begun.setdefault(self.submitted[unit], unit)
        lines = []
        for log, unit in list(begun.items())[:5]:
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
            lines.append(f"\n  {unit}: {said[-1] if said else 'printed nothing'} ({log})")
        more = f"\n  and {len(begun) - 5} more" if len(begun) > 5 else ""
        raise ValueError(
            f"{self.stage.name}: {len(lost)} units are not finished and Slurm no longer has their tasks: killed, or "
            f"out of memory (--mem-per-cpu) or time (--time)? They were at{''.join(lines)}{more}"
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
            except subprocess.CalledProcessError as error:
                said = f"{command[0]}: {error.stderr.strip()}"
            except subprocess.TimeoutExpired as error:
                said = str(error)
            if time.monotonic() + pause_s > deadline:
                raise ValueError(f"{self.stage.name}: for {RETRY_S:.0f} s Slurm has not answered: {said}")
            self.tell(news=f"{said}; asking again in {pause_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 60.0)


def run(stage: Stage, units: list[Unit], workers: int, options: Mapping[str, str], tell: Tell) -> None:
    """Do all the units. Whatever ends the watching, jobs go on; ValueError for what a user can fix."""
    watch = Watch(stage, tell)
    try:
        watch.run(units, workers, options)
    except (ValueError, RuntimeError, KeyboardInterrupt) as stop:
        if not watch.tasks:
            raise
        go_on = f"{len(watch.tasks)} tasks go on; the same command waits for them, scancel {watch.jobs()} ends them"
        raise type(stop)(f"{stop}; {go_on}" if str(stop) else go_on) from stop
    if not watch.look():
        for path in watch.logs.glob(f"*/{UNITS}"):
            path.unlink()


def check_none_queued(stage: Stage, tell: Tell) -> None:
    """ValueError when tasks in Slurm's queue still do units of this stage."""
    watch = Watch(stage, tell)
    if any(watch.logs.glob(f"*/{UNITS}")) and watch.look():
        raise ValueError(
            f"{stage.name}: Slurm still has {len(watch.tasks)} tasks of it, jobs {watch.jobs()}; wait for them with "
            "--executor slurm, or end them with scancel"
        )


def work(folder: Path, index: int) -> int:
    """One task; the exit status. The last line of its log names the unit at which it is, or what went wrong."""
    array: Array = pickle.loads((folder / UNITS).read_bytes())
    status = 0
    for unit in array.units(index):
        print(unit, flush=True)
        if not is_done(array.stage, unit) and (failure := attempt(array.stage, unit)):
            print(failure["message"], flush=True)
            shards.write_json(folder / "failed" / f"{index}-{unit.number}.json", failure)
            status = 1  # the others do not depend on it
    return status


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1]), int(sys.argv[2])))
