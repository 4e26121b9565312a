"""`python -m data_mixtures show LOCK|RUN`: what training reads, as text: documents, where they
lie and came from.

    show LOCK --step N --global-batch G [--sequence I]   the batch of a step, or its sequence I, counted from 0
    show RUN --step N [--sequence I]                     what this step of a run read, skipped data left out
    show RUN --bad-step N                                the batches that were refused at this step
    show LOCK|RUN --sequence I                           sequence I of the whole mixture
    show LOCK|RUN --document ID                          where a document lies, by its id as shown
    show LOCK|RUN --origin TEXT                          all documents whose origin holds this text

LOCK is a lock file, RUN the run folder of one phase. With --json, stdout gets a JSON object a line. A
sequence has one token more than the model's input: the last one is only predicted. Held-out documents are
in no document index.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap, zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import pyarrow.compute
import tyro
from rich.console import Console
from rich.progress import track

from data_mixtures import shards, tokenizer
from data_mixtures.mixture import BEGINS, CONVERSATIONS, Mixture, read_lock
from data_mixtures.shards import Json
from records import skips
from records.files import read_lines

T = TypeVar("T")
Condition = Callable[[np.ndarray, pyarrow.Array], np.ndarray]  # ids, origins -> bool, (documents,) each
Place = tuple[Path, dict[str, int], np.ndarray]
CHUNK_TOKENS = 1 << 20


_OneOf = Annotated[T | None, tyro.conf.create_mutex_group(required=False, title="what to show")]


@dataclass(frozen=True)
class Question:
    """What to show of which data."""

    data: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="LOCK|RUN")]
    """A lock file, or a run folder"""
    step: _OneOf[int] = None
    """A training step, from 1"""
    bad_step: _OneOf[int] = None
    """A step at which batches were refused"""
    document: _OneOf[str] = None
    """A document's id, 16 hexadecimal digits"""
    origin: _OneOf[str] = None
    """Part of an origin: a url, repository, file, licence"""
    sequence: int | None = None
    """A sequence of the mixture; with --step: of the step; from 0"""
    global_batch: int | None = None
    """Sequences per step; a run folder knows it"""
    json: tyro.conf.FlagCreatePairsOff[bool] = False
    """JSON lines in place of text"""


def command(question: tyro.conf.OmitArgPrefixes[Question]) -> None:
    """What training reads, as text, and where it came from."""
    run(question, Console(highlight=False))


def run(given: Question, console: Console) -> None:
    """ValueError for everything that a user can fix."""
    if not given.data.exists():
        raise ValueError(f"{given.data} does not exist; give a lock file (phase1.lock.json) or a run folder")
    attempts = skips.read_attempts(given.data) if given.data.is_dir() else []
    if given.document or given.origin:
        lock = attempts[-1].lock if attempts else given.data
        results = find(lock, _condition(given), Console(stderr=True))
    else:
        results = chain.from_iterable(starmap(sequences, _places(given, attempts)))
    count = 0
    for count, each in enumerate(results, 1):  # noqa: B007
        print(json.dumps(each, ensure_ascii=False)) if given.json else print_text(each, console)
    if not count:
        raise ValueError("no such document in the training data; held-out documents are in no document index")


def _condition(given: Question) -> Condition:
    if given.origin:
        return lambda _, origins: pyarrow.compute.match_substring(origins, given.origin).to_numpy(False)
    if not re.fullmatch(r"[0-9a-f]{16}", given.document or ""):
        raise ValueError(f"--document {given.document!r} must be 16 hexadecimal digits, as show prints them")
    return lambda ids, _: ids == np.uint64(int(given.document or "", 16))


def _places(given: Question, attempts: list[skips.Reading]) -> list[Place]:
    """What is to be shown: lock, offsets of its sources, sequence numbers."""
    step, sequence = given.step, given.sequence
    if given.bad_step is not None:
        return _refused_batches(given, attempts)
    if (step is None and sequence is None) or (step is not None and step < 1) or (sequence or 0) < 0:
        raise ValueError(
            "give --step N (from 1), --sequence I (from 0), --bad-step N, --document ID or --origin TEXT"
        )
    reading = attempts[-1] if attempts else None
    if step is None:
        numbers = np.array([sequence])
    elif attempts:
        reading = skips.attempt_of(attempts, step)
        numbers = reading.numbers(step)
    elif given.global_batch:
        numbers = np.arange((step - 1) * given.global_batch, step * given.global_batch)
    else:
        raise ValueError("--step of a lock file needs --global-batch; or give the run folder")
    if step is not None and sequence is not None:
        if sequence >= len(numbers):
            raise ValueError(f"--sequence {sequence}: a step has {len(numbers)} sequences, counted from 0")
        numbers = numbers[sequence : sequence + 1]
    return [(reading.lock, reading.offsets, numbers) if reading else (given.data, {}, numbers)]


def _refused_batches(given: Question, attempts: list[skips.Reading]) -> list[Place]:
    places = []
    for event in read_lines(given.data / "events.jsonl"):
        if event.get("kind") == "bad_step" and event["step"] == given.bad_step:
            reading = next((each for each in attempts if each.attempt == event["attempt"]), attempts[-1])
            batch = read_lines(given.data / "bad-steps" / Path(event["batch"]).name)
            places.append((reading.lock, reading.offsets, np.array([row["sequence"] for row in batch])))
    if not places:
        raise ValueError(f"{given.data}: events.jsonl has no refused batch at step {given.bad_step}")
    return places


