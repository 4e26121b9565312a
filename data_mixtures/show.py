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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, starmap
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
from records.attempts import Reading, attempt_of, read_attempts
from records.files import read_lines

T = TypeVar("T")
Batch = tuple[Path, dict[str, int], np.ndarray]  # lock, offsets of its sources, sequence numbers
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


def run(question: Question, console: Console) -> None:
    """Show what the question asks for; ValueError for everything that a user can fix."""
    if not question.data.exists():
        raise ValueError(
            f"{question.data} does not exist; give a lock file (phase1.lock.json) or a run folder"
        )
    attempts = read_attempts(question.data) if question.data.is_dir() else []
    if question.document or question.origin:
        lock = attempts[-1].lock if attempts else question.data
        results = find_documents(lock, question.document, question.origin, Console(stderr=True))
    else:
        results = chain.from_iterable(starmap(read_sequences, _batches(question, attempts)))
    count = 0
    for count, result in enumerate(results, 1):  # noqa: B007
        print(json.dumps(result, ensure_ascii=False)) if question.json else print_text(
            result, console
        )
    if not count:
        raise ValueError(
            "no such document in the training data; held-out documents are in no document index"
        )


def _batches(question: Question, attempts: list[Reading]) -> list[Batch]:
    step = question.step
    sequence = question.sequence
    if question.bad_step is not None:
        return _find_refused_batches(question, attempts)
    if (
        (step is None and sequence is None)
        or (step is not None and step < 1)
        or (sequence or 0) < 0
    ):
        raise ValueError(
            "give --step N (from 1), --sequence I (from 0), --bad-step N, --document ID or --origin TEXT"
        )
    reading = attempts[-1] if attempts else None
    if step is None:
        numbers = np.array([sequence])
    elif attempts:
        reading = attempt_of(attempts, step)
        numbers = reading.numbers(step)
    elif question.global_batch:
        numbers = np.arange((step - 1) * question.global_batch, step * question.global_batch)
    else:
        raise ValueError("--step of a lock file needs --global-batch; or give the run folder")
    if step is not None and sequence is not None:
        if sequence >= len(numbers):
            raise ValueError(
                f"--sequence {sequence}: a step has {len(numbers)} sequences, counted from 0"
            )
        numbers = numbers[sequence : sequence + 1]
    return [(reading.lock, reading.offsets, numbers) if reading else (question.data, {}, numbers)]


def _find_refused_batches(question: Question, attempts: list[Reading]) -> list[Batch]:
    batches = []
    for event in read_lines(question.data / "events.jsonl"):
        if event.get("kind") == "bad_step" and event["step"] == question.bad_step:
            reading = next(
                (attempt for attempt in attempts if attempt.attempt == event["attempt"]),
                attempts[-1],
            )
            rows = read_lines(question.data / "bad-steps" / Path(event["batch"]).name)
            batches.append(
                (reading.lock, reading.offsets, np.array([row["sequence"] for row in rows]))
            )
    if not batches:
        raise ValueError(
            f"{question.data}: events.jsonl has no refused batch at step {question.bad_step}"
        )
    return batches


def read_sequences(lock: Path, offsets: dict[str, int], numbers: np.ndarray) -> Iterator[Json]:
    mixture = Mixture.open(lock, offsets)
    pieces = tokenizer.load(shards.tokenizer_path(lock.parent))
    for number in numbers.tolist():
        (place,) = mixture.locate(np.array([number]))
        (tokens,) = mixture.sequences(number, 1)[0]
        starts = (
            mixture.flags(number, 1)[0] & BEGINS if mixture.packed else tokens == mixture.bos_id
        )
        # one that begins with the last token, which is only predicted, is the next sequence's
        begins = [0, *(1 + np.flatnonzero(starts[1:-1])).tolist()]
        parts = []
        for begin, end in pairwise([*begins, len(tokens)]):
            document = _document_at(lock.parent, place, begin, mixture.packed)
            text = {"tokens": end - begin, "text": pieces.decode(tokens[begin:end])}
            parts.append({"begins": begin, **document, **text})
        yield {**place, "documents": parts, "tokens": tokens.tolist()}


