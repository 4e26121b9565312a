"""A run folder with invented figures, for looking at and testing the dashboard only; never a result.

Two phases, attempts that fall back to a checkpoint, a warmup-stable-decay schedule in each
phase, noise and spikes.

    python -m tests.tools.dashboard.made_up_run FOLDER [--long | --published] [--missing]
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

from evals.intervals import wilson

TOKENS_A_STEP = 6_291_456
START, SECONDS_A_ROW = 1.79e9, 4.0
SOURCES = {"web": "general", "stdlib": "code", "math": "math", "wiki": "multilingual", "qa": "qa"}
MODEL = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "num_lanes": 4, "broadcast_delay": 2, "sliding_window": 64, "swa_layers": [0, 1],
         "max_position_embeddings": 512, "vocab_size": 4096}  # fmt: skip


PUBLISHED_STEPS, MODEL_2B = 620_000, {
    "hidden_size": 3072, "intermediate_size": 12288, "num_hidden_layers": 15, "num_attention_heads": 32,
    "num_key_value_heads": 16, "num_lanes": 8, "broadcast_delay": 2, "sliding_window": 2048,
    "swa_layers": list(range(10)), "max_position_embeddings": 4096, "vocab_size": 32000,
}  # fmt: skip


def learning_rate(step: int, steps: int, peak: float) -> float:
    warmup, decay = max(1, steps // 50), max(1, steps // 5)
    return peak * min(1.0, step / warmup, (steps - step + 1) / decay)


def metric(
    rng: random.Random, phase: str, attempt: int, step: int, steps: int, before: int
) -> dict[str, Any]:
    progress = (before / TOKENS_A_STEP + step) / (1.5 * steps)
    cooldown = 0.12 * max(0.0, step / steps - 0.8) / 0.2
    curve = (
        1.9
        + 6.4 * math.exp(-14 * progress**0.7)
        + 0.25 / (1 + 8 * progress)
        - cooldown
        - 0.35 * (phase == "phase2")
    )
    loss = curve + rng.gauss(0, 0.02)
    spike = rng.random() < 0.002
    tokens = step * TOKENS_A_STEP
    weights = {"web": 6, "stdlib": 3, "math": 1} if phase == "phase1" else {"web": 1, "stdlib": 6, "math": 3}
    by_source = {name: curve + 0.4 * i - 0.4 + rng.gauss(0, 0.05) for i, name in enumerate(weights)}
    valid = {}
    if step % (steps // 20) == 0:
        valid = {
            "valid_loss": curve + 0.03,
            "valid_loss_by_source": {n: v + 0.03 for n, v in by_source.items()},
            "valid_loss_by_position": {
                n: {str(at): v + 0.6 / (1 + i) for i, at in enumerate((0, 16, 32, 64, 128, 256))}
                for n, v in by_source.items()
            },
        }
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
        "mfu": 38 * rng.gauss(1, 0.008), "data_s": 0.01, "z_loss": 90 + 8 * math.exp(-9 * progress) + rng.gauss(0, 1),
        "max_logit": 14 + 9 * progress + rng.random(), "layer_grad_norm": layers(rng, 0.06, -0.11, spike),
        "layer_stream_rms": layers(rng, 1.2, 0.19, False),
    }  # fmt: skip


def layers(rng: random.Random, first: float, growth: float, spike: bool) -> list[float]:
    """A figure of six layers; in a spike the third one is thirty times what it should be."""
    return [
        first * math.exp(growth * i + rng.gauss(0, 0.06)) * (30 if spike and i == 2 else 1) for i in range(6)
    ]


# phase 1 in three attempts, each of which falls back behind the last one's end, then phase 2 in two
PLAN = (("phase1", 1, 0, 0.35), ("phase1", 2, 0.30, 0.7), ("phase1", 3, 0.66, 1.0), ("phase2", 1, 0, 0.5),
        ("phase2", 2, 0.45, 1.0))  # fmt: skip


def rows_of(steps: int, every: int, seconds_a_row: float = SECONDS_A_ROW) -> list[dict[str, Any]]:
    rng = random.Random(7)
    rows = []
    for place, (phase, attempt, first, last) in enumerate(PLAN):
        length, before = (steps, 0) if phase == "phase1" else (steps // 2, steps * TOKENS_A_STEP)
        for step in range(int(first * length) + every, int(last * length) + 1, every):
            time = START + 120 * place + seconds_a_row * len(rows)
            rows.append(metric(rng, phase, attempt, step, length, before) | {"time": time})
    return rows


def learned(step: int, steps: int) -> float:
    """Faster in both cooldowns, with a dip where the mixture changes."""
    cooled = min(1.0, max(0.0, (step - 0.8 * steps) / (0.2 * steps)))
    again = min(1.0, max(0.0, (step - 1.4 * steps) / (0.1 * steps)))
    since = max(0.0, step - steps) / (0.08 * steps)
    dip = 0.12 * (1 - math.exp(-4 * since)) * math.exp(-0.3 * since)
    return 0.78 * (1 - math.exp(-4.5 * step / steps)) + 0.12 * cooled * math.exp(-since) - dip + 0.16 * again


def evaluations(
    steps: int, checkpoints: int, missing: tuple[str, ...], every_score: int | None = None
) -> list[dict[str, Any]]:
    """every_score: checkpoints from one evaluation of code, questions and RULER to the next;
    None: only the last.
    """
    records: list[dict[str, Any]] = []
    rng = random.Random(11)
    for count in range(1, checkpoints + 1):
        part = 6 * count / checkpoints
        step = int(count / checkpoints * 1.5 * steps)
        tokens = step * TOKENS_A_STEP
        sources = {
            name: {
                "category": category,
                "bits_per_byte": 1.02 - 0.08 * i + 0.5 / part,
                "loss": 2.0,
                "bytes": 30000,
            }
            for i, (name, category) in enumerate(SOURCES.items())
        }
        late = step > steps
        origin = {"step": step - late * steps, "tokens_total": tokens, "phase": "phase2" if late else "phase1",
                  "time": 1.79e9 + 3600 * part, "seconds": 41.3, "code_version": "0123456789ab",
                  "tokenizer_sha256": "ab" * 32, "data_sha256": "cd" * 32}  # fmt: skip
        total = sum(s["bits_per_byte"] for s in sources.values()) / len(sources)
        records.append({"kind": "bits_per_byte", **origin, "bits_per_byte": total, "sources": sources})
        records.append({**origin, **core_record(rng, learned(step, steps), missing)})
        if every_score and count % every_score == 0 and count < checkpoints:
            records += scores(origin, learned(step, steps) - 0.1)
        records.append({**origin, "kind": "samples", "max_new_tokens": 64, "temperature": 0.8, "seed": 0,
                        "backend": "engine bf16", "samples": texts(step)})  # fmt: skip
    speed = {"tokens_per_s": 131.7, "bytes_per_token": 98.3e6, "probe_bytes_per_s": 17.4e9, "percent_of_probe": 74.4,
             "prefill_tokens_per_s": 2150.0, "ttft_s": 0.061, "cpu": "Some CPU (2 cores)", "dtype": "bf16",
             "isa": "avx512bf16", "threads": 2, "tokens_per_s_p10": 127.9, "tokens_per_s_p90": 134.2}  # fmt: skip
    return [
        *records,
        *scores(origin, 1, steps == PUBLISHED_STEPS),
        {**origin, "kind": "decode_speed", **speed},
    ]


def texts(step: int) -> list[dict[str, str]]:
    """Two prompts whose continuations grow with the step."""
    prose, code = "The old lighthouse keeper", "def is_prime(n: int) -> bool:\n"
    words = (
        " had <b>not</b> spoken to anyone for weeks, and the sea had been as quiet as he was. " * 3
    ).split()
    most = max(3, step // 40 % 40)
    return [
        {"name": "prose", "prompt": prose, "greedy": " ".join(words[:most]), "sampled": " ".join(words[: most // 2])},
        {"name": "code", "prompt": code, "greedy": "    if n < 2:\n        return False\n    return all(n % d for d in "
         "range(2, n))", "sampled": f"    # step {step}\n    return n & 1"},
    ]  # fmt: skip


# label: (category, type, shots, baseline v1, baseline v2, items)
CORE_TASKS = {
    "hellaswag_zeroshot": ("language", "multiple_choice", 0, 25, 25, 10042),
    "jeopardy": ("world", "language_modeling", 10, 0, 0, 2117),
    "bigbench_qa_wikidata": ("world", "language_modeling", 10, 0, 0, 20321),
    "arc_easy": ("world", "multiple_choice", 10, 25, 25, 2376),
    "arc_challenge": ("world", "multiple_choice", 10, 25, 25, 1172),
    "copa": ("commonsense", "multiple_choice", 0, 50, 50, 100),
    "commonsense_qa": ("commonsense", "multiple_choice", 10, 20, 40.3, 1221),
    "piqa": ("commonsense", "multiple_choice", 10, 50, 50, 1838),
    "openbook_qa": ("commonsense", "multiple_choice", 0, 25, 25, 500),
    "lambada_openai": ("language", "language_modeling", 0, 0, 0, 5153),
    "hellaswag": ("language", "multiple_choice", 10, 25, 25, 10042),
    "winograd": ("language", "schema", 0, 50, 50, 273),
    "winogrande": ("language", "schema", 0, 50, 50, 1267),
    "bigbench_dyck_languages": ("symbolic", "language_modeling", 10, 0, 0, 1000),
    "agi_eval_lsat_ar": ("symbolic", "multiple_choice", 3, 20, 25, 230),
    "bigbench_cs_algorithms": ("symbolic", "language_modeling", 10, 0, 0, 1320),
    "bigbench_operators": ("symbolic", "language_modeling", 10, 0, 0, 210),
    "bigbench_repeat_copy_logic": ("symbolic", "language_modeling", 10, 0, 0, 32),
    "squad": ("reading", "language_modeling", 10, 0, 0, 10570),
    "coqa": ("reading", "language_modeling", 0, 0, 0, 7983),
    "boolq": ("reading", "multiple_choice", 10, 62, 62, 3270),
    "bigbench_language_identification": ("language", "multiple_choice", 10, 9.1, 25, 10000),
}
RULER = ("niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
         "niah_multiquery", "niah_multivalue", "ruler_vt", "ruler_cwe", "ruler_fwe")  # fmt: skip


def core_record(rng: random.Random, share: float, missing: tuple[str, ...] = ()) -> dict[str, Any]:
    """A `core` record of a model that has learned this share of what it can."""
    tasks: dict[str, Any] = {}
    for place, (label, (category, kind, shots, v1, v2, items)) in enumerate(CORE_TASKS.items()):
        n = min(500, items)
        skill = (0.05 + 0.03 * (place % 7)) * 2 * share
        accuracy = min(1.0, max(0.0, v1 / 100 + (1 - v1 / 100) * skill + rng.gauss(0, 0.3) / n**0.5))
        error = math.sqrt(accuracy * (1 - accuracy) / n)
        centered = {f"centered_v{i}": (accuracy - b / 100) / (1 - b / 100) for i, b in ((1, v1), (2, v2))}
        if label not in missing:
            gold = {
                "gold_bits_per_byte": 1.6 - 0.04 * place - 0.7 * max(0, share) ** 0.5 + rng.gauss(0, 0.004)
            }
            tasks[label] = {**gold, "accuracy": accuracy, **centered, "standard_error": error, "n": n, "n_total": items,
                            "shots": shots, "baseline_v1": v1, "baseline_v2": v2, "type": kind,
                            "category": category}  # fmt: skip
    record: dict[str, Any] = {"kind": "core", "protocol": "nanochat", "seed": 1234, "max_per_task": 500}
    for v in ("v1", "v2"):
        values = [t[f"centered_{v}"] for t in tasks.values()]
        record |= {
            f"core_{v}": None if missing else sum(values) / 22,
            f"core_{v}_se": None if missing else 0.0065,
        }
    categories = {}
    for category in ("language", "world", "commonsense", "symbolic", "reading"):
        of_it = [t for t in tasks.values() if t["category"] == category]
        whole = len(of_it) == sum(t[0] == category for t in CORE_TASKS.values())
        categories[category] = {f"centered_{v}": sum(t[f"centered_{v}"] for t in of_it) / len(of_it) if whole else None
                                for v in ("v1", "v2")}  # fmt: skip
    reasons = {label: f"eval_data/{label}.jsonl is missing; copy it there" for label in missing}
    return {**record, "tasks": tasks, "missing": reasons, "categories": categories}


def wilson_of(share: float, items: int) -> list[float]:
    middle, half = wilson(round(share * items), items)
    return [middle - half, middle + half]


def needles(length: str, ruler: dict[str, float]) -> dict[str, Any]:
    """Counts of 50 documents a task; fewer needles are found in the middle, and in longer prompts."""
    lost = 0.6 if length == "4096" else 0.3
    depths = {
        task: [[round(5 * score * (1 - lost * (1 - abs(2 * i - 9) / 9))), 5] for i in range(10)]
        for task, score in ruler.items() if task.startswith("niah")
    }  # fmt: skip
    return {"documents": dict.fromkeys(ruler, 50), "depths": depths}


def scores(origin: dict[str, Any], share: float = 1.0, whole_ruler: bool = True) -> list[dict[str, Any]]:
    """Code, lm-eval with RULER, and contamination of a checkpoint; share: of the last one's scores."""
    code = {"kind": "code", "evalplus": "0.3.1", "prompt": "chat", "top_p": 1.0, "seed": 0, "max_new_tokens": 768,
            "model": "hf", "model_sha256": "ef" * 32, "answers_empty": 0,
            "sandbox": "bubblewrap"}  # fmt: skip
    control = {"passed": 162, "total": 164, "known_failures": {"HumanEval/32": "its tests are not counted"},
               "unexpected_failures": ["HumanEval/83"]}  # fmt: skip
    whole = {"passed": 378, "total": 378, "known_failures": {}, "unexpected_failures": []}
    one = {"base": 0.475, "plus": 0.439}
    ten = {"1": {"base": 0.61, "plus": 0.507}, "10": {"base": 0.751, "plus": 0.688}}
    ruler = {length: {task: round(0.9 - 0.05 * i - (length == "4096") * 0.11, 3) for i, task in enumerate(RULER)}
             for length in ("2048", "4096")}  # fmt: skip
    if not whole_ruler:
        ruler["4096"].pop("ruler_fwe")
    arc = {
        "arc_easy": {"acc": 0.501, "acc_stderr": 0.0103, "acc_norm": 0.4712, "acc_norm_stderr": 0.0102},
        "arc_challenge": {"acc": 0.277, "acc_stderr": 0.0131, "acc_norm": 0.3029, "acc_norm_stderr": 0.0134},
    }
    asked = {"protocol": "lm-eval 0.4.13, 0-shot, with BOS", "seed": 0, "backend": "engine", "add_bos": True,
             "seeds": {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}, "chat_template": False,
             "cut_prompts": 0, "max_length": 4224}  # fmt: skip
    numbers = {
        task: {length: ruler[length][task] for length in ruler if task in ruler[length]} for task in RULER
    }
    prompts = {task: {"documents": 100, "longest_tokens": 4145, "cut": 0} for task in RULER}
    found = {"humaneval": {"items": 164, "touched": 12, "documents_dropped": 431, "sources": {"code": {}}},
             "gsm8k": {"items": 8792, "touched": 0, "documents_dropped": 0, "sources": {}}}  # fmt: skip
    for scored in (one, *ten.values(), *ruler.values(), *arc.values()):
        scored |= {name: value * share for name, value in scored.items()}
    return [
        {**origin, **code, "dataset": "humaneval+", "version": "v0.1.10", "protocol": "greedy", "temperature": 0.0,
         "n": 1, "problems": 164, "pass@1_base": one["base"], "pass@1_plus": one["plus"], "pass@k": {"1": one},
         "pass@1_plus_interval": wilson_of(one["plus"], 164), "pass@1_base_interval": wilson_of(one["base"], 164),
         "control": control, "answers_cut": 3},
        {**origin, **code, "dataset": "mbpp+", "version": "v0.2.0", "protocol": "sampled", "temperature": 0.8, "n": 10,
         "problems": 378, "pass@1_base": ten["1"]["base"], "pass@1_plus": ten["1"]["plus"], "pass@k": ten,
         "control": whole, "answers_cut": 0},
        {**origin, **asked, "kind": "lm_eval", "tasks": arc, "limit": None, "num_fewshot": 0, "haystack": "upstream",
         "ruler": {}, "prompts": {}},
        {**origin, **asked, "chat_template": True, "kind": "lm_eval", "tasks": numbers, "limit": 50,
         "num_fewshot": None, "haystack": "offline", "ruler": ruler, "prompts": prompts,
         "ruler_counts": {length: needles(length, of) for length, of in ruler.items()}},
        {**origin, "kind": "contamination", "benchmarks": found, "phase": "phase1"},
    ]  # fmt: skip


