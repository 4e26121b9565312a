"""Write checkpoints as DCP does, and also leave every file's SHA-256 and the architecture beside the data."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.filesystem import FileSystem, _FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from records.checkpoints import ARCHITECTURE, CHECKSUMS
from records.files import write_atomically

from .supervise.signals import SIGNALS

# seconds from SIGKILL to the end; a process that takes longer hangs in a file system, and ends when that answers
KILLED_S = 30.0


class Hashing:
    """A binary stream, written in one go, and its SHA-256."""

    # torch's writer makes a RuntimeError of it that names no full disk
    problem: OSError | None = None

    def __init__(self, stream: Any):
        self.stream, self.sha256 = stream, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        try:
            return self.stream.write(data)
        except OSError as problem:
            self.problem = problem
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class HashingFileSystem(FileSystem):
    """DCP's file system; `sums` holds {file name: SHA-256} of what was written."""

    def __init__(self) -> None:
        self.sums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            hashing = Hashing(stream)
            try:
                yield hashing
            except Exception as consequence:
                raise hashing.problem or consequence from None
        self.sums[Path(path).name] = hashing.sha256.hexdigest()

    def rename(self, path: Any, new_path: Any) -> None:
        """Rename `.metadata`: all checksums are known by now."""
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)
        # before the rename of `.metadata`, which makes the checkpoint complete
        listing = json.dumps(self.sums, indent=0, sort_keys=True) + "\n"
        write_atomically(Path(new_path).with_name(CHECKSUMS), listing)
        super().rename(path, new_path)


@dataclasses.dataclass(frozen=True)
class HashedResult(WriteResult):
    """A result that carries its file's checksum from the rank that wrote it to the coordinator."""

    sha256: str = ""


# not of FileSystemWriter, which is a stager as well: async_save would use it as one
class HashingWriter(_FileSystemWriter):
    """Writes the checkpoint folder `path`; `architecture` is the text of its model.json."""

    def __init__(self, path: str, architecture: str):
        super().__init__(path)
        self.fs: HashingFileSystem = HashingFileSystem()
        self.architecture = architecture

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the writer in the process that saves in the background."""
        # it has to outlive a stop request, which asks for a checkpoint, while Slurm signals all processes of a step and
        # a terminal those of its group
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        vars(self).update(state)

    def write_data(self, plan: Any, planner: Any) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                HashedResult(**vars(r), sha256=self.fs.sums[r.storage_data.relative_path])
                for r in results
            ]
        )
        return future

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        # the coordinator's own file system has seen only what its rank wrote
        self.fs.sums |= {
            r.storage_data.relative_path: r.sha256 for of_rank in results for r in of_rank
        }
        with self.fs.create_stream(Path(self.path) / ARCHITECTURE, "wb") as stream:
            stream.write(self.architecture.encode())
        super().finish(metadata, results)


def end_background() -> None:
    """Kill the process that saves in the background, if there is one; the next save starts another."""
    # at the end of a worker, multiprocessing would wait for it after a SIGTERM; after a failed save, DCP would use a
    # process that has died, and a group that has lost a member, until the job ends
    if (background := _async_process_executor._CHECKPOINT_PROCESS) is not None:
        background._save_process.kill()
        background._save_process.join(KILLED_S)
        _async_process_executor._CHECKPOINT_PROCESS = None
