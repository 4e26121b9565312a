"""Pack conversations into the mixture of an SFT job.

    python -m train.sft [NAME=]CONVERSATIONS... --tokenizer T --out DIR

    DIR/tokenizer.model or tokenizer.json, chat_template.jinja
    DIR/<source>/source.json, shard-NNNNN.bin, shard-NNNNN.flags.bin, valid.bin, valid.flags.bin
    DIR/sft.lock.json

CONVERSATIONS: .jsonl, .jsonl.gz or .parquet files, folders of them, or datasets of the hub (ORG/NAME or
ORG/NAME:SPLIT); those of one NAME become one source, and without NAME= the file's own name is taken. Each row
has "messages" (role, content, tool_calls) or "conversations" (from, value), and may have "tools". After an
interruption, the same command continues with the first unfinished source.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field

from data_mixtures import mixture, order, shards
from data_mixtures.recipe import check_known
from data_mixtures.tokenizer import facts
from laneformer.hf.tokenizer import CHAT_TEMPLATE, TOOLS_TEMPLATE, open_tokenizer
from records.command import Count, check_ranges, run_command
from records.files import hold_lock
from records.workers import usable_cpus

from .conversations import list_files
from .source import Rules, list_dropped, prepare

PHASE = "sft"


@dataclass
class Arguments:
    conversations: tyro.conf.Positional[tuple[str, ...]]
    """[NAME=]FILE, [NAME=]FOLDER or [NAME=]ORG/DATASET[:SPLIT], one or more."""
    tokenizer: Path
    """The tokenizer.model or tokenizer.json of the weights, such as data/nemotron/tokenizer.model."""
    out: Path
    """Data folder to write."""
    seq_len: Annotated[int, Field(ge=16, le=1 << 20)] = 4096
    """Tokens of a window, training.seq_len of the job; longer conversations are dropped."""
    system_and_tools: bool = False
    """Also render system messages, tools, tool calls and results; of these only the calls are trained.
    Default: the published template, which ignores system messages and has no tools.
    The job, the exported folder and its servers use the template chosen here.
    """
    cut_long: bool = False
    """Keep the first exchanges of a conversation that is too long, as many as fit."""
    holdout: Annotated[float, Field(ge=0.0001, le=0.5)] = 0.01
    """Share of conversations held out for the validation loss, chosen by a hash of their content."""
    weights: tuple[str, ...] = ()
    """NAME=WEIGHT, integers, for every source; default: by size, so that all sources end together."""
    epoch_cap: Count = 4
    """How often a job may read a source before it is refused."""
    max_dropped: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of conversations of a source that may be unusable."""
    seed: int = 1
    """Seed of the order of the windows."""
    workers: Count = usable_cpus()  # noqa: RUF009
    """Processes that tokenize."""


def main() -> None:
    run(tyro.cli(Arguments, prog="python -m train.sft", description=__doc__))


def run(arguments: Arguments) -> Path:
    """Prepare all sources and pin them; return the path of the lock file."""
    sources = _group_origins(arguments.conversations)
    rules = _check_rules(arguments)
    out = arguments.out
    with hold_lock(
        out / ".sft.lock", f"another process writes {out}; wait for it, or give another --out"
    ):
        token_facts = facts(arguments.tokenizer)
        tokenizer, special = open_tokenizer(arguments.tokenizer)
        manifests, template_path = {}, TOOLS_TEMPLATE if rules.system_and_tools else CHAT_TEMPLATE
        template = {"chat_template": template_path.read_text(), **special}
        for name, origins in sources.items():
            manifests[name] = prepare(
                out / name,
                origins,
                token_facts,
                tokenizer,
                rules,
                arguments.max_dropped,
                arguments.workers,
                template,
            )
            print(_summarize(manifests[name]), flush=True)
        copies = {shards.TOKENIZER_MODEL: arguments.tokenizer}
        if arguments.tokenizer.suffix == ".json":
            config = arguments.tokenizer.with_name(shards.TOKENIZER_CONFIG)
            copies = {shards.TOKENIZER_JSON: arguments.tokenizer, shards.TOKENIZER_CONFIG: config}
        copies[shards.CHAT_TEMPLATE] = template_path
        # --tokenizer may be the copy in the folder itself
        for name, path in copies.items():
            if not (copy := out / name).exists() or not copy.samefile(path):
                shutil.copyfile(path, copy)
        weights = _choose_weights(
            arguments.weights, {name: manifest["windows"] for name, manifest in manifests.items()}
        )
        lock = mixture.pin(
            out,
            PHASE,
            weights,
            rules.seed,
            rules.seq_len,
            arguments.epoch_cap,
            mixture.CONVERSATIONS,
        )
    shares = ", ".join(
        f"{name} {weight / sum(weights.values()):.1%}" for name, weight in weights.items()
    )
    print(
        f"{lock}: {shares}; {sum(m['windows'] for m in manifests.values()):,} windows of {rules.seq_len} tokens"
    )
    return lock


