"""Filtering, decontaminating and tokenizing real text on one core, alternating with other tools
on the same text; and the whole way from JSON lines to shards, by stage.

    python -m tools.bench text [--out FILE.md] [--megabytes 8] [--rounds 3] [--tokenizer tokenizer.model]

The text is what the machine has: Python's library as code; manual pages and package descriptions as prose.
CPU seconds are counted, so that other work on the machine has little effect.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import os
import random
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = (
    "false"  # one core for every candidate; read when tokenizers is imported
)

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import sentencepiece
import tokenizers
from rich.console import Console

from data_mixtures import recipe, shards, tokenizer
from data_mixtures.recipe import TokenizerTraining
from data_mixtures.stages import decontaminate, filter, pipeline, stage, tokenize
from data_mixtures.stages.run import Options as Workers
from laneformer.hf.tokenizer import tokenizer_from_sentencepiece
from tools.bench import harness
from tools.bench.harness import Result, alternate, version
from tools.markdown import table

VOCAB_SIZE = 32_000
PASSAGE_WORDS = 60
MAX_CHARS = 10_000_000
SOURCE = "text"
KINDS = ("code", "prose")
PACKAGES = ("sentencepiece", "tokenizers", "datatrove", "pyarrow", "numpy")
FILE_START = """# Filtering and tokenizing text

