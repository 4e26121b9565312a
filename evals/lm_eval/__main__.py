"""lm-eval's stock tasks on a model: the engine in this process, or any OpenAI-compatible endpoint.

`ruler` stands for its eleven synthetic tasks, scored at each of `--lengths` tokens (the two that download QA sets are
chosen by name). `--limit N` takes the first N documents of a task, and of each length of a RULER task.

    python -m evals.lm_eval runs/demo/hf --tasks arc_easy,arc_challenge --num-fewshot 0 --data eval_data --limit 100
    python -m evals.lm_eval HF_DIR --tasks ruler --lengths 2048,4096 --max-length 4224 --out runs/NAME/evals.jsonl
    python -m evals.lm_eval HF_DIR --tasks arc_easy --base-url http://127.0.0.1:8000/v1

An endpoint also needs the folder: its tokenizer encodes the prompts and determines the lengths of RULER's.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from evals.lm_eval.evaluate import (
    Endpoint,
    Questions,
    documents_sha256,
    evaluate,
    figures_of,
    lengths_of,
    open_model,
    settings_figures,
    show,
)
from evals.lm_eval.tasks import data_folder, expand_tasks
from records.evals import NOWHERE, AboutFlags, EvalCommand
from records.files import file_sha256

ENGINE = Endpoint()


def main(
    hf_dir: Annotated[Path, tyro.conf.Positional],
    asked: Annotated[Questions, tyro.conf.OmitArgPrefixes],
    max_length: int | None = None,
    endpoint: Annotated[Endpoint, tyro.conf.OmitArgPrefixes] = ENGINE,
    about: AboutFlags = NOWHERE,
    device: str = "auto",
) -> dict[str, Any]:
    """Score a model on lm-eval's stock tasks. The last line on stdout is the record, JSON.

    Args:
        hf_dir: folder of the exported model
        asked: what is asked, and how
        max_length: context in tokens, default: config.json's; RULER needs up to 100 more than its longest length
        endpoint: server to ask instead of the engine
        about: options of the record
        device: device that runs the engine: auto, cpu or cuda
    """
    started = time.perf_counter()
    names, lengths, hf_dir = expand_tasks(asked.tasks), lengths_of(asked.lengths), hf_dir.resolve()
    about = replace(about, out=about.out and about.out.resolve())  # data_folder changes the working directory
    if not (hf_dir / "tokenizer.json").is_file():
        raise ValueError(f"{hf_dir} holds no tokenizer.json; pass the folder of an exported model")
    with data_folder(asked.data.resolve(), names) if asked.data else contextlib.nullcontext():
        model = open_model(hf_dir, endpoint, device, asked.add_bos, max_length)
        options: dict[str, Any] = {"num_fewshot": asked.num_fewshot, "chat_template": asked.chat_template}
        result = evaluate(model, names, hf_dir, lengths=lengths, limit=asked.limit, **options)
    figures = settings_figures(asked, endpoint.base_url or "engine") | figures_of(result, model, lengths)
    show(figures)
    seconds, tokenizer = time.perf_counter() - started, file_sha256(hf_dir / "tokenizer.json")
    documents = documents_sha256(result["samples"])
    return about.append("lm_eval", figures, seconds=seconds, tokenizer_sha256=tokenizer, data_sha256=documents)


COMMAND = EvalCommand("lm_eval", main, excludes=("--base-url",))


if __name__ == "__main__":
    COMMAND.run()
