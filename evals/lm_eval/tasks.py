"""lm-eval's stock tasks: their documents, the room that RULER needs, and the lines of a file of items.

A local folder replaces the hub, so that tasks run without a network:

    DIR/allenai/ai2_arc/                        README.md whose `configs:` name the files of ARC-Easy and ARC-Challenge
    DIR/openai/gsm8k/                           README.md whose `configs:` name the files of main
    DIR/google/IFEval/ifeval_input_data.jsonl   IFEval's prompts
    DIR/baber/paul_graham_essays/train.jsonl    {"text": ...}: the haystack of five RULER tasks
    DIR/nltk_data/tokenizers/punkt_tab/english/ RULER's and IFEval's sentence splitter; else trained on the essays

`hf download --repo-type dataset allenai/ai2_arc --local-dir DIR/allenai/ai2_arc` fetches one.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import os
import random
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data_mixtures.readers.local import json_objects
from evals.lm_eval.needles import find_needles
from records.files import JsonObject

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

ESSAYS = "baber/paul_graham_essays"
RULER_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multiquery",
    "niah_multivalue",
    "ruler_vt",
    "ruler_cwe",
    "ruler_fwe",
)
ARC_TASKS, IFEVAL = ("arc_easy", "arc_challenge"), "ifeval"
# of lm-eval, looked at first: to index all takes seconds
FOLDERS = ("arc", "ruler", "gsm8k", IFEVAL)
TABLES = Path("tokenizers") / "punkt_tab" / "english"
# lm-eval's defaults; the first two determine RULER's texts
SEEDS = {"random": 0, "numpy": 1234, "torch": 1234, "fewshot": 1234}
DRAWS = 20  # prompt lengths vary by a few tokens with the words drawn
# hard-coded in lm-eval's ruler/vt_utils.py and ruler/cwe_utils.py: tokens of the answers and of vt's worked
# example, and the smallest number of units (sentences, words) that is tried
VT_ANSWER_TOKENS, VT_EXAMPLE_TOKENS, VT_EXAMPLE_UNITS, VT_UNITS = 30, 500, 5, 10
CWE_ANSWER_TOKENS, CWE_UNITS = 120, 10
RIGHT = ("acc", "exact_match", "prompt_level_strict_acc")  # metrics of an item that are 0 or 1


def expand_tasks(names: str) -> list[str]:
    """Split a comma-separated list: `ruler` is eleven tasks, paths of task files become absolute."""
    tasks: list[str] = []
    for name in (part.strip() for part in names.split(",")):
        # absolute: --data changes the working directory
        if name.endswith((".yaml", ".yml")):
            if not Path(name).is_file():
                raise ValueError(f"--tasks: the task file {name} does not exist")
            name = str(Path(name).resolve())
        tasks += RULER_TASKS if name == "ruler" else [name]
    if "" in tasks or len(set(tasks)) < len(tasks):
        raise ValueError(
            f"--tasks {names} has an empty or repeated name; use a list such as arc_easy,arc_challenge,ruler"
        )
    return tasks


def load_tasks(
    names: Sequence[str], lengths: Sequence[int], tokenizer: Path
) -> tuple[TaskManager, list[Task]]:
    """Load the tasks with their documents, generated from SEEDS as by the `lm_eval` command."""
    import lm_eval.tasks
    from langdetect import DetectorFactory

    check_room(names, lengths, tokenizer)
    random.seed(SEEDS["random"])
    # IFEval's language detection draws for each text
    DetectorFactory.seed = SEEDS["random"]
    np.random.seed(SEEDS["numpy"])  # noqa: NPY002 - the generator that `ruler_vt` uses
    metadata: Any = {"max_seq_lengths": list(lengths), "tokenizer": str(tokenizer)}
    stock = {name for name in names if not Path(name).is_file()}
    folders: list[str | Path] = [Path(lm_eval.tasks.__file__).parent / folder for folder in FOLDERS]
    manager = lm_eval.tasks.TaskManager(
        include_path=folders, include_defaults=False, metadata=metadata
    )
    if not stock <= {*manager.all_tasks}:
        manager = lm_eval.tasks.TaskManager(metadata=metadata)
    names_of_tasks = sorted(manager.all_tasks)
    if unknown := sorted(stock - {*names_of_tasks}):
        near = difflib.get_close_matches(unknown[0], names_of_tasks, n=1)
        raise ValueError(
            f"--tasks: lm-eval has no {', '.join(unknown)}, but {len(names_of_tasks):,} others; "
            f"nearest: {', '.join(near) or 'none'}"
        )
    return manager, list(manager.load(list(names))["tasks"].values())


def select_documents(task: Task, limit: int | None) -> list[int]:
    """Return the indices of a task's first `limit` documents, per length if it has several."""
    counts = Counter[Any]()
    chosen = []
    for i, document in enumerate(task.eval_docs):
        length = document.get("max_length")
        counts[length] += 1
        if limit is None or counts[length] <= limit:
            chosen.append(i)
    return chosen


