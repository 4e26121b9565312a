"""Text for a Parquet file of sha1 hashes, from a bucket of contents such as Software Heritage's.

The file has a column `sha1` (40 hex digits, or 20 bytes) and may have `columns.ORIGIN_FIELDS`. The
bucket is any fsspec URL; objects may be gzip-compressed.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from data_mixtures.readers.columns import encode_origin, origin_columns
from data_mixtures.readers.local import group_by_size
from data_mixtures.readers.unpack import open_input
from data_mixtures.recipe import Input

# of one unit, at least; its receipt says that they have come or are counted as missing
UNIT_ROWS = 500_000
# asked for at a time and then saved: as much a kill may lose, and is in memory
PART_CONTENTS = 10_000
CONNECTIONS = 64  # of one process
TIMEOUT_S = 60.0
ATTEMPTS = 6
FIRST_WAIT_S = 1.0  # doubled with every attempt, with random jitter
PART = pa.schema([("sha1", pa.binary(20)), ("content", pa.binary())])
RAW = pa.schema([("text", pa.binary()), ("origin", pa.string())])  # bytes: `filter` tells UTF-8
_BATCH = 512


def fetch(
    path: str, name: str, groups: Sequence[int], settings: Input, target: Path, parts: Path
) -> dict[str, Any]:
    """Write the contents of some row groups of a Parquet file; return the counts of a receipt.

    Args:
        name: the file's name in origins.
        parts: folder of the contents that have come, kept after an error.

    Raises:
        ValueError: more than `max_missing_share` of the contents are missing, or nothing answers.
    """
    origins, left_out = _find_origins(path, name, groups)
    # after a kill, or when too much was missing, only the rest is requested
    saved = {sha1 for part in _parts(parts) for sha1 in part.read(["sha1"])["sha1"].to_pylist()}
    requests = [sha1 for sha1 in origins if sha1 not in saved]
    missing = _save(settings.content_url, requests, parts)
    share = missing.total() / max(len(origins), 1)
    if share > settings.max_missing_share:
        raise ValueError(
            f"{missing.total():,} of {len(origins):,} contents ({share:.2%}) are missing at {settings.content_url} "
            f"({', '.join(f'{k} {v:,}' for k, v in missing.most_common())}), max_missing_share is "
            f"{settings.max_missing_share}; what came is kept: start again to ask for the missing ones alone"
        )
    counts = _write(target, parts, origins)
    assert counts["documents"] + missing.total() == len(origins), (
        "contents must be written or counted as missing"
    )
    return {**counts, "dropped": dict(left_out + missing)}


def take_over(raw: Path, parts: Path) -> None:
    """Make parts from an older plan's raw file."""
    if not raw.is_file() or parts.is_dir():
        return
    # contents do not depend on which file named them
    with pq.ParquetFile(raw) as old:
        for batch in old.iter_batches(PART_CONTENTS, columns=["text"]):
            _save_part(
                parts, [(_sha1(content), content) for content in batch.column(0).to_pylist()]
            )


@contextmanager
def _open_resolved(path: str) -> Iterator[pq.ParquetFile]:
    with open_input(path) as file, pq.ParquetFile(file) as parquet:
        if (names := parquet.schema_arrow.names).count("sha1") != 1:
            raise ValueError(
                f"{path} needs one column sha1 (hex or bytes); its columns: {', '.join(names)}"
            )
        yield parquet


def units(path: str) -> list[list[int]]:
    """Return the row groups of each unit of a resolved file; ValueError without sha1."""
    with _open_resolved(path) as parquet:
        sizes = [
            parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)
        ]
    return list(group_by_size(range(len(sizes)), lambda number: sizes[number], UNIT_ROWS))


def _find_origins(
    path: str, name: str, groups: Sequence[int]
) -> tuple[dict[bytes, str], Counter[str]]:
    """Return the origins by distinct sha1 in row order, and counts of other rows."""
    origins: dict[bytes, str] = {}
    left_out = Counter(same_content=0, no_sha1=0)
    with _open_resolved(path) as parquet:
        columns = ["sha1", *origin_columns(parquet.schema_arrow)]
        first = sum(parquet.metadata.row_group(number).num_rows for number in range(groups[0]))
        batches = parquet.iter_batches(row_groups=groups, columns=columns)
        for row, fields in enumerate(
            (row for batch in batches for row in batch.to_pylist()), start=first
        ):
            sha1 = fields.pop("sha1")
            sha1 = bytes.fromhex(sha1) if isinstance(sha1, str) else sha1
            if not sha1 or sha1 in origins:
                left_out["same_content" if sha1 else "no_sha1"] += 1
            elif len(sha1) != 20:
                raise ValueError(f"{path}, row {row}: sha1 has {len(sha1)} bytes, not 20")
            else:
                origins[sha1] = encode_origin(name, row, fields)
    return origins, left_out


