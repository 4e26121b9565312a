"""The cards of what a model can do: code, questions, long context, contamination, samples, and all records.

A missing score is red, and then there is no mean: the mean of the others would be another number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from evals.lm_eval.tasks import RULER_TASKS
from records.page import (
    card,
    chart,
    code,
    colour,
    legend_entry,
    measured,
    missing,
    none,
    percent,
    short,
    table,
    utc,
)
from records.run import Run, number
from tools.dashboard.core import Point, newest, points_of, where_evaluated
from tools.dashboard.figures import Points, curve, lines_figure, span
from tools.dashboard.references import CODE, LM_EVAL, MODEL, RULER, RULER_LENGTHS

SAMPLES = 8  # checkpoints of a prompt that are shown
LISTED = 40  # more evaluations than this are counted, not listed
# in the list of evaluations: how each was made, and by what
HOW = {"dataset": "", "protocol": "", "seed": "seed ", "max_per_task": "at most ", "num_fewshot": "shots ",
       "limit": "limit ", "haystack": "haystack "}  # fmt: skip
BY = ("scorer", "backend", "device", "dtype")
NAMES = {
    "humaneval+": "HumanEval+",
    "mbpp+": "MBPP+",
    "arc_challenge": "ARC-Challenge",
    "arc_easy": "ARC-Easy",
}


class Series(NamedTuple):
    """One score over checkpoints, all asked in the same way; published: the same score
    of the published model.
    """

    name: str
    points: Points
    published: float | None


def scores_card(run: Run) -> str:
    """Code, lm-eval's tasks and RULER: curves over checkpoints and the newest values,
    beside the published model's.
    """
    groups = {"Code": ("pass@1", code_series(run)), "Questions": ("acc_norm", lm_eval_series(run)),
              "Long context": ("RULER, mean of its tasks", ruler_series(run))}  # fmt: skip
    panels = "".join(
        f"<div><h3>{title} <small>{unit}</small></h3>{panel(series, f'{title.split()[0].lower()}-{run.name}')}</div>"
        for title, (unit, series) in groups.items() if series
    )  # fmt: skip
    tables = {"Code: settings and control": code_table(run), "Questions: settings": lm_eval_table(run)}
    details = "".join(
        f"<details><summary>{title}</summary>{body}</details>" for title, body in tables.items() if body
    )
    body = (f'<div class="triple">{panels}</div>' if panels else "") + ruler_table(run) + details
    caption = f"The mark in a bar, the grey figure beside it and the dotted line are what {MODEL}'s authors published "
    caption += "of their instruction-tuned model, asked greedily."
    return card(f"Beside {MODEL}", body, caption) if body else ""


def panel(series: Sequence[Series], name: str) -> str:
    """Bars of the newest values, and curves where there are several checkpoints."""
    entries, curves, values = [], [], list[float]()
    for index, (label, points, published) in enumerate(series):
        tint, last = colour(index), points[-1][1]
        mark = "" if published is None else f'<u style="left:{100 * published:.1f}%"></u>'
        beside = "" if published is None else f"<small>{percent(published)}</small>"
        bar = (
            f'<span class="bar"><i style="width:{100 * (last or 0):.1f}%;background:{tint}"></i>{mark}</span>'
        )
        entries.append(
            f'<span class="bullet">{legend_entry(label, tint)}{bar}<b>{percent(last)}</b>{beside}</span>'
        )
        curves.append(curve(points, tint, marks="circle", name=label, legendgroup=label))
        values += [y for y in (*(y for _, y in points), published) if y is not None]
    if all(len(points) < 2 for _, points, _ in series):
        return f'<p class="chips">{"".join(entries)}</p>'
    figure = lines_figure(
        curves, 230, range=span(values), tickformat=".0%", hoverformat=".1%", fixedrange=True
    )
    for index, each in enumerate(series):
        if each.published is not None:
            figure.add_hline(each.published, line={"color": colour(index), "width": 1.4, "dash": "dot"})
    figure.update_layout(meta=None, xaxis_nticks=5)
    return chart(figure, name, entries)


def code_series(run: Run) -> list[Series]:
    """pass@1 on the extended tests, by set and way of asking."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for point in points_of(run, "code"):
        if (value := number(point.get("pass@1_plus"))) is not None:
            key = tuple(
                str(point.get(name)) for name in ("dataset", "version", "protocol", "prompt", "temperature")
            )
            found.setdefault(key, []).append((point, value))
    return [
        Series(NAMES.get(key[0], key[0]) + (f", {key[2]} at {key[4]}" if key[2] != "greedy" else ""), points,
               CODE.get((key[0], key[1])))
        for key, points in found.items()
    ]  # fmt: skip


