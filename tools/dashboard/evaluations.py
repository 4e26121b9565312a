"""Write the evaluation cards: CORE and its tasks, bits per byte, code and questions, contamination."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

from evals.core.tasks import NOT_CHOSEN
from evals.intervals import Z95
from records.evals import settings_words
from records.run import Record, Run, number
from tools.dashboard.charts import (
    LOSS,
    RATE,
    Interval,
    Json,
    Panel,
    curve,
    dig,
    figure,
    list_items,
    list_sources,
    make_loss_part,
    make_rows_part,
    select_points,
    series,
)
from tools.dashboard.page import (
    DASHES,
    Tile,
    card,
    chart,
    colour,
    dash,
    fold,
    format_figure,
    missing,
    none,
    percent,
    short,
    table,
    write_chart_card,
)

# of CORE, apart from the colours of phases and sources
TINT, NEUTRAL = "#8667f7", "#8a94a6"
# CORE of other models: v1 and v2 of the baselines (DCLM corrected three in September 2025)
PUBLISHED = (
    # nanochat's leaderboard
    ("GPT-2 124M", 0.113891, None),
    ("GPT-2 XL", 0.256525, None),
    # DCLM's result files
    ("DCLM 1B", 0.42330, 0.40537),
    ("DCLM-7B", 0.57136, 0.55961),
)


def name_checkpoint(record: Json) -> str:
    step = number(record["step"])
    parts = [str(record["phase"] or ""), "" if step is None else f"step {step:,.0f}"]
    return " ".join(filter(None, parts)) or "checkpoint not recorded"


def around(value: Any, error: Any) -> Interval | None:
    """Return the 95 % interval of a mean with a standard error."""
    middle, spread = number(value), number(error)
    return (
        None if middle is None or spread is None else (middle - Z95 * spread, middle + Z95 * spread)
    )


def read_interval(ends: Any) -> Interval | None:
    """Read an interval as a record holds it: [low, high]."""
    is_pair = isinstance(ends, list) and len(ends) == 2 and None not in map(number, ends)
    return (ends[0], ends[1]) if is_pair else None


def group_records(run: Run, kind: str) -> dict[str, list[Record]]:
    """Return the records of a kind by settings, the newest of each checkpoint."""
    groups: dict[str, dict[str, Record]] = {}
    for record in run.evals_of(kind):
        settings = ", ".join(settings_words(record))
        groups.setdefault(settings, {})[name_checkpoint(record)] = record
    return {settings: list(records.values()) for settings, records in groups.items()}


def make_core_tile(run: Run) -> Tile:
    last = [(Record(), None), *select_points(run.evals_of("core"), "core_v2")][-1][0]
    note = f"± {format_figure(last['core_v2_se'], '.4f')}, v2; {escape(name_checkpoint(last))}"
    return "CORE", format_figure(last["core_v2"], ".4f"), note


def write_core_card(run: Run) -> str:
    """Write CORE above loss and learning rate, and the newest one among published values."""
    curves, rows = list[Json](), list[tuple[float, list[str]]]()
    for index, (settings, records) in enumerate(group_records(run, "core").items()):
        if points := select_points(records, "core_v2"):
            ends = [around(value, record["core_v2_se"]) for record, value in points]
            look: Json = {"symbol": "circle", "dash": DASHES[index % len(DASHES)]}
            curves.append(curve(settings, points, TINT, ends, **look))
            last = points[-1][0]
            where = f"<b>{escape(name_checkpoint(last))}</b> <small>{escape(settings)}</small>"
            scores = [(last[key], last[f"{key}_se"]) for key in ("core_v1", "core_v2")]
            cells = [
                f"{format_figure(score, '.4f')} ± {format_figure(error, '.4f')}"
                for score, error in scores
            ]
            rows.append((number(last["core_v1"]) or 0.0, [where, *cells]))
    if not curves:
        return ""
    for name, v1, v2 in PUBLISHED:
        rows.append(
            (v1, [escape(name), f"{v1:.4f}", none("not given") if v2 is None else f"{v2:.4f}"])
        )
    top = max(value for line in curves for value in line["y"])
    # a level far above would flatten the curve
    levels = [
        {"panel": 0, "y": v2, "label": f"{name} {v2:.4f}"}
        for name, _, v2 in PUBLISHED
        if v2 and v2 < 1.4 * top
    ]
    panel = Panel(
        "CORE", "v2, mean centered accuracy of 22 tasks; bars: 95 %", height=300, form=".4f"
    )
    loss = make_loss_part(run, LOSS._replace(height=130), logged=False)
    content = figure([(panel, curves), loss, make_rows_part(run, RATE)], run, levels=levels)
    assert content is not None, "there is a curve"
    head = ("± standard error", "CORE v1", "CORE v2")
    listed = table(head, [cells for _, cells in sorted(rows)], "numbers wrap")
    return card("CORE along the run", chart(content, f"core-{run.name}") + listed)


def write_tasks_card(run: Run) -> str:
    """Write the tasks of CORE over the checkpoints, and the newest record in full."""
    groups = [
        [record for record in records if isinstance(record["tasks"], dict)]
        for records in group_records(run, "core").values()
    ]
    # the settings of the newest record
    records = max(
        filter(None, reversed(groups)), key=lambda each: each[-1]["x_step"] or 0, default=[]
    )
    if not any(record["tasks"] for record in records):
        return ""
    last = records[-1]
    parts, levels = list[tuple[Panel, list[Json]]](), list[Json]()
    for task in dict.fromkeys(name for record in records for name in record["tasks"]):
        if points := select_points(records, "tasks", task, "accuracy"):
            if baseline := number(dig(last, "tasks", task, "baseline_v2")):
                levels.append({"panel": len(parts), "y": baseline / 100, "label": ""})
            ends = [read_task_interval(record["tasks"][task]) for record, _ in points]
            panel = Panel(task.replace("bigbench_", "bb_"), height=96, form=".3f", zero=False)
            parts.append((panel, [curve("accuracy", points, TINT, ends, symbol="circle")]))
    # one point makes no curve: the table says it
    content = figure(parts, columns=4, levels=levels) if len(records) > 1 else None
    body = chart(content, f"tasks-{run.name}") if content else ""
    title = "Tasks of a toy bundle, not CORE" if last["not_core"] else "CORE by task"
    caption = (
        f"{escape(', '.join([name_checkpoint(last), *settings_words(last)]))}, seed {escape(str(last['seed']))}. "
        "Accuracy with its interval of 95 %; dashed: guessing. Centered: 0 at guessing, 1 if all is right."
    )
    return card(title, body + write_task_table(last) + write_missing(last), caption)


def read_task_interval(task: Json) -> Interval | None:
    return read_interval(task.get("interval")) or around(
        task.get("accuracy"), task.get("standard_error")
    )


def write_task_table(record: Record) -> str:
    rows = []
    for name, task in record["tasks"].items():
        if isinstance(task, dict):
            ends = read_task_interval(task)
            accuracy = format_figure(task.get("accuracy"), ".3f")
            accuracy += f" <small>{ends[0]:.3f} – {ends[1]:.3f}</small>" if ends else ""
            items = f"{short(task.get('n'))} of {short(task.get('n_total'))}"
            name = f"{escape(name)} <small>{short(task.get('shots'))}-shot</small>"
            guessing = format_figure(task.get("baseline_v2"), "g", " %")
            others = [
                format_figure(task.get(key), ".3f") for key in ("centered_v2", "gold_bits_per_byte")
            ]
            rows.append([name, items, accuracy, guessing, *others])
    head = ("task", "items", "accuracy", "guessing", "centered", "gold bits per byte")
    return fold("The newest record in full", table(head, rows, "numbers wrap")) if rows else ""


def write_missing(record: Record) -> str:
    """Write the tasks that a record lacks, with their reasons."""
    # what nobody chose is no gap
    absent = {task: why for task, why in list_items(record["missing"]) if why != NOT_CHOSEN}
    if not absent or record["not_core"]:
        return ""
    reasons = escape("".join(f"{task}: {why}\n" for task, why in absent.items()))
    return fold(
        f"{missing(f'{len(absent)} tasks missing')}, hence no CORE", f"<pre>{reasons}</pre>"
    )


def write_bits_card(run: Run) -> str:
    """Bits per byte of held-out text by source."""
    curves = list[Json]()
    for settings, records in group_records(run, "bits_per_byte").items():
        points = {
            f"{name} {settings}".rstrip(): select_points(records, "sources", name, "bits_per_byte")
            for name in list_sources(run)
        }
        whole = select_points(records, "bits_per_byte")
        curves += series(points, symbol="circle")
        curves.append(curve(f"all sources {settings}".rstrip(), whole, NEUTRAL, symbol="circle"))
    of_text = Panel(
        "Bits per byte", "held-out text, lower is better", "", 260, ".4f", zero=False, log=True
    )
    content = figure([(of_text, curves)])
    return write_chart_card("Bits per byte", content, f"bits-{run.name}")


class Score(NamedTuple):
    """A score of a checkpoint, its panel, and how it was measured."""

    panel: str
    name: str
    settings: str
    record: Record
    value: float | None
    ends: Interval | None


def list_scores(run: Run) -> Iterator[Score]:
    """List the scores of code and of lm-eval's tasks in the order of the run."""
    for record in run.evals_of("code"):
        how, value = ", ".join(settings_words(record)), number(record["pass@1_plus"])
        yield Score(
            "Code", "pass@1", how, record, value, read_interval(record["pass@1_plus_interval"])
        )
    for record in run.evals_of("lm_eval"):
        for task, metrics in list_items(record["tasks"]):
            values = {name.removesuffix(",none"): number(v) for name, v in list_items(metrics)}
            preferred = [name for name in ("acc_norm", "acc") if values.get(name) is not None][:1]
            for name in preferred or [name for name in values if not name.endswith("_stderr")]:
                how = ", ".join([name, *settings_words(record)])
                ends = around(values[name], values.get(f"{name}_stderr"))
                yield Score("Questions", task, how, record, values[name], ends)


