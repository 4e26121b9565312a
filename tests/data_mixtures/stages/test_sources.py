"""Plan and fetch, from a mirror and from local files: what will be read, what came, and all
that can be wrong.
"""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from data_mixtures import recipe as recipes
from data_mixtures import recipe_file
from data_mixtures.readers import hub
from data_mixtures.readers.local import find, roots
from data_mixtures.stages import fetch, plan, run, stage
from data_mixtures.stages.fetch import Fetch
from data_mixtures.stages.stage import Unit
from tests.data_mixtures.conftest import write_sums
from tests.data_mixtures.stages.hub_assets import REPO, recipe, write_mirror, write_parquet


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    write_mirror(tmp_path / "mirror")
    return tmp_path / "mirror"


@pytest.fixture
def quiet() -> Console:
    return Console(quiet=True)


def planned(path: Path, out: Path, mirror: Path | None = None) -> recipes.Recipe:
    read = recipe_file.load(path)
    plan.make(read, out, [source.name for source in read.sources], str(mirror) if mirror else None)
    return read


def fetched(path: Path, out: Path, mirror: Path | None, console: Console, budget: int | None = None) -> Fetch:
    read = planned(path, out, mirror)
    work = Fetch(read, out, tuple(source.name for source in read.sources), str(mirror) if mirror else None)
    with stage.exclusive(out):
        work.check_room(budget)
        run.run_units(work, run.Options(), console)
    return work


def test_folders_are_matched_exactly_and_columns_are_read(tmp_path, mirror):
    path = recipe(
        tmp_path,
        {"name": "exact"},
        {"name": "longer", "configs": '["4plus_MIND"]'},
        {"name": "content", "configs": '["contents"]', "more": 'text_columns = ["text", "content"]'},
        {"name": "both", "configs": '["4plus_MIND", "4plus"]'},
    )
    planned(path, tmp_path / "out", mirror)
    paths = {
        name: [entry["path"] for entry in stage.planned(tmp_path / "out", name)["units"]]
        for name in ("exact", "longer", "both")
    }
    assert paths["exact"] == [f"4plus/part_{number:06d}.parquet" for number in range(3)]
    assert paths["longer"] == ["4plus_MIND/part_000000.parquet"]
    assert paths["both"] == paths["longer"] + paths["exact"]
    assert stage.planned_unit(tmp_path / "out", Unit("content", 0))["text_column"] == "content"
    entry = stage.planned_unit(tmp_path / "out", Unit("exact", 1))
    assert entry["bytes"] == (mirror / REPO / entry["path"]).stat().st_size
    assert stage.planned_units(tmp_path / "out", "exact") == [Unit("exact", number) for number in range(3)]


def test_all_that_is_refused_is_named_at_once(tmp_path, mirror):
    path = recipe(
        tmp_path,
        {"name": "good"},
        {"name": "one", "repo": "nobody/Else"},
        {"name": "two", "repo": "nobody/Else"},
        {"name": "three", "repo": "nobody/Third"},
    )
    with pytest.raises(
        ValueError, match=r"(?s)2 repositories refuse.*one, two: nobody/Else @ abc.*three: nobody/Third"
    ):
        planned(path, tmp_path / "out", mirror)
    path = recipe(
        tmp_path,
        {"name": "good"},
        {"name": "body", "configs": '["unknown"]'},
        {"name": "typo", "configs": '["4plu"]'},
    )
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its lines are looked at
        planned(path, tmp_path / "out", mirror)
    text = str(caught.value)
    assert "2 sources are not as the recipe says" in text
    assert (
        "exactly one column of text or bytes named text; its columns: id (string), body (string), metadata"
        in text
    )
    assert "no Parquet file in 4plu/; did you mean '4plus'?" in text
    assert not (tmp_path / "out/plan.json").exists()


def test_a_plan_is_kept_and_extended(tmp_path, mirror):
    out = tmp_path / "out"
    planned(recipe(tmp_path, {"name": "exact"}), out, mirror)
    before = stage.planned(out, "exact")
    (mirror / REPO / "4plus/part_000001.parquet").unlink()
    planned(recipe(tmp_path, {"name": "exact"}, {"name": "longer", "configs": '["4plus_MIND"]'}), out, mirror)
    assert stage.planned(out, "exact") == before  # a revision does not change
    assert len(stage.planned(out, "longer")["units"]) == 1
    planned(recipe(tmp_path, {"name": "exact", "revision": "0123456"}), out, mirror)
    assert len(stage.planned(out, "exact")["units"]) == 2
    assert stage.planned(out, "exact")["plan_hash"] != before["plan_hash"]
    with pytest.raises(ValueError, match="lacks source 'other'; plan it: python"):
        stage.planned(out, "other")
    with pytest.raises(ValueError, match=r"plan.json does not exist; run `python -m data_mixtures plan"):
        stage.read_plan(tmp_path / "nowhere")


