"""Quarantine: damaged shards leave their manifest, which says why, and every lock that pins it gets a new fingerprint.

Nothing is silent and no shard file is deleted. What `shuffle` noted about such a shard is withdrawn, so that the next
preparation makes it anew from the tokenized units, with the same bytes: then manifest, locks and fingerprints are again
what they were before the damage.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from data_mixtures import mixture, shards
from data_mixtures.stages import shuffle, stage
from data_mixtures.stages.stage import Unit
from data_mixtures.stages.verify import Damage


def quarantine(out: Path, damage: Sequence[Damage], console: Console) -> None:
    """Take damaged shards (as `verify` reports them) out of their manifests, and pin the manifests anew.

    ValueError when something else than shards is damaged, or when a source would be left without any: then nothing is
    changed.
    """
    manifests = {path.parent.name: shards.read_manifest(path.parent) for path in out.glob(f"*/{shards.MANIFEST}")}
    reasons: dict[Path, list[str]] = {}
    for each in damage:
        reasons.setdefault(each.path, []).append(f"{each.path.name}: {each.what}")
    changed = {}
    for source, manifest in manifests.items():
        named = {
            entry["name"]: [out / source / name for name in shards.files_of(entry)] for entry in manifest["shards"]
        }
        bad = {name: "; ".join(r for path in paths for r in reasons.pop(path, [])) for name, paths in named.items()}
        if any(bad.values()):
            changed[source] = _without(out / source, manifest, {name: why for name, why in bad.items() if why})
    manifests |= changed
    _refuse_others(out, list(reasons), manifests)
    locks = {path: mixture.read_lock(path) for path in sorted(out.glob("*.lock.json"))}
    for source, manifest in changed.items():
        for entry in manifest["quarantined"]:
            _withdraw(out, source, entry["name"])
            console.print(
                f"quarantined: {out / source / entry['name']}: {entry['reason']}", markup=False, soft_wrap=True
            )
        shards.write_json(out / source / shards.MANIFEST, manifest)
    pinned_anew = [_pin(out, path, lock, manifests, console) for path, lock in locks.items()]
    if any(pinned_anew):
        console.print(
            "a job of the old fingerprint stops where it meets the damage; the new lock does not fit its checkpoints. "
            "Either prepare the data again, which makes the shard anew and gives the old fingerprint back, and resume; "
            "or start a new run from its weights with the new lock",
            highlight=False,
            soft_wrap=True,
        )


def _without(folder: Path, manifest: dict[str, Any], bad: dict[str, str]) -> dict[str, Any]:
    kept = [entry for entry in manifest["shards"] if entry["name"] not in bad]
    gone = [{**entry, "reason": bad[entry["name"]]} for entry in manifest["shards"] if entry["name"] in bad]
    if not kept:
        raise ValueError(f"all shards of {folder} are damaged: nothing would be left of it. Prepare the data again")
    windows = sum(entry["windows"] for entry in kept)
    return {**manifest, "windows": windows, "shards": kept, "quarantined": [*manifest.get("quarantined", []), *gone]}


def _refuse_others(out: Path, damaged: list[Path], manifests: dict[str, dict[str, Any]]) -> None:
    """ValueError for damage that leaving out shards does not mend; a file too many does no harm."""
    for path in damaged:
        manifest = manifests.get(path.parent.name)
        if manifest and path.name not in (shards.MANIFEST, shards.VALID):
            continue
        if path.name.endswith(".lock.json") and any("quarantined" in each for each in manifests.values()):
            continue  # a quarantine was interrupted after its manifest; a lock that is broken itself is refused later
        fix = f"prepare the data again (python -m data_mixtures.prepare RECIPE --out {out})"
        if path.name == shards.VALID:
            fix = f"remove the last unit of {out / shuffle.SHUFFLE / path.parent.name}, then {fix}: it is made anew"
        raise ValueError(
            f"{path} is damaged and is no shard, so it cannot be left out; nothing was changed. To mend it, {fix}"
        )


def _withdraw(out: Path, source: str, shard: str) -> None:
    number = int(re.findall(r"\d+", shard)[0])
    folder = stage.unit_folder(out, shuffle.SHUFFLE, Unit(source, number))
    if folder.is_dir():
        (folder / stage.RECEIPT).unlink(missing_ok=True)
        os.utime(folder.parent)  # by its time readers see that receipts changed


def _pin(out: Path, path: Path, lock: dict[str, Any], manifests: dict[str, dict[str, Any]], console: Console) -> bool:
    """Write the lock anew when one of its sources is in quarantine; returns whether its fingerprint changed."""
    for entry in lock["sources"]:
        manifest = manifests.get(entry["name"], {})
        if "quarantined" in manifest:
            entry["windows"] = manifest["windows"]
            entry["manifest_sha256"] = shards.manifest_sha256(out / entry["name"])
    old, new = lock["fingerprint"], mixture.fingerprint(lock)
    if new != old:
        shards.write_json(path, {**lock, "fingerprint": new})
        console.print(f"{path}: fingerprint {old} is now {new}", highlight=False, soft_wrap=True)
    return new != old
