"""A source of packed conversations on disk: shards and held-out windows with their flags, and source.json.

The folder has the form of any source of a mixture (data_mixtures/shards.py). It appears by one rename, and a
finished one is kept as long as what it was made from has not changed. Everything is in memory meanwhile,
about 6 bytes a token.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_mixtures import packing, shards
from records.files import file_sha256

from .conversations import Conversation, encode_all

WINDOWS_PER_SHARD = 8192
FLAGS = ".flags.bin"
EXCLUDED_BY = ["weight", "train"]  # keys of a message; sources made before they were read are made again


@dataclass(frozen=True)
class Rules:
    """The numbers that decide how conversations become windows."""

    seq_len: int
    seed: int
    valid_per_10000: int
    cut_long: bool


def prepare(
    folder: Path,
    origins: list[str],
    token_facts: dict[str, Any],
    tokenizer: Any,
    rules: Rules,
    max_dropped: float,
    workers: int,
    template: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Write a source, or find it written; its manifest. ValueError when too much of it cannot be used."""
    made_from = {"origins": [_identity(origin) for origin in origins], **token_facts}
    through = template and hashlib.sha256(template["chat_template"].encode()).hexdigest()
    facts = facts_of(folder, rules, made_from | {"excluded_by": EXCLUDED_BY, "chat_template_sha256": through})
    if None not in made_from["origins"] and (found := _finished(folder, facts)):
        return found
    kept, counts = _read(origins, tokenizer, token_facts["eos_id"], rules, workers, template)
    _check_dropped(folder.name, counts, max_dropped)
    return write_source(folder, facts, kept, counts, rules)


def facts_of(folder: Path, rules: Rules, made_from: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says besides its counts: `made_from`, with facts of the tokenizer, and the rules."""
    return {"format": shards.FORMAT, "source": folder.name, "category": "chat", **asdict(rules), **made_from}


def write_source(
    folder: Path, facts: dict[str, Any], kept: list[Conversation], counts: dict[str, Any], rules: Rules
) -> dict[str, Any]:
    """Pack texts and write them as a source; its manifest, which has `facts` and `counts` as well."""
    held_out = shards.held_out_below(rules.valid_per_10000)
    parts = {
        "train": [each for each in kept if each.key % 2**64 >= held_out],
        "valid": [each for each in kept if each.key % 2**64 < held_out],
    }
    _check_parts(folder.name, parts)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    dtype = np.dtype(f"<u{facts['token_bytes']}")
    entries = {part: _write(partial, part, each, rules, dtype) for part, each in parts.items()}
    manifest = {
        **facts,
        "windows_per_shard": WINDOWS_PER_SHARD,
        "documents": len(kept),
        "tokens": sum(len(each.ids) for each in kept),
        "trained_tokens": int(sum(each.trained.sum() for each in kept)),
        **counts,
        "windows": sum(entry["windows"] for entry in entries["train"]),
        "shards": entries["train"],
        "valid": entries["valid"][0],
    }
    shards.write_manifest(partial, manifest)
    shards.publish(partial, folder)
    return manifest


def _identity(origin: str) -> str | None:
    """A file's hash; None for a dataset of the hub, which may have changed since."""
    return file_sha256(Path(origin)) if Path(origin).is_file() else None


def _finished(folder: Path, facts: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a source made from the same, if its files have the hashes that it says."""
    try:
        manifest = shards.read_manifest(folder)
    except ValueError:
        return None
    if any(manifest.get(name) != value for name, value in facts.items()):
        return None
    listed = [each for entry in shards.token_files(manifest) for each in (entry, entry["flags"])]
    paths = [(folder / entry["name"], entry["sha256"]) for entry in listed]
    return manifest if all(path.is_file() and file_sha256(path) == sha256 for path, sha256 in paths) else None


def _read(
    origins: list[str],
    tokenizer: Any,
    eos_id: int,
    rules: Rules,
    workers: int,
    template: dict[str, str] | None,
) -> tuple[list[Conversation], dict[str, Any]]:
    """The conversations in the order of their keys, each once, and the counts of source.json."""
    found: dict[int, Conversation] = {}
    reasons: Counter[str] = Counter()
    read = system_ignored = 0
    for origin in origins:
        for each in encode_all(origin, tokenizer, eos_id, rules.seq_len, rules.cut_long, workers, template):
            read += 1
            if isinstance(each, str):
                reasons[each] += 1
                continue
            system_ignored += each.system
            kept = found.setdefault(each.key, each)
            if kept is not each:
                reasons["duplicate"] += 1
                kept.trained[:] &= each.trained  # what one copy excludes, whatever the order of rows
    # by key: the same whatever the order of rows and files
    ordered = [found[key] for key in sorted(found)]
    counts = {"read": read, "kept": len(ordered), "cut": sum(each.cut for each in ordered)}
    counts["system_ignored"] = system_ignored
    return ordered, {**counts, "dropped": dict(sorted(reasons.items()))}


def _check_dropped(name: str, counts: dict[str, Any], max_dropped: float) -> None:
    lost = {reason: count for reason, count in counts["dropped"].items() if reason != "duplicate"}
    share = sum(lost.values()) / max(counts["read"], 1)
    if share > max_dropped:
        listed = ", ".join(f"{reason} {count:,}" for reason, count in lost.items())
        raise ValueError(
            f"source {name!r}: {share:.1%} of {counts['read']:,} conversations cannot be used ({listed}); allowed are "
            f"{max_dropped:.1%}. Mend them, or raise --max-dropped; if too_long, raise --seq-len or give --cut-long; "
            "of rows with tools (content, role), give --system-and-tools"
        )


def _check_parts(name: str, parts: dict[str, list[Conversation]]) -> None:
    if not parts["train"] or not parts["valid"]:
        raise ValueError(
            f"source {name!r} has {len(parts['train'])} conversations to train on and {len(parts['valid'])} held out; "
            "both need at least one. Raise --holdout, or add conversations"
        )


def _write(
    folder: Path, part: str, conversations: list[Conversation], rules: Rules, dtype: np.dtype
) -> list[dict[str, Any]]:
    """Pack and write one part; the entries of its files, one for the held-out windows."""
    windows = packing.pack([len(each.ids) for each in conversations], rules.seq_len)
    windows = packing.shuffled(windows, [each.key for each in conversations], rules.seed)
    entries = []
    step = WINDOWS_PER_SHARD if part == "train" else len(windows)
    for number, first in enumerate(range(0, len(windows), step)):
        name = f"shard-{number:05d}" if part == "train" else Path(shards.VALID).stem
        tokens, flags = packing.streams(windows[first : first + step], conversations, rules.seq_len, dtype)
        streams = ((".bin", tokens), (FLAGS, flags))
        files = [shards.write_windows(folder / f"{name}{end}", each, rules.seq_len) for end, each in streams]
        entries.append({**files[0], "flags": files[1]})
    return entries
