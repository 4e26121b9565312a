"""repair: a damaged block of a shard or of valid.bin, from its parity and the other blocks of the file.

One block of each file can be restored, whatever happened to it; a parity that is damaged is made again. A
file is mended where it is: the block is lost anyway, so a kill meanwhile loses nothing, and the stage
`shuffle`, whose file it is by another link, is mended with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from rich.console import Console

from data_mixtures import shards
from data_mixtures.stages.verify import Damage
from records.files import file_sha256


def repair(damage: Sequence[Damage], console: Console) -> list[Damage]:
    """Restore what parity can restore; returns the damage that is left. ValueError
    for an unreadable manifest.
    """
    done: dict[Path, str] = {}  # why it could not be, "" if it was
    for folder in {each.path.parent for each in damage if (each.path.parent / shards.MANIFEST).is_file()}:
        manifest = shards.read_manifest(folder)
        for entry in shards.token_files(manifest):
            names = {folder / entry["name"], folder / entry["parity"]["name"]}
            if names & {each.path for each in damage}:
                done |= dict.fromkeys(names, _restore(folder, entry))
    for path in sorted({each.path for each in damage if each.path in done}):
        said = f"not repaired: {path}: {done[path]}" if done[path] else f"repaired: {path}"
        console.print(said, highlight=False, soft_wrap=True, markup=False)
    return [each for each in damage if done.get(each.path, "not a file of tokens")]


def _restore(folder: Path, entry: dict[str, Any]) -> str:
    """Make a file and its parity whole; returns why that is not possible, "" when it is done."""
    path, size, of_parity = folder / entry["name"], entry["bytes"], folder / entry["parity"]["name"]
    lost, bad = np.zeros(min(size, shards.BLOCK_BYTES), np.uint8), []
    for number, block in enumerate(shards.read_blocks(path, size)):
        if xxhash.xxh3_64_hexdigest(block) == entry["xxh3_blocks"][number]:
            lost[: len(block)] ^= np.frombuffer(block, np.uint8)
        else:
            bad.append(number)
    if len(bad) > 1:
        return f"blocks {', '.join(map(str, bad))} are damaged, and parity restores one"
    if not bad:
        _write_at(of_parity, 0, lost.data, len(lost))
    else:
        parity = of_parity.read_bytes() if of_parity.is_file() else b""
        if xxhash.xxh3_64_hexdigest(parity) != entry["parity"]["xxh3"]:
            return f"block {bad[0]} and {of_parity.name} are damaged"
        lost ^= np.frombuffer(parity, np.uint8)
        begin = bad[0] * shards.BLOCK_BYTES
        if xxhash.xxh3_64_hexdigest(lost[: size - begin].data) != entry["xxh3_blocks"][bad[0]]:
            return f"what {of_parity.name} gives for block {bad[0]} does not have its hash"
        _write_at(path, begin, lost[: size - begin].data, size)
    if path.stat().st_size != size:
        os.truncate(path, size)
    found = file_sha256(path)
    return "" if found == entry["sha256"] else f"its sha256 is {found}, {entry['sha256']} in the manifest"


def _write_at(path: Path, begin: int, content: memoryview, size: int) -> None:
    """Write into a file that is `size` long then; its time stays that of the file that `shuffle` wrote."""
    path.touch() if not path.exists() else None
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(content)
        file.truncate(size)
        file.flush()
        os.fsync(file.fileno())
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
