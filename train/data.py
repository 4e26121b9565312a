"""Batches for the trainer: a slice of the mixture's global order, read ahead by torchdata.

An attempt that continues after step `start` at `position` gives its step s the G positions from
position + (s - 1 - start) G on, G its global batch; a position is a sequence of the global order that is not
skipped. Ranks, accumulation and readers change who reads a sequence, never which sequences a step has. The state
is LoaderState, the same on every rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, cycle
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torchdata.nodes import IterableWrapper, Mapper, Prefetcher
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX

from data_mixtures.mixture import BEGINS, TRAINED, Mixture
from records.skips import SkipList, ranges_of, read_skip_list

# micro-batches that each reader thread holds ready
READ_AHEAD_BATCHES = 4
T = TypeVar("T")
Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass
class LoaderState:
    """What a checkpoint holds of the data: equal on all ranks, whatever their number."""

    # positions that the trainer has taken in this phase, all ranks together; `mixture_reach` is the
    # sequence number that they reach. Field names are keys of the checkpoint
    sequences: int = 0
    # SHA-256 by source, of all phases so far
    contents: dict[str, str] = field(default_factory=dict)
    # windows (of a source, S + 1 tokens) that earlier phases used up, by source, as all that follow
    offsets: dict[str, int] = field(default_factory=dict)
    # those among them that were skipped
    left_out: dict[str, int] = field(default_factory=dict)
    # sequence length S of the windows, by source
    lengths: dict[str, int] = field(default_factory=dict)
    # `Mixture.identify_files_read`
    read: dict[str, list[str]] = field(default_factory=dict)


class MixtureLoader(BaseDataLoader):
    """Yields ({"input": int64 (b, S), "source": int64 (b,)}, labels int64 (b, S)) from the current state on.

    b is the local batch size. Packed conversations have more inputs: `split_inputs_and_labels`.
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
        self.lock, self.skips, self.begin_again = lock, skips, begin_again
        self.mixture = Mixture.open(lock)
        self.state = LoaderState(contents=self.mixture.contents)
        self.micro_batch = local_batch_size * dp_world_size
        self.local = range(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)
        self.reader_threads = reader_threads

    @property
    def tokens_read(self) -> int:
        """Tokens of the positions taken, whether or not they have a label that counts."""
        return self.state.sequences * self.mixture.seq_len

    def _read(self, first: int, skips: SkipList) -> Batch:
        """This rank's part of the micro-batch that begins at position `first`."""
        numbers = skips.numbers(first + self.local.start, len(self.local))
        runs = [(begin, end - begin) for begin, end in ranges_of(numbers)]
        parts = [self.mixture.sequences(*run) for run in runs]
        tokens, source = (
            torch.from_numpy(np.concatenate(pieces)) for pieces in zip(*parts, strict=True)
        )
        flags = None
        if self.mixture.packed:
            flags = torch.from_numpy(np.concatenate([self.mixture.flags(*run) for run in runs]))
        inputs, labels = split_inputs_and_labels(tokens, flags)
        inputs = {name: prepare_copy(part) for name, part in {**inputs, "source": source}.items()}
        return inputs, prepare_copy(labels)

    def __iter__(self) -> Iterator[Batch]:
        # the skip list of now: what `rewind_past` adds later is exactly what was taken and not trained on
        first, skips = self.state.sequences, self.skips

        def read(number: int) -> Batch:
            return self._read(first + number * self.micro_batch, skips)

        # counted when it is handed out, not when it is read: a checkpoint must not skip what waits
        for batch in read_ahead(read, self.reader_threads):
            self.state.sequences += self.micro_batch
            yield batch

    def start_phase_after(self, used: dict[str, Any]) -> None:
        """Start a phase after the windows that earlier phases used up.

        Args:
            used: what their `state_dict` says.

        Raises:
            ValueError: what was read of a source has changed, and `begin_again` does not name it.
        """
        before, now = used["contents"], self.mixture.contents
        # text of before under a name that has other text now is counted as NAME@HASH
        names = {f"{name}@{sha256[:8]}": name for name, sha256 in now.items()}
        for name, sha256 in before.items():
            if now.get(name, sha256) != sha256:
                if f"{name}@{now[name][:8]}" in before or name in self.begin_again:
                    names[name] = f"{name}@{sha256[:8]}"
                else:
                    _check_continues(name, used, self.mixture)

        def rename_keys(key: str) -> dict[str, Any]:
            return {names.get(name, name): value for name, value in used[key].items()}

        self.restore(
            LoaderState(
                contents=rename_keys("contents") | now,
                offsets=rename_keys("windows"),
                left_out=rename_keys("windows_left_out"),
                lengths=rename_keys("lengths"),
                read=rename_keys("read"),
            )
        )

    def restore(self, state: LoaderState) -> None:
        """Set position and sources to a state of this phase, or to the start of a new one."""
        names, self.state = self.mixture.source_names, state
        offsets = {name: count for name, count in state.offsets.items() if name in names}
        self.mixture = self.mixture.starting_at(offsets)

    def rewind_past(self, ranges: Iterable[Sequence[int]]) -> None:
        """Skip the sequences taken last, as if the skip list had always held them."""
        # the reader threads go on: what they hold are the sequences that these positions have now
        self.skips = SkipList([*self.skips.ranges, *ranges])
        self.state.sequences -= sum(last - first for first, last in ranges)

    def check_epochs(self, positions: int) -> None:
        """Raise ValueError if this many sequences would repeat a source beyond its epoch cap."""
        self.mixture.check_epochs(self.skips.reach(positions))

    def locate(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return source, shard and token offset of the sequences at these positions."""
        return self.mixture.locate(self.skips.numbers(first, count))

    @property
    def mixture_reach(self) -> int:
        """Sequence numbers that this phase has used up, skipped ones included."""
        return self.skips.reach(self.state.sequences)

    def windows_per_source(self) -> dict[str, int]:
        """Count each source's windows that this phase and those before used up."""
        return {**self.state.offsets, **self.mixture.windows_per_source(self.mixture_reach)}

    def count_skipped_windows(self) -> dict[str, int]:
        """Count those among `windows_per_source` that were skipped."""
        left_out = dict(self.state.left_out)
        for first, last in self.skips.until(self.mixture_reach):
            before, after = (
                self.mixture.windows_per_source(first),
                self.mixture.windows_per_source(last),
            )
            for name in after:
                left_out[name] = left_out.get(name, 0) + after[name] - before[name]
        return left_out

    def tokens_per_source(self) -> dict[str, int]:
        """Count each source's tokens that this phase and those before were trained on."""
        return self._tokens_of(self.windows_per_source(), self.count_skipped_windows())

    def tokens_before(self) -> int:
        """Tokens that the phases before this one were trained on."""
        return sum(self._tokens_of(self.state.offsets, self.state.left_out).values())

    def _tokens_of(self, windows: dict[str, int], left_out: dict[str, int]) -> dict[str, int]:
        # windows may be of another length in every phase
        lengths = self._window_lengths()
        return {name: (w - left_out.get(name, 0)) * lengths[name] for name, w in windows.items()}

    def _window_lengths(self) -> dict[str, int]:
        return self.state.lengths | dict.fromkeys(self.mixture.source_names, self.mixture.seq_len)

    def state_dict(self) -> dict[str, Any]:
        """Describe position, mixture and windows used, as one JSON string that is equal on all ranks."""
        windows = self.mixture.windows_per_source(self.mixture_reach)
        read = {
            name: self.mixture.identify_files_read(name, count)
            for name, count in windows.items()
            if count
        }
        state = {
            **asdict(self.state),
            "skip_sequences": self.skips.until(self.mixture_reach),
            "fingerprint": self.mixture.fingerprint,
            "windows": self.windows_per_source(),
            "windows_left_out": self.count_skipped_windows(),
            "lengths": self._window_lengths(),
            "rule": self.mixture.rule,
            "read": self.state.read | read,
        }
        return {"mixture": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = json.loads(state_dict["mixture"])
        if state["fingerprint"] != self.mixture.fingerprint:
            check_same_so_far(state, self.mixture, self.lock)
        passed, now = SkipList(state["skip_sequences"]), self.skips
        if passed.ranges != now.until(now.reach(state["sequences"])):
            raise ValueError(
                f"the checkpoint has left out the sequences {passed.ranges}, but resilience.skip_sequences and "
                f"skip_sequences.json of the run folder say {now.ranges}, which would change what it was trained on; "
                "change only ranges that lie ahead, or start from an older checkpoint"
            )
        # a state of this phase: its own contents replace those that were read before
        saved = LoaderState(**{name: state[name] for name in LoaderState.__annotations__})
        self.restore(replace(saved, contents=saved.contents | self.mixture.contents))


def check_same_so_far(state: dict[str, Any], mixture: Mixture, lock: Path) -> None:
    """Raise ValueError unless this mixture gives the sequences that were read so far."""
    position = SkipList(state["skip_sequences"]).reach(state["sequences"])
    if state["rule"] != mixture.rule:
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
        mixture.check_continues(name, windows, used["read"].get(name))


def split_inputs_and_labels(tokens: torch.Tensor, flags: torch.Tensor | None = None) -> Batch:
    """Split windows (b, S + 1) and, if packed, their flags into inputs and labels (b, S)."""
    if flags is None:
        return {"input": tokens[:, :-1]}, tokens[:, 1:]
    labels = torch.where((flags[:, 1:] & TRAINED).bool(), tokens[:, 1:], IGNORE_INDEX)
    # numbers that grow along the window: equal ones are one document, which attention stays within
    documents = (flags[:, :-1] & BEGINS).bool().cumsum(1)
    return {
        "input": tokens[:, :-1],
        "documents": documents,
        "label_count": (labels != IGNORE_INDEX).sum(),
    }, labels


def prepare_copy(part: torch.Tensor) -> torch.Tensor:
    """Make a tensor contiguous and pinned, for a copy while the host goes on."""
    # a slice of pinned memory is not pinned
    part = part.contiguous()
    # in a context that the process has already, whatever device it is on
    return part.pin_memory() if torch.cuda.is_available() else part


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Start the copies of a batch; "label_count" stays on the CPU, which reads it."""
    inputs, labels = batch
    copied = {
        name: part if name == "label_count" else part.to(device, non_blocking=True)
        for name, part in inputs.items()
    }
    return copied, labels.to(device, non_blocking=True)


def select_packed_inputs(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Select the model's arguments besides ids and labels."""
    if "documents" not in inputs:
        return {}
    return {"documents": inputs["documents"], "label_count": int(inputs["label_count"])}


def read_ahead(read: Callable[[int], T], threads: int) -> Iterator[T]:
    """Yield read(0), read(1), ... in this order, each done ahead by a thread; raise what `read` raises."""

    def attempt(number: int) -> tuple[T | None, BaseException | None]:
        try:
            return read(number), None
        except BaseException as problem:
            # torchdata rewords an Exception, and waits forever after anything else
            return None, problem

    # thread t does every number with remainder t, so nothing has to be put back into order; the loader's state is its
    # position, so torchdata takes no snapshots
    # not ParallelMapper: it sets torch's thread count to 1 for every thread that starts later
    nodes = [
        Prefetcher(
            Mapper(IterableWrapper(count(first, threads)), attempt),
            READ_AHEAD_BATCHES,
            snapshot_frequency=0,
        )
        for first in range(threads)
    ]
    # all begin at once
    for node in nodes:
        node.reset()
    for node in cycle(nodes):
        result, problem = next(node)
        if problem is not None:
            raise problem
        yield result


def build_mixture_loader(
    dp_world_size: int, dp_rank: int, tokenizer: Any, job_config: Any
) -> MixtureLoader:
    """Build the dataloader for TorchTitan; ValueError where mixture and job do not fit."""
    section = job_config.mixture
    lock = Path(section.lock)
    if lock.is_dir():
        locks = ", ".join(sorted(path.name for path in lock.glob("*.lock.json"))) or "it has none"
        raise ValueError(
            f"mixture.lock = {section.lock!r} is a folder; give the lock file in it: {locks}"
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
