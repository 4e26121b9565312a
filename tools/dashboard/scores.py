"""The cards of what a model can do. A new evaluation is one row of CARDS and the function that writes its card.

A missing score is red, and then there is no mean: the mean of the others would be another number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape
from statistics import fmean
from typing import Any

from evals.lm_eval.tasks import RULER_TASKS
from records.evals import PROVENANCE
from records.page import card, code, measured, missing, none, percent, short, table, utc
from records.run import Run, number
from tools.dashboard.core import Point, core_card, newest, points_of, where_evaluated
from tools.dashboard.published import CODE, LM_EVAL, MODEL, RULER_LENGTHS

SAMPLES = 8  # checkpoints of a prompt that are shown
LISTED = 40  # more evaluations than this are counted, not listed
# in the list of evaluations: which figures come first, and what is said of how it was made
PREFERRED = ("core_v1", "core_v2", "pass@1_plus", "bits_per_byte", "loss", "tokens_per_s", "percent_of_probe")
HOW = {"dataset": "", "protocol": "", "seed": "seed ", "max_per_task": "at most ", "num_fewshot": "shots ",
       "limit": "limit ", "haystack": "haystack ", "not_core": ""}  # fmt: skip
NOT_FIGURES = {*PROVENANCE, *HOW, *PREFERRED, "checkpoint_time", "max_new_tokens", "temperature"}


def score_cards(run: Run) -> str:
    """All cards of scores of a run; one line for those that it has none of."""
    cards = "".join(write(run) for write in CARDS.values())
    return cards or card("Scores", none(f"not measured: {', '.join(CARDS)}"))


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
    return card("Code", table(head, rows, "wrap")) if rows else ""


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
                latest[task] = point, {name.split(",")[0]: number(value) for name, value in metrics.items()}
    rows = []
    for task, (point, metrics) in latest.items():
        errors = {name: f" ± {100 * e:.1f}" for name in metrics if (e := metrics.get(f"{name}_stderr")) is not None}
        results = [f"{name} {percent(value)}{errors.get(name, '')}" for name, value in metrics.items()
                   if not name.endswith("_stderr") and value is not None]  # fmt: skip
        metric, value = LM_EVAL.get(task, ("", None))
        published = f"{metric} {percent(value)}" if value is not None else "not given"
        how = escape(how_asked(point).removeprefix(", "))
        rows.append([escape(task), "<br>".join(results), published, how, escape(where_evaluated(point))])
    head = ("task", "result", f"{MODEL}, 0-shot", "how", "checkpoint")
    return card("lm-eval", table(head, rows)) if rows else ""


def ruler_card(run: Run) -> str:
    """RULER: eleven tasks by length; a length's mean only when all tasks are there."""
    scores, sources = ruler_scores(points_of(run, "lm_eval"))
    if not scores:
        return ""
    lengths = sorted({*scores, *RULER_LENGTHS}, key=lambda text: (len(text), text))
    found = {task: [scores.get(length, {}).get(task) for length in lengths] for task in RULER_TASKS}
    rows = [[escape(t), *(missing("missing") if c is None else percent(c) for c in row)] for t, row in found.items()]
    means = ['<b class="missing">N/A</b>' if None in column else f"<b>{percent(fmean(column))}</b>"
             for column in zip(*found.values(), strict=True)]  # fmt: skip
    rows += [[f"<b>mean of {len(RULER_TASKS)}</b>", *means], [MODEL, *["not given"] * len(lengths)]]
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
    points, rows = newest(points_of(run, "contamination"), "phase", "data_sha256"), []
    for point in points:
        for name, found in (point.get("benchmarks") or {}).items():
            items, touched = number(found.get("items")), number(found.get("touched"))
            share = touched / items if items and touched is not None else None
            counts = [short(items), short(touched), percent(share, ".2f"), short(found.get("documents_dropped"))]
            where = escape(str(point.get("phase") or ""))
            rows.append([escape(name), where, *counts, escape(", ".join(found.get("sources") or {}))])
    if not points:
        return ""
    head = ("evaluation set", "phase", "items", "touched, at most", "share", "documents dropped", "in sources")
    caption = "Items of which the training text held at least half of the 13-grams; the documents were left out."
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
        shown = [rows[round(i * every)] for i in range(min(SAMPLES, len(rows)))]  # the newest and the oldest among them
        texts = table(("checkpoint", "greedy", "one seeded sample"), shown, "texts")
        head = f"<b>{escape(name)}</b> <small>{escape(prompt)}</small>"
        body += f"<details{'' if body else ' open'}><summary>{head}</summary>{texts}</details>"
    return card("Samples", body, "What each evaluated checkpoint writes after the same prompts.") if body else ""


CARDS: dict[str, Callable[[Run], str]] = {  # in the order of the page; a card without records is ""
    "CORE": core_card, "code": code_card, "ARC": lm_eval_card, "long context": ruler_card,
    "contamination": contamination_card, "samples": samples_card,
}  # fmt: skip


def evaluations_card(run: Run) -> str:
    """The evaluations on record, the newest first."""
    rows = []
    for record in run.evals[: -LISTED - 1 : -1]:
        names = [key for key in PREFERRED if key in record] + [key for key in record if key not in NOT_FIGURES]
        known = [f"{name} {value:.4g}" for name in names if (value := number(record.get(name))) is not None]
        result = ", ".join(known[:2]) or ("N/A" if record.get("missing") else "see its table")
        how = ", ".join(f"{word}{record[key]}" for key, word in HOW.items() if record.get(key) is not None)
        texts = [escape(str(text)) for text in (record.get("kind", "?"), where_evaluated(record), result, how)]
        took, at = measured(record.get("seconds"), ".1f", " s"), utc(record.get("time"))
        rows.append([*texts, short(record.get("tokens_total")), took, at, code(record.get("code_version"))])
    head = ("evaluation", "checkpoint", "result", "how", "tokens", "took", "time (UTC)", "code")
    more = len(run.evals) - len(rows)
    caption = f"And {more:,} older ones, all in evals.jsonl." if more else ""
    return card("Evaluations", table(head, rows) if rows else none(), caption)