Figures are of CPU seconds of one process on one core; all candidates give the same ids. Stages include reading Parquet,
writing, sorting and loading the model once."""


Corpus = tuple[list[str], list[str]]  # texts of one kind that are timed, and others that are processed before
Candidate = Callable[[], Callable[[], Any]]  # prepares a trial without being timed; what it returns is timed


@dataclass(kw_only=True)
class Options(harness.Options):
    """Filtering and tokenizing speed on one core; the last line of stdout is JSON."""

    megabytes: float = 6
    """Text of each kind to time, in MB."""
    rounds: int = 3
    """Rounds; in each, every candidate is timed once."""
    passages: int = 30_000
    """Benchmark passages of 60 words in the index, cut from text of the other kind, so that
    few documents hold one.
    """
    tokenizer: Path | None = None
    """A sentencepiece model; default: 32,000 pieces trained on code."""


def measure(options: Options, console: Any) -> Result:
    """Bytes, MB/s of filtering and M tokens/s of tokenizing, for each kind of text."""
    stdlib, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    paths = {
        "code": [path for path in stdlib.rglob("*.py") if "site-packages" not in path.parts],
        "prose": [
            *packages.rglob("METADATA"),
            *packages.rglob("*.md"),
            *Path("/usr/share/man").glob("man[1-8]/*"),
        ],
    }
    result: Result = {}
    with tempfile.TemporaryDirectory() as name, console.status("reading text") as status:
        folder, corpora = Path(name), {kind: corpus(paths[kind], options.megabytes) for kind in KINDS}
        model = options.tokenizer or folder / "trained.model"
        if options.tokenizer is None:
            status.update("training a tokenizer")
            timed, before = corpora["code"]
            model.write_bytes(tokenizer.train([*timed, *before], TokenizerTraining(VOCAB_SIZE, 0, 0.9999)))
        for kind, other in zip(KINDS, reversed(KINDS), strict=True):
            timed, before = corpora[kind]
            size = sum(len(text.encode()) for text in timed)
            status.update(f"{kind}: filtering")
            filters = filtering(timed, cut_passages(corpora[other][1], options.passages), folder)
            filtered = rates(filters, size, options.rounds)
            status.update(f"{kind}: tokenizing")
            encoders, tokens = tokenizing(timed, before, model, folder)
            tokenized = rates(encoders, tokens, options.rounds)
            status.update(f"{kind}: JSON lines to shards")
            whole = to_shards([*timed, *before], model, folder / f"whole-{kind}")
            result[kind] = {"bytes": size, "filtering": filtered, "tokenizing": tokenized, "shards": whole}
    return result


def corpus(paths: list[Path], megabytes: float) -> Corpus:
    """Files in a fixed random order: `megabytes` to time, twice as much to process before."""
    paths = sorted(paths)
    random.Random(1).shuffle(paths)
    parts: Corpus = ([], [])
    left = [megabytes * 1e6, 2 * megabytes * 1e6]
    for path in paths:
        part = 0 if left[0] > 0 else 1
        with contextlib.suppress(UnicodeDecodeError, OSError):
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
            parts[part].append(text)
            left[part] -= len(text)
        if left[1] <= 0:
            break
    return parts


def rates(candidates: dict[str, Candidate], amount: float, rounds: int) -> dict[str, float]:
    """Millions per CPU second, the median of alternating rounds."""
    taken: dict[str, list[float]] = {name: [] for name in candidates}
    for name in (name for order in alternate(candidates, rounds) for name in order):
        run = candidates[name]()
        began = time.process_time()
        run()
        taken[name].append(time.process_time() - began)
    return {name: amount / 1e6 / statistics.median(seconds) for name, seconds in taken.items()}


def filtering(timed: list[str], passages: list[str], folder: Path) -> dict[str, Candidate]:
    """The stage from Parquet to Parquet, with and without benchmarks, and the search alone."""
    raw, result = folder / stage.RAW, folder / stage.DOCUMENTS
    pq.write_table(pa.table({"text": timed}), raw, compression="zstd")
    benchmark = decontaminate.Benchmark("cut", len(passages), len(passages), {})
    index = decontaminate.Index((benchmark,), decontaminate.build([[text] for text in passages]))
    grams = {gram for text in passages for gram in plain_grams(text)}

    def stage_with(held: decontaminate.Index | None) -> None:
        kept = filter.DocumentFilter(plain_recipe(folder), held)
        filter.write(result, (kept.kept(batch) for batch in filter.read_raw(raw, "text", raw.name)))

    return {
        "filter stage": lambda: functools.partial(stage_with, index),
        "filter stage without benchmarks": lambda: functools.partial(stage_with, None),
        "decontamination alone": lambda: functools.partial(index.find, timed),
        "a set of 13-grams in plain Python": lambda: (
            lambda: [grams.isdisjoint(plain_grams(text)) for text in timed]
        ),
    }


def cut_passages(texts: list[str], count: int) -> list[str]:
    words = " ".join(texts).split()
    step = max(len(words) // count, 1)
    return [" ".join(words[i : i + PASSAGE_WORDS]) for i in range(0, len(words) - PASSAGE_WORDS, step)][
        :count
    ]


def plain_grams(text: str) -> Iterator[tuple[str, ...]]:
    words = "".join(c if c.isalnum() else " " for c in text.lower()).split()
    return zip(*(words[i:] for i in range(decontaminate.GRAM_WORDS)), strict=False)


def tokenizing(
    timed: list[str], before: list[str], model: Path, folder: Path
) -> tuple[dict[str, Candidate], int]:
    """Encoders in memory, stages from Parquet to files of tokens; the number of tokens,
    after comparing the ids.
    """
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    spec = json.loads(tokenizer_from_sentencepiece(model).to_str())  # text is never parsed for control tokens
    plain = tokenizers.Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))
    tokens, _ = (made := tokenizer.load(model)).encode(timed)
    for batch in (processor.encode(timed, num_threads=1), [e.ids for e in plain.encode_batch_fast(timed)]):
        expected = (i for document in batch for i in (made.bos_id, *document, made.eos_id))
        assert np.array_equal(tokens, np.fromiter(expected, np.int64)), (
            "all candidates must give the same ids"
        )

    def encoder(texts_before: list[str]) -> Callable[[], Any]:
        ours = tokenizer.load(model)
        ours.encode(texts_before)
        return lambda: ours.encode(timed)

    return {
        "data_mixtures, after other text": lambda: encoder(before),
        "data_mixtures, first text": lambda: encoder([]),
        "sentencepiece": lambda: functools.partial(processor.encode, timed, num_threads=1),
        "tokenizers": lambda: functools.partial(plain.encode_batch_fast, timed),
        "tokenize stage, Parquet to files": lambda: our_stage(folder / "data", timed, model),
        "datatrove, Parquet to files": lambda: datatrove(folder, plain),
    }, len(tokens)


def our_stage(out: Path, timed: list[str], model: Path) -> Callable[[], Any]:
    """The tokenize stage on a data folder of one unit."""
    unit = stage.Unit(SOURCE, 0)
    filtered = stage.unit_folder(out, filter.Filter.name, unit)
    for made in (filtered, out / "result"):
        made.mkdir(parents=True, exist_ok=True)
    kept = filter.DocumentFilter(plain_recipe(model))
    filter.write(filtered / stage.DOCUMENTS, [kept.kept(filter.Rows([text.encode() for text in timed]))])
    of_documents = stage._entry(filtered / stage.DOCUMENTS)
    shards.write_json(filtered / stage.RECEIPT, {"files": {stage.DOCUMENTS: of_documents}})
    copy = out / (shards.TOKENIZER_JSON if model.suffix == ".json" else shards.TOKENIZER_MODEL)
    shutil.copy(model, copy)
    wanted = plain_recipe(copy)
    return lambda: tokenize.Tokenize(wanted, out, (SOURCE,)).work(unit, out / "result")


def to_shards(texts: list[str], model: Path, out: Path) -> dict[str, float]:
    """MB of text per CPU second of every stage and of all together, from one file of JSON lines, in one process,
    without benchmarks or near copies.
    """
    out.mkdir()
    lines = out / "text.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = recipe.LocalSource(SOURCE, inputs=(recipe.Input("jsonl", (str(lines),)),))
    wanted = replace(plain_recipe(model), sources=(source,), seq_len=128, max_document_chars=None)
    context = pipeline.RunContext(wanted, out, (SOURCE,), Workers(), Console(quiet=True), tables=False)
    seconds = {}
    for name in pipeline.TO_SHARDS:
        began = time.process_time()
        pipeline.do(context, name)
        seconds[name] = time.process_time() - began
    began = time.process_time()
    pipeline.publish(context)
    seconds["manifest"] = time.process_time() - began
    size = sum(len(text.encode()) for text in texts) / 1e6
    return {
        "text to shards": size / sum(seconds.values()),
        **{name: size / each for name, each in seconds.items()},
    }


def plain_recipe(model: Path) -> recipe.Recipe:
    """One source of whole documents, which keeps every text."""
    sources, limits = (recipe.LocalSource(SOURCE),), recipe.Filter(min_chars=1)
    return recipe.Recipe(
        tokenizer=recipe.TokenizerFile(str(model)),
        sources=sources,
        phases={},
        max_document_chars=MAX_CHARS,
        filter=limits,
    )


def datatrove(folder: Path, plain: tokenizers.Tokenizer) -> Callable[[], Any]:
    """datatrove's reader and tokenizer on the Parquet file of our stage."""
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.utils.logging import logger

    logger.remove()
    path = folder / "plain.json"
    path.write_text(plain.to_str())
    documents = folder / "data" / filter.Filter.name / SOURCE / "unit-00000"
    reader = ParquetReader(str(documents), glob_pattern=stage.DOCUMENTS, read_metadata=False)
    writer = DocumentTokenizer(str(folder / "datatrove"), str(path), eos_token="</s>", seed=1)
    return lambda: writer.run(reader.run())


def section(options: Options, result: Result) -> tuple[str, str]:
    parts = [
        f"Medians of {options.rounds} alternating rounds; {', '.join(f'{name} {version(name)}' for name in PACKAGES)}; "
        + (
            f"vocabulary {options.tokenizer.name}"
            if options.tokenizer
            else "32,000 pieces trained on the code"
        )
        + f"; an index of {options.passages:,} passages of {PASSAGE_WORDS} words.",
    ]
    tables = (
        ("filtering", "MB/s per core"),
        ("tokenizing", "M tokens/s per core"),
        ("shards", "MB/s per core, once"),
    )
    for what, unit in tables:
        rows = [
            [name, *(f"{result[kind][what][name]:.2f}" for kind in KINDS)] for name in result[KINDS[0]][what]
        ]
        parts.append(table([unit, *KINDS], rows))
    return f"{options.megabytes:g} MB of code and of prose", "\n\n".join(parts)
