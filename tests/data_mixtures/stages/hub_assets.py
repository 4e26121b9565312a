"""Parquet files like the hub's, in a mirror's layout, and recipes that name them."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

REPO = "nobody/Small-Data"
HEADER = """
seed = 11
seq_len = 32
windows_per_shard = 40
valid_per_10000 = 1000
max_document_chars = 5000
epoch_cap = 3
tokenizer = { vocab_size = 400, train_bytes = 60_000, character_coverage = 0.999 }
"""
SOURCE = """
[sources.{name}]
category = "math"
repo = "{repo}"
revision = "{revision}"
configs = {configs}
licence = "made here"
gate = "none"
expected_tokens_b = 0.001
{more}
"""


def recipe(folder: Path, *sources: dict[str, str], more: str = "") -> Path:
    base = {"repo": REPO, "revision": "abcdef0", "configs": '["4plus"]', "more": ""}
    tables = [SOURCE.format(**{**base, **source}) for source in sources]
    weights = "\n".join(["[phase1]", *(f"{source['name']} = 1" for source in sources)])
    path = folder / "hub.toml"
    path.write_text("\n".join([HEADER, *tables, more, weights]), encoding="utf-8")
    return path


def write_parquet(path: Path, first: int, count: int = 40, column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = range(first, first + count)
    texts = [
        f"Row {i}: " + " ".join(_word(1000 * i + j) for j in range(i % 7 + 30)) for i in numbers
    ]
    metadata = [{"category": "made", "models_used": ["none"]} for _ in numbers]
    pq.write_table(
        pa.table({"id": [str(i) for i in numbers], column: texts, "metadata": metadata}), path
    )


def _word(number: int) -> str:
    draw = random.Random(number)
    return "".join(
        draw.choice("bdfgklmnprstvz") + draw.choice("aeiou") for _ in range(draw.randint(1, 4))
    )


def write_mirror(root: Path) -> None:
    """Write two folders, one name a prefix of the other's, and one with an unknown layout."""
    for number in range(3):
        write_parquet(root / REPO / f"4plus/part_{number:06d}.parquet", 100 * number)
    write_parquet(root / REPO / "4plus_MIND/part_000000.parquet", 5000)
    write_parquet(root / REPO / "contents/part_000000.parquet", 6000, column="content")
    write_parquet(root / REPO / "unknown/part_000000.parquet", 7000, column="body")
    (root / REPO / "README.md").write_text("not data")