def events(phase: str, length: int, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    ends = {row["attempt"]: row["time"] for row in rows if row["phase"] == phase}
    told = [("signal", 1, 0.35, "SIGUSR1 ten minutes before the time limit"), ("roll_back", 2, 0.7, "loss z 11.2"),
            ("checkpoint_saved", 3, 0.9, None)]  # fmt: skip
    return [
        {"time": ends[attempt] + 1, "attempt": attempt, "step": int(share * length), "kind": kind, "rank": rank,
         "host": "node-07", "reason": reason}
        for kind, attempt, share, reason in told for rank in range(2)
        if phase == "phase1"
    ]  # fmt: skip


def write_run(
    folder: Path, steps: int = 2000, every: int = 2, checkpoints: int = 6, missing: tuple[str, ...] = (),
    every_score: int | None = None, model: dict[str, Any] = MODEL, seconds_a_row: float = SECONDS_A_ROW,
) -> Path:  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    evals, rows = evaluations(steps, checkpoints, missing, every_score), rows_of(steps, every, seconds_a_row)
    flavor = "tiny" if model is MODEL else "2b"
    (folder / "note.txt").write_text("Synthetic figures: no such run took place.")
    for name, records in (("metrics", rows), ("evals", evals)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for phase, length in (("phase1", steps), ("phase2", steps // 2)):
        (folder / phase).mkdir(exist_ok=True)
        (folder / phase / "config.toml").write_text(
            f'[phase]\nname = "{phase}"\n[model]\nflavor = "{flavor}"\n[training]\nsteps = {length}\nseq_len = 4096\n'
            f'global_batch_size = 1536\n[optimizer]\nname = "AdamW"\nlr = {4e-4 if phase == "phase1" else 2e-4}\n'
            f"[lr_scheduler]\ndecay_ratio = 0.2\nwarmup_steps = {length // 50}\n"
            f'[mixture]\nlock = "data/{phase}.lock.json"\n[metrics]\ngpu_hour_price = 2.5\ncurrency = "EUR"\n'
        )
        (folder / phase / "model.json").write_text(json.dumps(model))
        began = {r["attempt"]: r["time"] - 60 for r in reversed(rows) if r["phase"] == phase}
        starts = [{"attempt": n, "step": int(first * length), "world_size": 192, "torch": "2.13.0",
                   "code_version": "0123456789ab", "mixture_fingerprint": "ef" * 32, "time": began[n],
                   "started_from": None}
                  for of, n, first, _ in PLAN if of == phase]  # fmt: skip
        lines = "".join(json.dumps(event) + "\n" for event in events(phase, length, rows))
        (folder / phase / "events.jsonl").write_text(lines)
        (folder / phase / "attempts.jsonl").write_text("".join(json.dumps(s) + "\n" for s in starts))
    return folder


def write_published(folder: Path, every: int = 10, missing: tuple[str, ...] = ()) -> Path:
    """A run in the published shape: 930,000 steps in two phases, 21 days, 200 evaluated checkpoints."""
    seconds_a_row = 21 * 86400 / (1.5 * PUBLISHED_STEPS / every)
    return write_run(folder, PUBLISHED_STEPS, every, 200, missing, 10, MODEL_2B, seconds_a_row)


if __name__ == "__main__":
    where, gaps = Path(sys.argv[1]), ("squad", "coqa") if "--missing" in sys.argv else ()
    if "--published" in sys.argv:
        write_published(where, missing=gaps)
    else:
        long = "--long" in sys.argv
        write_run(where, 20_000 if long else 2000, checkpoints=200 if long else 6, missing=gaps)
