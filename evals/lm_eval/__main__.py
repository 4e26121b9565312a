"""lm-eval's stock tasks on a model: our engine in this process, or any OpenAI-compatible endpoint.

`ruler` means its eleven synthetic tasks, scored at each of `--lengths` tokens (the two that download QA sets are asked
for by name). `--limit N` takes the first N documents of a task, and of each length of a RULER task.

    python -m evals.lm_eval runs/demo/hf --tasks arc_easy,arc_challenge --num-fewshot 0 --data eval_data --limit 100
    python -m evals.lm_eval HF_DIR --tasks ruler --lengths 2048,4096 --max-length 4224 --out runs/NAME/evals.jsonl
    python -m evals.lm_eval HF_DIR --tasks arc_easy --base-url http://127.0.0.1:8000/v1

The folder is always needed: its tokenizer cuts the prompts, and sizes those of RULER. This module is `evals.lm_eval`;
`import lm_eval`, here as everywhere, is the library.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

from evals.lm_eval.figures import documents_sha256, figures_of, show
from evals.lm_eval.offline_tasks import ARC_TASKS, RULER_TASKS, data_folder
from evals.lm_eval.ruler_room import check_room
from records.evals import NOWHERE, AboutFlags, EvalCommand
from records.files import file_sha256

if TYPE_CHECKING:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

    from evals.lm_eval.models import CheckedCompletions, EngineLM

DEFAULT_LENGTHS = (2048, 4096)
SEEDS = {
    "random": 0,
    "numpy": 1234,
    "torch": 1234,
    "fewshot": 1234,
}  # lm-eval's defaults; the first two draw RULER's texts


@dataclass(frozen=True)
class Endpoint:
    """Where an OpenAI-compatible server listens, and how it is asked; without `base_url` the engine is asked."""

    base_url: str | None = None
    """an OpenAI-compatible server to ask instead of the engine, such as http://127.0.0.1:8000/v1"""
    model_name: str | None = None
    """what the server calls the model; the folder's name by default"""
    num_concurrent: int = 1
    """requests that the server is sent at a time"""
    timeout_s: int = 300
    """how long one answer of the server may take"""


ENGINE = Endpoint()
EndpointFlags = Annotated[Endpoint, tyro.conf.OmitArgPrefixes]  # --base-url, ... as flags of the command itself


def expand_tasks(names: str) -> list[str]:
    """Task names of a comma-separated list, `ruler` as its eleven tasks."""
    found: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        found += RULER_TASKS if name == "ruler" else [name]
    if "" in found or len(set(found)) < len(found):
        raise ValueError(
            f"--tasks {names} holds an empty name or names a task twice; write arc_easy,arc_challenge,ruler"
        )
    return found


def lengths_of(text: str) -> list[int]:
    """Ascending token counts of a comma-separated list."""
    lengths = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(lengths) < 512 or lengths != sorted(set(lengths)):
        raise ValueError(f"--lengths {text} must be ascending token counts of at least 512, as 2048,4096")
    return lengths


def open_endpoint(hf_dir: Path, endpoint: Endpoint, add_bos: bool, max_length: int | None) -> CheckedCompletions:
    """lm-eval's local-completions on token ids, with the context of the folder's config.json."""
    from evals.lm_eval.models import CheckedCompletions

    assert endpoint.base_url, "without one the engine is asked"
    config = json.loads((hf_dir / "config.json").read_text(encoding="utf-8"))
    url = endpoint.base_url.rstrip("/")
    return CheckedCompletions(
        base_url=url if url.endswith("/completions") else f"{url}/completions",
        model=endpoint.model_name or hf_dir.name,
        tokenizer=str(hf_dir),
        tokenizer_backend="huggingface",
        tokenized_requests=True,
        trust_remote_code=True,  # the folder is ours: it is the one under test
        max_length=max_length or config["max_position_embeddings"],  # its default of 2048 would cut
        add_bos_token=add_bos,
        num_concurrent=endpoint.num_concurrent,
        timeout=endpoint.timeout_s,
    )


def load_tasks(names: Sequence[str], lengths: Sequence[int], tokenizer: Path) -> tuple[TaskManager, list[Task]]:
    """The stock tasks with their documents, drawn as `lm_eval` itself draws them from SEEDS."""
    import lm_eval.tasks

    check_room(names, lengths, tokenizer)
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])  # noqa: NPY002 - the generator that `ruler_vt` draws its numbers from
    metadata: Any = {"max_seq_lengths": list(lengths), "tokenizer": str(tokenizer)}
    if set(names) <= {*ARC_TASKS, *RULER_TASKS}:  # the index of all of lm-eval's tasks takes half a minute
        paths: list[str | Path] = [Path(lm_eval.tasks.__file__).parent / folder for folder in ("arc", "ruler")]
        manager = lm_eval.tasks.TaskManager(include_path=paths, include_defaults=False, metadata=metadata)
    else:
        manager = lm_eval.tasks.TaskManager(metadata=metadata)
    return manager, list(manager.load(list(names))["tasks"].values())


