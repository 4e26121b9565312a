"""The commands, one stage at a time: sources in turn, freeing what is used up, verifying, options
that do not fit.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tyro
from rich.console import Console

from data_mixtures import __main__ as stages_command
from data_mixtures import prepare
from data_mixtures.mixture import Mixture
from data_mixtures.stages import pipeline, sorted_runs
from data_mixtures.stages.run import Options
from tests.data_mixtures.stages.hub_assets import REPO, recipe, write_mirror, write_parquet

SOURCES = ({"name": "plus"}, {"name": "mind", "configs": '["4plus_MIND"]'})
ROOT = Path(__file__).resolve().parents[2]
IN_A_ROW = (*pipeline.TO_SHARDS, "manifest")


@pytest.fixture
def recipe_path(tmp_path: Path) -> Path:
    write_mirror(tmp_path / "mirror")
    write_parquet(tmp_path / "mirror" / REPO / "4plus_MIND/part_000000.parquet", 5000, 300)
    return recipe(tmp_path, *SOURCES)


@pytest.fixture
def run(
    recipe_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """Run one stage as its command does, on one process; returns what was printed."""
    monkeypatch.setenv("COLUMNS", "160")

    def run_stage(name: str, *more: str, out: str = "out") -> str:
        capsys.readouterr()
        line = [name, str(recipe_path), "--out", str(tmp_path / out), "--mirror", str(tmp_path / "mirror")]
        stages_command.run([*line, "--workers", "1", *more])
        return capsys.readouterr().out

    return run_stage


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_stage_by_stage_is_what_prepare_does(run, recipe_path, tmp_path):
    printed = {name: run(name) for name in IN_A_ROW}
    prepare.prepare(recipe_path, tmp_path / "whole", Options(), Console(quiet=True), str(tmp_path / "mirror"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert "4 units of 2 sources" in printed["plan"]
    rows = [line.split() for line in printed["filter"].splitlines()]
    assert ["source", "units", "read", "cut", "kept", "bytes", "nuls", "dropped", "contamination"] in rows
    assert [row[:5] for row in rows if row and row[0] == "plus"] == [["plus", "3", "120", "0", "120"]]


def test_sources_can_go_through_one_after_the_other_and_be_freed(run, tmp_path):
    run("plan")
    with pytest.raises(ValueError, match=r"unknown source 'mid'; did you mean 'mind'"):
        run("fetch", "--sources", "plus,mind,mid")
    for name in ("plus", "mind"):
        run("fetch", "--sources", name)
        with pytest.raises(
            ValueError, match=rf"fetch of '{name}' is still needed: \d units are not through filter"
        ):
            run("free", "--stage", "fetch", "--sources", name)
        run("filter", "--sources", name)
        assert f"{name}: " in run("free", "--stage", "fetch", "--sources", name)
        assert not list((tmp_path / "out/fetch" / name).rglob("*.parquet"))
    for name in ("tokenize", "shuffle"):
        run(name)
    for name in ("filter", "tokenize"):
        run("free", "--stage", name)
        assert not [p for p in (tmp_path / "out" / name).rglob("*") if p.is_file() and p.suffix != ".json"]
    run("manifest")
    for name in IN_A_ROW:
        run(name, out="whole")
    kept = {
        name: data
        for name, data in files_of(tmp_path / "out").items()
        if name.split("/")[0] in ("plus", "mind")
    }
    assert kept
    assert kept.items() <= files_of(tmp_path / "whole").items()
    assert Mixture.open(tmp_path / "out/phase1.lock.json").sequences(0, 4)[0].shape == (4, 33)
    for name in IN_A_ROW:  # nothing of what was freed is made again
        assert "done, 0 as before" not in run(name)


def test_tokenized_units_are_freed_after_their_runs(run, tmp_path, monkeypatch):
    """Source plus has three units, and so two runs; mind has one, which is needed until
    its shards are written.
    """
    monkeypatch.setattr(sorted_runs, "RUNS", 2)
    for name in ("plan", "fetch", "filter", "tokenize"):
        run(name)
    with pytest.raises(ValueError, match="tokenize of 'plus' is still needed: 2 units are not through runs"):
        run("free", "--stage", "tokenize", "--sources", "plus")
    assert "2 units done" in run("runs")
    run("free", "--stage", "tokenize", "--sources", "plus")
    with pytest.raises(ValueError, match=r"mind/unit-00000 has not been through 'order'"):
        run("free", "--stage", "tokenize", "--sources", "mind")
    run("shuffle")
    assert "mind: 0 bytes of runs are free" in run("free", "--stage", "runs")
    assert not list((tmp_path / "out/runs").rglob("*.bin"))
    for name in IN_A_ROW:  # nothing of what was freed is made again
        assert name == "manifest" or "done, 0 as before" not in run(name)
    monkeypatch.setattr(sorted_runs, "RUNS", 64)
    for name in IN_A_ROW:
        run(name, out="whole")
    shards = {out: files_of(tmp_path / out / "shuffle") for out in ("out", "whole")}
    assert len(shards["out"]) > 10
    for name, data in shards["out"].items():
        assert name.endswith(".json") or data == shards["whole"][name]


def test_what_was_freed_and_is_needed_again_is_named(run, tmp_path, recipe_path):
    for name in ("plan", "fetch", "filter"):
        run(name)
    run("free", "--stage", "fetch")
    recipe_path.write_text(recipe_path.read_text().replace("[phase1]", "[filter]\nmin_chars = 70\n[phase1]"))
    with pytest.raises(
        ValueError, match=r"filter plus/unit-00000: .*was freed, and is needed again; remove .*fetch/plus"
    ):
        run("filter")


def test_a_stage_before_its_time_says_which_is_missing(run):
    with pytest.raises(ValueError, match=r"plan.json does not exist; run `python -m data_mixtures plan"):
        run("fetch")
    run("plan")
    with pytest.raises(
        ValueError, match=r"filter plus/unit-00000: .* has not been through 'fetch' yet; run that stage"
    ):
        run("filter")


@pytest.mark.parametrize("damaged", ["shard-00001.bin", "shard-00000.docs.zst", "valid.bin"])
@pytest.mark.job
def test_verify_finds_a_flipped_bit_and_its_commands_restore_the_bytes(run, tmp_path, damaged):
    for name in IN_A_ROW:
        run(name)
    assert "0 damaged" in run("verify")
    path, whole = tmp_path / "out/mind" / damaged, files_of(tmp_path / "out")
    flip(path)
    assert files_of(tmp_path / "out") != whole
    with pytest.raises(ValueError, match=r"1 damaged, named above") as said:
        run("verify")
    first, again = (line.strip() for line in str(said.value).splitlines()[1:])
    assert str(path) in first
    script = f"{first}\n{again} --mirror {tmp_path}/mirror --workers 1"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # .lock only names the process that prepared last
    assert {**files_of(tmp_path / "out"), ".lock": whole[".lock"]} == whole
    assert "0 damaged" in run("verify")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damaged", "reader", "tokenizer"),
    [
        ("fetch/plus/unit-00001/raw.parquet", "filter", False),
        # read for the tokenizer
        pytest.param("filter/mind/unit-00000/documents.parquet", "tokenize", True, marks=pytest.mark.rotate),
        ("filter/mind/unit-00000/documents.parquet", "tokenize", False),
    ],
)
def test_a_bit_flipped_between_two_stages_is_named_and_mended(run, tmp_path, damaged, reader, tokenizer):
    for name in IN_A_ROW:
        run(name, out="whole")
    stages = IN_A_ROW[: IN_A_ROW.index(reader)]
    for name in stages:
        run(name)
    if reader == "tokenize" and not tokenizer:
        shutil.copy(tmp_path / "whole/tokenizer.model", tmp_path / "out")
        shutil.copy(tmp_path / "whole/tokenizer.receipt.json", tmp_path / "out")
    path = tmp_path / "out" / damaged
    shutil.copy(path, tmp_path / "copy")
    (tmp_path / "copy").replace(path)  # not a link of the mirror's
    flip(path)
    with pytest.raises(
        ValueError, match=rf"{damaged} is not what '\w+' wrote: \d+ bytes.*made again"
    ) as said:
        run(reader)
    assert "\n" not in str(said.value)
    for name in IN_A_ROW:
        run(name)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("made_by", "readers"),
    [
        pytest.param("fetch", ["filter"], marks=pytest.mark.rotate),
        pytest.param("filter", ["tokenize"], marks=pytest.mark.job),
        pytest.param("tokenize", ["order", "shuffle"], marks=pytest.mark.rotate),
        pytest.param("tokenize", ["shuffle"], marks=pytest.mark.job),
        pytest.param("order", ["shuffle"], marks=pytest.mark.rotate),
    ],
)
def test_every_file_between_stages_is_compared_with_what_was_written(run, tmp_path, made_by, readers):
    """Each file of a unit in turn gets a flipped bit, and its readers run again: named,
    mended, the same bytes.
    """
    for name in IN_A_ROW:
        run(name)
    out = tmp_path / "out"
    whole, said = files_of(out), []
    for path in sorted((out / made_by / "plus/unit-00000").iterdir()):
        if path.name == "receipt.json" or not path.stat().st_size:
            continue
        shutil.copy(path, tmp_path / "copy")
        (tmp_path / "copy").replace(path)
        flip(path)
        for reader in readers:
            shutil.rmtree(out / reader / "plus")
        seen = len(said)
        for _ in range(3):
            try:
                for name in IN_A_ROW:
                    run(name)
            except ValueError as error:
                said.append(str(error))
        now = files_of(out)
        if len(said) > seen:
            assert now == whole
        else:  # not read again
            assert [name for name in whole if now[name] != whole[name]] == [str(path.relative_to(out))]
            path.write_bytes(whole[str(path.relative_to(out))])
    assert said
    assert all(f"{out / made_by}/plus/unit-00000/" in each and " is not what " in each for each in said)


def test_a_file_of_the_mirror_that_changed_in_place_is_named(run, tmp_path):
    for name in ("plan", "fetch"):
        run(name)
    original = tmp_path / "mirror" / REPO / "4plus/part_000001.parquet"
    flip(original)
    for _ in range(2):  # it is not taken for what was fetched, however often one starts
        with pytest.raises(
            ValueError, match=r"fetch/plus/unit-00001/raw.parquet .* It is a link of a mirror's file"
        ):
            run("filter")
        run("fetch")
    flip(original)
    run("filter")


def test_options_that_do_not_fit_are_refused(run):
    for more, message in (
        (("--workers", "0"), "--workers = 0 must be an integer from 1"),
        (("--sources", "plsu"), "unknown source 'plsu'; did you mean 'plus'"),
    ):
        with pytest.raises(ValueError, match=message):
            run("plan", *more)
    with pytest.raises(SystemExit):
        run("free")
    line = ["x.toml", "--out", "o", "--executor", "ray"]
    assert tyro.cli(prepare.Arguments, args=[*line, "--workers", "9"]).options() == Options(9, "ray")
    options = tyro.cli(prepare.Arguments, args=line).options()
    assert options == Options(0, "ray"), "as many as the cluster has CPUs"
    cpus = os.sched_getaffinity(0)
    assert options.threads == len(cpus)  # of verify and stats, which run here
    os.sched_setaffinity(0, {min(cpus)})  # as in a job that has fewer than its machine
    try:
        assert options.threads == tyro.cli(prepare.Arguments, args=line[:3]).options().workers == 1
    finally:
        os.sched_setaffinity(0, cpus)
