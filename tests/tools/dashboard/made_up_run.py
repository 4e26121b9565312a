"""A run folder with invented figures, for looking at and testing the dashboard only; never a result.

Two phases, attempts that fall back to a checkpoint, a warmup-stable-decay schedule in each phase, noise and spikes.

    python -m tests.tools.dashboard.made_up_run FOLDER [--published]
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from evals.core.tasks import TASKS

Json = dict[str, Any]
TOKENS_A_STEP, PUBLISHED_STEPS = 6_291_456, 620_000
START, SECONDS_A_ROW = 1.79e9, 4.0
SOURCES = ("web", "stdlib", "math", "wiki", "qa")
WEIGHTS = {"phase1": {"web": 6, "stdlib": 3, "math": 1}, "phase2": {"web": 1, "stdlib": 6, "math": 3}}
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "num_lanes": 4, "broadcast_delay": 2, "sliding_window": 64, "swa_layers": [0, 1],
         "max_position_embeddings": 512, "vocab_size": 4096}  # fmt: skip
# (phase, attempt, first and last step as shares): each attempt falls back behind the end of the one before
PLAN = (("phase1", 1, 0, 0.35), ("phase1", 2, 0.30, 0.7), ("phase1", 3, 0.66, 1.0), ("phase2", 1, 0, 0.5),
        ("phase2", 2, 0.45, 1.0))  # fmt: skip


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup, decay = max(1, steps // 50), max(1, steps // 5)
    return peak * min(1.0, step / warmup, (steps - step + 1) / decay)


def row_of(rng: random.Random, phase: str, step: int, steps: int, before: int) -> Json:
    progress = (before / TOKENS_A_STEP + step) / (1.5 * steps)
    cooldown = 0.12 * max(0.0, step / steps - 0.8) / 0.2
    curve = 1.9 + 6.4 * math.exp(-14 * progress**0.7) - cooldown - 0.35 * (phase == "phase2")
    spike, tokens = rng.random() < 0.002, step * TOKENS_A_STEP
    by_source = {name: curve + 0.4 * i - 0.4 + rng.gauss(0, 0.05) for i, name in enumerate(WEIGHTS[phase])}
    valid: Json = {}
    if step % (steps // 20) == 0:
        octaves = {str(at): 0.6 / (1 + i) for i, at in enumerate((0, 16, 32, 64, 128, 256))}
        by_position = {name: {at: v + more for at, more in octaves.items()} for name, v in by_source.items()}
        valid = {"valid_loss": curve + 0.03, "valid_loss_by_position": by_position}
        valid["valid_loss_by_source"] = {name: loss + 0.03 for name, loss in by_source.items()}
    return {
        "step": step, "phase": phase, "tokens": tokens, "tokens_total": before + tokens, "seconds": 19.4,
        "loss": curve + rng.gauss(0, 0.02) + spike * rng.uniform(0.2, 0.9),
        "lr": learning_rate(step, steps, 4e-4 if phase == "phase1" else 2e-4),
        "grad_norm": 0.25 + 2 * math.exp(-60 * progress) + abs(rng.gauss(0, 0.04)) + spike * 3,
        "tokens_per_s": 3.2e6 * rng.gauss(1, 0.008) * (0.55 if rng.random() < 0.01 else 1),
        "tokens_per_s_per_device": 16_700 * rng.gauss(1, 0.008), "mfu": 38 * rng.gauss(1, 0.008),
        "loss_z": rng.gauss(0, 1), "grad_norm_z": rng.gauss(0, 1) + 9 * spike, "loss_by_source": by_source,
        "tokens_by_source": {name: (before + tokens) * w / 10 for name, w in WEIGHTS[phase].items()},
        "checkpoint_s": 2.1 if step % (steps // 10) < 2 else 0.0, "memory_gib": 58.0 + rng.gauss(0, 0.1),
        "data_s": 0.01, "z_loss": 90 + rng.gauss(0, 1), "max_logit": 14 + 9 * progress + rng.random(),
        "layer_grad_norm": [0.06 * (30 if spike and i == 2 else 1) for i in range(6)], **valid,
    }  # fmt: skip


def rows_of(steps: int, every: int, seconds_a_row: float = SECONDS_A_ROW) -> list[Json]:
    rng, rows = random.Random(7), list[Json]()
    for place, (phase, attempt, first, last) in enumerate(PLAN):
        length, before = (steps, 0) if phase == "phase1" else (steps // 2, steps * TOKENS_A_STEP)
        for step in range(int(first * length) + every, int(last * length) + 1, every):
            time = START + 120 * place + seconds_a_row * len(rows)
            rows.append({**row_of(rng, phase, step, length, before), "attempt": attempt, "time": time})
    return rows


def evaluations(steps: int, checkpoints: int, missing: tuple[str, ...], every_score: int) -> list[Json]:
    """every_score: checkpoints from one evaluation of code and questions to the next."""
    records, rng = list[Json](), random.Random(11)
    for count in range(1, checkpoints + 1):
        step = int(count / checkpoints * 1.5 * steps)
        late, skill = step > steps, 0.9 * (1 - math.exp(-4.5 * step / steps)) - 0.1 * (step > steps)
        origin = {"step": step - late * steps, "tokens_total": step * TOKENS_A_STEP, "time": START + 3600 * count,
                  "phase": "phase2" if late else "phase1", "code_version": "0123456789ab",
                  "tokenizer_sha256": "ab" * 32, "data_sha256": "cd" * 32}  # fmt: skip
        bits = {name: 1.02 - 0.08 * i + 0.08 * checkpoints / count for i, name in enumerate(SOURCES)}
        sources = {name: {"bits_per_byte": each} for name, each in bits.items()}
        mean = sum(bits.values()) / len(bits)
        records.append({"kind": "bits_per_byte", **origin, "bits_per_byte": mean, "sources": sources})
        records.append({**origin, **core_record(rng, skill, missing)})
        if count % every_score == 0 or count == checkpoints:
            records += scores(origin, count / checkpoints)
    speed = {"tokens_per_s": 131.7, "bytes_per_token": 98.3e6, "probe_bytes_per_s": 17.4e9, "percent_of_probe": 74.4,
             "prefill_tokens_per_s": 2150.0, "ttft_s": 0.061, "cpu": "Some CPU (2 cores)", "dtype": "bf16",
             "isa": "avx512bf16", "threads": 2, "tokens_per_s_p10": 127.9, "tokens_per_s_p90": 134.2}  # fmt: skip
    return [*records, {**origin, "kind": "decode_speed", **speed}]


def core_record(rng: random.Random, skill: float, missing: tuple[str, ...] = ()) -> Json:
    tasks: dict[str, Json] = {}
    for place, task in enumerate(each for each in TASKS if each.label not in missing):
        guessing = task.baseline_v1 / 100
        accuracy = guessing + (1 - guessing) * (0.05 + 0.03 * (place % 7)) * 2 * skill + rng.gauss(0, 0.013)
        accuracy = min(1.0, max(0.0, accuracy))
        tasks[task.label] = {
            "accuracy": accuracy, "standard_error": math.sqrt(accuracy * (1 - accuracy) / 500), "n": 500,
            "centered_v1": (accuracy - guessing) / (1 - guessing), "baseline_v2": task.baseline_v2,
            "centered_v2": (accuracy - task.baseline_v2 / 100) / (1 - task.baseline_v2 / 100),
            "gold_bits_per_byte": 1.6 - 0.04 * place - 0.7 * skill + rng.gauss(0, 0.004), "shots": task.shots,
            "n_total": 2000,
        }  # fmt: skip
    record: Json = {"kind": "core", "protocol": "nanochat", "seed": 1234, "limit": 500, "tasks": tasks}
    for version in ("v1", "v2"):
        mean = sum(task[f"centered_{version}"] for task in tasks.values()) / len(TASKS)
        record |= {
            f"core_{version}": None if missing else mean,
            f"core_{version}_se": None if missing else 0.0065,
        }
    return record | {"missing": {label: f"eval_data/{label}.jsonl is missing" for label in missing}}


def scores(origin: Json, share: float) -> list[Json]:
    """Code, questions and contamination of a checkpoint; share: of the last one's scores."""
    arc = {
        "arc_easy": {"acc": 0.501, "acc_norm": 0.4712 * share, "acc_norm_stderr": 0.0102},
        "arc_challenge": {"acc": 0.277, "acc_norm": 0.3029 * share, "acc_norm_stderr": 0.0134},
    }
    found = {name: {"items": items, "touched": touched, "documents_dropped": 431 if touched else 0}
             for name, items, touched in (("humaneval", 164, 12), ("gsm8k", 8792, 0))}  # fmt: skip
    code, plus = {**origin, "kind": "code", "prompt": "chat"}, 0.439 * share
    greedy = {"dataset": "humaneval+", "protocol": "greedy", "temperature": 0.0, "pass@1_plus": plus}
    sampled = {"dataset": "mbpp+", "protocol": "sampled", "temperature": 0.8, "pass@1_plus": 0.507 * share}
    return [
        {**code, **greedy, "pass@1_plus_interval": [plus - 0.075, plus + 0.075]},
        {**code, **sampled},
        {**origin, "kind": "lm_eval", "tasks": arc, "limit": None, "num_fewshot": 0, "chat_template": False},
        {**origin, "kind": "contamination", "benchmarks": found, "phase": "phase1"},
    ]