def lm_eval_series(run: Run) -> list[Series]:
    """Each of lm-eval's tasks but RULER's, in the metric of the published value, else acc_norm
    or the first one.
    """
    found: dict[tuple[str, str, str], list[Any]] = {}
    for point in points_of(run, "lm_eval"):
        for task, metrics in metrics_of(point).items():
            known = [
                name for name, value in metrics.items() if value is not None and not name.endswith("_stderr")
            ]
            wanted = [name for name in (LM_EVAL.get(task, ("",))[0], "acc_norm", *known) if name in known]
            if wanted:
                found.setdefault((task, wanted[0], how_asked(point)), []).append((point, metrics[wanted[0]]))
    ways = {task: sum(other == task for other, *_ in found) for task, *_ in found}
    return [
        Series(NAMES.get(task, task) + f" {metric}" * (metric != "acc_norm") + how * (ways[task] > 1), points,
               LM_EVAL[task][1] if LM_EVAL.get(task, ("",))[0] == metric else None)
        for (task, metric, how), points in found.items()
    ]  # fmt: skip


def metrics_of(point: Point) -> dict[str, dict[str, float | None]]:
    """task -> metric -> value of an lm_eval record, without RULER's tasks."""
    tasks = {
        task: metrics for task, metrics in (point.get("tasks") or {}).items() if isinstance(metrics, dict)
    }
    return {task: {name.removesuffix(",none"): number(value) for name, value in metrics.items()}
            for task, metrics in tasks.items() if task not in RULER_TASKS}  # fmt: skip


def ruler_series(run: Run) -> list[Series]:
    """The mean of RULER's tasks by length, of the checkpoints that have them all, asked as the newest one."""
    series = []
    for length, entries in sorted(
        ruler_scores(points_of(run, "lm_eval")).items(), key=lambda item: int(item[0])
    ):
        whole = [e for e in entries if e.how == entries[-1].how and len(e.scores) == len(RULER_TASKS)]
        published = fmean(RULER[length].values()) if length in RULER else None
        points = [(e.point, fmean(e.scores.values())) for e in whole]
        series += [Series(f"{int(length):,} tokens", points, published)] if points else []
    return series


def code_table(run: Run) -> str:
    """HumanEval+ and MBPP+, the control of the same run, and the published value."""
    rows = []
    for point in newest(points_of(run, "code"), "dataset", "version", "protocol", "prompt", "temperature"):
        dataset = str(point.get("dataset")), str(point.get("version"))
        how = ", ".join(str(point[key]) for key in ("protocol", "temperature", "prompt") if point.get(key))
        cut = number(point.get("answers_cut"))
        rows.append([
            escape(" ".join(dataset)),
            escape(how) + (f" <small>{short(cut)} answers cut</small>" if cut else ""),
            f"{short(point.get('problems'))} × {short(point.get('n'))}",
            percent(point.get("pass@1_base")),
            f"<b>{percent(point.get('pass@1_plus'))}</b>",
            percent(CODE[dataset]) if dataset in CODE else "not given",
            pass_at_k_text(point),
            control_text(point.get("control") or {}),
            escape(str(point.get("sandbox"))),
            escape(where_evaluated(point)),
        ])  # fmt: skip
    head = ("set", "how", "problems × answers", "pass@1 base", "pass@1 plus", f"{MODEL}, greedy", "pass@k base / plus",
            "control", "sandbox", "checkpoint")  # fmt: skip
    return table(head, rows, "wrap") if rows else ""


def pass_at_k_text(point: Point) -> str:
    """On the base tests, and on base and plus tests together, for every k above 1."""
    known = {k: v for k, v in (point.get("pass@k") or {}).items() if k != "1" and isinstance(v, dict)}
    return ", ".join(
        f"{escape(k)}: {percent(v.get('base'))} / {percent(v.get('plus'))}" for k, v in known.items()
    )


def control_text(control: dict[str, Any]) -> str:
    """How many reference solutions passed; which are known to fail, and in red which failed
    without a known reason.
    """
    said = f"{short(control.get('passed'))} / {short(control.get('total'))}"
    if known := control.get("known_failures"):
        said += f" <small>known to fail: {escape(', '.join(known))}</small>"
    if unknown := control.get("unexpected_failures"):
        said += f' <small class="missing">fail here: {escape(", ".join(unknown))}</small>'
    return said


