"""Assets that tests of several parts share; each takes seconds to make."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

from examples import corpus

pytest_plugins = ["tests.tiers", "tests.proofs", "tests.schedule", "tests.shared", "pytester"]

# examples are timed on shared machines: a limit per example would fail on a slow day; a change is
# tried with the same examples each time, and the nightly looks for new ones
hypothesis.settings.register_profile("change", deadline=None, derandomize=True)
hypothesis.settings.register_profile("nightly", deadline=None)
hypothesis.settings.load_profile("change")


def pytest_configure(config: pytest.Config) -> None:
    # GPUs are hidden, also from processes that tests start: a job would need one for each of its ranks
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


# a shell that starts the tests in the background has Ctrl-C ignored, in every process that the
# tests start as well
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def pytester(pytester, monkeypatch):
    """Extend pytest's fixture: its sessions find our plugins and ignore this session's workers."""
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return pytester


RECIPE = """
seed = 7
seq_len = 32
windows_per_shard = 64
valid_per_10000 = 1000
epoch_cap = 4
max_document_chars = 4000

[tokenizer]
vocab_size = 512
train_bytes = 200_000
character_coverage = 0.999

[sources.web]
category = "web"
min_bytes = 10_000
inputs = [{ kind = "jsonl", max_bytes = 60_000, paths = ["web.jsonl"] }]

[sources.code]
category = "code"
min_bytes = 10_000
inputs = [{ kind = "text", max_bytes = 120_000, paths = ["{stdlib}/json/*.py", "{stdlib}/email/*.py"] }]

[sources.math]
category = "math"
min_bytes = 10_000
inputs = [{ kind = "text", paths = ["{stdlib}/statistics.py"] }]

[phase1]
web = 63
math = 0
code = 37

[phase2]
code = 59
math = 41
web = 0
"""


@pytest.fixture(scope="session")
def data_folder(shared):
    # three small sources, a 512-piece tokenizer, two phases' locks, windows of 32
    return shared("data_folder", prepare) / "out"


def prepare(folder: Path) -> None:
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE)
    corpus.write(folder, {"web": [(corpus.read(corpus.docstrings, "{stdlib}/*.py"), 70_000)]})
    command = [
        sys.executable,
        "-m",
        "data_mixtures.prepare",
        str(recipe),
        "--out",
        str(folder / "out"),
    ]
    # so little text is done before other processes have started
    command += ["--workers", "1"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-2000:]
