"""Read conversations from files and the hub, and encode them in worker processes."""

from __future__ import annotations

import gzip
import json
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
from records.files import json_lines, without_none
from records.workers import end_with_parent

from .turns import Conversation, encode

# rows that a worker process gets at a time
ROWS_AT_A_TIME = 64
# not .json, in which data sets of the hub describe themselves
IN_FOLDERS = ("jsonl", "ndjson", "parquet")


class Refusal(NamedTuple):
    """Why a row cannot be used: a reason of one word, and a sentence."""

    reason: str
    words: str


class NumberedRow(NamedTuple):
    """A row with its number from 1 and size as JSON; value: None for no JSON."""

    number: int
    value: Any
    size_bytes: int


def list_files(folder: Path) -> list[Path]:
    """List the files with rows in a folder and below; ValueError if there are none."""
    files = [path for path in folder.rglob("*") if path.is_file() and kind_of(path) in IN_FOLDERS]
    if not files:
        raise ValueError(f"{folder} holds no {', '.join(f'.{kind}' for kind in IN_FOLDERS)} file")
    return sorted(files)


def kind_of(path: Path) -> str:
    """Return the end of a file's name without .gz: jsonl, parquet, ..."""
    return path.name.lower().removesuffix(".gz").rpartition(".")[2]


def rows(origin: str) -> Iterator[NumberedRow]:
    """Read a .jsonl(.gz) or .parquet file, or a dataset of the hub, ORG/NAME or ORG/NAME:SPLIT.

    Raises:
        ValueError: a file that is missing, damaged or of another kind.
    """
    path = Path(origin)
    suffix = kind_of(path)
    if suffix in ("jsonl", "json", "ndjson", "parquet") and not path.is_file():
        raise ValueError(f"{path} does not exist")
    if suffix in ("jsonl", "json", "ndjson"):
        yield from _json_rows(path)
        return
    # seconds of imports, which JSON lines do not need
    import datasets

    if suffix == "parquet":
        dataset = datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )
    elif origin.count("/") == 1 and not path.exists():
        name, _, split = origin.partition(":")
        try:
            dataset = datasets.load_dataset(name, split=split or "train", streaming=True)
        except (OSError, datasets.exceptions.DatasetsError) as problem:
            raise ValueError(
                f"{origin} is no file, and the hub does not give such a dataset: {problem}"
            ) from problem
    else:
        raise ValueError(
            f"{origin} is no .jsonl, .jsonl.gz or .parquet file and no dataset of the hub (ORG/NAME)"
        )
    # all structs of a column have the same fields there: null stands for one that the row has not
    for number, row in enumerate(map(without_none, dataset), 1):
        yield NumberedRow(number, row, len(json.dumps(row, ensure_ascii=False, default=str)))


def _json_rows(path: Path) -> Iterator[NumberedRow]:
    # not through `datasets`, which ends at the first broken line
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    value = next((row for _, row in json_lines([line], path, {})), None)
                    yield NumberedRow(number, value, len(line))
        except (gzip.BadGzipFile, zlib.error, EOFError) as error:
            raise ValueError(f"{path} is damaged or truncated: {error}") from error


# system_and_tools, longest and cut of `encode`
How = tuple[bool, int, bool]
_worker: tuple[PromptEncoder, How]


def _start_worker(tokenizer_json: str, template: dict[str, str], how: How) -> None:
    global _worker
    # with one worker this is the main process itself
    if parent_process():
        end_with_parent()
    encoder = PromptEncoder(Tokenizer.from_str(tokenizer_json), template)
    _worker = encoder, how


def _encode_row(row: NumberedRow) -> tuple[Conversation | Refusal, int]:
    encoder, how = _worker
    try:
        return encode(row.value, encoder, *how), row.size_bytes
    except ChatError as problem:
        return Refusal(problem.reason, f"row {row.number}: {problem}"), row.size_bytes


def encode_all(
    origin: str,
    tokenizer: Tokenizer,
    template: dict[str, str],
    how: How,
    workers: int,
) -> Iterator[tuple[Conversation | Refusal, int]]:
    """Encode every row of an origin in its order: the conversation, or why it is none, and the row's bytes.

    Args:
        template: of a tokenizer_config.json, "chat_template" and its tokens.
    """
    start = (tokenizer.to_str(), template, how)
    if workers == 1:
        _start_worker(*start)
        yield from map(_encode_row, rows(origin))
        return
    unread = rows(origin)
    # not a Pool, which waits forever for what a killed worker had
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, start) as pool:
        try:
            # in groups: `map` takes all that it is given into memory at once
            while group := list(islice(unread, 16 * ROWS_AT_A_TIME * workers)):
                yield from pool.map(_encode_row, group, chunksize=ROWS_AT_A_TIME)
        except BrokenProcessPool as broken:
            raise ValueError(
                f"{origin}: a worker was killed (out of memory?); give fewer --workers"
            ) from broken