def make_item_lines(samples: dict[str, list[JsonObject]]) -> list[JsonObject]:
    lines = []
    for task, of_task in samples.items():
        for sample in of_task:
            # null where the task scores no answer as right or wrong
            right = next((bool(sample[metric]) for metric in RIGHT if metric in sample), None)
            line = {"task": task, "item": sample["doc_id"], "right": right}
            responses = sample["filtered_resps"]
            if length := sample["doc"].get("max_length"):  # of RULER
                line |= {"length": length, "needles": find_needles(sample["doc"], responses[0])}
            # nats of the choices, not per token
            scored = [
                r[0] for r in responses if isinstance(r, list | tuple) and isinstance(r[0], float)
            ]
            lines.append(line | {"losses": [-score for score in scored]})
    return lines


def hash_documents(samples: dict[str, list[JsonObject]]) -> str:
    digest = hashlib.sha256()
    for name, of_task in samples.items():
        digest.update(
            name.encode() + b"\0" + "".join(sample["doc_hash"] for sample in of_task).encode()
        )
    return digest.hexdigest()


# --- a local folder of data sets


@contextlib.contextmanager
def use_data_folder(data: Path, tasks: Sequence[str]) -> Iterator[None]:
    """Read all data sets from `data`; ValueError names missing files and how to get them."""
    check_present(data, tasks)
    if set(tasks) & {*RULER_TASKS, IFEVAL}:
        use_sentence_tables(data)
    before = {name: os.environ.get(name) for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")}
    # `datasets` reads them at import; missing data then fails at once
    os.environ.update(dict.fromkeys(before, "1"))
    import datasets

    # may hold a data set of the same name from elsewhere
    usual_cache = datasets.config.HF_DATASETS_CACHE
    # `datasets` prefers a folder of a data set's name in the working directory
    with tempfile.TemporaryDirectory() as cache, contextlib.chdir(data):
        datasets.config.HF_DATASETS_CACHE = Path(cache)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = usual_cache
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def check_present(data: Path, tasks: Sequence[str]) -> None:
    essays = f"{ESSAYS}/train.jsonl"
    ruler = {*RULER_TASKS}
    has_tables = (data / "nltk_data" / TABLES).is_dir()
    needed = {
        "allenai/ai2_arc/README.md": {*ARC_TASKS},
        "openai/gsm8k/README.md": {"gsm8k"},
        "google/IFEval/ifeval_input_data.jsonl": {IFEVAL},
        essays: ruler if has_tables else ruler | {IFEVAL},
    }
    for name, of_tasks in needed.items():
        if of_tasks & set(tasks) and not (data / name).is_file():
            raise ValueError(
                f"{data / name} is missing; download the data set {name.rsplit('/', 1)[0]} from the hub to "
                f"{(data / name).parent}, or run without --data to fetch it"
            )


def use_sentence_tables(data: Path) -> None:
    """Let NLTK find the sentence tables of `data`; train them if they are missing."""
    import nltk

    folder = (data / "nltk_data").resolve()
    if str(folder) not in nltk.data.path:
        nltk.data.path.insert(0, str(folder))
    if not (folder / TABLES).is_dir():
        # not NLTK's own: RULER's haystacks differ slightly, and such scores are marked "offline"
        make_sentence_tables(data / ESSAYS / "train.jsonl", folder)


def make_sentence_tables(essays: Path, folder: Path) -> None:
    from nltk.tokenize.punkt import PunktTrainer, save_punkt_params

    texts = [essay["text"] for _, essay in json_objects(essays)]
    trained = PunktTrainer("\n".join(texts)).get_params()
    place = folder / TABLES
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".english-", dir=place.parent) as part_of:
        part = Path(part_of, place.name)
        save_punkt_params(trained, str(part))
        part.rename(place)


