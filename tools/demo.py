"""Run the whole pipeline at toy size: text, mixture, three training phases, HF folder, engine, dashboard.

`make demo` runs this, with the commands of the 2B run and other configs. The last line of output is
one JSON object with the figures; runs/demo/ keeps everything.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from laneformer import Engine
from laneformer.engine.text_files import read_texts
from laneformer.prompts import PromptEncoder
from records.command import Count, check_ranges, run_function
from records.files import read_lines
from records.job import job_flags

NEW_TOKENS = 48
# not CORE: too few tasks, easy rows
BUNDLE = "evals/core/demo_bundle"
PHASES = ("phase1", "phase2", "sft")
CHAT_WEIGHTS = ("chitchat=4", "identity=1")
REPLY_TOKENS = 256
QUESTION = "Who are you?"
console = Console(stderr=True)


def main(
    out: Path = Path("runs/demo"),
    steps1: Count = 200,
    steps2: Count = 100,
    steps3: Count = 150,
    ranks: Count | None = None,
) -> dict[str, Any]:
    """Run every stage into `out`; prepared data is reused, training and everything after it is redone.

    Args:
        steps1: training steps of phase 1
        steps2: training steps of phase 2
        steps3: training steps of fine-tuning
        ranks: training processes; default: one for each GPU, at most two; two on a CPU
        out: folder of everything that the demo writes
    """
    check_ranges(main, locals())
    ranks = ranks or min(2, torch.cuda.device_count() or 2)  # two fill a step
    started = time.monotonic()
    # Transformers shows one for every model that it loads
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    clear(out)
    stage("1/8  real text -> tokens, shards, mixture locks")
    run("-m", "data_mixtures.prepare", "data_mixtures/demo.toml", "--out", out / "data")
    stage(f"2/8  phase 1: broad mixture, {ranks} FSDP ranks")
    first = train(out, "phase1", out / "data/phase1.lock.json", steps1, ranks, None)
    stage("3/8  phase 2: code and reasoning, from the last checkpoint of phase 1")
    second = train(out, "phase2", out / "data/phase2.lock.json", steps2, ranks, first)
    stage("4/8  fine-tuning on conversations of people, from the last checkpoint of phase 2")
    lock = prepare_conversations(out)
    third = train(out, "sft", lock, steps3, ranks, second, "--optimizer.lr", "3e-3")
    # for a reader who wants the run as one curve
    with open(out / "metrics.jsonl", "w") as merged:
        for phase in PHASES:
            merged.write((out / phase / "metrics.jsonl").read_text())
    stage("5/8  checkpoints -> Hugging Face folders, before and after fine-tuning")
    base, final = out / "phase2/hf", out / "hf"
    export(second, base)
    exported = export(third, final)
    stage("6/8  the decode engine against Transformers, token for token")
    options = ("--trust-remote-code", "--new-tokens", NEW_TOKENS, "--json")
    greedy = run("-m", "tools.check", "published", final, *options)["greedy"]
    stage("7/8  bits per byte, a toy bundle of CORE, contamination, decode speed")
    measured = evaluate(out, base, final, steps2, steps3)
    stage("8/8  dashboard")
    run("-m", "tools.dashboard", out, "--out", out / "dashboard.html")
    size = sum(path.stat().st_size for path in final.glob("*.safetensors"))
    console.print(f"[bold]a sample exchange[/bold] with a model of {size:,} bytes:")
    text = f"user:      {QUESTION}\nassistant: {reply(final, QUESTION)}"
    console.print(text, markup=False, highlight=False)
    console.print(f"everything is in {out}/; open {out}/dashboard.html")
    return {
        **training_figures(out),
        "hf_max_logit_diff": exported["hf_max_logit_diff"],
        "engine_matches_hf": greedy["same"] == greedy["prompts"],
        **measured,
        "seconds": round(time.monotonic() - started, 1),
        "out": str(out),
    }


def clear(out: Path) -> None:
    """Remove what an earlier demo left in `out`, but its data."""
    out.mkdir(parents=True, exist_ok=True)
    for stale in (*PHASES, "hf", "metrics.jsonl", "evals.jsonl", "dashboard.html"):
        path = out / stale
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def prepare_conversations(out: Path) -> Path:
    """Pack conversations of people and about the model; return their mixture's lock file."""
    folder = out / "conversations"
    people, identity = folder / "chitchat.jsonl", folder / "identity.jsonl"
    run("-m", "examples.chitchat", "--out", people)
    run("-m", "train.sft.identity", "--out", identity, "--conversations", 500)
    options = ("--tokenizer", out / "data/tokenizer.model", "--out", folder, "--seq-len", 256)
    run("-m", "train.sft", people, identity, *options, "--weights", *CHAT_WEIGHTS)
    return folder / "sft.lock.json"


