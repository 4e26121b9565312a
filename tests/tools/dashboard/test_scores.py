"""The dashboard's scores: every figure of the records is on the page, and what is missing is red
and has no CORE.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from evals.core.evaluate import task_figures
from evals.core.tasks import NOT_CHOSEN, TASKS
from laneformer.config import LaneformerConfig
from laneformer.flops import flops_per_token
from records.page import colour
from records.run import Record, as_record, read_run
from tests.tools.dashboard import made_up_run
from tools.dashboard.__main__ import FIGURE, PARTS, write_page
from tools.dashboard.cards import tiles_of
from tools.dashboard.comparison import side_by_side
from tools.dashboard.core import (
    along_figure,
    core_curves,
    core_figure,
    draw_references,
    points_of,
    reference_table,
)
from tools.dashboard.figures import curve
from tools.dashboard.listings import contamination_card, evaluations_card
from tools.dashboard.references import CORE_REFERENCES, RULER
from tools.dashboard.rows import prepare
from tools.dashboard.ruler import depth_map, ruler_series, ruler_table
from tools.dashboard.scores import (
    code_series,
    lm_eval_series,
    scores_card,
)
from tools.dashboard.tasks import heat_figure, missing_part, task_table, tasks_card

NOW = 1.79e9 + 3600


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_up_run.write_run(tmp_path_factory.mktemp("runs") / "whole", steps=60, every=1)


@pytest.fixture(scope="module")
def gappy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "gappy"
    return made_up_run.write_run(folder, steps=60, every=1, missing=("squad", "coqa"))


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [
        r for r in map(json.loads, (folder / "evals.jsonl").read_text().splitlines()) if r["kind"] == kind
    ]


def append(folder: Path, *lines: dict[str, Any]) -> None:
    with open(folder / "evals.jsonl", "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def cards_of(folder: Path) -> str:
    """Every card of a run."""
    run = read_run(folder)
    prepare(run)
    return "".join(write(run) for write in PARTS.values())


def test_core_and_its_errors_over_tokens_steps_and_flops(whole: Path) -> None:
    run = read_run(whole)
    figure = core_figure(core_curves([run]))
    written = records(whole, "core")
    (v2,) = figure.data
    assert list(v2.y) == [r["core_v2"] for r in written]
    assert list(v2.error_y.array) == [r["core_v2_se"] for r in written]
    x = {"tokens": v2.x} | {axis: place["x"] for axis, place in v2.meta["x"].items()}
    assert list(figure.layout.meta["x"]) == ["tokens", "steps", "FLOPs"]
    assert list(x["tokens"]) == [r["tokens_total"] for r in written]
    assert x["steps"] == [r["tokens_total"] / made_up_run.TOKENS_A_STEP for r in written], "phase 2 goes on"
    flops = flops_per_token(LaneformerConfig.from_dict(made_up_run.MODEL), 4096)
    assert x["FLOPs"] == [r["tokens_total"] * flops for r in written]


def test_only_references_of_the_drawn_version_are_lines_and_none_flattens_the_curve(whole: Path) -> None:
    assert not core_figure(core_curves([read_run(whole)])).layout.annotations, "0.41 is far above 0.27"
    higher = go.Figure(
        [curve([({"x_step": i}, y) for i, y in enumerate((0.3, 0.55))], "red", error_y_array=[0, 0])]
    )
    draw_references(higher)
    drawn = {
        note.text: shape.y0
        for note, shape in zip(higher.layout.annotations, higher.layout.shapes, strict=True)
    }
    assert drawn == {f"{r.name} {r.value:.4f}": r.value for r in CORE_REFERENCES if r.version == "v2"}
    assert higher.layout.yaxis.range is None, "plotly's own range holds curves, bars and lines"


def test_the_newest_core_stands_among_the_published_ones_by_version(whole: Path) -> None:
    run = read_run(whole)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(
        r"<tr>(<td>.*?)</tr>", reference_table(core_curves([run])))]  # fmt: skip
    for each in CORE_REFERENCES:
        (row,) = [row for row in rows if row[0] == each.name]
        assert row[("v1", "v2").index(each.version) + 1] == f"{each.value:.4f}"
    last = records(whole, "core")[-1]
    (ours,) = [row for row in rows if row[0].startswith("<b>phase2")]
    for cell, version in zip(ours[1:], ("v1", "v2"), strict=True):
        assert f"{last[f'core_{version}']:.4f}</b> ± {last[f'core_{version}_se']:.4f}" in cell
    values = [float(re.findall(r"\d\.\d{4}", row[1])[0]) for row in rows]
    assert values == sorted(values), "ascending in v1"
    assert sum("not given" in row[2] for row in rows) == 4, "GPT-2 has no v2"


def test_missing_tasks_are_one_line_and_there_is_no_core(gappy: Path, tmp_path: Path) -> None:
    run = read_run(gappy)
    text = tasks_card(run)
    assert 'id="core-gappy"' not in cards_of(gappy), "no aggregate, no figure of it"
    assert text.count("2 of 22 tasks missing") == 1
    assert "hence no CORE: squad, coqa<" in text
    assert "eval_data/squad.jsonl is missing" in text
    assert ">squad<" not in text, "no row of its own"
    assert '<span class="missing">N/A</span>: reading<' in text
    assert (
        '<h3>CORE</h3><strong><span class="none">not measured</span></strong><small>20 of its 22'
        in tiles_of(run)
    )
    heat = heat_figure(points_of(run, "core")).to_dict()["data"][0]
    assert {*heat["y"]} == {*made_up_run.CORE_TASKS} - {"squad", "coqa"}
    assert all(v is not None for row in heat["z"] for v in row)


def test_a_task_that_one_checkpoint_lacks_is_a_gap_there(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    last = records(whole, "core")[-1]
    tasks = {task: found for task, found in last["tasks"].items() if task != "squad"}
    append(
        tmp_path / "run", {**last, "step": last["step"] + 1, "tasks": tasks, "missing": {"squad": "no file"}}
    )
    heat = heat_figure(points_of(read_run(tmp_path / "run"), "core")).to_dict()["data"][0]
    gaps = [
        (task, i)
        for task, row in zip(heat["y"], heat["z"], strict=True)
        for i, v in enumerate(row)
        if v is None
    ]
    assert gaps == [("squad", 6)]
    assert {"%{y}", "%{customdata}", "%{z:.4f}"} <= {*re.findall(r"%\{.*?\}", heat["hovertemplate"])}
    assert len(heat["customdata"][0]) == 7, "the checkpoint"


def test_tasks_code_arc_ruler_and_contamination_beside_published_values(whole: Path) -> None:
    text = cards_of(whole)
    assert "<details><summary>Accuracy of each task, nanochat, 500 items a task</summary>" in text, "folded"
    for task, found in records(whole, "core")[-1]["tasks"].items():
        assert f">{task}<" in text
        for key in ("accuracy", "centered_v1", "centered_v2"):
            assert f"{found[key]:.4f}" in text, (task, key)
    for told in (
        "43.9 %", "<small>± 7.5</small>", "45.1 %", "50.7 %", "asked otherwise",  # code, ours and published
        "10: 75.1 % / 68.8 %", "164 × 1", "378 × 10", "greedy, chat <small>3 answers cut</small>",
        "162 / 164 <small>known to fail: HumanEval/32</small>",
        '<small class="missing">fail here: HumanEval/83</small>',
    ):  # fmt: skip
        assert told in text, told
    for told in ("30.3 % <small>± 2.6</small>", "31.1 %", "47.9 %", "shots 0"):  # ARC
        assert told in text, told
    ruler = text[text.index("<h3>RULER") : text.index("Code: settings")]
    rows = re.findall(r"<tr><td>(\w+)</td>(.*?)</tr>", ruler)
    assert [task for task, _ in rows] == list(made_up_run.RULER)
    for task, cells in rows:
        published = [f"{100 * RULER[length][task]:.1f} %" for length in RULER]
        assert re.findall(r"<td>(.*?)</td>", cells)[1::2] == published
    assert len(re.findall(r"<td>\d+\.\d %", ruler)) == 21 + 22, "ours, and all that are published"
    assert len(re.findall(r" % <small>± \d+\.\d</small></td>", ruler)) == 21, "ours, of 50 documents"
    assert ruler.count('<span class="missing">missing</span>') == 1, "ruler_fwe at 4,096"
    assert ruler.count('<b class="missing">N/A</b>') == 1, "and so no mean of 4,096"
    assert "<b>87.3 %</b>" in ruler, "the mean of what is published at 2,048"
    assert "<td>12</td><td>7.32 %</td><td>431</td>" in text
    assert "4,096 tokens" in ruler
    assert "offline haystack" in ruler
    assert "limit 50" in ruler
    assert "ruler_vt" not in text[text.index("<h3>Questions") : text.index("<h3>Long context")]


def test_published_ruler_scores_are_those_of_the_model_card() -> None:
    assert sum(map(len, RULER.values())) == 22
    assert (RULER["2048"]["ruler_vt"], RULER["4096"]["ruler_vt"]) == (0.7792, 0.0392)
    assert (RULER["2048"]["niah_multikey_2"], RULER["4096"]["niah_multikey_2"]) == (0.978, 0.6)
    assert sum(RULER["2048"].values()) == pytest.approx(9.6004)
    assert sum(RULER["4096"].values()) == pytest.approx(8.2489)


def test_scores_are_curves_over_checkpoints_beside_the_published_value(tmp_path: Path) -> None:
    folder = made_up_run.write_run(tmp_path / "scored", steps=60, every=1, checkpoints=12, every_score=3)
    run = read_run(folder)
    (humaneval, mbpp), (easy, challenge), (short, long) = (
        code_series(run),
        lm_eval_series(run),
        ruler_series(run),
    )
    plus = [r["pass@1_plus"] for r in records(folder, "code") if r["dataset"] == "humaneval+"]
    assert [y for _, y in humaneval.points] == plus
    assert len(plus) == 4
    assert (humaneval.published, mbpp.published, easy.published, challenge.published) == (
        0.451,
        None,  # sampled: the published answers were greedy
        0.479,
        0.3106,
    )
    means = [sum(r["ruler"]["2048"].values()) / 11 for r in records(folder, "lm_eval") if r["ruler"]]
    assert [y for _, y in short.points] == pytest.approx(means)
    assert len(long.points) == 3, "the last one lacks a task"
    (last,) = [r for r in run.evals_of("code") if r["protocol"] == "sampled"][-1:]
    run.evals += [Record(last, temperature=0.2)]
    _, at_08, at_02 = code_series(run)
    assert (at_08.name, len(at_08.points)) == (mbpp.name, len(mbpp.points)), (
        "another temperature is another curve"
    )
    assert (at_02.name, len(at_02.points)) == ("MBPP+, sampled at 0.2", 1)
    assert scores_card(run).count("</script>") == 4, "a figure each, and the map of depths"


def test_core_stands_above_loss_and_learning_rate_with_the_phases(whole: Path) -> None:
    run = read_run(whole)
    prepare(run)
    figure = along_figure(run, core_curves([run]))
    of_axis = {axis: [t for t in figure.data if (t.yaxis or "y") == axis] for axis in ("y", "y2", "y3")}
    assert list(of_axis["y"][0].y) == [r["core_v2"] for r in records(whole, "core")]
    last = run.kept_rows[-1]
    assert any(last["lr"] == pytest.approx(t.y[-1], rel=1e-5) for t in of_axis["y3"])
    assert any(last["smooth_loss"] == pytest.approx(t.y[-1], rel=1e-5) for t in of_axis["y2"])
    phases = [(s.x0, s.x1) for s in figure.layout.shapes if s.type == "rect"]
    ends = [[row["x_tokens"] for row in run.kept_rows if row["phase"] == phase] for phase in run.phases]
    assert phases == [(min(xs), max(xs)) for xs in ends]


def test_records_say_results_and_by_what_and_not_settings(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    arc = next(r for r in records(whole, "lm_eval") if "arc_easy" in r["tasks"])
    append(
        tmp_path / "run",
        {**arc, "model_sha256": "5a" * 32, "device": "cuda:0", "backend": "transformers bf16"},
    )
    text = evaluations_card(read_run(tmp_path / "run"))
    assert text.index("<details><summary>") < text.index("<table"), "folded"
    for told in ("arc_easy acc_norm 47.1%", "transformers bf16, cuda:0", "5a5a5a5a5a5a…", "pass@1 43.9%"):
        assert told in text, told
    for told in ("max_length", "cut_prompts", "top_p"):
        assert told not in text, told


def test_needles_stand_by_length_and_depth(whole: Path) -> None:
    """Every cell counts the needles of the record, of all tasks or of one."""
    counted = next(r for r in reversed(records(whole, "lm_eval")) if r["ruler"])["ruler_counts"]
    text = scores_card(read_run(whole))
    (drawn,) = [json.loads(figure) for name, figure in FIGURE.findall(text) if name.startswith("depths-")]
    (trace,) = drawn["data"]
    assert trace["x"] == ["2,048", "4,096"]
    assert (trace["y"][0], trace["y"][-1]) == ("0 – 10 %", "90 – 100 %")
    for task, cells in trace["meta"]["task"].items():
        for column, length in enumerate(counted):
            depths = counted[length]["depths"]
            parts = [depths[name] for name in (depths if task == "all" else [f"niah_{task}"])]
            for row in range(10):
                found, asked = (sum(part[row][i] for part in parts) for i in (0, 1))
                assert cells["text"][row][column] == f"{found}/{asked}", (task, length, row)
                assert cells["z"][row][column] == found / asked
    assert drawn["layout"]["meta"]["task"].keys() == trace["meta"]["task"].keys()
    assert len(trace["meta"]["task"]) == 1 + len(counted["2048"]["depths"])
    assert depth_map({"2048": {"a": [[1, 2]]}, "4096": {}}, ["a"]) == {
        "z": [[0.5, None]],
        "text": [["1/2", ""]],
    }


def test_ruler_of_two_checkpoints_is_never_in_one_column(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "run")
    old = next(r for r in records(whole, "lm_eval") if r["ruler"])
    later = {**old, "step": old["step"] + 1, "ruler": {"2048": {"ruler_vt": 0.123}}}
    append(tmp_path / "run", later, {**later, "ruler": {"2048": {"ruler_cwe": 0.234}}})
    text = ruler_table(read_run(tmp_path / "run"))
    ours = [
        re.findall(r"<td>(.*?)</td>", row)[::2] for row in re.findall(r"<tr><td>\w+</td>(.*?)</tr>", text)
    ]
    shown = [cell.split(" <")[0] for row in ours for cell in row if " % <small>" in cell]
    assert {"12.3 %", "23.4 %"} < set(shown)
    assert len(shown) == 2 + 10, "two of the newest checkpoint, ten at 4,096 of the one before"
    assert text.count('<b class="missing">N/A</b>') == 2
    assert f"step {later['step']:,}" in text
    assert f"step {old['step']:,}" in text
    other = {**later, "haystack": "upstream", "ruler": {"2048": {"ruler_fwe": 0.345}}}
    append(tmp_path / "run", other)
    assert "12.3 %" not in ruler_table(read_run(tmp_path / "run")), "other documents"


def test_protocols_are_never_on_one_curve_and_a_repeated_checkpoint_counts_once(
    whole: Path, tmp_path: Path
) -> None:
    folder = made_up_run.write_run(tmp_path / "two", steps=60, every=1)
    last = records(folder, "core")[-1]
    append(folder, {**last, "protocol": "dclm", "core_v1": 0.5}, {**last, "core_v1": 0.125})
    curves = core_curves([read_run(folder)])
    assert [(c.name, len(c.points)) for c in curves] == [
        ("nanochat, 500 items a task", 6),
        ("dclm, 500 items a task", 1),
    ]
    assert curves[0].last["core_v1"] == 0.125


def test_a_toy_bundle_shows_its_tasks_and_one_line_about_the_rest(whole: Path, tmp_path: Path) -> None:
    folder = made_up_run.write_run(tmp_path / "toy", steps=60, every=1, missing=("squad",))
    assert "not CORE" not in tasks_card(read_run(folder))
    append(folder, {**records(folder, "core")[-1], "not_core": "not CORE: <i>a toy"})
    text = tasks_card(read_run(folder))
    assert "<h2>Tasks of a toy bundle, not CORE</h2><p>not CORE: &lt;i&gt;a toy</p>" in text
    assert text.count("The other 1 tasks of CORE are not in this bundle.") == 1
    assert 'class="missing"' not in text
    assert "squad" not in text
    assert "heat-toy" not in text, "one checkpoint"
    assert "arc_easy" in text
    assert [len(c.points) for c in core_curves([read_run(folder)])] == [6, 1], "never on the curve of CORE"
    assert "21 of its 22 tasks evaluated" in (tiles := tiles_of(read_run(folder)))
    assert "74 % of the read bandwidth" in tiles
    append(folder, {**records(folder, "decode_speed")[-1], "percent_of_probe": 162.0})
    assert "at batch 1, from weights in the caches" in tiles_of(read_run(folder))


def test_an_old_record_has_a_standard_error_and_a_new_one_an_interval_and_few_items_are_noisy() -> None:
    old = {"accuracy": 0.0, "standard_error": 0.0, "n": 4, "n_total": 4}
    assert "0.0000 ± 0.0000 <small>noisy</small>" in task_table(as_record({"tasks": {"winograd": old}}))
    assert "noisy" not in task_table(as_record({"tasks": {"winograd": {**old, "accuracy": 0.5, "n": 500}}}))
    winograd = next(task for task in TASKS if task.label == "winograd")
    wrong = {"group": "", "right": False, "bytes": 10, "nats": 20 * math.log(2)}
    new = task_figures(winograd, [wrong] * 4, 4)  # as the evaluation writes it
    text = task_table(as_record({"tasks": {"winograd": new}}))
    assert "0.0000 (0.000 – 0.490) <small>noisy</small>" in text
    assert "<td>2.000</td>" in text, "the gold answer's bits per byte"


def test_tasks_that_were_not_chosen_are_not_missing() -> None:
    assert missing_part(Record(tasks={}, missing={"copa": NOT_CHOSEN, "piqa": NOT_CHOSEN})) == (
        '<p class="caption">2 tasks were not chosen.</p>'
    )
    text = missing_part(Record(tasks={}, missing={"copa": NOT_CHOSEN, "squad": "no file"}))
    assert "1 of 2 tasks missing</span>, hence no CORE: squad<" in text


@pytest.mark.job
def test_several_runs_are_compared(whole: Path, gappy: Path, tmp_path: Path) -> None:
    write_page([gappy, whole], tmp_path / "x.html", now=NOW)
    text = (tmp_path / "x.html").read_text()
    head = text[text.index("CORE of all runs") : text.index("<article>")]
    (figure,) = re.findall(r'id="core-comparison"></div><script type="application/json">(.*?)</script>', head)
    assert [(t["line"]["color"], t["legendgroup"]) for t in json.loads(figure)["data"]] == [
        (colour(1), "whole: nanochat, 500 items a task")
    ], "the colour that the run has in the figure of losses, though it is the only one with a CORE"
    assert '<b class="missing">N/A</b>' in head
    assert len(re.findall(r'id="(core-[a-z0-9]+)"', text)) == 2, "the comparison, and the run that has a CORE"
    ids = re.findall(r'<div id="([^"]+)"></div><script', text)
    assert len(ids) == len(set(ids)), ids


def test_records_of_nobody_knows_what_do_not_break_the_page(tmp_path: Path) -> None:
    folder = made_up_run.write_run(tmp_path / "odd", steps=60, every=1)
    append(
        folder, {"kind": "core"}, {"kind": "core", "tasks": {"x": {"accuracy": None}}}, {"kind": "code"},
        {"kind": "lm_eval"}, {"kind": "lm_eval", "ruler": {"2048": {"ruler_vt": -1}}}, {"kind": "contamination"},
        {"kind": "core", "tasks": {}, "missing": {"<i>squad": "<b>why"}, "step": 3},
    )  # fmt: skip
    text = cards_of(folder)
    assert "<i>squad" not in text
    assert "<b>why" not in text


def test_what_was_asked_otherwise_stands_beside_no_published_value(whole: Path) -> None:
    run = read_run(whole)
    asked = [dict(record, chat_template=not record["chat_template"]) for record in run.evals_of("lm_eval")]
    run.evals = [Record(record) for record in (*asked, *run.evals_of("code"))]
    for record in run.evals_of("code"):
        record["prompt"] = "completion"
    every = [*code_series(run), *lm_eval_series(run), *ruler_series(run)]
    assert len(every) >= 5
    assert all(each.published is None for each in every)
    assert "published" not in ruler_table(run)


def test_gold_bits_are_curves_of_every_task_and_empty_contamination_is_a_sentence(whole: Path) -> None:
    run = read_run(whole)
    assert 'id="gold-whole"' in tasks_card(run)
    for record in run.evals_of("contamination"):
        for found in record["benchmarks"].values():
            found["touched"] = 0
    text = contamination_card(run)
    assert "<p>No item of gsm8k, humaneval was found in the training text.</p>" in text
    assert "<table" not in text


def test_runs_side_by_side_show_the_settings_that_differ(whole: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(whole, other)
    config = other / "phase2" / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.0002", "lr = 0.0003"))
    runs = [read_run(whole), read_run(other)]
    for run in runs:
        prepare(run)
    text = side_by_side(runs)
    assert "1 settings differ" in text
    assert "<td>phase2 optimizer.lr</td>" in text
    assert text.count("HumanEval+ pass@1") == 1
    assert "All settings on record are equal" in side_by_side(runs[:1] * 2)