def lm_eval_table(run: Run) -> str:
    """lm-eval's tasks but RULER's, the newest record of each, beside the published values."""
    latest = {
        task: (point, metrics)
        for point in points_of(run, "lm_eval")
        for task, metrics in metrics_of(point).items()
    }
    rows = []
    for task, (point, metrics) in latest.items():
        errors = {
            name: f" ± {100 * e:.1f}" for name in metrics if (e := metrics.get(f"{name}_stderr")) is not None
        }
        results = [f"{name} {percent(value)}{errors.get(name, '')}" for name, value in metrics.items()
                   if not name.endswith("_stderr") and value is not None]  # fmt: skip
        metric, value = LM_EVAL.get(task, ("", None))
        published = f"{metric} {percent(value)}" if value is not None else "not given"
        how = escape(how_asked(point).removeprefix(", "))
        rows.append([escape(task), "<br>".join(results), published, how, escape(where_evaluated(point))])
    return table(("task", "result", f"{MODEL}, 0-shot", "how", "checkpoint"), rows) if rows else ""


def ruler_table(run: Run) -> str:
    """RULER: eleven tasks by length, ours beside the published; a length's mean only when
    all tasks are there.
    """
    newest_of = {length: entries[-1] for length, entries in ruler_scores(points_of(run, "lm_eval")).items()}
    if not newest_of:
        return ""
    lengths = sorted({*newest_of, *RULER_LENGTHS}, key=int)
    columns: list[tuple[str, Mapping[str, float], str]] = []  # title, scores, what a gap reads
    for length in lengths:
        ours = newest_of[length].scores if length in newest_of else {}
        columns += [(f"{int(length):,} tokens", ours, missing("missing") if ours else none())]
        columns += [("published", RULER[length], "")] if length in RULER else []
    rows = [[escape(task), *(percent(scores[task]) if task in scores else gap for _, scores, gap in columns)]
            for task in RULER_TASKS]  # fmt: skip
    means = [f"<b>{percent(fmean(scores.values()))}</b>" if len(scores) == len(RULER_TASKS) else
             '<b class="missing">N/A</b>' if scores else "" for _, scores, _ in columns]  # fmt: skip
    rows.append([f"<b>mean of {len(RULER_TASKS)}</b>", *means])
    caption = "; ".join(f"{int(length):,} tokens: {entry.source}" for length, entry in newest_of.items())
    text = table(("task", *(title for title, *_ in columns)), rows, "numbers")
    return f'<h3>RULER by task</h3>{text}<p class="caption">{caption}.</p>'


class RulerEntry(NamedTuple):
    """RULER of one checkpoint at one length, asked in one way."""

    point: Point
    how: str  # HTML
    scores: dict[str, float]  # task -> share

    @property
    def source(self) -> str:
        return f"{escape(where_evaluated(self.point))}, {self.how}"


def ruler_scores(points: Sequence[Point]) -> dict[str, list[RulerEntry]]:
    """Length -> what was scored, in the order of the run.

    Scores of different checkpoints, haystacks or tokenizers (which cut the documents) are never together.
    """
    found: dict[str, list[RulerEntry]] = {}
    for point in points:
        how = (
            f"{escape(str(point.get('haystack')))} haystack, tokenizer {code(point.get('tokenizer_sha256'))}"
        )
        how += escape(how_asked(point))
        for length, tasks in (point.get("ruler") or {}).items():
            if not str(length).isdigit():
                continue
            entries, entry = found.setdefault(length, []), RulerEntry(point, how, {})
            if not entries or entries[-1].source != entry.source:
                entries.append(entry)
            known = {task: v for task, value in tasks.items() if (v := number(value)) is not None and v >= 0}
            entries[-1].scores.update(known)
    return {length: kept for length, entries in found.items() if (kept := [e for e in entries if e.scores])}


def how_asked(point: Point) -> str:
    """What a record says of the way it asked, each part after a comma."""
    how = [f"{point['num_fewshot']}-shot"] if point.get("num_fewshot") is not None else []
    how += [f"limit {point['limit']}"] if point.get("limit") is not None else []
    how += ["chat template"] if point.get("chat_template") else []
    how += ["without BOS"] if point.get("add_bos") is False else []
    how += [f"{cut} prompts cut"] if (cut := point.get("cut_prompts")) else []
    return "".join(f", {part}" for part in how)