def _document_at(data: Path, place: Json, begin: int, packed: bool) -> Json:
    """Return the document that holds a token of a sequence; {} if none is found."""
    folder = data / place["source"]
    token = place["token_offset"] + begin
    manifest = _manifest(folder)
    stride = manifest["windows_per_shard"] * manifest["seq_len"]
    names = [entry["name"] for entry in manifest["shards"]]
    number = shards.shard_number(place["shard"])
    # it may begin in an earlier shard. {} for padding, the rest of a long document in packed
    # windows, or an earlier shard that is gone
    for position in range(names.index(place["shard"]), -1, -1):
        index = read_index(folder, position)
        # the same token, counted from the beginning of this shard
        at = token + (number - shards.shard_number(names[position])) * stride
        if last := int(np.searchsorted(index.begins, at, side="right")):
            before = at - int(index.begins[last - 1])
            if before >= index.lengths[last - 1] or (packed and before):
                return {}
            return {**({"before": before} if before else {}), **index.facts(last - 1)}
        if packed:
            break
    return {}


@functools.lru_cache(maxsize=64)
def _manifest(folder: Path) -> Json:
    return shards.read_manifest(folder)


@dataclass(frozen=True)
class Index:
    """The documents that begin in a shard; `begins` (int64) are their first tokens in it."""

    begins: np.ndarray
    ids: np.ndarray
    lengths: np.ndarray
    origins: Sequence[Any]

    def facts(self, i: int) -> Json:
        origin = json.loads(self.origins[i].as_py() or "{}")
        return {
            "id": f"{self.ids[i]:016x}",
            "document_tokens": int(self.lengths[i]),
            "origin": origin,
        }


@functools.lru_cache(maxsize=16)
def read_index(folder: Path, number: int) -> Index:
    entry = _manifest(folder)["shards"][number]
    bos_id = _manifest(folder)["bos_id"]
    if "docs" not in entry:  # conversations
        nothing = np.empty(0, np.int64)
        return Index(nothing, nothing, nothing, ())
    ids, lengths, origins = shards.read_documents(folder / entry["docs"]["name"])
    tokens = np.memmap(folder / entry["name"], dtype=shards.token_dtype(entry), mode="r")
    chunks = range(0, len(tokens), CHUNK_TOKENS)
    begins = [i + np.flatnonzero(tokens[i : i + CHUNK_TOKENS] == bos_id) for i in chunks]
    return Index(np.concatenate(begins)[: len(ids)], ids, lengths, origins)


def find_documents(
    lock: Path, document: str | None, origin: str | None, console: Console
) -> Iterator[Json]:
    """Yield all documents of a lock with this id, or with this text in their origin."""
    if not origin and not re.fullmatch(r"[0-9a-f]{16}", document or ""):
        raise ValueError(
            f"--document {document!r} must be 16 hexadecimal digits, as show prints them"
        )
    if (content := read_lock(lock))["packing"] == CONVERSATIONS:
        raise ValueError(f"{lock} holds packed conversations, which have no document index")
    folders = [lock.parent / source["name"] for source in content["sources"]]
    places = [
        (folder, at, entry)
        for folder in folders
        for at, entry in enumerate(_manifest(folder)["shards"])
    ]
    for folder, at, entry in track(places, "searching", console=console, transient=True):
        ids, _, origins = shards.read_documents(folder / entry["docs"]["name"])
        if origin:
            matches = pyarrow.compute.match_substring(origins, origin).to_numpy(False)
        else:
            matches = ids == np.uint64(int(document or "", 16))
        for i in np.flatnonzero(matches).tolist():
            index = read_index(folder, at)
            place = {
                "source": folder.name,
                "shard": entry["name"],
                "token_offset": int(index.begins[i]),
            }
            yield {**place, **index.facts(i)}


def print_text(result: Json, console: Console) -> None:

    def line(text: str, style: str = "") -> None:
        console.print(text, style=style, markup=False, soft_wrap=True)

    place = f"{result['source']}/{result['shard']}, token {result['token_offset']:,}"
    if "documents" not in result:
        return line(f"{place}: {_title(result)}")
    line(f"sequence {result['sequence']:,}: {place}, epoch {result['epoch']}", "bold reverse")
    for document in result["documents"]:
        line(_title(document), "bold cyan")
        line(document["text"])


def _title(part: Json) -> str:
    first = part.get("before", 0)
    tokens = part.get("tokens")
    if "id" not in part:
        return f"{tokens:,} tokens"
    span = f"tokens {first:,} to {first + tokens:,} of " if tokens else ""
    origin = "".join(f", {name} {value}" for name, value in part["origin"].items())
    return f"document {part['id']}, {span}{part['document_tokens']:,} tokens{origin}"
