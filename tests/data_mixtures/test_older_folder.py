"""Test that a folder of older code (commit 0a831885; older_folder.tar.xz) is read and continued."""

from __future__ import annotations

import hashlib
import re
import tarfile
from pathlib import Path

from rich.console import Console

from data_mixtures import mixture, prepare
from data_mixtures.stages import stage
from data_mixtures.stages.run import Options

ASSET = Path(__file__).with_name("older_folder.tar.xz")
STAGES = ("filter", "tokenize", "order", "shuffle")  # were of format 1
TOKENS_SHA256 = "84ef2563e110aebf4c47a2aca5c94b5761791364e2a70e8b1552329fc040104c"  # sha256 of its first 100 sequences


def test_a_folder_of_older_code_is_read_and_prepared_further(tmp_path):
    with tarfile.open(ASSET) as archive:
        archive.extractall(tmp_path, filter="data")
    out = tmp_path / "out"
    lock = tmp_path / "out/phase1.lock.json"
    # published token files, which newer code must neither change nor write again
    files = sorted((out / "lines").glob("*.bin"))
    before = [path.read_bytes() for path in files]
    tokens, _ = mixture.Mixture.open(lock).sequences(0, 100)
    assert hashlib.sha256(tokens.tobytes()).hexdigest() == TOKENS_SHA256
    pinned = mixture.read_lock(lock)["fingerprint"]
    console = Console(record=True, width=200)
    prepare.prepare(tmp_path / "recipe.toml", out, Options(), console)
    units = dict(re.findall(r"^(\w+) +(\d+) units done", console.export_text(), re.MULTILINE))
    # fetch runs again because the input has another path; the text is the same
    assert int(units.pop("fetch")) == 1
    # a stage whose format was raised since may make its units again
    same = [name for name in STAGES if stage.FORMATS[name] == 1]
    assert {name: units[name] for name in same} == dict.fromkeys(same, "0")
    assert [path.read_bytes() for path in files] == before
    assert mixture.read_lock(lock)["fingerprint"] == pinned
