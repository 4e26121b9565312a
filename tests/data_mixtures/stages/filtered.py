"""Raw units for tests of the stages after fetch: a plan and raw Parquet files with receipts,
from lists of texts.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from data_mixtures import recipe
from data_mixtures.stages import decontaminate, filter, stage

Texts = dict[str, list[list[Any]]]


@dataclass(frozen=True)
class Raw:
    """A fetch stage whose units are lists of values."""

    out: Path
    texts: Texts
    kind: pa.DataType = pa.string()  # noqa: RUF009 - types are constants
    name: ClassVar[str] = "fetch"

    def units(self) -> list[stage.Unit]:
        return [stage.Unit(source, i) for source, units in self.texts.items() for i in range(len(units))]

    def key(self, unit: stage.Unit) -> str:
        return stage.key_of("fetch", repr(self.texts[unit.source][unit.number]))

    def work(self, unit: stage.Unit, folder: Path) -> dict[str, Any]:
        texts = self.texts[unit.source][unit.number]
        array = pa.array([text.encode() if isinstance(text, str) else text for text in texts], pa.binary())
        if (
            self.kind != pa.binary()
        ):  # the same bytes under another type, unchecked, as a broken writer leaves them
            array = pa.Array.from_buffers(pa.string(), len(array), array.buffers()).cast(self.kind)
        pq.write_table(pa.table({"text": array}), folder / stage.RAW, row_group_size=100)
        return {"documents": len(texts)}


def write_raw(out: Path, texts: Texts, kind: pa.DataType = pa.string()) -> None:  # noqa: B008
    """DIR/plan.json and DIR/fetch of sources with one list of texts per unit."""
    out.mkdir(exist_ok=True)
    units = {
        source: [{"source": source, "number": i, "kind": "local"} for i in range(len(parts))]
        for source, parts in texts.items()
    }
    described = {source: {"units": entries, "plan_hash": "none"} for source, entries in units.items()}
    (out / stage.PLAN).write_text(json.dumps({"format": stage.PLAN_FORMAT, "sources": described}))
    do_all(Raw(out, texts, kind))


def do_all(done: Any) -> int:
    """All units that are not done, one after the other; returns how many."""
    todo = [unit for unit in done.units() if not stage.is_done(done, unit)]
    for unit in todo:
        stage.do(done, unit)
    return len(todo)


def make_recipe(sources: Iterable[str], tokenizer: Any, **limits: Any) -> recipe.Recipe:
    local = tuple(recipe.LocalSource(name, "web", ()) for name in sources)
    return recipe.Recipe(
        seed=11, seq_len=32, windows_per_shard=40, valid_per_10000=1000, max_document_chars=5000, epoch_cap=3,
        tokenizer=tokenizer, sources=local, phases={}, filter=recipe.Filter(**limits),
    )  # fmt: skip


def filtered(out: Path, texts: Texts, wanted: recipe.Recipe) -> filter.Filter:
    """Raw units and their filter, done."""
    write_raw(out, texts)
    decontaminate.make_index(wanted.filter.benchmarks, out)
    done = filter.Filter(wanted, out, tuple(texts))
    do_all(done)
    return done
