"""Tests of plan and fetch, from a mirror and from local files, and of all errors."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from data_mixtures import recipe as recipes
from data_mixtures import recipe_file
from data_mixtures.readers import hub
from data_mixtures.stages import fetch, plan, run, stage
from data_mixtures.stages.fetch import Fetch
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.stages.hub_assets import REPO, recipe, write_mirror

LONGER = {"name": "longer", "configs": '["4plus_MIND"]'}


@pytest.fixture
def mirror(tmp_path):
    write_mirror(tmp_path / "mirror")
    return tmp_path / "mirror"


def make_plan(path: Path, out: Path, mirror: Path | None = None) -> recipes.Recipe:
    recipe = recipe_file.load(path)
    plan.make(
        recipe, out, [source.name for source in recipe.sources], str(mirror) if mirror else None
    )
    return recipe


def fetch_all(
    path: Path, out: Path, mirror: Path | None = None, budget: int | None = None
) -> Fetch:
    recipe = make_plan(path, out, mirror)
    work = Fetch(
        recipe,
        out,
        tuple(source.name for source in recipe.sources),
        str(mirror) if mirror else None,
    )
    with stage.exclusive(out):
        work.check_room(budget)
        run.run_units(work, run.Options(), Console(quiet=True))
    return work


def list_paths(out: Path, name: str) -> list[str]:
    return [entry["path"] for entry in stage.find_plan(out, name)["units"]]


def test_folders_are_matched_exactly_and_columns_are_read(tmp_path, mirror):
    out = tmp_path / "out"
    content = {
        "name": "content",
        "configs": '["contents"]',
        "more": 'text_columns = ["text", "content"]',
    }
    both = {"name": "both", "configs": '["4plus_MIND", "4plus"]'}
    make_plan(recipe(tmp_path, {"name": "exact"}, LONGER, content, both), out, mirror)
    exact = list_paths(out, "exact")
    longer = list_paths(out, "longer")
    assert exact == [f"4plus/part_{number:06d}.parquet" for number in range(3)]
    assert longer == ["4plus_MIND/part_000000.parquet"]
    assert list_paths(out, "both") == longer + exact
    assert stage.find_unit_plan(out, Unit("content", 0))["text_column"] == "content"
    some = {"name": "some", "more": "files = 2"}
    make_plan(recipe(tmp_path, some), tmp_path / "some", mirror)
    assert set(list_paths(tmp_path / "some", "some")) < set(exact)
    entry = stage.find_unit_plan(out, Unit("exact", 1))
    assert entry["bytes"] == (mirror / REPO / entry["path"]).stat().st_size
    assert stage.list_units(out, "exact") == [Unit("exact", number) for number in range(3)]


def test_all_that_is_refused_is_named_at_once(tmp_path, mirror):
    wrong = [{"name": "body", "configs": '["unknown"]'}, {"name": "typo", "configs": '["4plu"]'}]
    with pytest.raises(ValueError, match="2 sources are not as the recipe says") as caught:
        make_plan(recipe(tmp_path, {"name": "good"}, *wrong), tmp_path / "out", mirror)
    columns = "columns: id (string), body (string), metadata"
    for part in (
        f"exactly one column of text or bytes named text; its {columns}",
        "no Parquet file in 4plu/; did you mean '4plus'?",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "out/plan.json").exists()


def test_a_plan_is_kept_and_extended(tmp_path, mirror):
    out = tmp_path / "out"
    make_plan(recipe(tmp_path, {"name": "exact"}), out, mirror)
    before = stage.find_plan(out, "exact")
    (mirror / REPO / "4plus/part_000001.parquet").unlink()
    make_plan(recipe(tmp_path, {"name": "exact"}, LONGER), out, mirror)
    # files of a pinned revision do not change, so the plan is kept
    assert stage.find_plan(out, "exact") == before
    assert len(stage.find_plan(out, "longer")["units"]) == 1
    make_plan(recipe(tmp_path, {"name": "exact", "revision": "0123456"}), out, mirror)
    assert len(stage.find_plan(out, "exact")["units"]) == 2
    assert stage.find_plan(out, "exact")["plan_hash"] != before["plan_hash"]
    with pytest.raises(ValueError, match="lacks source 'other'; plan it: python"):
        stage.find_plan(out, "other")


def test_a_local_mirror_is_linked_and_any_other_is_copied(tmp_path, mirror, monkeypatch):
    # a symbolic link, as in the Hugging Face hub's cache, is linked to its target
    path = recipe(tmp_path, {"name": "exact"})
    blob = mirror / "blob"
    linked_file = mirror / REPO / "4plus/part_000001.parquet"
    linked_file.rename(blob)
    linked_file.symlink_to(os.path.relpath(blob, linked_file.parent))
    fetch_all(path, tmp_path / "linked", mirror)

    def other_disk(*args):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    fetch_all(path, tmp_path / "copied", mirror)
    for number in range(3):
        source = mirror / REPO / f"4plus/part_{number:06d}.parquet"
        name = f"fetch/exact/unit-{number:05d}/raw.parquet"
        linked = tmp_path / "linked" / name
        copied = tmp_path / "copied" / name
        assert os.path.samefile(source, linked)
        assert not linked.is_symlink()
        assert not os.path.samefile(source, copied)
        assert copied.read_bytes() == source.read_bytes()
        receipt = stage.read_receipt(tmp_path / "linked", "fetch", Unit("exact", number))
        assert receipt["counts"] == {"documents": 40, "bytes": source.stat().st_size}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: raw[:-1], r"parquet came with [\d,]+ bytes, the plan says [\d,]+: truncated"),
        (
            lambda raw: raw[:-4] + b"rubb",
            r"parquet is not a complete Parquet file .*truncated, or another",
        ),
        (None, r"parquet @ abcdef0 is planned and no longer there"),
    ],
)
def test_a_damaged_file_is_refused_and_the_next_start_goes_on(tmp_path, mirror, damage, message):
    path = recipe(tmp_path, {"name": "exact"})
    out = tmp_path / "out"
    make_plan(path, out, mirror)
    victim = mirror / REPO / "4plus/part_000001.parquet"
    whole = victim.read_bytes()
    victim.unlink()
    if damage:
        victim.write_bytes(damage(whole))
    with pytest.raises(
        ValueError, match=rf"^fetch exact/unit-00001: .*4plus/part_000001\.{message}"
    ):
        fetch_all(path, out, mirror)
    assert [folder.name for folder in (out / "fetch/exact").iterdir()] == ["unit-00000"]
    victim.write_bytes(whole)
    work = fetch_all(path, out, mirror)
    assert all(stage.is_done(work, unit) for unit in work.units())


def test_what_may_pass_is_tried_again():
    # transfers that go wrong: test_hub
    transient = [
        ConnectionResetError(),
        TimeoutError(),
        OSError(errno.EIO, ""),
        fetch.DiffersFromPlan("truncated"),
    ]
    final = [
        OSError(errno.ENOSPC, ""),
        FileNotFoundError(),
        PermissionError(),
        ValueError("no column"),
    ]
    assert all(map(fetch._is_transient, transient))
    assert not any(map(fetch._is_transient, final))


def test_budget_and_disk_are_checked_before_anything_is_read(tmp_path, mirror, monkeypatch):
    path = recipe(tmp_path, {"name": "exact"}, LONGER)
    out = tmp_path / "out"
    size = sum(file.stat().st_size for file in (mirror / REPO).glob("4plus*/*.parquet"))
    over = rf"0 bytes are fetched and {size:,} are to come, more than --bud"
    with pytest.raises(ValueError, match=over):
        fetch_all(path, out, mirror, budget=size - 1)
    assert not (out / "fetch").exists()
    work = fetch_all(path, out, mirror, budget=size)
    work.check_room(size)
    with pytest.raises(ValueError, match=f"{size:,} bytes are fetched and 0 are to come"):
        work.check_room(1)
    # freed units do not count against the budget
    stage.free(out, "fetch", Unit("longer", 0))
    work.check_room(size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=7))
    (out / "fetch/exact/unit-00000/receipt.json").unlink()
    # links to a local mirror need no room
    work.check_room(None)
    # as if the mirror were on another machine: its files are copied
    monkeypatch.setattr(hub, "is_local", lambda system: False)
    few = r"bytes are to be fetched, but .* has 7 bytes of free disk"
    with pytest.raises(ValueError, match=few):
        work.check_room(None)


def write_local_recipe(folder: Path, *inputs: str) -> Path:
    path = folder / "local.toml"
    header = recipe(folder).read_text().split("[phase1]")[0]
    source = f'category = "web"\nmin_bytes = 1000\ninputs = [{", ".join(inputs)}]'
    path.write_text(f"{header}[sources.notes]\n{source}\n[phase1]\nnotes = 1\n")
    return path


@pytest.fixture
def notes(tmp_path):
    (tmp_path / "notes").mkdir()
    for number in range(30):
        (tmp_path / f"notes/{number}.txt").write_text(
            f"note {number} is about this and that\n" * 30
        )
    (tmp_path / "notes/latin.txt").write_bytes(b"gr\xfc\xdfe " * 50)
    (tmp_path / "notes/blank.txt").write_text(" \n")
    return tmp_path / "notes"


def texts(out: Path) -> list[str]:
    files = sorted((out / "fetch/notes").glob("unit-*/raw.parquet"))
    return [text for file in files for text in pq.read_table(file)["text"].to_pylist()]


def test_a_changed_local_file_is_read_again_and_a_new_time_alone_gives_the_same(tmp_path, notes):
    path = write_local_recipe(tmp_path, f'{{ kind = "text", paths = ["{notes}/*.txt"] }}')
    out = tmp_path / "out"
    unit = Unit("notes", 0)
    work = fetch_all(path, out)
    before = stage.read_receipt(out, "fetch", unit)
    hash_before = stage.find_plan(out, "notes")["plan_hash"]
    # another time without other content: read again, with the same result
    os.utime(notes / "3.txt", ns=(1, 1))
    make_plan(path, out)
    assert not stage.is_done(work, unit)
    fetch_all(path, out)
    assert stage.read_receipt(out, "fetch", unit)["files"] == before["files"]
    assert stage.find_plan(out, "notes")["plan_hash"] == hash_before
    (notes / "3.txt").write_text(
        "something else, and long enough to be kept as a document of its own\n" * 9
    )
    make_plan(path, out)
    assert stage.find_plan(out, "notes")["plan_hash"] != hash_before


def test_too_little_text_is_an_error_that_names_the_source(tmp_path, notes, mirror):
    path = write_local_recipe(tmp_path, f'{{ kind = "text", paths = ["{notes}/b*"] }}')
    work = fetch_all(path, tmp_path / "out")
    with pytest.raises(ValueError, match=r"'notes' has 0 bytes of text, .* min_bytes = 1000"):
        fetch.check_enough(work.recipe, tmp_path / "out", ("notes",))
    (mirror / REPO / "empty").mkdir()
    pq.write_table(
        pa.table({"text": pa.array([], pa.string())}), mirror / REPO / "empty/part_0.parquet"
    )
    work = fetch_all(
        recipe(tmp_path, {"name": "none", "configs": '["empty"]'}), tmp_path / "hub", mirror
    )
    with pytest.raises(
        ValueError, match="source 'none' has 1 files of nobody/Small-Data, and not one row"
    ):
        fetch.check_enough(work.recipe, tmp_path / "hub", ("none",))


CORPUS = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
out = parser.parse_args().out
out.mkdir(parents=True)
(out / "notes.jsonl").write_text('{"text": "a line of the corpus"}\\n')
"""


def test_a_program_of_the_recipe_writes_text_before_it_is_looked_for(tmp_path, monkeypatch):
    (tmp_path / "our_corpus.py").write_text(CORPUS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = write_local_recipe(tmp_path, '{ kind = "jsonl", paths = ["{corpus}/*.jsonl"] }')
    out = tmp_path / "out"
    path.write_text(path.read_text().replace("seed = 11", 'seed = 11\ncorpus = "our_corpus"'))
    fetch_all(path, out)
    assert texts(out) == ["a line of the corpus"]
    failed = r"(?s)corpus = 'our_corpus' ended with exit status 1:.*FileExistsError"
    with pytest.raises(ValueError, match=failed):
        make_plan(path, out)