def events(phase: str, length: int, rows: list[Json]) -> list[Json]:
    """Of phase 1, each on two ranks."""
    ends = {row["attempt"]: row["time"] for row in rows if row["phase"] == phase}
    kinds = [("signal", 1, 0.35, "SIGUSR1 ten minutes before the time limit"), ("roll_back", 2, 0.7, "loss z 11.2"),
             ("checkpoint_saved", 3, 0.9, None)]  # fmt: skip
    return [
        {"time": ends[attempt] + 1, "attempt": attempt, "step": int(share * length), "kind": kind, "rank": rank,
         "host": "node-07", "reason": reason}
        for kind, attempt, share, reason in kinds for rank in range(2) if phase == "phase1"
    ]  # fmt: skip


def write_lines(path: Path, records: list[Json]) -> Path:
    """Returns the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path.parent


def write_run(
    folder: Path, steps: int = 2000, every: int = 2, checkpoints: int = 6, missing: tuple[str, ...] = (),
    every_score: int = 3, seconds_a_row: float = SECONDS_A_ROW,
) -> Path:  # fmt: skip
    rows = rows_of(steps, every, seconds_a_row)
    write_lines(folder / "metrics.jsonl", rows)
    write_lines(folder / "evals.jsonl", evaluations(steps, checkpoints, missing, every_score))
    (folder / "note.txt").write_text("Synthetic figures: no such run took place.")
    for phase, length in (("phase1", steps), ("phase2", steps // 2)):
        began = {row["attempt"]: row["time"] - 60 for row in reversed(rows) if row["phase"] == phase}
        starts = [{"attempt": n, "step": int(first * length), "world_size": 192, "torch": "2.13.0", "time": began[n],
                   "code_version": "0123456789ab", "mixture_fingerprint": "ef" * 32, "started_from": None}
                  for of, n, first, _ in PLAN if of == phase]  # fmt: skip
        write_lines(folder / phase / "events.jsonl", events(phase, length, rows))
        write_lines(folder / phase / "attempts.jsonl", starts)
        (folder / phase / "model.json").write_text(json.dumps(MODEL))
        (folder / phase / "config.toml").write_text(
            f'[phase]\nname = "{phase}"\n[model]\nflavor = "tiny"\n[training]\nsteps = {length}\nseq_len = 4096\n'
            f'global_batch_size = 1536\n[optimizer]\nname = "AdamW"\nlr = {4e-4 if phase == "phase1" else 2e-4}\n'
            '[metrics]\ngpu_hour_price = 2.5\ncurrency = "EUR"\n'
        )
    return folder


def write_published(folder: Path, every: int = 10) -> Path:
    """A run in the published shape: 930,000 steps in two phases, 21 days, 200 evaluated checkpoints."""
    return write_run(
        folder, PUBLISHED_STEPS, every, 200, (), 10, 21 * 86400 / (1.5 * PUBLISHED_STEPS / every)
    )


if __name__ == "__main__":
    (write_published if "--published" in sys.argv else write_run)(Path(sys.argv[1]))
