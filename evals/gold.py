"""Benchmark items with their right answers, as token ids: what a training job measures gold bits per byte on.

    python -m evals.gold data/nemotron --bundle benchmarks/eval_bundle --out data/nemotron/gold.jsonl.gz

`validation.gold_items` of a job file names the result (train/gold.py). The prompts are those of
`evals.core`, the option is the right one. They are made once, by the tokenizer of the data: a job needs
neither it nor the bundle.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import tyro

from data_mixtures.shards import read_manifests, tokenizer_path
from data_mixtures.tokenizer import facts
from evals.core.__main__ import SettingsFlags
from evals.core.evaluate import Settings
from evals.core.prompts import Unscorable, items
from evals.core.tasks import Bundle, Task
from evals.scorer import Encoder
from evals.tables import console
from records.evals import EvalCommand, check_range, check_writable, optional
from records.files import JsonObject, write_atomically
from records.items import items_file

FEW = Settings(limit=64)


def encoder_of(tokenizer: Path) -> Encoder:
    """The tokenizer of a data folder as evaluations read one."""
    from laneformer.hf.tokenizer import write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        made, special = write_tokenizer(tokenizer, Path(folder), 0)
        ids = {
            f"{name}_token_id": made.token_to_id(special[f"{name}_token"])
            for name in ("bos", "eos")
        }
        (Path(folder) / "config.json").write_text(json.dumps(ids))
        return Encoder(Path(folder))


def gold_lines(
    task: Task, bundle: Bundle, settings: Settings, encoder: Encoder, max_length: int
) -> Iterator[JsonObject]:
    """The right option of each item: ids of the prompt, where the answer starts in them, its bytes."""
    # nanochat's limit would change the examples
    limit = None if settings.protocol == "nanochat" else settings.limit
    asked = items(task, bundle.rows(task), settings.protocol, encoder, max_length, limit)
    for number, item in enumerate(itertools.islice(asked, settings.limit)):
        ids, start = item.prompts[item.gold if len(item.prompts) > 1 else 0]
        size = len(encoder.text_after(ids[:start], ids[start:]).encode())
        yield {"task": task.label, "item": number, "ids": ids, "start": start, "bytes": size}


def main(
    data: tyro.conf.Positional[Path],
    bundle: Path,
    out: Path,
    settings: SettingsFlags = FEW,
    max_length: Annotated[int | None, optional("INT", "that of the data")] = None,
) -> JsonObject:
    """Write the items of a bundle with their right answers, tokenized as the data of a training run.

    Args:
        data: directory written by `python -m data_mixtures.prepare`, whose tokenizer encodes the items
        bundle: folder with the tasks, as of `python -m evals.core`
        out: file to write, .jsonl.gz, for validation.gold_items
        max_length: most tokens of an item: training.seq_len of the job
    """
    check_range(1, max_length=max_length)
    check_writable(out)
    length = max_length or next(iter(read_manifests(data).values()))["seq_len"]
    tasks, tokenizer = Bundle(bundle), tokenizer_path(data)
    encoder, lines = encoder_of(tokenizer), list[JsonObject]()
    for task in tasks.chosen(settings.labels())[0]:
        try:
            lines += gold_lines(task, tasks, settings, encoder, length)
        except Unscorable as problem:
            console.print(f"{task.label} is left out: {problem}", markup=False)
    if not lines:
        raise ValueError(f"no task of {bundle} fits into {length} tokens; raise --max-length")
    sha256 = facts(tokenizer)["tokenizer_sha256"]
    head = {"kind": "gold_items", "protocol": settings.protocol, "tokenizer_sha256": sha256}
    content = items_file(head, lines)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, content)
    return {
        "tasks": len({line["task"] for line in lines}),
        "items": len(lines),
        "longest_tokens": max(len(line["ids"]) for line in lines),
        "out": str(out),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


COMMAND = EvalCommand("gold", main)


if __name__ == "__main__":
    COMMAND.run()