def first_documents(task: Task, limit: int | None) -> list[int]:
    """Indices of a task's first `limit` documents, and of each length where it has several."""
    seen: dict[Any, int] = {}
    chosen = []
    for i, document in enumerate(task.eval_docs):
        length = document.get("max_length")
        seen[length] = seen.get(length, 0) + 1
        if limit is None or seen[length] <= limit:
            chosen.append(i)
    return chosen


def evaluate(
    model: TemplateLM,
    names: Sequence[str],
    tokenizer: Path,
    *,
    lengths: Sequence[int] = DEFAULT_LENGTHS,
    limit: int | None = None,
    num_fewshot: int | None = None,
    chat_template: bool = False,
) -> dict[str, Any]:
    """Run stock tasks; the result of `lm_eval.simple_evaluate`, samples included."""
    import lm_eval

    manager, tasks = load_tasks(names, lengths, tokenizer)
    result: Any = lm_eval.simple_evaluate(
        model=model,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=num_fewshot,
        # not its own `limit`: that takes the first documents of all lengths together, so of the shortest alone
        samples={task.task_name: first_documents(task, limit) for task in tasks},
        apply_chat_template=chat_template,
        random_seed=SEEDS["random"],
        numpy_random_seed=SEEDS["numpy"],
        torch_random_seed=SEEDS["torch"],
        fewshot_random_seed=SEEDS["fewshot"],
    )
    return result


def open_model(
    hf_dir: Path, endpoint: Endpoint, device: str, add_bos: bool, max_length: int | None
) -> EngineLM | CheckedCompletions:
    """The server, where one is named, or the engine."""
    from evals.lm_eval.models import EngineLM

    if endpoint.base_url:
        return open_endpoint(hf_dir, endpoint, add_bos, max_length)
    return EngineLM(hf_dir, device=device, add_bos=add_bos, max_length=max_length)


def settings_figures(
    backend: str, limit: int | None, num_fewshot: int | None, add_bos: bool, chat_template: bool, offline: bool
) -> dict[str, Any]:
    """What the record says of how the tasks were asked."""
    shots = "the tasks' own shots" if num_fewshot is None else f"{num_fewshot}-shot"
    return {
        "protocol": f"lm-eval {version('lm-eval')}, {shots}, {'with' if add_bos else 'without'} BOS",
        "seed": SEEDS["random"],
        "seeds": SEEDS,
        "backend": backend,
        "limit": limit,
        "num_fewshot": num_fewshot,
        "add_bos": add_bos,
        "chat_template": chat_template,
        "haystack": "offline" if offline else "upstream",
    }


def check_request(hf_dir: Path, limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit} leaves nothing to score; give at least 1, or leave it out for all")
    if not (hf_dir / "tokenizer.json").is_file():
        raise ValueError(f"{hf_dir} holds no tokenizer.json; give the folder of an exported model")


def main(
    hf_dir: Annotated[Path, tyro.conf.Positional],
    tasks: str,
    lengths: str = ",".join(map(str, DEFAULT_LENGTHS)),
    limit: int | None = None,
    num_fewshot: int | None = None,
    data: Path | None = None,
    add_bos: bool = True,
    chat_template: bool = False,
    max_length: int | None = None,
    endpoint: EndpointFlags = ENGINE,
    about: AboutFlags = NOWHERE,
    device: str = "auto",
) -> None:
    """Score a model on lm-eval's stock tasks. The last line on stdout is the record, JSON.

    Args:
        hf_dir: folder of the exported model
        tasks: lm-eval's names, comma-separated; `ruler` means its eleven synthetic tasks
        lengths: tokens of a RULER prompt with its answer, comma-separated
        limit: documents of each task (and length) to score; all by default
        num_fewshot: worked examples before each question; the task's own number by default
        data: folder of local data sets (evals/lm_eval/offline_tasks.py shows its layout); by default they come from the hub
        add_bos: put the begin-of-text id before every prompt, as in training
        chat_template: ask through the model's chat template
        max_length: context in tokens, default that of config.json; RULER needs up to 100 more than its length
        endpoint: the server to ask instead of the engine
        about: where the record goes, and what it is about
        device: where the engine runs: auto, cpu or cuda
    """
    started = time.perf_counter()
    names, counts, hf_dir = expand_tasks(tasks), lengths_of(lengths), hf_dir.resolve()
    about = replace(about, out=about.out and about.out.resolve())  # local data sets are found by a change of folder
    check_request(hf_dir, limit)
    with data_folder(data.resolve(), names) if data else contextlib.nullcontext():
        model = open_model(hf_dir, endpoint, device, add_bos, max_length)
        options: dict[str, Any] = {"limit": limit, "num_fewshot": num_fewshot, "chat_template": chat_template}
        result = evaluate(model, names, hf_dir, lengths=counts, **options)
    figures = settings_figures(endpoint.base_url or "engine", add_bos=add_bos, offline=data is not None, **options)
    figures |= figures_of(result, model, counts)
    show(figures)
    seconds, tokenizer = time.perf_counter() - started, file_sha256(hf_dir / "tokenizer.json")
    documents = documents_sha256(result["samples"])
    record = about.append("lm_eval", figures, seconds=seconds, tokenizer_sha256=tokenizer, data_sha256=documents)
    print(json.dumps(record))


COMMAND = EvalCommand("lm_eval", main, excludes=("--base-url",))


if __name__ == "__main__":
    COMMAND.run()
