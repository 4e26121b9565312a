"""Conversations from files and the hub: rows of JSON lines or Parquet, encoded by worker processes."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from laneformer.chat import ChatError
from laneformer.prompts import PromptEncoder
from records.files import Skipped, json_lines, without_none
from records.workers import end_with_parent

from .turns import Conversation, encode

ROWS_AT_A_TIME = 64  # to a worker process


class Refusal(NamedTuple):
    """Why a row cannot be used. reason: one word, to count by; words: with the row's number."""

    reason: str
    words: str


def rows(origin: str) -> Iterator[tuple[int, Any]]:
    """The rows, with their numbers from 1, of a .jsonl or .jsonl.gz file, a .parquet file, or a dataset of the
    hub, ORG/NAME or ORG/NAME:SPLIT.

    None for a line that is not JSON. ValueError for a file that is missing, damaged or of another kind.
    """
    path = Path(origin)
    suffix = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give its files, such as {path}/*.jsonl")
    if suffix in ("jsonl", "json", "ndjson", "parquet") and not path.is_file():
        raise ValueError(f"{path} does not exist")
    if suffix in ("jsonl", "json", "ndjson"):
        yield from _json_rows(path)
        return
    import datasets  # seconds of imports, which JSON lines do not need

    if suffix == "parquet":
        of_arrow = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )
    elif origin.count("/") == 1 and not path.exists():
        name, _, split = origin.partition(":")
        try:
            of_arrow = datasets.load_dataset(name, split=split or "train", streaming=True)
        except (OSError, datasets.exceptions.DatasetsError) as problem:
            raise ValueError(
                f"{origin} is no file, and the hub does not give such a dataset: {problem}"
            ) from problem
    else:
        raise ValueError(
            f"{origin} is no .jsonl, .jsonl.gz or .parquet file and no dataset of the hub (ORG/NAME)"
        )
    # all structs of a column have the same fields there: null stands for one that the row has not
    yield from enumerate(map(without_none, of_arrow), 1)


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    # not through `datasets`, which ends at the first broken line
    broken: Skipped = {}
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
        try:
            yield from json_lines(file, path, broken)
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path} is damaged or truncated: {error}") from error
    yield from ((number, None) for number in broken)


_worker: tuple[PromptEncoder, bool, int, bool]


def _start_worker(
    tokenizer_json: str, template: dict[str, str], system_and_tools: bool, longest: int, cut: bool
) -> None:
    global _worker
    if parent_process():
        end_with_parent()
    encoder = PromptEncoder(Tokenizer.from_str(tokenizer_json), template)
    _worker = encoder, system_and_tools, longest, cut


def _encode_row(numbered: tuple[int, Any]) -> Conversation | Refusal:
    number, row = numbered
    try:
        return encode(row, *_worker)
    except ChatError as problem:
        return Refusal(problem.reason, f"row {number}: {problem}")


def encode_all(
    origin: str,
    tokenizer: Tokenizer,
    template: dict[str, str],
    system_and_tools: bool,
    longest: int,
    cut: bool,
    workers: int,
) -> Iterator[Conversation | Refusal]:
    """Every row of an origin in its order: the conversation, or why it is none.

    template: of a tokenizer_config.json, "chat_template" and its tokens.
    """
    start = (tokenizer.to_str(), template, system_and_tools, longest, cut)
    if workers == 1:
        _start_worker(*start)
        yield from map(_encode_row, rows(origin))
        return
    given = rows(origin)
    # not a Pool, which waits forever for what a killed worker had
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, start) as pool:
        try:
            while group := list(islice(given, 16 * ROWS_AT_A_TIME * workers)):
                yield from pool.map(_encode_row, group, chunksize=ROWS_AT_A_TIME)
        except BrokenProcessPool as broken:
            raise ValueError(
                f"{origin}: a worker was killed (out of memory?); give fewer --workers"
            ) from broken