# --- the room that RULER needs


def check_room(names: Sequence[str], lengths: Sequence[int], folder: Path) -> None:
    """Refuse a length at which a RULER task cannot be generated with the tokenizer of the folder."""
    # RULER shortens a text until it fits; where even the shortest does not, these two loop forever
    # or sample from an empty list, so their shortest prompts are made first, by lm-eval's own
    # functions
    tasks = {"ruler_vt": measure_vt, "ruler_cwe": measure_cwe}
    for name in tasks.keys() & set(names):
        from lm_eval.tasks.ruler.common_utils import get_tokenizer

        tokenizer = get_tokenizer(str(folder))
        for length in lengths:
            for what, needed, room in tasks[name](tokenizer, length):
                if needed > room:
                    raise ValueError(
                        f"{name} cannot be generated at a length of {length}: with the tokenizer of {folder} {what} "
                        f"takes {needed} tokens, which must be at most {room}; use longer --lengths, or remove it "
                        "from --tasks"
                    )


# parts of a prompt: what it is, its tokens, the most that it may have
Measured = list[tuple[str, int, int]]


def measure_vt(tokenizer: Any, length: int) -> Measured:
    """Measure the worked example of variable tracking, and the shortest prompt behind it."""
    from lm_eval.tasks.ruler import vt_utils

    def longest(units: int, example: bool) -> int:
        samples = [
            vt_utils.generate_input_output(units, 1, 4, is_icl=example) for _ in range(DRAWS)
        ]
        return (
            max(len(tokenizer(f"{text} {answer}").input_ids) for text, answer in samples)
            + VT_ANSWER_TOKENS
        )

    parts = [("its worked example", longest(VT_EXAMPLE_UNITS, example=True), VT_EXAMPLE_TOKENS)]
    if parts[0][1] <= VT_EXAMPLE_TOKENS:
        # lm-eval prints every attempt
        with contextlib.redirect_stdout(io.StringIO()):
            (example,) = vt_utils.sys_vartrack_w_noise_random(
                tokenizer,
                num_samples=1,
                max_seq_length=VT_EXAMPLE_TOKENS,
                incremental=VT_EXAMPLE_UNITS,
            )
        worked = tokenizer(f"{example['input']} {' '.join(example['outputs'])}\n\n").input_ids
        parts.append(
            ("its shortest prompt", len(worked) + longest(VT_UNITS, example=False), length)
        )
    return parts


def measure_cwe(tokenizer: Any, length: int) -> Measured:
    """Measure the shortest common-words prompt of a length, its worked example and its answer."""
    from lm_eval.tasks.ruler import cwe_utils

    def count(example: str, text: str, answer: list[str]) -> int:
        listed = " ".join(f"{i}. {word}" for i, word in enumerate(answer, 1))
        return len(tokenizer(f"{example}\n{text} {listed}").input_ids) + CWE_ANSWER_TOKENS

    # lm-eval seeds this generator at import, and the documents depend on its state
    state = cwe_utils.RNG.getstate()
    samples = [cwe_utils.generate_input_output(CWE_UNITS, length) for _ in range(DRAWS)]
    cwe_utils.RNG.setstate(state)
    return [("its shortest prompt", max(count(*sample) for sample in samples), length)]
