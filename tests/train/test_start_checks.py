"""Tests that a job is refused before it is queued, with its ranks' message."""

from __future__ import annotations

import pytest

from tests.train.runs import toy
from train.job_config import load_job
from train.start_checks import check_start

HYBRID = "parallelism.data_parallel_replicate_degree"


@pytest.mark.parametrize(
    ("ranks", "settings", "problem"),
    [
        (2, {}, None),
        (3, {}, r"global_batch_size = 8 is not a multiple of 3 GPUs x local_batch_size = 2"),
        (2, {HYBRID: 2}, "with shard degree 1 is plain DDP"),
        (2, {"training.seq_len": 16}, "holds windows of 32 tokens, but training.seq_len is 16"),
        (2, {"architecture.vocab_size": 256}, "a vocabulary of 512, but the model's vocab_size is"),
        (2, {"training.steps": 90_000}, "epoch_cap"),
        (2, {"mixture.lock": "nowhere.json"}, r"nowhere\.json is missing; prepare the data"),
        (2, {"checkpoint.no-allow_fresh_start": ()}, "would start from random weights"),
    ],
)
def test_what_a_rank_would_refuse(data_folder, tmp_path, ranks, settings, problem):
    lock = data_folder / "phase1.lock.json"
    flags = toy(tmp_path / "run", lock, {"training.global_batch_size": 8, **settings})
    if problem is None:
        check_start(load_job(flags, ranks), ranks)
        return
    with pytest.raises(ValueError, match=problem):
        check_start(load_job(flags, ranks), ranks)
