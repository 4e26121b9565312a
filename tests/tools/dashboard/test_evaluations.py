"""Tests of the evaluation cards: CORE with intervals, code and questions, contamination."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from evals.core.tasks import NOT_CHOSEN
from evals.intervals import Z95
from records.files import read_lines
from records.run import Record, Run, as_record, read_run
from tests.records.lines import write_lines
from tests.tools.dashboard import made_up_run
from tests.tools.dashboard.made_up_run import chart_of
from tools.dashboard import evaluations
from tools.dashboard.evaluations import (
    make_core_tile,
    write_bits_card,
    write_core_card,
    write_missing,
    write_scores_card,
    write_tasks_card,
)
from tools.dashboard.header import write_tiles


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_lines(folder / "evals.jsonl") if record["kind"] == kind]


def run_with(folder: Path, copy: Path, *lines: dict[str, Any]) -> Run:
    shutil.copytree(folder, copy)
    write_lines(copy / "evals.jsonl", [*read_lines(folder / "evals.jsonl"), *lines])
    return read_run(copy)


def test_core_stands_with_its_interval_above_loss_and_learning_rate_and_among_published_values(
    folder, tmp_path
):
    card, written = write_core_card(read_run(folder)), records(folder, "core")
    chart = chart_of(card)
    assert [panel["title"] for panel in chart["panels"]] == ["CORE", "Loss", "Learning rate"]
    core, last = chart["curves"][0], written[-1]
    assert core["y"] == pytest.approx([record["core_v2"] for record in written], rel=1e-5)
    half = Z95 * written[0]["core_v2_se"]
    assert core["ends"][0] == pytest.approx([core["y"][0] - half, core["y"][0] + half], abs=1e-5)
    assert core["x"]["tokens"] == [record["tokens_total"] for record in written]
    assert core["x"]["steps"] == [
        record["tokens_total"] / made_up_run.TOKENS_A_STEP for record in written
    ]
    assert "DCLM-7B</td><td>0.5714</td><td>0.5596" in card
    assert f"{last['core_v1']:.4f} ± {last['core_v1_se']:.4f}" in card
    assert f"{last['core_v2']:.4f}" in make_core_tile(read_run(folder))[1]
    # other settings are another curve, and a repeated checkpoint counts once
    run = run_with(
        folder, tmp_path / "run", {**last, "protocol": "dclm"}, {**last, "core_v2": 0.125}
    )
    curves = [each for each in chart_of(write_core_card(run))["curves"] if each["panel"] == 0]
    lengths = {each["name"]: len(each["y"]) for each in curves}
    assert lengths == {"nanochat, limit-500": 6, "dclm, limit-500": 1}
    assert curves[0]["y"][-1] == 0.125


def test_tasks_have_a_panel_each_with_intervals_and_the_newest_record_in_full(folder):
    card, last = write_tasks_card(read_run(folder)), records(folder, "core")[-1]
    chart = chart_of(card)
    assert len(chart["panels"]) == len(chart["curves"]) == 22
    for curve, (task, figures) in zip(chart["curves"], last["tasks"].items(), strict=True):
        assert curve["y"][-1] == pytest.approx(figures["accuracy"], rel=1e-5), task
        half = Z95 * figures["standard_error"]
        assert curve["ends"][-1] == pytest.approx(
            [curve["y"][-1] - half, curve["y"][-1] + half], abs=1e-5
        )
        assert f">{task} <small>" in card
        assert (
            f"<td>{figures['centered_v2']:.3f}</td><td>{figures['gold_bits_per_byte']:.3f}</td>"
            in card
        )
    # guessing
    assert {round(level["y"], 4) for level in chart["levels"]} == {0.25, 0.5, 0.403, 0.62}
    # none of four is right: the normal interval would be empty
    wilson = as_record({"tasks": {"winograd": {"accuracy": 0.0, "interval": [0.0, 0.49], "n": 4}}})
    assert "0.000 <small>0.000 – 0.490</small>" in evaluations.write_task_table(wilson)


def test_without_a_task_there_is_no_core_and_what_nobody_chose_is_not_missing(folder, tmp_path):
    *_, record = written = records(folder, "core")
    tasks = {
        label: figures
        for label, figures in record["tasks"].items()
        if label not in ("squad", "coqa")
    }
    reasons = dict.fromkeys(("squad", "coqa"), "eval_data/squad.jsonl is missing")
    gap = {"core_v1": None, "core_v2": None, "tasks": tasks, "missing": reasons}
    gappy = shutil.copytree(folder, tmp_path / "gappy")
    write_lines(gappy / "evals.jsonl", [complete | gap for complete in written])
    run = read_run(gappy)
    assert write_core_card(run) == ""
    assert 'class="none"' in make_core_tile(run)[1]
    card = write_tasks_card(run)
    assert "2 tasks missing</span>, hence no CORE" in card
    assert "eval_data/squad.jsonl is missing" in card
    assert len(chart_of(card)["panels"]) == 20
    assert write_missing(Record(tasks={}, missing={"copa": NOT_CHOSEN})) == ""
    # a toy bundle is no CORE with gaps: it says so, and its words are never markup
    toy = {**record, **gap, "not_core": "not CORE: <i>a toy"}
    card = write_tasks_card(run_with(gappy, tmp_path / "toy", toy))
    assert "<h2>Tasks of a toy bundle, not CORE</h2>" in card
    assert "not CORE: &lt;i&gt;a toy" in card
    assert "missing" not in card


def test_code_and_questions_are_curves_by_the_way_they_were_asked(folder):
    run = read_run(folder)
    card = write_scores_card(run)
    chart = chart_of(card)
    assert [panel["title"] for panel in chart["panels"]] == ["Code", "Questions"]
    assert [each["name"] for each in chart["curves"]] == [
        "pass@1 humaneval+, greedy, chat, temperature-0.0",
        "pass@1 mbpp+, sampled, chat, temperature-0.8",
        "arc_easy acc_norm, num_fewshot-0, chat_template-False",
        "arc_challenge acc_norm, num_fewshot-0, chat_template-False",
    ]
    assert chart["curves"][0]["y"] == pytest.approx([0.439 / 2, 0.439], rel=1e-5)
    assert "<td>43.9 % ± 7.5</td><td>phase2 step 30</td>" in card
    assert "<td>30.3 % ± 2.6</td>" in card
    for record in run.evals:  # never on one curve
        record["chat_template"] = record["phase"] == "phase2"
        record["problems"] = 164 if record["phase"] == "phase2" else 9
    card = write_scores_card(run)
    for words in ("chat_template-True", "chat_template-False", "problems-164", "problems-9"):
        assert card.count(words) == 2, words


def test_the_newest_evaluation_is_that_of_the_highest_step_however_late_another_was_written(
    folder, tmp_path
):
    other = {**records(folder, "core")[0], "protocol": "dclm"}
    run = run_with(folder, tmp_path / "run", other)
    lines = read_lines(tmp_path / "run/evals.jsonl")
    write_lines(tmp_path / "run/evals.jsonl", lines[::-1])
    backwards = read_run(tmp_path / "run")
    for each in (run, backwards):
        assert make_core_tile(each)[2].endswith("phase2 step 30")
        assert "phase2 step 30, nanochat" in write_tasks_card(each)
        assert "held-out text, phase2 step 30" in write_tiles(each)
        for curve in chart_of(write_scores_card(each))["curves"]:
            assert curve["x"]["steps"] == sorted(curve["x"]["steps"])


def test_bits_of_a_part_of_the_windows_are_another_curve(folder, tmp_path):
    run = run_with(folder, tmp_path / "run", {**records(folder, "bits_per_byte")[-1], "limit": 8})
    lengths = {each["name"]: len(each["y"]) for each in chart_of(write_bits_card(run))["curves"]}
    assert lengths["all sources"] == lengths["web"] == 6
    assert lengths["all sources limit-8"] == lengths["web limit-8"] == 1


def test_one_record_without_tokens_costs_no_axis(folder, tmp_path):
    last = records(folder, "core")[-1]
    unplaced = {**last, "step": 7, "tokens_total": None, "phase": "elsewhere", "time": None}
    chart = chart_of(write_core_card(run_with(folder, tmp_path / "run", unplaced)))
    assert chart["axes"] == ["steps", "tokens", "time"], "first one with a place for all"


def test_contamination_counts_what_was_touched_and_says_so_where_nothing_was_searched(folder):
    run = read_run(folder)
    assert "<td>12</td><td>7.32 %</td><td>431</td>" in evaluations.write_contamination_card(run)
    for record in run.evals_of("contamination"):
        record["benchmarks"] = {}
    text = evaluations.write_contamination_card(run)
    assert "The data were not searched for evaluation items." in text
    # no empty table
    assert "<table" not in text
