"""One packed mixture and one checkpoint to start from, for all tests of the third stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.runs import STEPS, succeed
from tests.train.sft import chats


@pytest.fixture(scope="session")
def lock(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of packed conversations in windows of chats.SEQ_LEN tokens."""
    return chats.prepare(tmp_path_factory.mktemp("chats"), prepared_data / "tokenizer.model", 300)


@pytest.fixture(scope="session")
def parent(prepared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a short phase 1."""
    run = tmp_path_factory.mktemp("parent") / "run"
    flags = (*chats.FLAGS[:4], "--validation.no-enable")
    succeed(run, prepared_data / "phase1.lock.json", *flags, ranks=1)
    return run / f"checkpoint/step-{STEPS}"
