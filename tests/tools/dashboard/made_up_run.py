"""Write a run folder with invented figures, for looking at and testing the dashboard; never a result.

python -m tests.tools.dashboard.made_up_run FOLDER
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from evals.core.tasks import TASKS
from tests.records.lines import write_lines

Json = dict[str, Any]
TOKENS_A_STEP = 6_291_456
START = 1.79e9
SOURCES = ("web", "stdlib", "math", "wiki", "qa")
TRAINED = SOURCES[:3]
# (phase, attempt, first and last step as shares): each attempt falls back behind the end of the one
# before
PLAN = (("phase1", 1, 0, 0.35), ("phase1", 2, 0.30, 0.7), ("phase1", 3, 0.66, 1.0), ("phase2", 1, 0, 0.5),
        ("phase2", 2, 0.45, 1.0))  # fmt: skip
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_lanes": 4,
    "broadcast_delay": 2,
    "sliding_window": 64,
    "swa_layers": [0, 1],
    "max_position_embeddings": 512,
    "vocab_size": 4096,
}
CONFIG = """[phase]
name = "{phase}"
[model]
flavor = "tiny"
[training]
steps = {steps}
seq_len = 4096
global_batch_size = 1536
[optimizer]
lr = {lr}
[metrics]
gpu_hour_price = 2.5
currency = "EUR"
"""
LR = {"phase1": 4e-4, "phase2": 2e-4}
IDENTITY = {"code_version": "0123456789ab", "tokenizer_sha256": "ab" * 32, "data_sha256": "cd" * 32}
STEADY = {
    "seconds": 19.4,
    "data_s": 0.01,
    "checkpoint_s": 2.1,
    "memory_gib": 58.0,
    "mfu": 38,
    "tokens_per_s": 3.2e6,
    "tokens_per_s_per_device": 16_700,
    "z_loss": 90,
    "max_logit": 14,
    "layer_grad_norm": [0.06, 0.07],
    "loss_z": 0.3,
    "grad_norm_z": -0.2,
}
SPEED = {"tokens_per_s": 131.7, "percent_of_probe": 74.4}


def charts_of(html: str) -> dict[str, Json]:
    """Return the charts of a card or a page by name."""
    pairs = re.findall(
        r'<div id="([^"]+)"></div><script type="application/json">(.*?)</script>', html, re.S
    )
    return {name: json.loads(content) for name, content in pairs}


def chart_of(card: str) -> Json:
    (chart,) = charts_of(card).values()
    return chart


def row_of(phase: str, step: int, steps: int) -> Json:
    # falls in phase 1; every second row is 0.04 higher, so that smoothed and logged losses differ
    loss = 1.9 + 6.4 * math.exp(-8 * step / steps) * (phase == "phase1")
    by_source = {name: loss + 0.4 * i for i, name in enumerate(TRAINED)}
    row: Json = {
        "step": step,
        "phase": phase,
        "tokens": step * TOKENS_A_STEP,
        "loss": loss + 0.04 * (step % 2),
        "lr": LR[phase],
        "loss_by_source": by_source,
        **STEADY,
        "grad_norm": 0.25 + 0.01 * (step % 3),
    }
    if step % (steps // 20) == 0:
        by_position = {
            name: {"0": v + 0.6, "16": v + 0.3, "32": v} for name, v in by_source.items()
        }
        row |= {"valid_loss": loss + 0.03, "valid_loss_by_position": by_position}
        row["valid_loss_by_source"] = {name: v + 0.03 for name, v in by_source.items()}
    return row


def rows_of(steps: int) -> list[Json]:
    rows = list[Json]()
    for place, (phase, attempt, first, last) in enumerate(PLAN):
        length, before = (steps, 0) if phase == "phase1" else (steps // 2, steps * TOKENS_A_STEP)
        for step in range(int(first * length) + 1, int(last * length) + 1):
            row, time = row_of(phase, step, length), START + 120 * place + 4.0 * len(rows)
            rows.append(
                {**row, "tokens_total": before + row["tokens"], "attempt": attempt, "time": time}
            )
    return rows


def evaluations(steps: int) -> list[Json]:
    # of six checkpoints; the third and the last have code and questions
    records, origin = list[Json](), Json()
    for count in range(1, 7):
        share, step = count / 6, int(count / 6 * 1.5 * steps)
        late = step > steps
        origin = {
            "step": step - late * steps,
            "tokens_total": step * TOKENS_A_STEP,
            "time": START + 3600 * count,
            "phase": "phase2" if late else "phase1",
            **IDENTITY,
        }
        bits = {
            name: {"bits_per_byte": 1.02 - 0.08 * i + 0.08 / share}
            for i, name in enumerate(SOURCES)
        }
        whole = {"kind": "bits_per_byte", "bits_per_byte": 0.9 + 0.08 / share, "sources": bits}
        records += [{**origin, **whole}, {**origin, **core_record(share)}]
        if count % 3 == 0:
            records += scores(origin, share)
    return [*records, {**origin, "kind": "decode_speed", **SPEED}]


def core_record(share: float) -> Json:
    tasks: dict[str, Json] = {}
    for task in TASKS:
        guessing, skill = task.baseline_v2 / 100, 0.3 * share
        tasks[task.label] = {
            "accuracy": guessing + (1 - guessing) * skill,
            "standard_error": 0.02,
            "n": 500,
            "n_total": 2000,
            "centered_v2": skill,
            "baseline_v2": task.baseline_v2,
            "gold_bits_per_byte": 1.6 - 0.7 * share,
            "shots": task.shots,
        }
    figures = {
        "core_v1": 0.31 * share,
        "core_v1_se": 0.006,
        "core_v2": 0.3 * share,
        "core_v2_se": 0.0065,
    }
    record = {"kind": "core", "protocol": "nanochat", "seed": 1234, "limit": 500, "tasks": tasks}
    return {**record, **figures, "missing": {}}


def scores(origin: Json, share: float) -> list[Json]:
    # the last checkpoint's have a share of 1
    arc = {
        "arc_easy": {"acc": 0.501, "acc_norm": 0.4712 * share, "acc_norm_stderr": 0.0102},
        "arc_challenge": {"acc": 0.277, "acc_norm": 0.3029 * share, "acc_norm_stderr": 0.0134},
    }
    searched = {"humaneval": {"items": 164, "touched": 12, "documents_dropped": 431}}
    code, plus = {**origin, "kind": "code", "prompt": "chat"}, 0.439 * share
    greedy = {
        "dataset": "humaneval+",
        "protocol": "greedy",
        "temperature": 0.0,
        "pass@1_plus": plus,
    }
    sampled = {
        "dataset": "mbpp+",
        "protocol": "sampled",
        "temperature": 0.8,
        "pass@1_plus": 0.507 * share,
    }
    return [
        {**code, **greedy, "pass@1_plus_interval": [plus - 0.075, plus + 0.075]},
        {**code, **sampled},
        {
            **origin,
            "kind": "lm_eval",
            "tasks": arc,
            "limit": None,
            "num_fewshot": 0,
            "chat_template": False,
        },
        {**origin, "kind": "contamination", "benchmarks": searched, "phase": "phase1"},
    ]


def events(steps: int) -> list[Json]:
    # of phase 1; each is reported by two ranks, and is one on the page
    kinds = [
        ("signal", 1, 0.35, "SIGUSR1 ten minutes before the time limit"),
        ("roll_back", 2, 0.7, "loss z 11.2"),
        ("checkpoint_saved", 3, 0.9, None),
    ]
    return [
        {
            "time": START,
            "attempt": attempt,
            "step": int(share * steps),
            "kind": kind,
            "rank": rank,
            "host": "node-07",
            "reason": reason,
        }
        for kind, attempt, share, reason in kinds
        for rank in range(2)
    ]


def write_run(folder: Path, steps: int = 2000) -> Path:
    rows = rows_of(steps)
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "evals.jsonl", evaluations(steps))
    write_lines(folder / "phase1/events.jsonl", events(steps))
    (folder / "note.txt").write_text("Synthetic figures: no such run took place.")
    for phase, length in (("phase1", steps), ("phase2", steps // 2)):
        began = {
            row["attempt"]: row["time"] - 60 for row in reversed(rows) if row["phase"] == phase
        }
        starts = [
            {
                "attempt": n,
                "step": int(first * length),
                "world_size": 192,
                "time": began[n],
                **IDENTITY,
            }
            for of, n, first, _ in PLAN
            if of == phase
        ]
        write_lines(folder / phase / "attempts.jsonl", starts)
        (folder / phase / "model.json").write_text(json.dumps(MODEL))
        (folder / phase / "config.toml").write_text(
            CONFIG.format(phase=phase, steps=length, lr=LR[phase])
        )
    return folder


if __name__ == "__main__":
    write_run(Path(sys.argv[1]))
