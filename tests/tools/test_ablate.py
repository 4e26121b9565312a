"""Tests of the ablation: flags that the trainer takes, paired runs that resume, a right table."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import tyro

from laneformer import LaneformerConfig
from records.events import BAD_STEP, DONE, STOPPED, read_outcome
from records.files import hold_lock, read_lines
from records.job import job_flags, read_job, read_sections
from tests.records.lines import write_lines
from tests.train.runs import ask
from tools import ablate
from tools.ablate import Options, check_settings, compare, plan_runs, read_plan, read_result

SHIPPED = Path("configs/ablation.toml")


def model_of(run: ablate.Run) -> LaneformerConfig:
    from train.job_config import JobConfig

    job, rest = tyro.cli(JobConfig, args=run.flags, return_unknown_args=True)
    unread = {word for word in rest if word.startswith("--")}
    assert unread == {"--job.config_file", "--debug.seed"}, "TorchTitan's own; others do not exist"
    changes = {name: value for name, value in asdict(job.architecture).items() if value is not None}
    shape = read_sections(Path(rest[1]))["architecture"]
    return LaneformerConfig.from_flavor("2b", **{**shape, **changes})


def test_every_shipped_variant_is_a_model_that_the_trainer_builds():
    runs = plan_runs(read_plan(Options(SHIPPED, Path("out"))), Path("out"), [])
    models = {run.variant: model_of(run) for run in runs if run.seed == 0}
    baseline = models["delay_0"]
    assert (baseline.broadcast_delay, baseline.num_lanes, baseline.swa_layers) == (0, 8, ())
    assert baseline.parameter_count()["total"] == 984_672, "the published runs' size"
    # the same again shows how far two runs of one model lie apart
    same = {name for name, model in models.items() if model == baseline}
    assert same == {"delay_0", "delay_0_again"}
    assert len({repr(model) for model in models.values()}) == len(models) - 1
    width = baseline.intermediate_size
    assert models["handicap"].intermediate_size == width * 7 // 8
    assert models["handicap_large"].intermediate_size == width * 5 // 8


def test_a_seed_has_batches_and_weights_of_its_own_whatever_the_variant():
    options = Options(
        SHIPPED, Path("out"), variants=("delay_0_again", "delay_0", "delay_2"), seeds=(0, 3, 0)
    )
    shared = ["--training.steps", "5", "--optimizer.lr", "6e-3"]
    runs = plan_runs(read_plan(options), Path("out"), shared)
    names = [run.folder.name for run in runs]
    assert names == [f"{name}-{seed}" for seed in (0, 3) for name in options.variants]
    assert all(run.flags[2:6] == shared for run in runs)
    skipped = [read_job(run.flags).resilience.skip_sequences for run in runs]
    # a seed's data begin behind those of smaller ones: 5 steps of 4 windows each
    assert skipped == [[]] * 3 + [[(0, 3 * 5 * 4)]] * 3
    seeds = [
        run.flags[max(i for i, word in enumerate(run.flags) if word == "--debug.seed") + 1]
        for run in runs
    ]
    assert seeds == ["1000", "0", "0", "1003", "3", "3"]


@pytest.mark.parametrize(
    ("change", "options", "problem"),
    [
        (
            ('baseline = "delay_0"', 'baseline = "delay_00"'),
            {},
            "baseline 'delay_00'; did you mean 'delay_0'",
        ),
        (("seeds =", "seed ="), {}, "unknown key of .* 'seed'; did you mean 'seeds'"),
        ((), {"variants": ("delay_22",)}, "name for --variants: 'delay_22'; did you mean 'delay_2"),
        ((), {"flags": ["--reprot"]}, "unknown option --reprot; see --help"),
    ],
)
def test_a_mistake_in_the_config_or_the_options_is_named(tmp_path, change, options, problem):
    config, flags = tmp_path / "ablation.toml", options.pop("flags", [])
    config.write_text(SHIPPED.read_text().replace(*change) if change else SHIPPED.read_text())
    with pytest.raises(ValueError, match=problem):
        plan_runs(read_plan(Options(config, tmp_path, **options)), tmp_path, flags)


def test_a_folder_holds_runs_of_one_training_to_which_variants_are_added(tmp_path):
    path, first = (
        tmp_path / "settings.json",
        {"flags": ["--training.steps", "5"], "variant a": "--x.y 1"},
    )
    check_settings(path, first)
    check_settings(path, first | {"variant b": "--x.y 2"})
    check_settings(path, first)
    assert set(json.loads(path.read_text())) == {"flags", "variant a", "variant b"}
    for other in ({"flags": []}, {"variant b": "--x.y 3"}):
        with pytest.raises(
            ValueError, match=f"has another {next(iter(other))}; choose another --out"
        ):
            check_settings(path, first | other)


def test_one_command_at_a_time_trains_into_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ablate", str(SHIPPED), "--out", str(tmp_path)])
    with (
        hold_lock(tmp_path / ".lock", "held"),
        pytest.raises(ValueError, match=r"another tools\.ablate trains"),
    ):
        ablate.main()
    sys.argv += ["--workers", "0"]
    with pytest.raises(ValueError, match="--workers 0: it should be greater than or equal to 1"):
        ablate.main()


def rows_of(losses: dict[str, tuple[float | None, ...]]) -> list[dict[str, object]]:
    return [
        {"variant": variant, "seed": seed, "valid_loss": loss}
        for variant, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    ]


def cells(markdown: str) -> dict[str, list[str]]:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in markdown.splitlines()[2:]
    ]
    return {name: rest for name, *rest in lines}


def test_differences_are_paired_by_seed():
    # seeds differ by 1, variants by 0.1 to 0.3: t of three pairs is 4.303, their deviation 0.1
    losses = {
        "base": (4.0, 5.0, 6.0),
        "late": (4.1, 5.2, 6.3),
        "short": (4.5,),
        "lost": (4.0, None, 6.0),
    }
    table = cells(
        compare([*rows_of(losses), {"variant": "late", "seed": 9, "valid_loss": 50.0}], "base")
    )
    assert table["base"] == ["3", "5.0000", "-", "-", "-"]
    seeds, loss, difference, half, p = table["late"]
    assert (seeds, loss, difference) == ("3", "5.2000", "+0.2000")
    assert float(half) == pytest.approx(4.303 * 0.1 / math.sqrt(3), abs=1e-4)
    assert float(p) == pytest.approx(0.0742, abs=1e-4)
    assert table["short"] == ["1", "4.5000", "+0.5000", "-", "-"]
    assert table["lost"] == ["3", "inf", "+inf", "-", "-"], "a run that diverged"
    with pytest.raises(ValueError, match="no results of delay_0, the baseline"):
        compare(rows_of(losses), "delay_0")


def test_the_published_runs_are_what_the_documents_say():
    runs = read_lines(Path("docs/benchmarks/ablation.jsonl"))
    table = cells(compare([row for row in runs if row["learning_rate"] == 3e-3], "delay_0"))
    page = Path("docs/benchmarks/ablation.md").read_text()
    rows = re.findall(
        r"\| ([+-][\d.]+) ± ([\d.]+) \| ([+-][\d.]+) \|", Path("docs/dtp.md").read_text()
    )
    stated = sorted(tuple(map(float, row)) for row in rows)
    del table["delay_0"]
    for seeds, loss, difference, half, _ in table.values():
        assert f"| {seeds} | {loss} | {difference} | {half} |" in page
    # at 1.684 bytes a token
    nats_a_bit = 1.684 * math.log(2)
    nats = sorted((float(difference), float(half)) for _, _, difference, half, _ in table.values())
    measured = [(by, half, by / nats_a_bit) for by, half in nats]
    assert len(measured) == len(stated) == 8
    for one, other in zip(measured, stated, strict=True):
        # half of the last digit, rounded twice
        assert one == pytest.approx(other, abs=0.00056)


def test_a_run_that_diverges_has_no_loss_and_one_that_fails_shows_its_log(tmp_path):
    run = ablate.Run("delay_1", 3, tmp_path, ["--a.b", "1"])
    write_lines(tmp_path / "metrics.jsonl", [{"loss": 9.0, "gpu_hours": 0.5, "valid_loss": 4.0}])
    (tmp_path / "train.log").write_text("no such file")
    row = {
        "variant": "delay_1",
        "seed": 3,
        "train_loss": 9.0,
        "seconds": 1800.0,
        "flags": run.flags,
    }
    assert read_result(run, DONE) == row | {"valid_loss": 4.0}
    assert read_result(run, BAD_STEP) == row | {"valid_loss": None}
    with pytest.raises(
        ValueError, match=r"ended with exit status 1; .*/train.log ends:\nno such file"
    ):
        read_result(run, 1)


def command(out: Path, lock: Path, *words: str) -> list[str]:
    shapes = {
        "training.steps": 6,
        "training.seq_len": 32,
        "training.global_batch_size": 2,
        "training.local_batch_size": 2,
        "architecture.max_position_embeddings": 32,
        "architecture.num_hidden_layers": 3,
        "lr_scheduler.warmup_steps": 1,
        "mixture.lock": lock,
    }
    return [
        sys.executable,
        "-m",
        "tools.ablate",
        str(SHIPPED),
        "--out",
        str(out),
        *job_flags(shapes),
        *words,
    ]


def run(
    out: Path, lock: Path, *words: str, then: Callable[[], None] | None = None
) -> tuple[int, str]:
    # by the fork server, which leaves the process id in OUT.pid
    log, pid = (out.with_name(out.name + end) for end in (".log", ".pid"))
    for path in (log, pid):
        path.unlink(missing_ok=True)
    job = {
        "command": command(out, lock, *words),
        "environment": {},
        "log": str(log),
        "pid": str(pid),
    }
    return ask(job, *filter(None, [then])), log.read_text()


def losses_in(out: Path) -> dict[tuple[str, int], float]:
    rows = read_lines(out / "results.jsonl")
    losses = {(row["variant"], row["seed"]): row["valid_loss"] for row in rows}
    assert len(losses) == len(rows)
    return losses


@pytest.mark.rotate
def test_an_interrupted_ablation_leaves_no_run_behind_and_goes_on_as_if_it_had_not_been(
    data_folder, tmp_path
):
    # an interrupted run saves and goes on from there: losses are bitwise those of runs in one piece
    lock, out, whole = data_folder / "phase1.lock.json", tmp_path / "out", tmp_path / "whole"
    words = (
        "--variants",
        "delay_0",
        "delay_2",
        "--seeds",
        "0",
        "--workers",
        "1",
        "--training.steps",
        "60",
    )
    trained = out / "runs" / "delay_0-0"

    def interrupt() -> None:
        while not (trained / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(int((tmp_path / "out.pid").read_text()), signal.SIGINT)

    status, output = run(out, lock, *words, then=interrupt)
    assert status == 130, output
    assert "interrupted; the same command goes on" in output
    outcome = read_outcome(trained)
    assert outcome["code"] == STOPPED
    assert (trained / "checkpoint" / f"step-{outcome['step']}").exists()
    assert not (out / "results.jsonl").exists()
    for folder in (out, whole):
        status, output = run(folder, lock, *words)
        assert status == 0, output
        assert "| delay_2 | 1 |" in output
    assert losses_in(out) == losses_in(whole)
    assert len(set(losses_in(out).values())) == 2
    assert [row["step"] for row in read_lines(trained / "attempts.jsonl")] == [0, outcome["step"]]
    assert not (trained / "checkpoint").exists()
