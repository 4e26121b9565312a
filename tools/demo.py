"""The whole way at toy size: text, mixture, two training phases, HF folder, decode engine, evaluation, dashboard.

`make demo` runs this. Every stage is the command that the 2B run uses; only the configs differ. The last line of the
output is one JSON object with the figures; runs/demo/ keeps everything.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from records.files import read_lines

PROMPTS = ("def main(", "The first", "import os\n", "Question: what is 12 + 30?\n", "Returns a list of")
NEW_TOKENS = 48
BUNDLE = "evals/core/demo_bundle"  # not CORE: too few tasks, easy rows
console = Console(stderr=True)


def main(out: Path = Path("runs/demo"), steps1: int = 200, steps2: int = 100, ranks: int = 2) -> None:
    """Run every stage into `out`; prepared data is reused, training and everything after it is redone."""
    started = time.monotonic()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # Transformers shows one for every model that it loads
    clear(out)
    stage("1/7  real text -> tokens, shards, mixture locks")
    run("-m", "data_mixtures.prepare", "data_mixtures/demo.toml", "--out", str(out / "data"))
    stage(f"2/7  phase 1: broad mixture, {ranks} FSDP ranks")
    train(out, "phase1", steps1, ranks)
    stage("3/7  phase 2: code and reasoning, from the last checkpoint of phase 1")
    parent = out / f"phase1/checkpoint/step-{steps1}"
    train(out, "phase2", steps2, ranks, "--checkpoint.initial_load_path", str(parent))
    merge_metrics(out)
    stage("4/7  checkpoint -> Hugging Face folder")
    last = out / f"phase2/checkpoint/step-{steps2}"
    exported = run("-m", "tools.export_hf", "--checkpoint", str(last), "--out", str(out / "hf"), "--dtype", "float32")
    stage("5/7  the decode engine against Transformers, token for token")
    matches, sample = engine_matches_hf(out / "hf")
    stage("6/7  bits per byte, a toy bundle of CORE, contamination, decode speed")
    measured = evaluate(out, steps2)
    stage("7/7  dashboard")
    run("-m", "tools.dashboard", str(out), "--out", str(out / "dashboard.html"))
    size = sum(path.stat().st_size for path in (out / "hf").glob("*.safetensors"))
    console.print(f"[bold]a sample[/bold] of a model of {size:,} bytes:")
    console.print(sample.strip(), markup=False, highlight=False)
    console.print(f"everything is in {out}/; open {out}/dashboard.html")
    rest = {"hf_max_logit_diff": exported["hf_max_logit_diff"], "engine_matches_hf": matches, **measured}
    rest |= {"seconds": round(time.monotonic() - started, 1), "out": str(out)}
    print(json.dumps(training_figures(out) | rest))


def clear(out: Path) -> None:
    """Remove what an earlier demo left in `out`, but its data."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in ("phase1", "phase2", "hf", "metrics.jsonl", "evals.jsonl", "dashboard.html"):
        path = out / stale
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def evaluate(out: Path, step: int) -> dict[str, Any]:
    """Evaluate the exported model into evals.jsonl; returns the figures of the demo's last line."""
    tokens_total = read_lines(out / "metrics.jsonl")[-1]["tokens_total"]
    about = ("--out", str(out / "evals.jsonl"), "--step", str(step), "--tokens-total", str(tokens_total))
    where = (str(out / "hf"), *about, "--phase", "phase2")
    bpb = run("-m", "evals.bits_per_byte", *where, "--data", str(out / "data"))
    core = run("-m", "evals.core", *where, "--bundle", BUNDLE, "--protocol", "nanochat")
    run("-m", "evals.contamination", "--data", str(out / "data"), *about[:2])
    bench = run("-m", "evals.decode_speed", *where)
    return {
        "decode_tokens_per_s": bench["tokens_per_s"],
        "percent_of_probe": bench["percent_of_probe"],
        "bits_per_byte": bpb["bits_per_byte"],
        "core_tasks": len(core["tasks"]),
        "core_v1": core["core_v1"],
    }