def contamination_card(run: Run) -> str:
    """What the training text held of the evaluation sets before its documents were dropped."""
    points, rows = newest(points_of(run, "contamination"), "phase", "data_sha256"), []
    for point in points:
        for name, found in (point.get("benchmarks") or {}).items():
            items, touched = number(found.get("items")), number(found.get("touched"))
            share = touched / items if items and touched is not None else None
            counts = [
                short(items),
                short(touched),
                percent(share, ".2f"),
                short(found.get("documents_dropped")),
            ]
            where = escape(str(point.get("phase") or ""))
            rows.append([escape(name), where, *counts, escape(", ".join(found.get("sources") or {}))])
    if not points:
        return ""
    head = (
        "evaluation set",
        "phase",
        "items",
        "touched, at most",
        "share",
        "documents dropped",
        "in sources",
    )
    caption = (
        "Items of which the training text held at least half of the 13-grams; the documents were left out."
    )
    unsearched = none("the data were not searched for evaluation items")
    return card("Contamination", table(head, rows) if rows else unsearched, caption)


def samples_card(run: Run) -> str:
    """What the checkpoints wrote after the same prompts, prompt by prompt, the newest checkpoint first."""
    prompts: dict[str, tuple[str, list[list[str]]]] = {}
    for record in reversed(points_of(run, "samples")):
        for text in record.get("samples") or []:
            rows = prompts.setdefault(str(text.get("name")), (str(text.get("prompt")), []))[1]
            # a model that has learned little writes pages of empty lines
            written = (re.sub(r"\n{3,}", lambda run: f" ↵×{len(run[0])} ", escape(str(text.get(way, ""))))
                       for way in ("greedy", "sampled"))  # fmt: skip
            rows.append([escape(where_evaluated(record)), *written])
    body = ""
    for name, (prompt, rows) in prompts.items():
        every = max(1, (len(rows) - 1) / (SAMPLES - 1))
        shown = [
            rows[round(i * every)] for i in range(min(SAMPLES, len(rows)))
        ]  # the newest and the oldest among them
        texts = table(("checkpoint", "greedy", "one seeded sample"), shown, "texts")
        head = f"<b>{escape(name)}</b> <small>{escape(prompt)}</small>"
        body += f"<details{'' if body else ' open'}><summary>{head}</summary>{texts}</details>"
    return (
        card("Samples", body, "What each evaluated checkpoint writes after the same prompts.") if body else ""
    )


def evaluations_card(run: Run) -> str:
    """The evaluations on record, the newest first."""
    rows = []
    for record in run.evals[: -LISTED - 1 : -1]:
        how = ", ".join(f"{word}{record[key]}" for key, word in HOW.items() if record.get(key) is not None)
        by = ", ".join(str(record[key]) for key in BY if record.get(key))
        texts = [
            escape(str(text))
            for text in (record.get("kind", "?"), where_evaluated(record), result_of(record))
        ]
        took, at = measured(record.get("seconds"), ",.1f", " s"), utc(record.get("time"))
        model = code(record["model_sha256"]) if record.get("model_sha256") else ""
        rows.append([at, *texts, took, escape(how), escape(by), model, code(record.get("code_version"))])
    head = ("time (UTC)", "evaluation", "checkpoint", "result", "took", "how", "by", "model", "code")
    more = f", the newest {len(rows)}" if len(run.evals) > len(rows) else ""
    if not rows:
        return ""
    summary = f"<summary>{len(run.evals):,} records in evals.jsonl{more}</summary>"
    return card("Evaluations", f"<details>{summary}{table(head, rows)}</details>")


def result_of(record: Point) -> str:
    """The figures that a record is about."""
    tasks = metrics_of(record)
    results = {
        "core": [("CORE v2", record.get("core_v2"), ".4f"), ("v1", record.get("core_v1"), ".4f")],
        "code": [("pass@1", record.get("pass@1_plus"), ".1%")],
        "bits_per_byte": [("bits per byte", record.get("bits_per_byte"), ".4f")],
        "decode_speed": [("tokens/s", record.get("tokens_per_s"), ",.4g")],
        "lm_eval": [(f"{task} {name}", value, ".1%") for task, metrics in tasks.items()
                    for name, value in metrics.items() if name in ("acc", "acc_norm")],
    }.get(str(record.get("kind")), [])  # fmt: skip
    known = [
        f"{name} {value:{form}}" for name, found, form in results if (value := number(found)) is not None
    ]
    if not known and record.get("kind") == "core":
        return f"{len(record.get('tasks') or {})} tasks, no CORE"
    return ", ".join(known[:4]) or "see its card"
