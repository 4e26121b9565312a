"""The experiment's data: documents of the tasks and of text as JSON lines, and shards of them for every length of
window, which `data_mixtures.prepare` makes. Equal on every machine: text of packages at pinned versions, and tasks.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import sentencepiece
import tomli_w
from rich.console import Console

from data_mixtures.prepare import Options, prepare
from data_mixtures.shards import tokenizer_path
from examples import wheels_corpus
from records.files import write_atomically

from .tasks import KINDS, Document, document

HELD_OUT_EVERY = 20  # of the text's documents, for the loss by position; not in training
SHORTEST = 64  # tokens of a training document: short ones are what the tasks are learned on


def read_text(path: Path | None, out: Path) -> Path:
    """JSON lines; without a path those of examples.wheels_corpus, written once."""
    if path is not None:
        return path
    if not (out / "corpus/code.jsonl").exists():
        wheels_corpus.main(out / "corpus")
    return out / "corpus/web.jsonl"


@functools.cache
def texts(path: Path) -> tuple[str, ...]:
    with path.open(encoding="utf-8") as file:
        return tuple(json.loads(line)["text"] for line in file)


def split(path: Path, held_out: bool) -> list[str]:
    return [text for i, text in enumerate(texts(path)) if (i % HELD_OUT_EVERY == 0) == held_out]


def long_texts(pieces: Iterable[str], characters: int) -> Iterator[str]:
    """Texts in a row, cut to so many characters each."""
    held = ""
    for piece in pieces:
        held += piece + "\n\n"
        while len(held) >= characters:
            yield held[:characters]
            held = held[characters:]


def task_texts(seq_len: int, tokens: int, count: functools.partial[int]) -> Iterator[str]:
    """Training documents of all kinds and, by octaves, of all lengths, until there are so many tokens."""
    draw, made = random.Random(f"lengths {seq_len}"), 0
    for seed in range(1_000_000_000):
        length = round(SHORTEST * ((seq_len - 2) / SHORTEST) ** draw.random())  # 2 for the ends of a document
        kind = (*KINDS, "hops")[seed % 4]
        yield document(kind, seed, length, count, told=True).text
        made += length
        if made >= tokens:
            return


def write_jsonl(path: Path, each: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps({"text": text}) + "\n" for text in each))


def prepared(
    out: Path, text: Path, lengths: Sequence[int], tokens: Sequence[int], task_percent: int, vocab_size: int
) -> dict[int, Path]:
    """The lock file of each length of window; what is there is not made again. tokens: that a run reads of each."""
    locks, model = {}, out / f"data-{lengths[0]}/tokenizer.model"
    for seq_len, read in zip(lengths, tokens, strict=True):
        folder = out / f"data-{seq_len}"
        locks[seq_len] = folder / "phase1.lock.json"
        if locks[seq_len].exists():
            continue
        trained = model.exists()
        counter = functools.partial(count_tokens, model if trained else None)
        wanted = read * 5 // 4  # some are held out, some windows are not filled
        write_jsonl(folder / "tasks.jsonl", task_texts(seq_len, wanted * task_percent // 100, counter))
        characters = seq_len if seq_len == lengths[0] else seq_len * 2  # about two of a token
        write_jsonl(
            folder / "text.jsonl",
            itertools.islice(long_texts(split(text, False), characters), 1 + wanted * 4 // characters),
        )
        own = {"vocab_size": vocab_size, "train_bytes": 2_000_000, "character_coverage": 0.9995}
        names = {
            kind: f"{kind}{seq_len}" for kind in ("tasks", "text")
        }  # a phase goes on in a source of the same name
        recipe = {
            "seed": 38, "seq_len": seq_len, "packing": "best_fit", "windows_per_shard": 4096, "valid_per_10000": 500,
            "tokenizer": str(model.resolve()) if trained else own,
            "sources": {
                name: {"inputs": [{"kind": "jsonl", "paths": [f"{kind}.jsonl"]}]} for kind, name in names.items()
            },
            "phase1": {names["tasks"]: task_percent, names["text"]: 100 - task_percent},
        }  # fmt: skip
        write_atomically(folder / "recipe.toml", tomli_w.dumps(recipe))
        prepare(folder / "recipe.toml", folder, Options(), Console(stderr=True, quiet=True))
    return locks


@functools.cache
def processor(model: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


@functools.lru_cache(1 << 18)
def count_tokens(model: Path | None, line: str) -> int:
    """Of a line; before there is a tokenizer, what it will have, as the tasks' words are frequent."""
    if model is None:
        return len(line.split()) + 1 + line.startswith("?")
    return len(processor(model).encode(line))


def scored_documents(lock: Path, kind: str, seq_len: int, number: int) -> list[Document]:
    """For scoring: of other seeds than the training documents."""
    count, first = functools.partial(count_tokens, tokenizer_path(lock.parent)), 1_000_000_000
    return [document(kind, first + i, seq_len - 2, count, told=False) for i in range(number)]