def export(checkpoint: Path, out: Path) -> dict[str, Any]:
    return run(
        "-m", "tools.export_hf", "--checkpoint", checkpoint, "--out", out, "--dtype", "float32"
    )


def evaluate(out: Path, base: Path, final: Path, steps2: int, steps3: int) -> dict[str, Any]:
    """Write evaluations and decode speed into evals.jsonl; return the last line's figures."""
    records = ("--out", out / "evals.jsonl")
    tokens = {row["phase"]: row["tokens_total"] for row in read_lines(out / "metrics.jsonl")}

    def about(folder: Path, phase: str, step: int) -> tuple[Any, ...]:
        return folder, *records, "--phase", phase, "--step", step, "--tokens-total", tokens[phase]

    pretrained = about(base, "phase2", steps2)
    bpb = run("-m", "evals.bits_per_byte", *pretrained, "--data", out / "data")
    core = run("-m", "evals.core", *pretrained, "--bundle", BUNDLE, "--protocol", "nanochat")
    run("-m", "evals.contamination", "--data", out / "data", *records)
    bench = run("-m", "evals.decode_speed", *about(final, "sft", steps3))
    return {
        "decode_tokens_per_s": bench["tokens_per_s"],
        "percent_of_probe": bench["percent_of_probe"],
        "bits_per_byte": bpb["bits_per_byte"],
        "core_tasks": len(core["tasks"]),
        "core_v1": core["core_v1"],
    }


def stage(title: str) -> None:
    console.rule(f"[bold cyan]{title}", align="left")


def run(*arguments: Any) -> dict[str, Any]:
    """Run one of our commands, show its output, and return its last line if that is JSON."""
    command = [sys.executable, *map(str, arguments)]
    # else a command's lines would come in blocks
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            if line.strip():
                last = line
            if not line.startswith("{"):
                console.print(line.rstrip(), markup=False, highlight=False)
    if process.returncode:
        raise SystemExit(f"{' '.join(command[1:])} failed with exit status {process.returncode}")
    return json.loads(last) if last.startswith("{") else {}


def train(
    out: Path, phase: str, lock: Path, steps: int, ranks: int, parent: Path | None, *overrides: str
) -> Path:
    """Train one phase under torchrun, showing progress; return its last checkpoint."""
    folder = out / phase
    folder.mkdir(parents=True)
    log = folder / "train.log"
    settings: dict[str, Any] = {
        "job.config_file": f"configs/debug_{phase}.toml",
        "job.dump_folder": folder,
        "mixture.lock": lock,
        "training.steps": steps,
    }
    if parent is not None:
        settings["checkpoint.initial_load_path"] = parent
    torchrun = f"-m torch.distributed.run --standalone --nproc_per_node={ranks} -m train"
    command = [sys.executable, *torchrun.split(), *job_flags(settings), *overrides]
    console.print(f"python {' '.join(command[1:])}\n(log: {log})", markup=False, highlight=False)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(log, "w") as file, Progress(console=console) as progress:
        task = progress.add_task(phase, total=steps)
        with subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env) as process:
            try:
                while process.poll() is None:
                    time.sleep(0.5)
                    for row in read_lines(folder / "metrics.jsonl")[-1:]:
                        figures = f"loss {row['loss'] or math.nan:.3f}, {row['tokens_per_s']:,.0f} tokens/s"
                        progress.update(
                            task, completed=row["step"], description=f"{phase}: {figures}"
                        )
            except BaseException:
                # Ctrl-C included: the job must not outlive the demo
                process.terminate()
                raise
    if process.returncode:
        console.print(
            "".join(log.read_text().splitlines(keepends=True)[-40:]), markup=False, highlight=False
        )
        raise SystemExit(
            f"training {phase} failed with exit status {process.returncode}; the whole log is {log}"
        )
    return folder / f"checkpoint/step-{steps}"


def reply(folder: Path, question: str) -> str:
    with Engine.from_pretrained(folder, device="cpu") as engine:
        assert engine.tokenizer is not None, f"{folder} was exported with its tokenizer"
        prompts = PromptEncoder(engine.tokenizer, read_texts(folder).tokenizer_config)
        prompt = prompts.encode(prompts.render([{"role": "user", "content": question}]))
        return str(engine.tokenizer.decode(engine.generate(prompt, max_new_tokens=REPLY_TOKENS)))


def training_figures(out: Path) -> dict[str, Any]:
    rows = read_lines(out / "metrics.jsonl")
    figures: dict[str, float] = {}
    for phase in PHASES:
        losses = [row["loss"] for row in rows if row["phase"] == phase]
        figures |= {f"{phase}_loss_first": losses[0], f"{phase}_loss_last": losses[-1]}
    return {**figures, "tokens": rows[-1]["tokens_total"]}


if __name__ == "__main__":
    run_function("tools.demo", main)
