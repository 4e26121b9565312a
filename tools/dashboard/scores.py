"""The cards of what a model can do: code, questions, long context, contamination, samples, and all records.

A missing score is red, and then there is no mean: the mean of the others would be another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from evals.lm_eval.tasks import RULER_TASKS
from records.page import (
    card,
    chart,
    fold,
    none,
    percent,
    short,
    table,
)
from records.run import Record, Run, number
from tools.dashboard.core import Point, how_asked, interval_text, newest, normal, points_of, where_evaluated
from tools.dashboard.figures import Series, checkpoint_figure
from tools.dashboard.references import CODE, LM_EVAL, MODEL
from tools.dashboard.ruler import ruler_series, ruler_table

NAMES = {
    "humaneval+": "HumanEval+",
    "mbpp+": "MBPP+",
    "arc_challenge": "ARC-Challenge",
    "arc_easy": "ARC-Easy",
}


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
    details = fold("Code: settings and control", rows) if (rows := code_table(run)) else ""
    body = (f'<div class="triple">{panels}</div>' if panels else "") + ruler_table(run) + details
    caption = f"Bars, ±: 95 %. Published, and dotted: what {MODEL}'s authors give for their instruction-tuned model, "
    caption += "beside what was asked in the same way only."
    return card(f"Beside {MODEL}", body, caption) if body else ""


def panel(series: Sequence[Series], name: str) -> str:
    """The newest values in a table, above their curves where there are several checkpoints."""
    rows = [[escape(label), percent(points[-1][1]) + interval_text(ends[-1] if ends else ()),
             none("none") if published is None else percent(published)]
            for label, points, published, ends in series]  # fmt: skip
    text = table(("", "ours", "published"), rows, "numbers")
    if all(len(each.points) < 2 for each in series):
        return text
    axis = {"tickformat": ".0%", "hoverformat": ".1%", "fixedrange": True}
    figure = checkpoint_figure(series, (), 230, **axis).update_layout(meta=None, xaxis_nticks=5)
    return text + chart(figure, name)


def code_series(run: Run) -> list[Series]:
    """pass@1 on the extended tests, by set and way of asking."""
    found: dict[tuple[str, ...], list[Any]] = {}
    for point in points_of(run, "code"):
        if (value := number(point["pass@1_plus"])) is not None:
            key = tuple(
                str(point[name]) for name in ("dataset", "version", "protocol", "prompt", "temperature")
            )
            found.setdefault(key, []).append((point, value))
    return [
        Series(NAMES.get(key[0], key[0]) + (f", {key[2]} at {key[4]}" if key[2] != "greedy" else ""), points,
               published_code(points[-1][0]), [p["pass@1_plus_interval"] or () for p, _ in points])
        for key, points in found.items()
    ]  # fmt: skip


def published_code(point: Point) -> float | None:
    """pass@1 of the published model where it was asked as here: a conversation, greedy answers."""
    same = (point["protocol"], point["prompt"]) == ("greedy", "chat")
    return CODE.get((str(point["dataset"]), str(point["version"]))) if same else None


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
                ends = normal(metrics[wanted[0]], metrics.get(f"{wanted[0]}_stderr"))
                found.setdefault((task, wanted[0], how_asked(point)), []).append(
                    (point, metrics[wanted[0]], ends)
                )
    ways = {task: sum(other == task for other, *_ in found) for task, *_ in found}
    return [
        Series(NAMES.get(task, task) + f" {metric}" * (metric != "acc_norm") + how * (ways[task] > 1),
               [(point, value) for point, value, _ in points],
               LM_EVAL[task][1] if LM_EVAL.get(task, ("",))[0] == metric and zero_shot(points[-1][0]) else None,
               [ends for *_, ends in points])
        for (task, metric, how), points in found.items()
    ]  # fmt: skip


def zero_shot(point: Point) -> bool:
    """Whether ARC was asked as of the published model: no examples (lm-eval's own number), no conversation."""
    return point["num_fewshot"] in (0, None) and not point["chat_template"]


def metrics_of(point: Point) -> dict[str, dict[str, float | None]]:
    """task -> metric -> value of an lm_eval record, without RULER's tasks."""
    tasks = {task: metrics for task, metrics in (point["tasks"] or {}).items() if isinstance(metrics, dict)}
    return {task: {name.removesuffix(",none"): number(value) for name, value in metrics.items()}
            for task, metrics in tasks.items() if task not in RULER_TASKS}  # fmt: skip


def code_table(run: Run) -> str:
    """HumanEval+ and MBPP+, the control of the same run, and the published value."""
    rows = []
    for point in newest(points_of(run, "code"), "dataset", "version", "protocol", "prompt", "temperature"):
        dataset = str(point["dataset"]), str(point["version"])
        how = ", ".join(str(point[key]) for key in ("protocol", "temperature", "prompt") if point[key])
        cut = number(point["answers_cut"])
        rows.append([
            escape(" ".join(dataset)),
            escape(how) + (f" <small>{short(cut)} answers cut</small>" if cut else ""),
            f"{short(point['problems'])} × {short(point['n'])}",
            percent(point["pass@1_base"]) + interval_text(point["pass@1_base_interval"] or ()),
            f"<b>{percent(point['pass@1_plus'])}</b>" + interval_text(point["pass@1_plus_interval"] or ()),
            none("asked otherwise") if published_code(point) is None else percent(published_code(point)),
            pass_at_k_text(point),
            control_text(point["control"] or Record()),
            escape(str(point["sandbox"])),
            escape(where_evaluated(point)),
        ])  # fmt: skip
    head = ("set", "how", "problems × answers", "pass@1 base", "pass@1 plus", f"{MODEL}, greedy", "pass@k base / plus",
            "control", "sandbox", "checkpoint")  # fmt: skip
    return table(head, rows, "wrap") if rows else ""


def pass_at_k_text(point: Point) -> str:
    """On the base tests, and on base and plus tests together, for every k above 1."""
    known = {k: v for k, v in (point["pass@k"] or {}).items() if k != "1" and isinstance(v, dict)}
    return ", ".join(f"{escape(k)}: {percent(v['base'])} / {percent(v['plus'])}" for k, v in known.items())


def control_text(control: dict[str, Any]) -> str:
    """How many reference solutions passed; which are known to fail, and in red which failed
    without a known reason.
    """
    said = f"{short(control['passed'])} / {short(control['total'])}"
    if known := control["known_failures"]:
        said += f" <small>known to fail: {escape(', '.join(known))}</small>"
    if unknown := control["unexpected_failures"]:
        said += f' <small class="missing">fail here: {escape(", ".join(unknown))}</small>'
    return said
