"""Batches for the trainer: a slice of the mixture's global order, read ahead by torchdata.

Step N of the whole job takes the global sequences [N G, (N+1) G), G the global batch. A rank takes its slice
of every micro-batch, so ranks, accumulation and readers change who reads a sequence, never which sequences a
step has. The state is one number, the same on every rank, so a checkpoint loads with any world size. Skipped
windows shift everything after them (`records/skips.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torchdata.nodes import IterableWrapper, Mapper, Prefetcher
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from data_mixtures.mixture import BEGINS, TRAINED, Mixture
from records.skips import SkipList, read_skip_list, windows_of

READ_AHEAD_BATCHES = 4  # for each reader thread
T = TypeVar("T")
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class MixtureLoader(BaseDataLoader):
    """Yields ({"input": int64 (b, S), "source": int64 (b,)}, labels int64 (b, S)) from the current state on.

    b is the local batch size; "source" counts in `mixture.source_names`. Packed conversations have more: see
    `inputs_and_labels`.
    """

    def __init__(
        self,
        lock: Path,
        dp_rank: int,
        dp_world_size: int,
        local_batch_size: int,
        reader_threads: int,
        skips: SkipList,
        begin_again: Sequence[str] = (),
    ):
        self.lock, self.skips = lock, skips
        self.mixture = Mixture.open(lock)
        self.contents = self.mixture.contents  # {source: SHA-256}, of this phase and those before it
        self.offsets: dict[str, int] = {}  # windows of each source that earlier phases used up
        self.left_out: dict[str, int] = {}  # those among them that were skipped
        self.lengths: dict[str, int] = {}  # by source, tokens of the windows of `offsets`
        self.begin_again = begin_again  # sources that may have other text than that of the same name before
        self.read: dict[str, list[str]] = {}  # by source, `Mixture.read_files` of what earlier phases used up
        self.sequences = 0  # positions that the trainer has taken, all ranks together
        self.micro_batch = local_batch_size * dp_world_size
        self.local = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.reader_threads = reader_threads

    def _read(self, first: int, skips: SkipList) -> Batch:
        runs = windows_of(skips.numbers(first + self.local.start, len(self.local)))
        parts, sources = zip(
            *(self.mixture.sequences(number, last - number) for number, last in runs), strict=True
        )
        tokens = torch.from_numpy(parts[0] if len(runs) == 1 else np.concatenate(parts))
        source = torch.from_numpy(np.concatenate(sources))
        flags = None
        if self.mixture.packed:
            marks = [self.mixture.flags(number, last - number) for number, last in runs]
            flags = torch.from_numpy(np.concatenate(marks))
        inputs, labels = inputs_and_labels(tokens, flags)
        return {
            name: ready_to_copy(part) for name, part in {**inputs, "source": source}.items()
        }, ready_to_copy(labels)

    def __iter__(self) -> Iterator[Batch]:
        # the skip list of now: what `leave_out` adds later is exactly what has been read ahead past
        first, skips = self.sequences, self.skips
        for batch in read_ahead(
            lambda number: self._read(first + number * self.micro_batch, skips), self.reader_threads
        ):
            self.sequences += self.micro_batch
            yield batch

    def begin_after(self, used: dict[str, Any]) -> None:
        """Start a phase behind the windows that those before it used up; used: what `state_dict` says.

        A source that has changed goes on where what was read of it is the same, else it is refused: ValueError.
        One of `begin_again` starts at its own beginning, and that before is counted as NAME@HASH. Checkpoints
        from before contents were saved have names only.
        """
        before, now = used.get("contents", {}), self.mixture.contents
        names = {f"{name}@{sha256[:8]}": name for name, sha256 in now.items()}
        for name, sha256 in before.items():
            if now.get(name, sha256) != sha256:
                if f"{name}@{now[name][:8]}" in before or name in self.begin_again:
                    names[name] = f"{name}@{sha256[:8]}"
                else:
                    _check_continues(name, used, self.mixture)

        def renamed(values: dict[str, Any]) -> dict[str, Any]:
            return {names.get(name, name): value for name, value in values.items()}

        self.contents, self.read = renamed(before) | now, renamed(used.get("read", {}))
        self.lengths = renamed(used.get("lengths", {}))
        self.begin_at(renamed(used["windows"]), renamed(used["windows_left_out"]))

    def begin_at(self, offsets: dict[str, int], left_out: dict[str, int]) -> None:
        """Start every source after the windows that earlier phases used; left_out: how many
        of these were skipped.
        """
        self.offsets, self.left_out = dict(offsets), dict(left_out)
        names = self.mixture.source_names
        self.mixture = self.mixture.starting_at({name: offsets[name] for name in names if name in offsets})

    def leave_out(self, windows: Iterable[Sequence[int]]) -> None:
        """Skip the sequences taken last, as if the skip list had always held them; those that follow move up."""
        self.skips = SkipList([*self.skips.windows, *windows])
        self.sequences -= sum(last - first for first, last in windows)

    def check_epochs(self, positions: int) -> None:
        """ValueError if a job of this many sequences would repeat a source more often than
        its epoch cap allows.
        """
        self.mixture.check_epochs(self.skips.used(positions))

    def locate(self, first: int, count: int) -> list[dict[str, Any]]:
        """Source, shard and token offset of every sequence at positions first .. first + count."""
        return self.mixture.locate(self.skips.numbers(first, count))

    def windows_per_source(self) -> dict[str, int]:
        """Windows of every source that this phase and those before it have used up, in closed form."""
        return {**self.offsets, **self.mixture.windows_per_source(self.skips.used(self.sequences))}

    def left_out_per_source(self) -> dict[str, int]:
        """Those among them that were skipped: what was trained on is the difference."""
        left_out = dict(self.left_out)
        for first, last in self.skips.until(self.skips.used(self.sequences)):
            before, after = self.mixture.windows_per_source(first), self.mixture.windows_per_source(last)
            for name in after:
                left_out[name] = left_out.get(name, 0) + after[name] - before[name]
        return left_out

    def tokens_per_source(self) -> dict[str, int]:
        """Tokens of every source that this phase and those before it were trained on."""
        return self._tokens_of(self.windows_per_source(), self.left_out_per_source())

    def tokens_before(self) -> int:
        """Tokens that the phases before this one were trained on."""
        return sum(self._tokens_of(self.offsets, self.left_out).values())

    def _tokens_of(self, windows: dict[str, int], left_out: dict[str, int]) -> dict[str, int]:
        lengths = self._window_lengths()
        return {name: (w - left_out.get(name, 0)) * lengths[name] for name, w in windows.items()}

    def _window_lengths(self) -> dict[str, int]:
        """Of every source that was read; one of another phase may have windows of another length."""
        names = {**self.offsets, **self.mixture.contents}
        ours = self.mixture.source_names
        seq_len = self.mixture.seq_len
        return {name: seq_len if name in ours else self.lengths.get(name, seq_len) for name in names}

    def state_dict(self) -> dict[str, Any]:
        """One JSON string, equal on all ranks: position, mixture, and the windows of every
        source used so far.
        """
        state = {
            "sequences": self.sequences,
            "skip_sequences": self.skips.until(self.skips.used(self.sequences)),
            "fingerprint": self.mixture.fingerprint,
            "contents": self.contents,
            "offsets": self.offsets,
            "left_out": self.left_out,
            "windows": self.windows_per_source(),
            "windows_left_out": self.left_out_per_source(),
            "lengths": self._window_lengths(),
            "rule": self.mixture.rule,
            "read": self.read | self._read_files(),
        }
        return {"mixture": json.dumps(state)}

    def _read_files(self) -> dict[str, list[str]]:
        used = self.mixture.windows_per_source(self.skips.used(self.sequences))
        return {name: self.mixture.read_files(name, windows) for name, windows in used.items() if windows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = json.loads(state_dict["mixture"])
        if state["fingerprint"] != self.mixture.fingerprint:
            check_same_so_far(state, self.mixture, self.lock)
        self.sequences = state["sequences"]
        passed, now = SkipList(state["skip_sequences"]), self.skips
        if passed.windows != now.until(now.used(self.sequences)):
            raise ValueError(
                f"the checkpoint has left out the sequences {passed.windows}, but resilience.skip_sequences and "
                f"skip_sequences.json of the run folder say {now.windows}, which would change what it was trained on; "
                "change only windows that lie ahead, or start from an older checkpoint"
            )
        self.contents = state.get("contents", {}) | self.mixture.contents
        self.read, self.lengths = state.get("read", {}), state.get("lengths", {})
        self.begin_at(state["offsets"], state["left_out"])


def check_same_so_far(state: dict[str, Any], mixture: Mixture, lock: Path) -> None:
    """ValueError unless this mixture gives the sequences that were read so far; state: as `state_dict` says."""
    position = SkipList(state["skip_sequences"]).used(state["sequences"])
    if state.get("rule") != mixture.rule:
        raise ValueError(
            f"the checkpoint was trained on mixture {state['fingerprint'][:12]}, but {lock} is "
            f"{mixture.fingerprint[:12]}, and its first {position} sequences are others; continue with the mixture "
            "of the checkpoint, or start a new phase from it (checkpoint.initial_load_path in a new job.dump_folder)"
        )
    for name, sha256 in mixture.contents.items():
        if state["contents"].get(name, sha256) != sha256:
            _check_continues(name, state, mixture)


def _check_continues(name: str, used: dict[str, Any], mixture: Mixture) -> None:
    if windows := used["windows"].get(name, 0):
        mixture.check_continues(name, windows, used.get("read", {}).get(name))


def inputs_and_labels(tokens: torch.Tensor, flags: torch.Tensor | None) -> Batch:
    """Windows (b, S + 1) and their flags, if they are packed -> inputs (b, S) and
    labels, IGNORE_INDEX if untrained.
    """
    if flags is None:
        return {"input": tokens[:, :-1]}, tokens[:, 1:]
    labels = torch.where((flags[:, 1:] & TRAINED).bool(), tokens[:, 1:], IGNORE_INDEX)
    documents = (flags[:, :-1] & BEGINS).bool().cumsum(1)
    return {
        "input": tokens[:, :-1],
        "documents": documents,
        "trained": (labels != IGNORE_INDEX).sum(),
    }, labels


def ready_to_copy(part: torch.Tensor) -> torch.Tensor:
    """What a GPU can copy while the host goes on: adjacent and pinned, which a slice of pinned memory is not."""
    part = part.contiguous()
    # in a context that the process has already, whatever device it is on
    return part.pin_memory() if torch.cuda.is_available() else part


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The same batch there, without waiting for the copies; "trained" stays on the CPU, which reads it."""
    inputs, labels = batch
    copied = {
        name: part if name == "trained" else part.to(device, non_blocking=True)
        for name, part in inputs.items()
    }
    return copied, labels.to(device, non_blocking=True)


