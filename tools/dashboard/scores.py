"""The cards of what a model can do: CORE with its 22 tasks, code, ARC and long context, and what the data held of them.

A missing task is red with its reason, and then there is no CORE: the mean of the others would be another number.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from records.run import Run, number
from tools.dashboard.cards import card, code, line_chip, measured, short, table, where_evaluated
from tools.dashboard.charts import colour, to_div
from tools.dashboard.core import (
    VERSIONS,
    Curve,
    Point,
    categories_figure,
    core_curves,
    core_figure,
    figure_of,
    heat_figure,
    labels_of,
    newest,
    points_of,
    settings_text,
)
from tools.dashboard.csv import csv_link
from tools.dashboard.published import CODE, LM_EVAL, MODEL, RULER_LENGTHS, RULER_TASKS

NOISY = 0.03  # a standard error of the accuracy above which a task alone says little
BOX = (200.0, 60.0)  # of a small chart, in its own units


def score_cards(run: Run, index: int) -> str:
    """All cards of scores of a run; one line where there are none."""
    cards = [core_card(run, index), code_card(run), lm_eval_card(run), ruler_card(run), contamination_card(run)]
    if any(cards):
        return "".join(cards)
    none = '<p class="none">not measured: CORE, code, ARC, long context, contamination</p>'
    return card("Scores", none)


def core_card(run: Run, index: int) -> str:
    curves = core_curves([run])
    if not curves:
        return ""
    drawn = [c for c in curves if any(number(p.get("core_v1")) is not None for p in c.points)]
    notes = dict.fromkeys(str(c.last["not_core"]) for c in curves if c.last.get("not_core"))
    body = f'<ul class="warnings">{"".join(f"<li>{escape(n)}</li>" for n in notes)}</ul>' if notes else ""
    body += "".join(core_words(curve) for curve in curves)
    if drawn:
        body += core_chips(drawn) + to_div(core_figure(drawn), f"core-{index}", "middle")
    curve = curves[-1]
    points, texts = curve.points, [checkpoint_text(p) for p in curve.points]
    body += f"<h3>Accuracy of each task, {escape(settings_text(points[-1]))}</h3>{small_charts(points)}"
    body += "<h3>Centered accuracy by checkpoint (tokens seen)</h3>"
    body += f'<div class="scroll">{to_div(heat_figure(points, texts), f"heat-{index}", "heat")}</div>'
    body += categories_part(points, index)
    body += task_table(points[-1]) + csv_link(run)
    caption = (
        "CORE is the mean of 22 centered accuracies; bars are one standard error. v2 has DCLM's corrected baselines; "
        "grey lines are published values in the version that they name. "
        f"{escape(where_evaluated(points[-1]))}: seed {escape(str(points[-1].get('seed')))}, "
        f"data {code(points[-1].get('data_sha256'))}, tokenizer {code(points[-1].get('tokenizer_sha256'))}, "
        f"code {code(points[-1].get('code_version'))}."
    )
    return card("CORE", body, caption)


def categories_part(points: Sequence[Point], index: int) -> str:
    """The means by category over checkpoints; a category that lacks a task has none."""
    means = {name: values.get("centered_v2") for name, values in (points[-1].get("categories") or {}).items()}
    chips = "".join(
        f'<span class="missing">{escape(name)}: N/A</span>' if number(mean) is None else line_chip(i, name)
        for i, (name, mean) in enumerate(means.items())
    )
    if all(number(mean) is None for mean in means.values()):
        return ""
    figure = to_div(categories_figure(points), f"categories-{index}", "low")
    return f'<h3>Means by category, centered on v2</h3><p class="chips">{chips}</p>{figure}'


def core_words(curve: Curve) -> str:
    """The last CORE of a curve in both versions, or in red why there is none."""
    last, said = curve.last, []
    for version in VERSIONS:
        value, error = (number(last.get(f"core_{version}{end}")) for end in ("", "_se"))
        text = '<b class="missing">N/A</b>' if value is None else f"<b>{value:.4f}</b> ± {measured(error, '.4f')}"
        said.append(f"CORE {version} {text}")
    where = escape(f"{where_evaluated(last)} ({settings_text(last)})")
    missing = last.get("missing") or {}
    why = f'<span class="missing">missing: {escape(", ".join(missing))}</span>' if missing else ""
    return f'<p class="chips core"><span>{" · ".join(said)}</span><span>{where}</span>{why}</p>'


def core_chips(curves: Sequence[Curve]) -> str:
    chips = "".join(line_chip(i, curve.name) for i, curve in enumerate(curves))
    return f'<p class="chips">{chips}<span>solid: v1, dashed: v2</span></p>'


def checkpoint_text(point: Point) -> str:
    tokens = number(point.get("tokens_total"))
    return where_evaluated(point) if tokens is None else f"{short(tokens)}"


def small_charts(points: Sequence[Point]) -> str:
    """One small chart a task: accuracy, its error as a band, the baselines (v1 dotted, v2 dashed), the last value."""
    return f'<div class="smalls">{"".join(small_chart(points, task) for task in labels_of(points))}</div>'


def small_chart(points: Sequence[Point], task: str) -> str:
    known = [(p["at"]["tokens"] or p["at"]["steps"] or i, p) for i, p in enumerate(points) if task in p["tasks"]]
    values = [(x, figure_of(p, task, "accuracy"), figure_of(p, task, "standard_error") or 0.0) for x, p in known]
    curve = [(x, y, e) for x, y, e in values if y is not None]
    missing = (points[-1].get("missing") or {}).get(task)
    if missing is not None or not curve:
        why = f'<small class="missing">missing: {escape(str(missing or "no figure"))}</small>'
        name = f"<figcaption>{breakable(task)}</figcaption>"
        return f'<figure class="missing" title="{escape(str(missing))}">{name}{why}</figure>'
    base = {v: (figure_of(known[-1][1], task, f"baseline_{v}") or 0.0) / 100 for v in VERSIONS}
    low = min([*base.values(), *(y - e for _, y, e in curve)])
    high = max([*base.values(), *(y + e for _, y, e in curve), low + 0.02])
    first, last = curve[0][0], curve[-1][0]

    def at(x: float, y: float) -> str:
        across = 0.5 if last == first else (x - first) / (last - first)
        return f"{4 + across * (BOX[0] - 8):.1f},{BOX[1] - 4 - (y - low) / (high - low) * (BOX[1] - 8):.1f}"

    band = " ".join([*(at(x, y + e) for x, y, e in curve), *(at(x, y - e) for x, y, e in reversed(curve))])
    rule = '<line x1="0" x2="{}" y1="{}" y2="{}" class="{}"/>'
    rules = ""
    for version in VERSIONS if base["v1"] != base["v2"] else ("v1",):
        height = at(first, base[version]).split(",")[1]
        rules += rule.format(BOX[0], height, height, f"base {version}")
    dot = at(*curve[-1][:2]).split(",")
    _, y, error = curve[-1]
    told = f"{y:.3f} ± {error:.3f}, baseline {' / '.join(f'{b:.3f}' for b in dict.fromkeys(base.values()))}"
    noisy = " noisy" if error > NOISY else ""
    return (
        f"<figure><figcaption>{breakable(task)}<b>{y:.3f}</b></figcaption>"
        f'<svg viewBox="0 0 {BOX[0]:.0f} {BOX[1]:.0f}" role="img"><title>{escape(f"{task}: {told}")}</title>{rules}'
        f'<polygon points="{band}" fill="{colour(0)}" opacity=".18"/>'
        f'<polyline points="{" ".join(at(x, y) for x, y, _ in curve)}" fill="none" stroke="{colour(0)}"/>'
        f'<circle cx="{dot[0]}" cy="{dot[1]}" r="2.5" fill="{colour(0)}"/></svg>'
        f"<small>± {error:.3f}{noisy}</small></figure>"
    )


def breakable(task: str) -> str:
    """A name that may be broken after its underscores."""
    return f"<span>{escape(task).replace('_', '_<wbr>')}</span>"


def task_table(point: Point) -> str:
    """All tasks of one record with how they were asked; the missing ones in red with the reason."""
    rows = []
    for task, found in point["tasks"].items():
        error = number(found.get("standard_error"))
        asked = f"{short(found.get('n'))} of {short(found.get('n_total'))}"
        noisy = " <small>noisy</small>" if (error or 0) > NOISY else ""
        accuracy = f"{measured(found.get('accuracy'), '.4f')} ± {measured(error, '.4f')}{noisy}"
        bases = " / ".join(dict.fromkeys(measured(found.get(f"baseline_{v}"), "g") for v in VERSIONS))
        cells = [escape(task), escape(str(found.get("category", ""))), escape(str(found.get("type", "")))]
        cells += [short(found.get("shots")), asked, accuracy, f"{bases} %"]
        rows.append([*cells, *(measured(found.get(f"centered_{v}"), ".4f") for v in VERSIONS)])
    for task, reason in (point.get("missing") or {}).items():
        why = f'<span class="missing" title="{escape(str(reason))}">missing</span>'
        rows.append([f'<span class="missing">{escape(task)}</span>', *[""] * 4, why, "", "", ""])
    head = ("task", "category", "type", "shots", "items", "accuracy ± SE", "baseline", "centered v1", "centered v2")
    return table(head, rows)


def percent(value: Any) -> str:
    known = number(value)
    return measured(None) if known is None else f"{100 * known:.1f} %"


def code_card(run: Run) -> str:
    """HumanEval+ and MBPP+, the control of the same run, and the published value."""
    rows = []
    for point in newest(points_of(run, "code"), "dataset", "version", "protocol", "prompt"):
        dataset = str(point.get("dataset")), str(point.get("version"))
        how = ", ".join(str(point[key]) for key in ("protocol", "prompt") if point.get(key) is not None)
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
    return card("Code", table(head, rows)) if rows else ""


def pass_at_k_text(point: Point) -> str:
    """On the base tests, and on base and plus tests together, for every k above 1."""
    known = {k: v for k, v in (point.get("pass@k") or {}).items() if k != "1" and isinstance(v, dict)}
    return ", ".join(f"{escape(k)}: {percent(v.get('base'))} / {percent(v.get('plus'))}" for k, v in known.items())


def control_text(control: dict[str, Any]) -> str:
    """How many reference solutions passed; which are known to fail, and in red which failed without a known reason."""
    said = f"{short(control.get('passed'))} / {short(control.get('total'))}"
    if known := control.get("known_failures"):
        said += f" <small>known to fail: {escape(', '.join(known))}</small>"
    if unknown := control.get("unexpected_failures"):
        said += f' <small class="missing">fail here: {escape(", ".join(unknown))}</small>'
    return said


def lm_eval_card(run: Run) -> str:
    """lm-eval's tasks but RULER's, the newest record of each, beside the published values."""
    latest: dict[str, tuple[Point, dict[str, Any]]] = {}
    for point in points_of(run, "lm_eval"):
        for task, metrics in (point.get("tasks") or {}).items():
            if isinstance(metrics, dict) and task not in RULER_TASKS:
                latest[task] = point, {name.split(",")[0]: value for name, value in metrics.items()}
    rows = []
    for task, (point, metrics) in latest.items():
        figures = [f"{name} {percent(metrics[name])}" + with_error(metrics, name) for name in metrics
                   if not name.endswith("_stderr") and number(metrics[name]) is not None]  # fmt: skip
        metric, value = LM_EVAL.get(task, ("", None))
        published = f"{metric} {percent(value)}" if value is not None else "not given"
        how = escape(how_asked(point).removeprefix(", "))
        rows.append([escape(task), "<br>".join(figures), published, how, escape(where_evaluated(point))])
    head = ("task", "result", f"{MODEL}, 0-shot", "how", "checkpoint")
    return card("lm-eval", table(head, rows)) if rows else ""


def with_error(metrics: dict[str, Any], name: str) -> str:
    error = number(metrics.get(f"{name}_stderr"))
    return "" if error is None else f" ± {100 * error:.1f}"


def ruler_card(run: Run) -> str:
    """RULER: eleven tasks by length; a length's mean only when all tasks are there."""
    scores, sources = ruler_scores(points_of(run, "lm_eval"))
    if not scores:
        return ""
    lengths = sorted({*scores, *RULER_LENGTHS}, key=lambda text: (len(text), text))
    rows = []
    for task in RULER_TASKS:
        cells = [scores.get(length, {}).get(task) for length in lengths]
        rows.append(
            [escape(task), *('<span class="missing">missing</span>' if c is None else percent(c) for c in cells)]
        )
    means = []
    for length in lengths:
        found = [scores.get(length, {}).get(task) for task in RULER_TASKS]
        there = [value for value in found if value is not None]
        complete = len(there) == len(RULER_TASKS)
        means.append(f"<b>{percent(sum(there) / len(there))}</b>" if complete else '<b class="missing">N/A</b>')
    rows.append(["<b>mean of 11</b>", *means])
    rows.append([f"{MODEL}", *["not given"] * len(lengths)])
    caption = "; ".join(f"{escape(length)} tokens: {source}" for length, source in sources.items())
    caption += ". The published model was run on RULER-style tasks at both lengths; its scores are not given."
    return card("RULER", table(("task", *(f"{length} tokens" for length in lengths)), rows), caption)