def _check_rules(arguments: Arguments) -> Rules:
    check_ranges(Arguments, vars(arguments))
    return Rules(
        arguments.seq_len,
        arguments.seed,
        round(arguments.holdout * 10_000),
        arguments.cut_long,
        arguments.system_and_tools,
    )


def _group_origins(arguments: tuple[str, ...]) -> dict[str, list[str]]:
    sources: dict[str, list[str]] = {}
    for argument in arguments:
        name, _, origin = argument.partition("=")
        # a path may hold a "=" itself
        if not origin or "/" in name or Path(argument).exists():
            name, origin = (
                re.sub(r"[^a-z0-9._-]+", "-", Path(argument).name.split(".")[0].lower()),
                argument,
            )
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", name):
            raise ValueError(
                f"{argument!r}: the name {name!r} becomes a folder: use a-z, 0-9, '-', '_' and '.'"
            )
        # no shell expands ~ behind NAME=
        path = Path(origin).expanduser()
        files = list_files(path) if path.is_dir() else [path]
        sources.setdefault(name, []).extend(map(str, files))
    if not sources:
        raise ValueError("no conversations are given; name at least one file")
    return sources


def _choose_weights(options: tuple[str, ...], windows: dict[str, int]) -> dict[str, int]:
    """Return each source's integer weight."""
    # by size, in proportion, within the length that the order's pattern may have
    if not options:
        scale = max(1.0, sum(windows.values()) / (order.MAX_WEIGHT_SUM - len(windows)))
        return {name: max(1, int(count / scale)) for name, count in windows.items()}
    pairs = dict(option.partition("=")[::2] for option in options)
    check_known("source in --weights", pairs, windows)
    for name in windows:
        if not pairs.get(name, "").isdecimal():
            raise ValueError(
                f"--weights {' '.join(options)}: source {name!r} needs an integer, as in {name}=1"
            )
    weights = {name: int(pairs[name]) for name in windows}
    order.pattern(list(weights.values()))
    return weights


def _summarize(manifest: dict[str, Any]) -> str:
    valid, trained = manifest["valid"], manifest["trained_tokens"] / manifest["tokens"]
    room = (manifest["windows"] + valid["windows"]) * manifest["seq_len"]
    ignored = ", ".join(
        f"{name} {count:,}" for name, count in manifest["ignored"].items() if name != "system"
    )
    unseen = f"fields that the template does not show: {ignored}; " if ignored else ""
    return (
        f"{manifest['source']}: {manifest['read']:,} conversations read, {manifest['kept']:,} kept, "
        f"{manifest['cut']:,} of them cut; {manifest['system_ignored']:,} without their system message; "
        f"{unseen}dropped: {list_dropped(manifest)}; {manifest['tokens']:,} tokens, {trained:.1%} trained; "
        f"{manifest['windows']:,} windows and {valid['windows']:,} held out, {manifest['tokens'] / room:.1%} full"
    )


if __name__ == "__main__":
    run_command("train.sft", main)