def of_packed(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What the model's forward gets besides ids and labels."""
    if "documents" not in inputs:
        return {}
    return {"documents": inputs["documents"], "trained": int(inputs["trained"])}


def read_ahead(read: Callable[[int], T], threads: int) -> Iterator[T]:
    """read(0), read(1), ... in this order, each done by a thread before it is asked for;
    raises what `read` raises.

    Thread t does every number with remainder t, so nothing has to be put back into order. The loader's state
    is its position, so torchdata takes no snapshots. The threads end when the iterator is closed.
    """

    def attempt(number: int) -> tuple[T | None, BaseException | None]:
        try:
            return read(number), None
        except (
            BaseException
        ) as problem:  # torchdata rewords an Exception, and waits forever after anything else
            return None, problem

    # not ParallelMapper: it sets torch's thread count to 1 for every thread that starts later
    nodes = [
        Prefetcher(
            Mapper(IterableWrapper(count(first, threads)), attempt), READ_AHEAD_BATCHES, snapshot_frequency=0
        )
        for first in range(threads)
    ]
    for node in nodes:
        node.reset()  # all begin at once
    for node in cycle(nodes):
        result, problem = next(node)
        if problem is not None:
            raise problem
        yield result


def build_mixture_loader(dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any) -> MixtureLoader:
    """TorchTitan's dataloader builder. Raises ValueError when mixture, sequence length or
    vocabulary do not fit.
    """
    section = job_config.mixture
    lock = Path(section.lock)
    if not lock.is_file():
        raise ValueError(
            f"mixture.lock = {section.lock!r} does not exist; `python -m data_mixtures.prepare` writes one"
        )
    batch = job_config.training.local_batch_size
    skips = read_skip_list(Path(job_config.job.dump_folder), job_config.resilience.skip_sequences)
    loader = MixtureLoader(
        lock, dp_rank, dp_world_size, batch, section.reader_threads, skips, section.begin_again
    )
    if loader.mixture.seq_len != job_config.training.seq_len:
        raise ValueError(
            f"{lock} holds windows of {loader.mixture.seq_len} tokens, but training.seq_len is "
            f"{job_config.training.seq_len}; set training.seq_len = {loader.mixture.seq_len} or prepare the data again"
        )
    if loader.mixture.packed and not job_config.model.mask_documents:
        raise ValueError(
            f"{lock} holds windows of several conversations or documents, which must not see each other; set "
            "model.mask_documents = true"
        )
    return loader
