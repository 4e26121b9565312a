"""Raw units from lists of texts: a plan and Parquet files with receipts, as `fetch` leaves them."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data_mixtures import recipe
from data_mixtures.stages import decontaminate, filter, stage
from records.files import write_json

Texts = dict[str, list[Any]]
NONE = recipe.TokenizerFile("none")


def make_unit_folder(out: Path, name: str, unit: stage.Unit) -> Path:
    folder = stage.unit_folder(out, name, unit)
    # receipts are read again when a folder of units changes
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def write_receipt(folder: Path, counts: dict[str, Any]) -> None:
    """Write a unit's receipt as `stage.do` does."""
    files = {
        path.name: stage._entry(path) for path in folder.iterdir() if path.name != stage.RECEIPT
    }
    write_json(folder / stage.RECEIPT, {"key": "", "files": files, "counts": counts})


def text_column(texts: list[Any], kind: pa.DataType) -> pa.Array:
    """Make a column of the same bytes for any type, unchecked, as a broken writer leaves them."""
    array = pa.array(
        [text.encode() if isinstance(text, str) else text for text in texts], pa.binary()
    )
    if kind == pa.binary():
        return array
    # pa.array would refuse bytes that are not UTF-8
    return pa.Array.from_buffers(pa.string(), len(array), array.buffers()).cast(kind)


def write_raw(out: Path, texts: Texts, kind: pa.DataType | None = None, **entry: str) -> None:
    """Write DIR/plan.json and DIR/fetch from the texts, or columns, of each source's units.

    kind: the type of the texts; entry: more fields of each unit's plan.
    """
    sources = {}
    for source, units in texts.items():
        entries = [
            {"source": source, "number": n, "kind": "local", **entry} for n in range(len(units))
        ]
        sources[source] = {"units": entries, "plan_hash": "none"}
        for number, rows in enumerate(units):
            folder = make_unit_folder(out, "fetch", stage.Unit(source, number))
            columns = (
                rows if isinstance(rows, dict) else {"text": text_column(rows, kind or pa.string())}
            )
            pq.write_table(pa.table(columns), folder / stage.RAW, row_group_size=100)
            write_receipt(folder, {})
    write_json(out / stage.PLAN, {"format": stage.PLAN_FORMAT, "sources": sources})


def do_all(work: Any) -> int:
    todo = [unit for unit in work.units() if not stage.is_done(work, unit)]
    for unit in todo:
        stage.do(work, unit)
    return len(todo)


def make_recipe(
    sources: Iterable[str],
    tokenizer: recipe.TokenizerTraining | recipe.TokenizerFile = NONE,
    **limits: Any,
) -> recipe.Recipe:
    local = tuple(recipe.LocalSource(name, "web", ()) for name in sources)
    return recipe.Recipe(
        seed=11,
        seq_len=32,
        windows_per_shard=40,
        valid_per_10000=1000,
        max_document_chars=5000,
        epoch_cap=3,
        tokenizer=tokenizer,
        sources=local,
        phases={},
        filter=recipe.Filter(**limits),
    )


def run_filter(out: Path, texts: Texts, plan: recipe.Recipe) -> filter.Filter:
    write_raw(out, texts)
    decontaminate.make_index(plan.filter.benchmarks, out)
    work = filter.Filter(plan, out, tuple(texts))
    do_all(work)
    return work