def test_a_local_mirror_is_linked_and_any_other_is_copied(tmp_path, mirror, quiet, monkeypatch):
    path = recipe(tmp_path, {"name": "exact"})
    fetched(path, tmp_path / "linked", mirror, quiet)

    def other_disk(*args):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", other_disk)
    fetched(path, tmp_path / "copied", mirror, quiet)
    for number in range(3):
        source = mirror / REPO / f"4plus/part_{number:06d}.parquet"
        linked, copied = (
            tmp_path / name / f"fetch/exact/unit-{number:05d}/raw.parquet" for name in ("linked", "copied")
        )
        assert os.path.samefile(source, linked)
        assert not os.path.samefile(source, copied)
        assert copied.read_bytes() == source.read_bytes()
    receipt = stage.read_receipt(tmp_path / "linked", "fetch", Unit("exact", 0))
    assert receipt["counts"] == {"documents": 40, "bytes": source.stat().st_size} | {
        "bytes": (mirror / REPO / "4plus/part_000000.parquet").stat().st_size
    }


def test_a_symbolic_link_is_linked_to_what_it_names(tmp_path, mirror, quiet):
    """As in the cache of the Hugging Face hub, whose files are relative links to blobs."""
    (mirror / "blobs").mkdir()
    for path in (mirror / REPO / "4plus").glob("*.parquet"):
        blob = path.rename(mirror / "blobs" / path.name)
        path.symlink_to(os.path.relpath(blob, path.parent))
    fetched(recipe(tmp_path, {"name": "exact"}), tmp_path / "out", mirror, quiet)
    raw = tmp_path / "out/fetch/exact/unit-00000/raw.parquet"
    assert not raw.is_symlink()
    assert os.path.samefile(raw, mirror / "blobs/part_000000.parquet")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def garble(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4] + b"rubb")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"4plus/part_000001.parquet came with [\d,]+ bytes, the plan says [\d,]+: truncated"),
        (garble, r"4plus/part_000001.parquet is not a complete Parquet file .*truncated, or another file"),
        (Path.unlink, r"4plus/part_000001.parquet @ abcdef0 is planned and no longer there"),
    ],
)
def test_a_damaged_file_is_refused_and_the_next_start_goes_on(tmp_path, mirror, quiet, damage, message):
    path, out = recipe(tmp_path, {"name": "exact"}), tmp_path / "out"
    planned(path, out, mirror)
    victim = mirror / REPO / "4plus/part_000001.parquet"
    whole = victim.read_bytes()
    damage(victim)
    with pytest.raises(ValueError, match=f"^fetch exact/unit-00001: .*{message}"):
        fetched(path, out, mirror, quiet)
    assert sorted(p.name for p in (out / "fetch/exact").iterdir()) == ["unit-00000"]
    victim.unlink(missing_ok=True)
    victim.write_bytes(whole)
    work = fetched(path, out, mirror, quiet)
    assert all(stage.is_done(work, unit) for unit in work.units())


def test_a_file_with_other_columns_or_another_hash_is_refused(tmp_path, mirror):
    path = mirror / REPO / "4plus/part_000000.parquet"
    entry = {"bytes": path.stat().st_size, "sha256": None, "text_column": "text"}
    assert fetch.check(path, entry, "here")["documents"] == 40
    with pytest.raises(fetch.Damaged, match=r"here came with sha256 [0-9a-f]{64}, the plan says 00"):
        fetch.check(path, {**entry, "sha256": "00"}, "here")
    write_parquet(path, 0, column="content")
    with pytest.raises(
        ValueError,
        match=r"exactly one column of text or bytes named text; its columns: id \(string\), content",
    ):
        fetch.check(path, {**entry, "bytes": path.stat().st_size}, "here")