def write_scores_card(run: Run) -> str:
    """Write code and lm-eval's tasks: curves over checkpoints, and the newest values."""
    groups: dict[str, dict[tuple[str, str], list[Score]]] = {"Code": {}, "Questions": {}}
    for score in list_scores(run):
        if score.value is not None:
            groups[score.panel].setdefault((score.name, score.settings), []).append(score)
    rows, parts = [], []
    units = {"Code": "pass@1, base and plus tests", "Questions": "share right"}
    for title, scores_by_name in groups.items():
        curves = []
        for index, ((name, settings), scores) in enumerate(scores_by_name.items()):
            points = [(score.record, score.value) for score in scores]
            look: Json = {"symbol": "circle", "dash": dash(index)}
            ends, last = [score.ends for score in scores], scores[-1]
            curves.append(curve(f"{name} {settings}", points, colour(index), ends, **look))
            half = f" ± {50 * (last.ends[1] - last.ends[0]):.1f}" if last.ends else ""
            where = escape(name_checkpoint(last.record))
            rows.append([escape(name), escape(settings), percent(last.value) + half, where])
        if any(len(line["y"]) > 1 for line in curves):
            parts.append((Panel(title, units[title], "", 200, ".1%"), curves))
    if not rows:
        return ""
    content = figure(parts)
    body = chart(content, f"scores-{run.name}") if content else ""
    head = ("score", "how", "±: 95 %", "checkpoint")
    return card("Code and questions", body + table(head, rows, "wrap"))


def write_contamination_card(run: Run) -> str:
    """Write what the training text held of evaluation sets before documents were dropped."""
    rows, records = dict[tuple[str, str], list[str]](), run.evals_of("contamination")
    for record in records:
        phase = str(record["phase"] or "")
        for name, counts in list_items(record["benchmarks"]):
            items, touched = number(dig(counts, "items")), number(dig(counts, "touched"))
            share = percent(touched / items if items and touched is not None else None, ".2f")
            figures = [short(items), short(touched), share, short(dig(counts, "documents_dropped"))]
            rows[name, phase] = [escape(name), escape(phase), *figures]
    if not records:
        return ""
    if not rows:
        return card("Contamination", "<p>The data were not searched for evaluation items.</p>")
    head = ("evaluation set", "phase", "items", "touched, at most", "share", "documents dropped")
    caption = "Items of which the training text held at least half of the 13-grams; the documents were left out."
    return card("Contamination", table(head, rows.values(), "wrap"), caption)