def _parts(folder: Path) -> Iterator[pq.ParquetFile]:
    for path in sorted(folder.glob("part-*.parquet")):
        with pq.ParquetFile(path) as part:
            yield part


def _save(url: str, requests: list[bytes], folder: Path) -> Counter[str]:
    """Save every content that comes and count the others; ValueError if nothing answers."""
    bucket = _Bucket(url)
    missing = Counter[str]()
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        for start in range(0, len(requests), PART_CONTENTS):
            names = requests[start : start + PART_CONTENTS]
            answers = list(pool.map(bucket.content, names))
            pairs = zip(names, answers, strict=True)
            _save_part(
                folder, [(sha1, answer) for sha1, answer in pairs if isinstance(answer, bytes)]
            )
            missing.update(answer for answer in answers if isinstance(answer, str))
            # only in logs, such as Slurm's; a terminal has the bar of all units
            if not sys.stderr.isatty():
                progress = f"{start + len(names):,} of {len(requests):,} contents, {missing.total():,} missing"
                place = f"{folder.parent.name}/{folder.stem.lstrip('.')}"
                print(f"fetch {place}: {progress}", file=sys.stderr, flush=True)
            if bucket.is_silent():
                raise ValueError(
                    f"{url} does not answer ({dict(missing)}; {bucket.unanswered} contents in a row, {ATTEMPTS} "
                    "attempts each); what came is kept: start again when it does"
                )
    return missing


def _save_part(folder: Path, contents: list[tuple[bytes, bytes]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # named by a number, without the plan: no change of plan makes a part wrong
    path = folder / f"part-{len(list(folder.glob('part-*.parquet'))):06d}.parquet"
    partial = path.with_suffix(".partial")
    table = pa.Table.from_pylist(
        [{"sha1": sha1, "content": content} for sha1, content in contents], schema=PART
    )
    pq.write_table(table, partial, compression="zstd", row_group_size=_BATCH)
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, path)


class _Bucket:
    def __init__(self, url: str) -> None:
        # s3fs has time-outs of its own
        options = {"timeout": aiohttp.ClientTimeout(TIMEOUT_S)} if url.startswith("http") else {}
        self.system, self.pattern = fsspec.url_to_fs(url, **options)
        # counts contents in a row: any answer resets it
        self.unanswered = 0

    def is_silent(self) -> bool:
        return self.unanswered > 2 * CONNECTIONS

    def content(self, sha1: bytes) -> bytes | str:
        """Return a content, or the reason why it is missing."""
        url = self.pattern.format(sha1=sha1.hex())
        answer: bytes | str = "not_asked"
        for attempt in range(0 if self.is_silent() else ATTEMPTS):
            # only this thread waits, so a bucket that refuses is asked less often
            if attempt:
                time.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(0.5, 1))
            try:
                answer = _with_sha1(sha1, self.system.cat_file(url))
            except FileNotFoundError:
                answer = "not_found"
            except PermissionError:
                answer = "http_403"
            except (OSError, aiohttp.ClientError) as error:
                # time-outs, damage, and what s3fs raises
                status = getattr(error, "status", None)
                answer = f"http_{status}" if status else type(error).__name__
                # no answer, a server's error, a time-out or a rate limit may pass; other refusals
                # are final
                if not status or status >= 500 or status in (408, 429):
                    continue
            self.unanswered = 0
            return answer
        self.unanswered += 1
        return answer


class WrongSha1(OSError):
    """The object is not the requested content."""


def _with_sha1(sha1: bytes, body: bytes) -> bytes:
    if _sha1(body) == sha1:
        return body
    with suppress(OSError, EOFError, zlib.error):
        if _sha1(unpacked := gzip.decompress(body)) == sha1:
            return unpacked
    raise WrongSha1


def _sha1(content: bytes) -> bytes:
    return hashlib.sha1(content, usedforsecurity=False).digest()


def _write(target: Path, parts: Path, origins: dict[bytes, str]) -> dict[str, int]:
    counts = {"documents": 0, "bytes": 0}
    with pq.ParquetWriter(target, RAW, compression="zstd") as writer:
        for part in _parts(parts):
            for batch in part.iter_batches(_BATCH):
                pairs = list(zip(*map(pa.Array.to_pylist, batch.columns), strict=True))
                if any(_sha1(content) != sha1 for sha1, content in pairs):
                    raise ValueError(
                        f"{parts} was damaged on disk; delete this folder and start again"
                    )
                rows = [(content, origins[sha1]) for sha1, content in pairs if sha1 in origins]
                columns = [[content for content, _ in rows], [origin for _, origin in rows]]
                writer.write_batch(pa.record_batch(columns, schema=RAW))
                counts["documents"] += len(rows)
                counts["bytes"] += sum(len(content) for content, _ in rows)
    return counts
