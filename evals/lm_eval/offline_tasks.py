"""lm-eval's stock tasks without a network: a folder of data sets stands where the hub would.

    DIR/allenai/ai2_arc/                        README.md whose `configs:` name the files of ARC-Easy and ARC-Challenge
    DIR/baber/paul_graham_essays/train.jsonl    {"text": ...}: the haystack of five RULER tasks
    DIR/nltk_data/tokenizers/punkt_tab/english/ how RULER cuts sentences; made here from the essays where it is missing

`hf download --repo-type dataset allenai/ai2_arc --local-dir DIR/allenai/ai2_arc` fetches one. lm-eval opens data sets
by name, and `datasets` prefers a folder of that name in the working directory. Sentence tables made here are not
NLTK's, so RULER's haystacks differ a little: such scores are marked "offline".
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from records.files import json_lines

ESSAYS = "baber/paul_graham_essays"
RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multiquery", "niah_multivalue", "ruler_vt", "ruler_cwe", "ruler_fwe",
)  # fmt: skip
ARC_TASKS = ("arc_easy", "arc_challenge")
TABLES = Path("tokenizers") / "punkt_tab" / "english"


@contextlib.contextmanager
def data_folder(data: Path, tasks: Sequence[str]) -> Iterator[None]:
    """Run with `data` as the source of all data sets; ValueError names what is missing and where it belongs."""
    check_present(data, tasks)
    before = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    os.environ.update(dict.fromkeys(before, "1"))  # read at import: what is missing fails at once, and is not fetched
    try:
        if set(tasks) & set(RULER_TASKS):
            use_sentence_tables(data)
        with tempfile.TemporaryDirectory() as cache, prepared_in(Path(cache)), contextlib.chdir(data):
            yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def prepared_in(cache: Path) -> Iterator[None]:
    """Let `datasets` prepare what it loads in this folder: in its own, it takes any folder of the same name for it."""
    import datasets

    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = cache
    try:
        yield
    finally:
        datasets.config.HF_DATASETS_CACHE = before


def check_present(data: Path, tasks: Sequence[str]) -> None:
    needed = {}
    if set(tasks) & set(ARC_TASKS):
        needed["allenai/ai2_arc/README.md"] = "a README.md that names the files of ARC-Easy and ARC-Challenge"
    if set(tasks) & set(RULER_TASKS):
        needed[f"{ESSAYS}/train.jsonl"] = 'lines of {"text": ...}'
    for name, what in needed.items():
        if not (data / name).is_file():
            raise ValueError(
                f"{data / name} is missing ({what}); download the data set {name.rsplit('/', 1)[0]} from the hub into "
                f"{(data / name).parent}, or run without --data to have it fetched"
            )


def use_sentence_tables(data: Path) -> None:
    """Let NLTK find the tables of `data`, which are made first where they are missing."""
    import nltk

    folder = (data / "nltk_data").resolve()
    if not (folder / TABLES).is_dir():
        make_sentence_tables(data / ESSAYS / "train.jsonl", folder)
    if str(folder) not in nltk.data.path:
        nltk.data.path.insert(0, str(folder))


def make_sentence_tables(essays: Path, folder: Path) -> None:
    """Train NLTK's Punkt on the essays and write its four tables; they appear all at once."""
    from nltk.tabdata import TabEncoder
    from nltk.tokenize.punkt import PunktTrainer

    with open(essays, encoding="utf-8") as file:
        found = PunktTrainer("\n".join(essay["text"] for _, essay in json_lines(file, essays))).get_params()
    tables = {
        "collocations.tab": TabEncoder().tups2tab(sorted(found.collocations)),
        "sent_starters.txt": "\n".join(sorted(found.sent_starters)),
        "abbrev_types.txt": "\n".join(sorted(found.abbrev_types)),
        "ortho_context.tab": TabEncoder().ivdict2tab(dict(sorted(found.ortho_context.items()))),
    }
    place = folder / TABLES
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=".english-", dir=place.parent))
    try:
        for name, text in tables.items():
            (part / name).write_text(text, encoding="utf-8")
        part.chmod(0o755)
        part.rename(place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
