"""One packed mixture and one checkpoint to start from, for all tests of the third stage."""

from __future__ import annotations

import pytest

from tests.train.runs import STEPS, train_toy
from tests.train.sft import chats


@pytest.fixture(scope="session")
def lock(data_folder, shared):
    tokenizer = data_folder / "tokenizer.model"
    return (
        shared("chats", lambda folder: chats.prepare(folder, tokenizer, 300)) / "data/sft.lock.json"
    )


@pytest.fixture(scope="session")
def parent(phase1, shared):
    flags = (*chats.FLAGS[:4], "--validation.no-enable")
    folder = shared("parent", lambda folder: train_toy(folder / "run", phase1, *flags, ranks=1))
    return folder / f"run/checkpoint/step-{STEPS}"