def test_transfers_are_tried_again_but_refusals_are_not(tmp_path, mirror, monkeypatch):
    path, out = recipe(tmp_path, {"name": "exact"}), tmp_path / "out"
    read = planned(path, out, mirror)
    monkeypatch.setattr(fetch, "FIRST_WAIT_S", 0.001)
    original, tries = hub.Mirror.fetch, []

    def unsteady(self, repo, revision, name, target):
        tries.append(name)
        original(self, repo, revision, name, target)
        if len(tries) < 4:
            data = target.read_bytes()
            target.unlink()
            target.write_bytes(data[:-1])
            if len(tries) == 2:
                raise ConnectionResetError("the other side is gone")

    monkeypatch.setattr(hub.Mirror, "fetch", unsteady)
    monkeypatch.setattr(hub.Mirror, "remote", True, raising=False)
    monkeypatch.setattr(hub.Mirror, "__init__", _remote(hub.Mirror.__init__))
    work = Fetch(read, out, ("exact",), str(mirror))
    stage.do(work, Unit("exact", 0))
    assert len(tries) == 4
    monkeypatch.setattr(hub.Mirror, "fetch", lambda *a: tries.append("full") or _raise(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        stage.do(work, Unit("exact", 1))
    assert tries[4:] == ["full"]


def _remote(init):
    def made(self, url):
        init(self, url)
        self.remote = True

    return made


def _raise(number: int):
    raise OSError(number, os.strerror(number))


def test_budget_and_disk_are_checked_before_anything_is_read(tmp_path, mirror, quiet, monkeypatch):
    path, out = (
        recipe(tmp_path, {"name": "exact"}, {"name": "longer", "configs": '["4plus_MIND"]'}),
        tmp_path / "out",
    )
    sizes = [p.stat().st_size for p in (mirror / REPO).glob("4plus*/*.parquet")]
    with pytest.raises(
        ValueError, match=rf"0 bytes are fetched and {sum(sizes):,} are to come \(exact .*, longer .*--bud"
    ):
        fetched(path, out, mirror, quiet, budget=sum(sizes) - 1)
    assert not (out / "fetch").exists()
    work = fetched(path, out, mirror, quiet, budget=sum(sizes))
    work.check_room(sum(sizes))
    with pytest.raises(ValueError, match=f"{sum(sizes):,} bytes are fetched and 0 are to come"):
        work.check_room(1)
    stage.free(out, "fetch", Unit("longer", 0))
    work.check_room(sum(sizes) - 1)
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda path: os.terminal_size((1, 1)) and _Usage())
    (out / "fetch/exact/unit-00000/receipt.json").unlink()
    work.check_room(None)  # links need no room
    monkeypatch.setattr(hub.Mirror, "__init__", _remote(hub.Mirror.__init__))
    with pytest.raises(
        ValueError, match=r"bytes are to be fetched \(exact .*but .* has 7 bytes of free disk"
    ):
        work.check_room(None)


class _Usage:
    free = 7


def local(folder: Path, *inputs: str) -> Path:
    path = folder / "local.toml"
    header = recipe(folder).read_text().split("[phase1]")[0]
    tables = f'[sources.notes]\ncategory = "web"\nmin_bytes = 1000\ninputs = [{", ".join(inputs)}]\n[phase1]\nnotes = 1\n'  # noqa: E501
    path.write_text(header + tables)
    return path


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes").mkdir()
    for number in range(30):
        (tmp_path / f"notes/{number}.txt").write_text(f"note {number} is about this and that\n" * 30)
    (tmp_path / "notes/latin.txt").write_bytes(b"gr\xfc\xdfe " * 50)
    (tmp_path / "notes/blank.txt").write_text(" \n")
    return tmp_path / "notes"


def texts(out: Path) -> list[str]:
    files = sorted((out / "fetch/notes").glob("unit-*/raw.parquet"))
    return [text for file in files for text in pq.read_table(file)["text"].to_pylist()]


def test_local_inputs_without_a_cap_are_many_units_of_the_same_text(tmp_path, notes, quiet, monkeypatch):
    write_sums(tmp_path / "sums.jsonl", 90)
    one = f'{{ kind = "text", paths = ["{notes}/*.txt"] }}'
    two = f'{{ kind = "jsonl", max_bytes = 20_000, paths = ["{tmp_path}/sums.jsonl"] }}'
    fetched(local(tmp_path, one, two), tmp_path / "few", None, quiet)
    monkeypatch.setattr(plan, "UNIT_BYTES", 5000)
    fetched(local(tmp_path, one, two), tmp_path / "many", None, quiet)
    assert len(stage.planned_units(tmp_path / "few", "notes")) == 2
    count = len(stage.planned_units(tmp_path / "many", "notes"))
    assert 6 <= count <= 8  # 31 files of 0.9 kB in groups of 5 kB, and the capped input
    assert texts(tmp_path / "few") == texts(tmp_path / "many")
    assert len(texts(tmp_path / "few")) > 30
    receipts = [stage.read_receipt(tmp_path / "many", "fetch", Unit("notes", n)) for n in range(count)]
    dropped = [receipt["counts"]["dropped"] for receipt in receipts]
    assert sum(each.get("not_utf8", 0) for each in dropped) == 1
    assert sum(each.get("no_text", 0) for each in dropped) == 1
    assert sum(receipt["counts"]["documents"] for receipt in receipts) == len(texts(tmp_path / "many"))


def test_a_capped_input_is_one_unit_up_to_its_cap(tmp_path, notes, quiet, monkeypatch):
    monkeypatch.setattr(plan, "UNIT_BYTES", 5000)
    capped = f'{{ kind = "text", max_bytes = 9_000, paths = ["{notes}/*.txt"] }}'
    fetched(local(tmp_path, capped), tmp_path / "out", None, quiet)
    assert len(stage.planned_units(tmp_path / "out", "notes")) == 1
    assert 8_000 < sum(len(text) for text in texts(tmp_path / "out")) <= 9_000
    found = [
        name for name, *_ in find(recipes.Input("text", (f"{notes}/*.txt",)), roots(tmp_path, tmp_path))[:8]
    ]
    order = [Path(name).read_text() for name in found if "lat" not in name]
    assert texts(tmp_path / "out")[0] in order


def test_a_changed_local_file_is_read_again_and_a_new_time_alone_gives_the_same(tmp_path, notes, quiet):
    path, out = local(tmp_path, f'{{ kind = "text", paths = ["{notes}/*.txt"] }}'), tmp_path / "out"
    work = fetched(path, out, None, quiet)
    before, hash_before = (
        stage.read_receipt(out, "fetch", Unit("notes", 0)),
        stage.planned(out, "notes")["plan_hash"],
    )
    os.utime(notes / "3.txt", ns=(1, 1))
    planned(path, out)
    assert not stage.is_done(work, Unit("notes", 0))
    fetched(path, out, None, quiet)
    after = stage.read_receipt(out, "fetch", Unit("notes", 0))
    assert after["files"] == before["files"]
    assert stage.planned(out, "notes")["plan_hash"] == hash_before
    (notes / "3.txt").write_text("something else, and long enough to be kept as a document of its own\n" * 9)
    fetched(path, out, None, quiet)
    assert stage.planned(out, "notes")["plan_hash"] != hash_before
    (notes / "na\udcffme.txt").write_text("a name of bytes")
    with pytest.raises(ValueError, match=r"na\\udcffme.txt' is not UTF-8; rename it, or exclude it"):
        planned(path, out)
    (notes / "na\udcffme.txt").unlink()
    (notes / "4.txt").unlink()
    with pytest.raises(ValueError, match=r"4.txt is planned and no longer there; start again"):
        stage.do(work, Unit("notes", 0))


def test_too_little_text_is_an_error_that_names_the_source(tmp_path, notes, quiet, mirror):
    work = fetched(
        local(tmp_path, f'{{ kind = "text", paths = ["{notes}/b*"] }}'), tmp_path / "out", None, quiet
    )
    with pytest.raises(ValueError, match=r"'notes' has 0 bytes of text, .* min_bytes = 1000"):
        fetch.check_enough(work.recipe, tmp_path / "out", ("notes",))
    empty = mirror / REPO / "empty/part_0.parquet"
    empty.parent.mkdir()
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), empty)
    work = fetched(
        recipe(tmp_path, {"name": "none", "configs": '["empty"]'}), tmp_path / "hub", mirror, quiet
    )
    with pytest.raises(ValueError, match="source 'none' has 1 files of nobody/Small-Data, and not one row"):
        fetch.check_enough(work.recipe, tmp_path / "hub", ("none",))


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path, notes, quiet):
    write_sums(tmp_path / "sums.jsonl", 4000)
    path, out = local(tmp_path, f'{{ kind = "jsonl", paths = ["{tmp_path}/sums.jsonl"] }}'), tmp_path / "out"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(ValueError, match=r"fetch notes/unit-00000: .*File too large"):
            fetched(path, out, None, quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (out / "fetch").rglob("*")] == ["notes"]
    fetched(path, out, None, quiet)
    assert len(texts(out)) > 1000


CORPUS = """
import argparse, pathlib
parser = argparse.ArgumentParser()
parser.add_argument("--out", type=pathlib.Path)
out = parser.parse_args().out
out.mkdir(parents=True)
(out / "notes.jsonl").write_text('{"text": "a line of the corpus"}\\n')
"""


def test_a_program_of_the_recipe_writes_text_before_it_is_looked_for(tmp_path, quiet, monkeypatch):
    (tmp_path / "our_corpus.py").write_text(CORPUS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    path = local(tmp_path, '{ kind = "jsonl", paths = ["{corpus}/*.jsonl"] }')
    path.write_text(path.read_text().replace("seed = 11", 'seed = 11\ncorpus = "our_corpus"'))
    fetched(path, tmp_path / "out", None, quiet)
    assert texts(tmp_path / "out") == ["a line of the corpus"]
    with pytest.raises(
        ValueError, match=r"(?s)corpus = 'our_corpus' ended with exit status 1:.*FileExistsError"
    ):
        planned(path, tmp_path / "out")
