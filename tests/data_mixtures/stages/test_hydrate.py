"""Hydration: metadata rows become text, what is missing is counted by reason, and too much of it stops the run."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_mixtures import recipe
from data_mixtures.stages import hydrate, plan, stage
from data_mixtures.stages.fetch import Fetch
from data_mixtures.stages.hydrate import Hydrate, Missing, Row
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.stages import hub_assets

UNIT = Unit("files", 0)


def contents(rows: list[Row]) -> Iterator[bytes | Missing]:
    """The resolver that a recipe below names: knows every path but those with "lost" in it."""
    for row in rows:
        yield Missing("lost") if "lost" in row.rel_path else f"content of {row.repo} {row.rel_path}".encode()


def too_few(rows: list[Row]) -> list[bytes]:
    return [b"one"]


def prepared(folder: Path, rows: list[tuple[str | None, ...]], hydration: str) -> Hydrate:
    """Plan and fetch one file of metadata rows (repo, commit, path, blob id)."""
    columns = dict(zip(("repo", "commit_id", "rel_path", "blob_id"), zip(*rows, strict=True), strict=True))
    path = folder / "mirror/nobody/Small-Data/metadata/part_0.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()}), path)
    source = {"name": "files", "configs": '["metadata"]', "more": "needs_hydration = true"}
    read = recipe.load(hub_assets.recipe(folder, source, more=hydration))
    out = folder / "out"
    plan.make(read, out, ["files"], str(folder / "mirror"))
    stage.do(Fetch(read, out, ("files",), str(folder / "mirror")), UNIT)
    return Hydrate(read, out, ("files",))


def hydrated(work: Hydrate) -> list[str]:
    return pq.read_table(stage.unit_folder(work.out, "hydrate", UNIT) / "raw.parquet")["text"].to_pylist()


def test_text_from_a_folder_and_what_is_missing_by_reason(tmp_path):
    root = tmp_path / "repositories/owner/name/c0ffee"
    (root / "src").mkdir(parents=True)
    (root / "src/main.py").write_text("print('grüße')\n", encoding="utf-8")
    (root / "latin.c").write_bytes(b"// gr\xfc\xdfe")
    (tmp_path / "secret").write_text("not for training")
    right = hydrate.git_blob_sha1((root / "src/main.py").read_bytes())
    rows = [
        ("owner/name", "c0ffee", "src/main.py", right),
        ("owner/name", "c0ffee", "src/main.py", "0" * 40),
        ("owner/name", "c0ffee", "src/main.py", None),
        ("owner/name", "c0ffee", "src/none.py", None),
        ("owner/name", "c0ffee", "src/main.py/deeper", None),
        ("owner/name", "c0ffee", "src", None),
        ("owner/name", "c0ffee", "latin.c", None),
        ("owner/name", "c0ffee", "../../../../secret", None),
        ("owner/name", "c0ffee", "/etc/hostname", None),
    ]
    work = prepared(tmp_path, rows, '[hydrate]\nresolver = "local:repositories"\nmax_missing_share = 0.8')
    stage.do(work, UNIT)
    assert hydrated(work) == ["print('grüße')\n"] * 2
    counts = stage.read_receipt(work.out, "hydrate", UNIT)["counts"]
    missing = {"wrong_sha1": 1, "not_there": 2, "not_readable": 1, "not_utf8": 1, "unsafe_path": 2}
    assert counts == {"rows": 9, "documents": 2, "bytes": 34, "dropped": missing}
    assert stage.raw_text(work.out, UNIT) == ("hydrate", "text")


def test_the_name_of_a_blob_is_that_of_git(tmp_path):
    done = subprocess.run(["git", "hash-object", "--stdin"], input=b"text\n", capture_output=True, check=True)
    assert hydrate.git_blob_sha1(b"text\n") == done.stdout.decode().strip()


def test_a_resolver_of_ones_own_and_its_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(hydrate, "ROWS", 4)
    rows = [("a/b", "c", "lost" if number == 7 else f"{number}.py", None) for number in range(10)]
    work = prepared(tmp_path, rows, f'[hydrate]\nresolver = "{__name__}:contents"\nmax_missing_share = 0.1')
    stage.do(work, UNIT)
    assert hydrated(work) == [f"content of a/b {number}.py" for number in range(10) if number != 7]
    strict = Hydrate(changed(work.recipe, max_missing_share=0.09), work.out, work.sources)
    assert not stage.is_done(strict, UNIT)
    with pytest.raises(
        ValueError, match=r"1 of 10 files \(10.00%\) have no content from .*:contents \(lost 1\); .* 0.09"
    ):
        stage.do(strict, UNIT)
    wrong = Hydrate(changed(work.recipe, resolver=f"{__name__}:too_few"), work.out, work.sources)
    with pytest.raises(ValueError, match="too_few' answered 1 times to 4 rows"):
        stage.do(wrong, UNIT)


def changed(read: recipe.Recipe, **changes: object) -> recipe.Recipe:
    return replace(read, hydrate=replace(read.hydrate, **changes))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("local:/nowhere/at/all", "there is no such folder"),
        ("no_such_module:x", "cannot be imported: No module named"),
        ("json:no_such_function", "cannot be imported: module 'json' has no attribute"),
    ],
)
def test_a_resolver_that_is_not_there_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        hydrate.resolver(name)


def test_metadata_without_a_resolver_is_refused_and_other_sources_need_none(tmp_path):
    work = prepared(tmp_path, [("a", "b", "c", None)], "")
    with pytest.raises(ValueError, match=r"files list files without their text: add \[hydrate\].*as nemotron-no"):
        work.units()
    assert Hydrate(work.recipe, work.out, ()).units() == []
