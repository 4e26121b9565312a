"""The cards of what a model can do: code, questions, long context, contamination, samples, and all records.

A missing score is red, and then there is no mean: the mean of the others would be another number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from typing import Any, NamedTuple

from evals.intervals import Z95, wilson
from evals.lm_eval.tasks import RULER_TASKS
from records.page import (
    card,
    chart,
    code,
    fold,
    missing,
    none,
    percent,
    short,
    table,
)
from records.run import Record, Run, number
from tools.dashboard.core import Point, newest, points_of, where_evaluated
from tools.dashboard.figures import Series, checkpoint_figure
from tools.dashboard.references import CODE, LM_EVAL, MODEL, RULER, RULER_LENGTHS

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
    tables = {"Code: settings and control": code_table(run), "Questions: settings": lm_eval_table(run)}
    details = "".join(fold(title, body) for title, body in tables.items() if body)
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


def interval_text(ends: Sequence[float]) -> str:
    """ " ± half of it in percent", or "" where there is no interval."""
    return f" <small>± {50 * (ends[1] - ends[0]):.1f}</small>" if ends else ""


def normal(value: float | None, error: float | None) -> Sequence[float]:
    """The interval of 95 % of a mean with a standard error; () where that is not known."""
    return () if value is None or error is None else (value - Z95 * error, value + Z95 * error)


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


def ruler_series(run: Run) -> list[Series]:
    """The mean of RULER's tasks by length, of the checkpoints that have them all, asked as the newest one."""
    series = []
    for length, entries in sorted(
        ruler_scores(points_of(run, "lm_eval")).items(), key=lambda item: int(item[0])
    ):
        whole = [e for e in entries if e.how == entries[-1].how and len(e.scores) == len(RULER_TASKS)]
        points = [(e.point, fmean(e.scores.values())) for e in whole]
        if whole:
            published = fmean(RULER[length].values()) if whole[-1].conversation and length in RULER else None
            series.append(
                Series(f"{int(length):,} tokens", points, published, [e.mean_ends() for e in whole])
            )
    return series


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
            name: interval_text(normal(value, metrics.get(f"{name}_stderr")))
            for name, value in metrics.items()
        }
        results = [f"{name} {percent(value)}{errors.get(name, '')}" for name, value in metrics.items()
                   if not name.endswith("_stderr") and value is not None]  # fmt: skip
        metric, value = LM_EVAL.get(task, ("", None))
        published = f"{metric} {percent(value)}" if value is not None and zero_shot(point) else none("none")
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
        entry = newest_of.get(length)
        columns += [
            (
                f"{int(length):,} tokens",
                entry.scores if entry else {},
                missing("missing") if entry else none(),
            )
        ]
        same = length in RULER and (entry is None or entry.conversation)
        columns += [("published", RULER[length], "")] if same else []
    asked = {f"{int(length):,} tokens": entry for length, entry in newest_of.items()}

    def cell(task: str, title: str, scores: Mapping[str, float], gap: str) -> str:
        ends = asked[title].ends(task) if title in asked and task in scores else ()
        return percent(scores[task]) + interval_text(ends) if task in scores else gap

    rows = [[escape(task), *(cell(task, *column) for column in columns)] for task in RULER_TASKS]
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

    def ends(self, task: str) -> Sequence[float]:
        """Wilson's interval of a task's score, its documents as sample; () where their number is not known."""
        documents = number((self.point["prompts"] or {}).get(task, {}).get("documents"))  # of all lengths
        each = documents and documents / len(self.point["ruler"])
        asked = min(filter(None, (each, number(self.point["limit"]))), default=None)
        if not asked:
            return ()
        middle, half = wilson(round(self.scores[task] * asked), round(asked))
        return middle - half, middle + half

    def mean_ends(self) -> Sequence[float]:
        """The interval of the mean of the tasks, from theirs."""
        ends = [self.ends(task) for task in self.scores]
        half = sum((end[1] - end[0]) ** 2 for end in ends if end) ** 0.5 / 2 / len(ends)
        mean = fmean(self.scores.values())
        return (mean - half, mean + half) if all(ends) else ()

    @property
    def conversation(self) -> bool:
        """Whether the prompts were messages, as those of the published model."""
        return bool(self.point["chat_template"])

    @property
    def source(self) -> str:
        return f"{escape(where_evaluated(self.point))}, {self.how}"


def ruler_scores(points: Sequence[Point]) -> dict[str, list[RulerEntry]]:
    """Length -> what was scored, in the order of the run.

    Scores of different checkpoints, haystacks or tokenizers (which cut the documents) are never together.
    """
    found: dict[str, list[RulerEntry]] = {}
    for point in points:
        how = f"{escape(str(point['haystack']))} haystack, tokenizer {code(point['tokenizer_sha256'])}"
        how += escape(how_asked(point))
        for length, tasks in (point["ruler"] or {}).items():
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
    how = [f"{point['num_fewshot']}-shot"] if point["num_fewshot"] is not None else []
    how += [f"limit {point['limit']}"] if point["limit"] is not None else []
    how += ["chat template"] if point["chat_template"] else []
    how += ["without BOS"] if point["add_bos"] is False else []
    how += [f"{cut} prompts cut"] if (cut := point["cut_prompts"]) else []
    return "".join(f", {part}" for part in how)