def ruler_scores(points: Sequence[Point]) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """Scores by length and task, and by length what they are of: the newest checkpoint, asked in the newest way.

    Scores of different checkpoints, haystacks or tokenizers (which cut the documents) are never in one column.
    """
    scores: dict[str, dict[str, float]] = {}
    sources: dict[str, str] = {}
    for point in points:
        source = f"{escape(where_evaluated(point))}, {escape(str(point.get('haystack')))} haystack, "
        source += f"tokenizer {code(point.get('tokenizer_sha256'))}{escape(how_asked(point))}"
        for length, tasks in (point.get("ruler") or {}).items():
            known = {task: v for task, value in tasks.items() if (v := number(value)) is not None and v >= 0}
            same = scores.get(length, {}) if sources.get(length) == source else {}
            scores[length], sources[length] = same | known, source
    return scores, sources


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
    points = newest(points_of(run, "contamination"), "phase", "data_sha256")
    rows = []
    for point in points:
        for name, found in (point.get("benchmarks") or {}).items():
            items, touched = number(found.get("items")), number(found.get("touched"))
            share = 100 * touched / items if items and touched is not None else None
            phase = str(point.get("phase") or "")
            counts = [short(items), short(touched), measured(share, ".2f", " %"), short(found.get("documents_dropped"))]
            rows.append([escape(name), escape(phase), *counts, escape(", ".join(found.get("sources") or {}))])
    if not points:
        return ""
    head = ("evaluation set", "phase", "items", "touched, at most", "share", "documents dropped", "in sources")
    caption = "Items of which the training text held at least half of the 13-grams; the documents were left out."
    none = '<p class="none">the data were not searched for evaluation items</p>'
    return card("Contamination", table(head, rows) if rows else none, caption)


def scores_of_all(runs: Sequence[Run]) -> str:
    """CORE of several runs in one figure, and the newest accuracy of every task side by side."""
    curves = core_curves(runs)
    if not curves:
        return ""
    drawn = [c for c in curves if any(number(p.get("core_v1")) is not None for p in c.points)]
    body = core_chips(drawn) + to_div(core_figure(drawn), "core-comparison", "middle") if drawn else ""
    labels = labels_of([p for c in curves for p in c.points])
    rows = [["CORE v1 / v2", *(" / ".join(aggregate(c.last, v) for v in VERSIONS) for c in curves)]]
    for task in labels:
        cells = [figure_of(c.last, task, "accuracy") for c in curves]
        rows.append(
            [escape(task), *('<span class="missing">missing</span>' if c is None else f"{c:.4f}" for c in cells)]
        )
    return card("CORE of all runs", body + table(("accuracy at the last checkpoint", *(c.name for c in curves)), rows))


def aggregate(point: Point, version: str) -> str:
    value = number(point.get(f"core_{version}"))
    return '<b class="missing">N/A</b>' if value is None else f"<b>{value:.4f}</b>"
