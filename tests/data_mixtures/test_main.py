"""Tests of the commands by stage: sources in turn, freeing, verifying, options that do not fit."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import tyro

from data_mixtures import __main__ as stages_command
from data_mixtures import prepare
from data_mixtures.mixture import Mixture
from data_mixtures.stages import pipeline, sorted_runs
from data_mixtures.stages.run import Options
from tests.data_mixtures.conftest import files_of, flip, prepare_folder, run_shell
from tests.data_mixtures.stages.hub_assets import REPO, recipe, write_mirror, write_parquet

IN_A_ROW = (*pipeline.TO_SHARDS, "manifest")


def make_prepared(folder: Path) -> None:
    write_mirror(folder / "mirror")
    write_parquet(folder / "mirror" / REPO / "4plus_MIND/part_000000.parquet", 5000, 120)
    path = recipe(folder, {"name": "plus"}, {"name": "mind", "configs": '["4plus_MIND"]'})
    prepare_folder(path, folder / "whole", mirror=str(folder / "mirror"))


@pytest.fixture
def folder(shared, tmp_path):
    """Copy hub.toml, its mirror, and whole/, which `prepare` made of them."""
    prepared = shared("two_hub_sources", make_prepared)
    # -a keeps hard links: published shards are those of the stage shuffle
    subprocess.run(["cp", "-a", f"{prepared}/.", tmp_path], check=True)
    return tmp_path


@pytest.fixture
def run(folder, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")

    def run_stage(*words: str, out: str = "out") -> str:
        capsys.readouterr()
        name, *more = words
        line = [name, str(folder / "hub.toml"), "--out", str(folder / out)]
        stages_command.run([*line, "--mirror", str(folder / "mirror"), "--workers", "1", *more])
        return capsys.readouterr().out

    return run_stage


def assert_refused(run, words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(*words.split())


def test_stage_by_stage_is_what_prepare_does(run, folder):
    # the files are compared whole: receipts, indexes, manifests and locks too
    printed = {name: run(name) for name in IN_A_ROW}
    assert files_of(folder / "out") == files_of(folder / "whole")
    assert "4 units of 2 sources" in printed["plan"]
    rows = [line.split() for line in printed["filter"].splitlines()]
    head = "source units read cut kept bytes nuls dropped contamination"
    assert head.split() in rows
    assert [row[:5] for row in rows if row and row[0] == "plus"] == [
        ["plus", "3", "120", "0", "120"]
    ]


@pytest.mark.job
def test_sources_can_go_through_one_after_the_other_and_be_freed(run, folder, monkeypatch):
    # plus has three units, so two runs; mind has one, needed until its shards are written
    monkeypatch.setattr(sorted_runs, "RUNS", 2)
    out = folder / "out"
    assert_refused(run, "fetch", r"plan.json does not exist; run `python -m data_mixtures plan")
    run("plan")
    assert_refused(
        run, "filter", r"filter plus/unit-00000: .* has not been through 'fetch' yet; run that"
    )
    for name in ("plus", "mind"):
        run("fetch", "--sources", name)
        # text may be freed only after `filter` has read all of it
        needed = rf"fetch of '{name}' is still needed: \d units are not through filter"
        assert_refused(run, f"free --stage fetch --sources {name}", needed)
        run("filter", "--sources", name)
        assert f"{name}: " in run("free", "--stage", "fetch", "--sources", name)
        assert not list((out / "fetch" / name).rglob("*.parquet"))
    path = folder / "hub.toml"
    text = (folder / "hub.toml").read_text()
    path.write_text(text.replace("[phase1]", "[filter]\nmin_chars = 70\n[phase1]"))
    # a changed filter would need the freed text again
    freed = r"filter plus/unit-00000: .*was freed, and is needed again; remove .*fetch/plus"
    assert_refused(run, "filter", freed)
    path.write_text(text)
    run("tokenize")
    free_plus = "free --stage tokenize --sources plus"
    assert_refused(
        run, free_plus, "tokenize of 'plus' is still needed: 2 units are not through runs"
    )
    assert "2 units done" in run("runs")
    run(*free_plus.split())
    # mind has one unit, which is its own run: `shuffle` reads it
    needed = r"mind/unit-00000 has not been through 'order'"
    assert_refused(run, "free --stage tokenize --sources mind", needed)
    run("shuffle")
    for name in ("filter", "tokenize", "runs"):
        run("free", "--stage", name)
        assert {path.suffix for path in (out / name).rglob("*") if path.is_file()} == {".json"}
    run("manifest")
    for name in ("plus", "mind"):
        assert files_of(out / name) == files_of(folder / "whole" / name)
    assert Mixture.open(out / "phase1.lock.json").sequences(0, 4)[0].shape == (4, 33)
    # a second pass makes nothing that was freed again
    for name in IN_A_ROW:
        assert "done, 0 as before" not in run(name)


@pytest.mark.job
def test_verify_finds_a_flipped_bit_and_its_commands_restore_the_bytes(run, folder):
    whole = files_of(folder / "whole")
    path = folder / "whole/mind/shard-00001.bin"
    flip(path)
    with pytest.raises(ValueError, match=r"1 damaged, named above") as caught:
        run("verify", out="whole")
    # the message ends with the commands, one to a line
    removal, preparation = (line.strip() for line in str(caught.value).splitlines()[1:])
    assert str(path) in removal
    script = f"{removal}\n{preparation} --mirror {folder}/mirror --workers 1"
    run_shell(script, folder)
    assert files_of(folder / "whole") == whole
    assert "0 damaged" in run("verify", out="whole")


@pytest.mark.job
def test_every_file_between_stages_is_compared_with_what_was_written(run, folder):
    # the next start mends a flipped bit to the same bytes; files behind tokenize: test_shuffle
    out = folder / "whole"
    whole = files_of(out)
    # without its output `tokenize` must read the filtered unit again
    shutil.rmtree(out / "tokenize/plus")
    (damaged,) = (out / "filter/plus/unit-00000").glob("*.parquet")
    flip(damaged)

    def run_all() -> None:
        for name in IN_A_ROW:
            run(name, out="whole")

    with pytest.raises(
        ValueError, match=rf"{damaged} is not what 'filter' wrote: \d+ bytes"
    ) as caught:
        run_all()
    assert "made again" in str(caught.value)
    assert "\n" not in str(caught.value)
    run_all()
    assert files_of(out) == whole


def test_a_file_of_the_mirror_that_changed_in_place_is_named(run, folder):
    for name in ("plan", "fetch"):
        run(name)
    original = folder / "mirror" / REPO / "4plus/part_000001.parquet"
    before = original.read_bytes()
    original.write_bytes(before[:99] + bytes([before[99] ^ 1]) + before[100:])
    # the changed file is refused at every start, not only at the first
    for _ in range(2):
        linked = r"fetch/plus/unit-00001/raw.parquet .* It is a link of a mirror's file"
        assert_refused(run, "filter", linked)
        run("fetch")
    original.write_bytes(before)
    run("filter")


def test_options_that_do_not_fit_are_refused(run):
    for more, message in (
        ("--workers 0", "--workers 0: it should be greater than or equal to 1"),
        ("--sources plsu", "unknown source 'plsu'; did you mean 'plus'"),
    ):
        assert_refused(run, f"plan {more}", message)
    with pytest.raises(SystemExit):
        run("free")
    line = ["x.toml", "--out", "o", "--executor", "ray"]
    assert tyro.cli(prepare.Arguments, args=[*line, "--workers", "9"]).options() == Options(
        9, "ray"
    )
    unlimited = tyro.cli(prepare.Arguments, args=line).options()
    assert unlimited == Options(0, "ray"), "as many as the cluster has CPUs"
