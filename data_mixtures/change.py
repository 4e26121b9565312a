"""`python -m data_mixtures change LOCK|RUN --at-step N`: other weights behind a step, sources added and dropped.

    change RUN --at-step 40000 --weight web=60 --weight code=40 --add books=5 --drop forum

Writes a lock of the same sequences up to that step, beside the old one, which stays. Every source goes on behind
the windows that it has served, so nothing is read again; a source that is added is prepared in the same folder and
starts at its beginning. The run continues with --mixture.lock and the new file: its checkpoints up to that step fit
both locks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from data_mixtures import order, shards
from data_mixtures.mixture import CHANGED_RULE, Mixture, fingerprint, read_lock, segments_of, source_entry
from data_mixtures.recipe import check_integer, check_known
from data_mixtures.shards import Json
from data_mixtures.stages.run import figures
from records import skips

Pairs = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclass(frozen=True)
class Change:
    """What changes, of which mixture."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="LOCK|RUN")]
    """A lock file, or the run folder of one phase"""
    at_step: int
    """The last step with the weights of before"""
    weight: Pairs = ()
    """NAME=WEIGHT of a source; the others keep theirs"""
    add: Pairs = ()
    """NAME=WEIGHT of a source that is prepared in the same folder and not in the mixture yet"""
    drop: Pairs = ()
    """NAME of a source that is no longer read"""
    global_batch: int | None = None
    """Sequences per step; a run folder knows it"""
    out: Path | None = None
    """The new lock; default: <phase>-<first sequence>.lock.json beside the old one"""


def command(given: tyro.conf.OmitArgPrefixes[Change]) -> None:
    """Change the weights of a mixture behind a step."""
    run(given, Console(highlight=False))


def run(given: Change, console: Console) -> Path:
    """Write the changed lock, print what each source has read. ValueError for what a user can fix."""
    check_integer("--at-step", given.at_step)
    path, offsets, first = _place(given)
    changed = make(
        path, first, named_numbers("--weight", given.weight), named_numbers("--add", given.add), given.drop
    )
    out = given.out or path.with_name(f"{changed['phase']}-{first}.lock.json")
    if out.exists():
        raise ValueError(f"{out} exists, and a run may be pinned to it; give --out")
    if out.parent.resolve() != path.parent.resolve():
        raise ValueError(f"--out {out} must lie in {path.parent}, beside the sources")
    shards.write_json(out, changed)
    before, after = Mixture.open(path, offsets), Mixture.open(out, offsets)
    assert before.rule(first) == after.rule(first), "a change must leave the sequences before it as they are"
    sizes = {entry["name"]: entry["windows"] for entry in changed["sources"]}
    _print(before, after, first, sizes, console)
    console.print(f"{out}: continue the run with --mixture.lock {out}", soft_wrap=True)
    return out


def _place(given: Change) -> tuple[Path, dict[str, int], int]:
    """Lock, offsets of its sources, and the first sequence behind the step."""
    if given.data.is_dir():
        reading = skips.attempt_of(skips.read_attempts(given.data), given.at_step)
        return reading.lock, reading.offsets, int(reading.numbers(given.at_step)[-1]) + 1
    if given.global_batch is None:
        raise ValueError("a lock file does not say how many sequences a step has: give --global-batch")
    check_integer("--global-batch", given.global_batch)
    return given.data, {}, given.at_step * given.global_batch


def named_numbers(option: str, given: Iterable[str]) -> dict[str, int]:
    """What an option of NAME=NUMBER says. ValueError names what is none."""
    pairs = [each.partition("=") for each in given]
    for name, _, number in pairs:
        if not (name and number.isdecimal()):
            raise ValueError(f"{option} {name!r} needs a number, as in {option} {name or 'web'}=60")
    return {name: int(number) for name, _, number in pairs}


def make(
    path: Path, first: int, weights: dict[str, int], added: dict[str, int], dropped: Iterable[str] = ()
) -> Json:
    """The lock of `path` with other weights from sequence `first` on. ValueError for unknown sources or weights."""
    lock = read_lock(path)
    begin, latest = segments_of(lock)[-1]
    known = [entry["name"] for entry in lock["sources"]]
    if first <= begin:
        raise ValueError(f"{path} already changes at sequence {begin}; a change at {first} must lie behind")
    check_known("source in --weight or --drop:", [*weights, *dropped], known)
    if again := sorted(added.keys() & set(known)):
        raise ValueError(f"--add: {again} are in {path} already; change their --weight")
    now = dict(zip(known, latest, strict=True)) | weights | dict.fromkeys(dropped, 0) | added
    try:
        order.pattern(list(now.values()))
    except ValueError as error:
        raise ValueError(f"{error}; the sources in order: {list(now)}") from error
    cap = max(entry["epoch_cap"] for entry in lock["sources"])
    new = [source_entry(path.parent, name, 0, cap, lock) for name in added]
    changes = [*lock.get("changes", ()), {"from_sequence": first, "weights": now}]
    changed = {**lock, "order": CHANGED_RULE, "sources": [*lock["sources"], *new], "changes": changes}
    return {**changed, "fingerprint": fingerprint(changed)}


def _print(before: Mixture, after: Mixture, first: int, sizes: dict[str, int], console: Console) -> None:
    read, latest = before.windows_per_source(first), after.windows_per_source(first)
    old = dict(zip(before.source_names, before.weights, strict=True))
    rows, repeated = [], 0
    for (name, windows), weight in zip(sizes.items(), after.weights, strict=True):
        left = windows - latest[name] % windows
        again = max(read.get(name, 0) - latest[name], 0)
        repeated += again
        rows.append([name, *(f"{n:,}" for n in (old.get(name, 0), weight, latest[name], left, again))])
    head = ("source", "weight before", "from then on", "windows read", "left of this epoch", "read again")
    console.print(figures(f"{after.phase} from sequence {first:,} on", head, rows))
    console.print(f"{repeated} windows are read again because of the change")
