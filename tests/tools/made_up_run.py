"""A run folder with invented figures, for looking at and testing the dashboard only; never a result.

Two phases, attempts that fall back to a checkpoint, a warmup-stable-decay schedule in each phase, noise and spikes.

    python tests/tools/made_up_run.py FOLDER    (writes a run to look at)
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

TOKENS_A_STEP = 6_291_456
SOURCES = {"web": "general", "stdlib": "code", "math": "math", "wiki": "multilingual", "qa": "qa"}
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "num_lanes": 4, "broadcast_delay": 2, "sliding_window": 64, "swa_layers": [0, 1],
         "max_position_embeddings": 512, "vocab_size": 4096}  # fmt: skip


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup, decay = max(1, steps // 50), max(1, steps // 5)
    return peak * min(1.0, step / warmup, (steps - step + 1) / decay)


def metric(rng: random.Random, phase: str, attempt: int, step: int, steps: int, before: int) -> dict[str, Any]:
    progress = (before / TOKENS_A_STEP + step) / (1.5 * steps)
    cooldown = 0.12 * max(0.0, step / steps - 0.8) / 0.2
    curve = (
        1.9 + 6.4 * math.exp(-14 * progress**0.7) + 0.25 / (1 + 8 * progress) - cooldown - 0.35 * (phase == "phase2")
    )
    loss = curve + rng.gauss(0, 0.02)
    spike = rng.random() < 0.002
    tokens = step * TOKENS_A_STEP
    weights = {"web": 6, "stdlib": 3, "math": 1} if phase == "phase1" else {"web": 1, "stdlib": 6, "math": 3}
    by_source = {name: curve + 0.4 * i - 0.4 + rng.gauss(0, 0.05) for i, name in enumerate(weights)}
    valid = {}
    if step % (steps // 20) == 0:
        valid = {"valid_loss": curve + 0.03, "valid_loss_by_source": {n: v + 0.03 for n, v in by_source.items()}}
    return {
        "step": step, "phase": phase, "attempt": attempt,
        "loss": loss + spike * rng.uniform(0.2, 0.9),
        "lr": learning_rate(step, steps, 4e-4 if phase == "phase1" else 2e-4),
        "grad_norm": 0.25 + 2 * math.exp(-60 * progress) + abs(rng.gauss(0, 0.04)) + spike * 3,
        "tokens": tokens, "tokens_total": before + tokens,
        "tokens_per_s": 3.2e6 * rng.gauss(1, 0.008) * (0.55 if rng.random() < 0.01 else 1),
        "tokens_per_s_per_device": 16_700 * rng.gauss(1, 0.008), "loss_z": rng.gauss(0, 1), **valid,
        "grad_norm_z": rng.gauss(0, 1) + 9 * spike, "loss_by_source": by_source, "seconds": 19.4,
        "tokens_by_source": {n: (before + tokens) * w / 10 for n, w in weights.items()},
        "checkpoint_s": 2.1 if step % (steps // 10) < 2 else 0.0, "memory_gib": 58.0 + rng.gauss(0, 0.1),
        "mfu": 38 * rng.gauss(1, 0.008), "data_s": 0.01, "time": 1.79e9 + 2 * (before / TOKENS_A_STEP + step),
    }  # fmt: skip


# phase 1 in three attempts, each of which falls back behind the last one's end, then phase 2 in two
PLAN = (("phase1", 1, 0, 0.35), ("phase1", 2, 0.30, 0.7), ("phase1", 3, 0.66, 1.0), ("phase2", 1, 0, 0.5),
        ("phase2", 2, 0.45, 1.0))  # fmt: skip


def rows_of(steps: int, every: int) -> list[dict[str, Any]]:
    rng = random.Random(7)
    rows = []
    for phase, attempt, first, last in PLAN:
        length, before = (steps, 0) if phase == "phase1" else (steps // 2, steps * TOKENS_A_STEP)
        for step in range(int(first * length) + every, int(last * length) + 1, every):
            rows.append(metric(rng, phase, attempt, step, length, before))
    return rows


def evaluations(steps: int) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    for part in range(1, 7):
        tokens = int(part / 6 * 1.5 * steps) * TOKENS_A_STEP
        sources = {
            name: {"category": category, "bits_per_byte": 0.7 + 0.08 * i + 0.5 / part, "loss": 2.0, "bytes": 30000}
            for i, (name, category) in enumerate(SOURCES.items())
        }
        origin = {"step": tokens // TOKENS_A_STEP, "tokens_total": tokens, "phase": "phase1" if part < 5 else "phase2",
                  "time": 1.79e9 + 3600 * part, "seconds": 41.3, "code_version": "0123456789ab",
                  "tokenizer_sha256": "ab" * 32, "data_sha256": "cd" * 32}  # fmt: skip
        total = sum(s["bits_per_byte"] for s in sources.values()) / len(sources)
        records.append({"kind": "bits_per_byte", **origin, "bits_per_byte": total, "sources": sources})
    speed = {"tokens_per_s": 131.7, "bytes_per_token": 98.3e6, "probe_bytes_per_s": 17.4e9, "percent_of_probe": 74.4,
             "prefill_tokens_per_s": 2150.0, "ttft_s": 0.061, "cpu": "Some CPU (2 cores)", "dtype": "bf16",
             "isa": "avx512bf16", "threads": 2, "tokens_per_s_p10": 127.9, "tokens_per_s_p90": 134.2}  # fmt: skip
    return [*records, {**origin, "kind": "decode_speed", **speed}]


def events(phase: str, length: int) -> list[dict[str, Any]]:
    told = [("signal", 1, 0.35, "SIGUSR1 ten minutes before the time limit"), ("roll_back", 2, 0.7, "loss z 11.2"),
            ("checkpoint_saved", 3, 0.9, None)]  # fmt: skip
    return [
        {"time": 1.79e9, "attempt": attempt, "step": int(share * length), "kind": kind, "rank": rank, "host": "node-07",
         "reason": reason}
        for kind, attempt, share, reason in told for rank in range(2)
        if phase == "phase1"
    ]  # fmt: skip


def write_run(folder: Path, steps: int = 2000, every: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in (("metrics", rows_of(steps, every)), ("evals", evaluations(steps))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for phase, length in (("phase1", steps), ("phase2", steps // 2)):
        (folder / phase).mkdir(exist_ok=True)
        (folder / phase / "config.toml").write_text(
            f'[phase]\nname = "{phase}"\n[model]\nflavor = "tiny"\n[training]\nsteps = {length}\nseq_len = 4096\n'
            f'global_batch_size = 1536\n[optimizer]\nname = "AdamW"\nlr = {4e-4 if phase == "phase1" else 2e-4}\n'
            f"[lr_scheduler]\ndecay_ratio = 0.2\nwarmup_steps = {length // 50}\n"
            f'[mixture]\nlock = "data/{phase}.lock.json"\n'
        )
        (folder / phase / "model.json").write_text(json.dumps(MODEL))
        starts = [{"attempt": n, "step": int(first * length), "world_size": 192, "torch": "2.13.0",
                   "code_version": "0123456789ab", "mixture_fingerprint": "ef" * 32, "time": 1.79e9,
                   "started_from": None}
                  for of, n, first, _ in PLAN if of == phase]  # fmt: skip
        lines = "".join(json.dumps(event) + "\n" for event in events(phase, length))
        (folder / phase / "events.jsonl").write_text(lines)
        (folder / phase / "attempts.jsonl").write_text("".join(json.dumps(s) + "\n" for s in starts))
    return folder


if __name__ == "__main__":
    write_run(Path(sys.argv[1]), steps=20_000 if "--long" in sys.argv else 2000)
