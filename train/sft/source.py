"""Write a source of packed conversations: shards and held-out windows with their flags, and source.json."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_mixtures import packing, shards
from data_mixtures.document_ids import is_held_out
from records.files import file_sha256

from .conversations import Refusal, encode_all
from .turns import Conversation

WINDOWS_PER_SHARD = 8192
FLAGS = ".flags.bin"
# the highest --holdout
MOST_PER_10000 = 5000
# version of how rows are read: sources that were made by another one are made again
READING = 2


@dataclass(frozen=True)
class Rules:
    """The numbers that decide how conversations become windows."""

    seq_len: int
    seed: int
    valid_per_10000: int
    cut_long: bool
    system_and_tools: bool


def prepare(
    folder: Path,
    origins: list[str],
    token_facts: dict[str, Any],
    tokenizer: Any,
    rules: Rules,
    max_dropped: float,
    workers: int,
    template: dict[str, str],
) -> dict[str, Any]:
    """Write a source, unless it is finished; return its manifest."""
    # a dataset of the hub has no hash: it may have changed since
    hashes = [file_sha256(Path(origin)) if Path(origin).is_file() else None for origin in origins]
    facts = {
        "format": shards.FORMAT,
        "source": folder.name,
        "category": "chat",
        **asdict(rules),
        "origins": hashes,
        **token_facts,
        "reading": READING,
        "chat_template_sha256": hashlib.sha256(template["chat_template"].encode()).hexdigest(),
    }
    if None not in hashes and (manifest := _find_finished(folder, facts)):
        return manifest
    conversations, counts = _read(origins, tokenizer, template, rules, workers)
    _check_dropped(folder.name, counts, max_dropped)
    # by content: a conversation is on the same side whatever else the source holds
    train, valid = (
        [c for c in conversations if is_held_out(c.key % 2**64, rules.valid_per_10000) == held_out]
        for held_out in (False, True)
    )
    if not train or not valid:
        raise ValueError(
            f"source {folder.name!r} has {len(train)} conversations to train on and {len(valid)} held out, by their "
            f"hashes; both need at least one: {_advise_holdout(conversations)}"
        )
    partial = folder.with_name(f".{folder.name}.partial")
    # of a run that was killed
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dtype = np.dtype(f"<u{facts['token_bytes']}")
    entries = _write(partial, "train", train, rules, dtype)
    (held_out,) = _write(partial, "valid", valid, rules, dtype)
    manifest = {
        **facts,
        "windows_per_shard": WINDOWS_PER_SHARD,
        "documents": len(conversations),
        "tokens": sum(len(chat.ids) for chat in conversations),
        "trained_tokens": int(sum(chat.loss_mask.sum() for chat in conversations)),
        **counts,
        "windows": sum(entry["windows"] for entry in entries),
        "shards": entries,
        "valid": held_out,
    }
    shards.write_manifest(partial, manifest)
    shards.publish(partial, folder)
    return manifest


def _advise_holdout(conversations: list[Conversation]) -> str:
    """Say how to get a conversation held out."""
    if not conversations:
        return "add conversations"
    hashes = [chat.key % 2**64 for chat in conversations]
    # the smallest share of 10,000 above the lowest hash
    per_10000 = min(hashes) * 10_000 // 2**64 + 1
    if is_held_out(max(hashes), per_10000) or per_10000 > MOST_PER_10000:
        return "add conversations"
    return f"--holdout {per_10000 / 10_000:.4f} holds one out; or add conversations"


def _find_finished(folder: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """Return the manifest of a source made from the same, if its files are intact."""
    try:
        manifest = shards.read_manifest(folder)
    except ValueError:
        return None
    if any(manifest.get(name) != value for name, value in facts.items()):
        return None
    for entry in shards.token_files(manifest):
        for file in (entry, entry["flags"]):
            path = folder / file["name"]
            if not path.is_file() or file_sha256(path) != file["sha256"]:
                return None
    return manifest


def _read(
    origins: list[str], tokenizer: Any, template: dict[str, str], rules: Rules, workers: int
) -> tuple[list[Conversation], dict[str, Any]]:
    by_key: dict[int, Conversation] = {}
    reasons, ignored, examples = Counter[str](), Counter[str](), dict[str, str]()
    dropped_bytes, read, read_bytes = Counter[str](), 0, 0
    for origin in origins:
        how = (rules.system_and_tools, rules.seq_len, rules.cut_long)
        for chat, size_bytes in encode_all(origin, tokenizer, template, how, workers):
            read, read_bytes = read + 1, read_bytes + size_bytes
            if isinstance(chat, Refusal):
                reasons[chat.reason] += 1
                dropped_bytes[chat.reason] += size_bytes
                examples.setdefault(chat.reason, f"{origin}, {chat.words}")
                continue
            ignored.update(chat.ignored)
            first = by_key.setdefault(chat.key, chat)
            if first is not chat:
                reasons["duplicate"] += 1
                dropped_bytes["duplicate"] += size_bytes
                # what one copy excludes, whatever the order of rows
                first.loss_mask[:] &= chat.loss_mask
    # by key: the same whatever the order of rows and files
    ordered = [by_key[key] for key in sorted(by_key)]
    counts = {
        "read": read,
        "kept": len(ordered),
        "cut": sum(chat.cut for chat in ordered),
        "system_ignored": ignored["system"],
        "ignored": dict(sorted(ignored.items())),
        "dropped": dict(sorted(reasons.items())),
        "read_bytes": read_bytes,
        "dropped_bytes": dict(sorted(dropped_bytes.items())),
        "examples": examples,
    }
    return ordered, counts


def _check_dropped(name: str, counts: dict[str, Any], max_dropped: float) -> None:
    unusable = {
        reason: count for reason, count in counts["dropped"].items() if reason != "duplicate"
    }
    share = sum(unusable.values()) / max(counts["read"], 1)
    if share > max_dropped:
        raise ValueError(
            f"source {name!r}: {share:.1%} of {counts['read']:,} conversations cannot be used "
            f"({list_dropped(counts)}); allowed are {max_dropped:.1%}. Mend them, or raise --max-dropped; if too_long, "
            "raise --seq-len or give --cut-long; of rows with tools (role, tools), give --system-and-tools"
        )


def list_dropped(counts: dict[str, Any]) -> str:
    """List each reason with its rows, their share of the bytes, and the first."""
    examples = counts["examples"]
    reasons = []
    for reason, count in counts["dropped"].items():
        facts = [examples[reason]] if reason in examples else []
        # the manifest of an older source has none
        if "dropped_bytes" in counts:
            share = counts["dropped_bytes"][reason] / counts["read_bytes"]
            facts.insert(0, f"{share:.1%} of the bytes")
        reasons.append(
            f"{reason} {count:,} ({', '.join(facts)})" if facts else f"{reason} {count:,}"
        )
    return "; ".join(reasons) or "none"


def _write(
    folder: Path, part: str, conversations: list[Conversation], rules: Rules, dtype: np.dtype
) -> list[dict[str, Any]]:
    windows = packing.pack([len(chat.ids) for chat in conversations], rules.seq_len)
    windows = packing.shuffle_windows(windows, [chat.key for chat in conversations], rules.seed)
    entries = []
    step = WINDOWS_PER_SHARD if part == "train" else len(windows)
    for number, first in enumerate(range(0, len(windows), step)):
        name = f"shard-{number:05d}" if part == "train" else Path(shards.VALID).stem
        tokens, flags = packing.streams(
            windows[first : first + step], conversations, rules.seq_len, dtype
        )
        streams = ((".bin", tokens), (FLAGS, flags))
        files = [
            shards.write_windows(folder / f"{name}{end}", stream, rules.seq_len)
            for end, stream in streams
        ]
        entries.append({**files[0], "flags": files[1]})
    return entries
