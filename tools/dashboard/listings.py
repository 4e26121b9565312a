"""The cards that list records: contamination of the training text, samples, and all evaluations."""

from __future__ import annotations

import re
from html import escape

from records.page import card, code, fold, measured, none, percent, short, table, utc
from records.run import Record, Run, number
from tools.dashboard.core import Point, newest, points_of, where_evaluated
from tools.dashboard.scores import metrics_of

SAMPLES = 8  # checkpoints of a prompt that are shown
LISTED = 40  # more evaluations than this are counted, not listed
# in the list of evaluations: how each was made, and by what
HOW = {"dataset": "", "protocol": "", "seed": "seed ", "max_per_task": "at most ", "num_fewshot": "shots ",
       "limit": "limit ", "haystack": "haystack "}  # fmt: skip
BY = ("scorer", "backend", "device", "dtype")


def contamination_card(run: Run) -> str:
    """What the training text held of the evaluation sets before its documents were dropped."""
    points, rows = newest(points_of(run, "contamination"), "phase", "data_sha256"), []
    for point in points:
        for name, found in (point["benchmarks"] or {}).items():
            items, touched = number(found["items"]), number(found["touched"])
            share = touched / items if items and touched is not None else None
            counts = [
                short(items),
                short(touched),
                percent(share, ".2f"),
                short(found["documents_dropped"]),
            ]
            where = escape(str(point["phase"] or ""))
            rows.append([escape(name), where, *counts, escape(", ".join(found["sources"] or {}))])
    clean = clean_part(run)
    if not points:
        return card("Contamination", clean) if clean else ""
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
    if not rows:
        return card("Contamination", none("the data were not searched for evaluation items") + clean)
    found = [each for point in points for each in (point["benchmarks"] or {}).values()]
    if not any(each["touched"] for each in found):
        names = ", ".join(sorted({name for point in points for name in point["benchmarks"] or {}}))
        told = f"<p>No item of {escape(names)} was found in the training text.</p>"
        return card("Contamination", told + clean)
    return card("Contamination", table(head, rows) + clean, caption)


def clean_part(run: Run) -> str:
    """The newest scores of all items beside those of items that the text did not hold; "" without any."""
    rows = []
    for kind in ("core", "lm_eval", "code"):
        last = ([Record(), *(p for p in points_of(run, kind) if p["clean"])])[-1]
        clean = last["clean"] or Record(tasks={})
        parts = {
            task: (of["score"], of["difference"], of["standard_error"]) for task, of in clean["tasks"].items()
        }
        if kind == "core":
            parts["CORE v2"] = tuple(clean[f"core_v2{end}"] for end in ("", "_difference", "_difference_se"))
        for name, (score, change, error) in parts.items():
            if change is not None and error:
                told = f"{change:+.4f} ± {error:.4f}"
                rows.append(
                    [
                        escape(name),
                        escape(where_evaluated(last)),
                        f"{score - change:.4f}",
                        f"{score:.4f}",
                        told,
                    ]
                )
    if not rows:
        return ""
    head = ("score", "checkpoint", "all items", "clean items", "clean minus all")
    words = "Scores with contaminated items; ± is a standard error, in which the shared items cancel."
    return f"<h3>All and clean</h3>{table(head, rows, 'numbers')}<p class='caption'>{words}</p>"


def samples_card(run: Run) -> str:
    """What the checkpoints wrote after the same prompts, prompt by prompt, the newest checkpoint first."""
    prompts: dict[str, tuple[str, list[list[str]]]] = {}
    for record in reversed(points_of(run, "samples")):
        for text in record["samples"] or []:
            rows = prompts.setdefault(str(text["name"]), (str(text["prompt"]), []))[1]
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
        body += fold(head, texts, not body)
    return (
        card("Samples", body, "What each evaluated checkpoint writes after the same prompts.") if body else ""
    )


def evaluations_card(run: Run) -> str:
    """The evaluations on record, the newest first."""
    rows = []
    for record in run.evals[: -LISTED - 1 : -1]:
        how = ", ".join(f"{word}{record[key]}" for key, word in HOW.items() if record[key] is not None)
        by = ", ".join(str(record[key]) for key in BY if record[key])
        texts = [
            escape(str(text))
            for text in (record.get("kind", "?"), where_evaluated(record), result_of(record))
        ]
        took, at = measured(record["seconds"], ",.1f", " s"), utc(record["time"])
        model = code(record["model_sha256"]) if record["model_sha256"] else ""
        rows.append([at, *texts, took, escape(how), escape(by), model, code(record["code_version"])])
    head = ("time (UTC)", "evaluation", "checkpoint", "result", "took", "how", "by", "model", "code")
    more = f", the newest {len(rows)}" if len(run.evals) > len(rows) else ""
    if not rows:
        return ""
    return card("Evaluations", fold(f"{len(run.evals):,} records in evals.jsonl{more}", table(head, rows)))


def result_of(record: Point) -> str:
    """The figures that a record is about."""
    tasks = metrics_of(record)
    results = {
        "core": [("CORE v2", record["core_v2"], ".4f"), ("v1", record["core_v1"], ".4f")],
        "code": [("pass@1", record["pass@1_plus"], ".1%")],
        "bits_per_byte": [("bits per byte", record["bits_per_byte"], ".4f")],
        "decode_speed": [("tokens/s", record["tokens_per_s"], ",.4g")],
        "lm_eval": [(f"{task} {name}", value, ".1%") for task, metrics in tasks.items()
                    for name, value in metrics.items() if name in ("acc", "acc_norm")],
    }.get(str(record["kind"]), [])  # fmt: skip
    known = [
        f"{name} {value:{form}}" for name, found, form in results if (value := number(found)) is not None
    ]
    if not known and record["kind"] == "core":
        return f"{len(record['tasks'] or {})} tasks, no CORE"
    return ", ".join(known[:4]) or "see its card"