def stage(title: str) -> None:
    console.rule(f"[bold cyan]{title}", align="left")


def run(*arguments: str) -> dict[str, Any]:
    """Run one of our commands; its output is shown, and its last line returned if that is JSON."""
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=dict(os.environ, PYTHONUNBUFFERED="1")
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            if line.strip():
                last = line
            if not line.startswith("{"):
                console.print(line.rstrip(), markup=False, highlight=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed with exit status {process.returncode}")
    return json.loads(last) if last.startswith("{") else {}


def train(out: Path, phase: str, steps: int, ranks: int, *overrides: str) -> None:
    """One phase under torchrun, its log beside its checkpoints, its progress from the metrics it writes."""
    folder = out / phase
    folder.mkdir(parents=True)
    log = folder / "train.log"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "-m", "train",
        "--job.config_file", f"configs/debug_{phase}.toml", "--job.dump_folder", str(folder),
        "--mixture.lock", str(out / f"data/{phase}.lock.json"), "--training.steps", str(steps), *overrides,
    ]  # fmt: skip
    console.print(f"python {' '.join(command[1:])}\n(log: {log})", markup=False, highlight=False)
    with open(log, "w") as file, progress_bar() as progress:
        task = progress.add_task(phase, total=steps, loss="", rate="")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env)
        try:
            while process.poll() is None:
                show_progress(progress, task, folder / "metrics.jsonl")
                time.sleep(0.5)
        finally:
            if process.poll() is None:
                process.terminate()
        show_progress(progress, task, folder / "metrics.jsonl")
    if process.returncode:
        console.print("".join(log.read_text().splitlines(keepends=True)[-40:]), markup=False, highlight=False)
        raise SystemExit(f"training {phase} failed with exit status {process.returncode}; the whole log is {log}")


def progress_bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[rate]}"), console=console)


def show_progress(progress: Progress, task: Any, metrics: Path) -> None:
    rows = read_lines(metrics)
    if rows:
        row = rows[-1]
        rate, loss = f"{row['tokens_per_s']:,.0f} tokens/s", row["loss"]
        progress.update(task, completed=row["step"], loss=f"loss {loss:.3f}" if loss else "", rate=rate)


def merge_metrics(out: Path) -> None:
    """Both phases in one file, for a reader who wants the run as one curve."""
    with open(out / "metrics.jsonl", "w") as merged:
        for phase in ("phase1", "phase2"):
            merged.write((out / phase / "metrics.jsonl").read_text())


def engine_matches_hf(folder: Path) -> tuple[bool, str]:
    """Greedy tokens of the C++ engine and of Transformers for a few prompts: equal or not, and one decoded text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from laneformer import Engine

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    equal, sample = [], ""
    with Engine.from_pretrained(folder, device="cpu") as engine:
        for prompt in PROMPTS:
            ids = tokenizer(prompt, return_tensors="pt").input_ids
            theirs = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0, ids.shape[1] :].tolist()
            ours = engine.generate(ids[0].tolist(), max_new_tokens=NEW_TOKENS)
            equal.append(list(ours) == theirs)
            console.print(f"{'same' if equal[-1] else 'DIFFERENT'}: {prompt!r}", markup=False, highlight=False)
            sample = sample or prompt + str(tokenizer.decode(ours))
    return all(equal), sample


def training_figures(out: Path) -> dict[str, Any]:
    rows = read_lines(out / "metrics.jsonl")
    losses = {phase: [row["loss"] for row in rows if row["phase"] == phase] for phase in ("phase1", "phase2")}
    ends = {f"{phase}_loss_{end}": of[i] for phase, of in losses.items() for end, i in (("first", 0), ("last", -1))}
    return {**ends, "tokens": rows[-1]["tokens_total"]}


if __name__ == "__main__":
    tyro.cli(main)