def sequences(lock: Path, offsets: dict[str, int], numbers: np.ndarray) -> Iterator[Json]:
    """Sequences of a lock with their documents."""
    mixture, pieces = Mixture.open(lock, offsets), tokenizer.load(shards.tokenizer_path(lock.parent))
    for number in numbers.tolist():
        (place,), (tokens,) = mixture.locate(np.array([number])), mixture.sequences(number, 1)[0]
        starts = tokens == mixture.bos_id
        if mixture.packed:
            starts = mixture.flags(number, 1)[0] & BEGINS
        begins = [0, *(1 + np.flatnonzero(starts[1:])).tolist()]
        parts = _documents(lock.parent / place["source"], place, begins, mixture)
        for part, after in zip_longest(parts, parts[1:]):
            ids = tokens[part["begins"] : after and after["begins"]]
            part |= {"tokens": len(ids), "text": pieces.decode(ids)}
        yield {**place, "documents": parts, "tokens": tokens.tolist()}


def _documents(folder: Path, place: Json, begins: list[int], mixture: Mixture) -> list[Json]:
    """What is known of the documents of a window, by where they begin; nothing of parts and padding."""
    number = [entry["name"] for entry in _manifest(folder)["shards"]].index(place["shard"])
    documents = []
    for begin in begins:
        facts = read_index(folder, number).facts_at(place["token_offset"] + begin)
        if facts is None and not mixture.packed:
            if begin == mixture.seq_len:  # the next window's first token, which is in the next shard
                continue
            if begin:
                raise ValueError(f"{folder / place['shard']} does not fit its document index; run verify")
            facts = _continued(folder, number, place["token_offset"])
        documents.append({"begins": begin, **(facts or {})})
    return documents


def _continued(folder: Path, number: int, offset: int) -> Json:
    """The document that holds a token and began before it; {} if its shard is not here any more."""
    manifest = _manifest(folder)
    stride = manifest["windows_per_shard"] * manifest["seq_len"]
    firsts = [shards.shard_number(entry["name"]) * stride for entry in manifest["shards"]]
    for earlier in range(number, -1, -1):
        index, token = read_index(folder, earlier), firsts[number] + offset - firsts[earlier]
        if last := int(np.searchsorted(index.begins, token)):
            before = token - int(index.begins[last - 1])
            return {"before": before, **index.facts(last - 1)} if before < index.lengths[last - 1] else {}
    return {}


@functools.lru_cache(maxsize=64)
def _manifest(folder: Path) -> Json:
    return shards.read_manifest(folder)


@dataclass(frozen=True)
class Index:
    """The documents that begin in a shard, in the order of `begins`, int64: their first tokens in it."""

    begins: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    origins: Sequence[Any]

    def facts(self, i: int) -> Json:
        origin = json.loads(self.origins[i].as_py() or "{}")
        return {"id": f"{self.ids[i]:016x}", "document_tokens": int(self.lengths[i]), "origin": origin}

    def facts_at(self, token: int) -> Json | None:
        """Of the document whose first token this is, None if it is none's."""
        i = int(np.searchsorted(self.begins, token))
        return self.facts(i) if i < len(self.begins) and self.begins[i] == token else None


@functools.lru_cache(maxsize=16)
def read_index(folder: Path, number: int) -> Index:
    entry, bos_id = _manifest(folder)["shards"][number], _manifest(folder)["bos_id"]
    if "docs" not in entry:  # conversations
        nothing = np.empty(0, np.int64)
        return Index(nothing, nothing, nothing, ())
    ids, lengths, origins = shards.read_documents(folder / entry["docs"]["name"])
    tokens = np.memmap(folder / entry["name"], dtype=shards.token_dtype(entry), mode="r")
    chunks = range(0, len(tokens), CHUNK_TOKENS)
    begins = [i + np.flatnonzero(tokens[i : i + CHUNK_TOKENS] == bos_id) for i in chunks]
    return Index(np.concatenate(begins)[: len(ids)], ids, lengths, origins)


def find(lock: Path, condition: Condition, console: Console) -> Iterator[Json]:
    """The documents that meet a condition, of all sources of a lock."""
    if (content := read_lock(lock))["packing"] == CONVERSATIONS:
        raise ValueError(f"{lock} holds packed conversations, which have no document index")
    folders = [lock.parent / source["name"] for source in content["sources"]]
    places = [(folder, at) for folder in folders for at in range(len(_manifest(folder)["shards"]))]
    for folder, at in track(places, "searching", console=console, transient=True):
        entry = _manifest(folder)["shards"][at]
        ids, _, origins = shards.read_documents(folder / entry["docs"]["name"])
        for i in np.flatnonzero(condition(ids, origins)).tolist():
            index = read_index(folder, at)
            place = {"source": folder.name, "shard": entry["name"], "token_offset": int(index.begins[i])}
            yield {**place, **index.facts(i)}


def print_text(found: Json, console: Console) -> None:
    """A sequence, or a document that was searched for."""

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    place = f"{found['source']}/{found['shard']}, token {found['token_offset']:,}"
    if "documents" not in found:
        return line(f"{place}: {_title(found)}")
    line(f"sequence {found['sequence']:,}: {place}, epoch {found['epoch']}", "bold reverse")
    for document in found["documents"]:
        line(_title(document), "bold cyan")
        line(document["text"])


def _title(part: Json) -> str:
    first, tokens = part.get("before", 0), part.get("tokens")
    if "id" not in part:
        return f"{tokens:,} tokens"
    span = f"tokens {first:,} to {first + tokens:,} of " if tokens else ""
    origin = "".join(f", {name} {value}" for name, value in part["origin"].items())
    return f"document {part['id']}, {span}{part['document_tokens']:,} tokens{origin}"
