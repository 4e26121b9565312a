"""Test that synthetic shards are a mixture like any other."""

from __future__ import annotations

from data_mixtures.mixture import Mixture
from tools.synthetic import write_synthetic_lock


def test_synthetic_ids_of_a_large_vocabulary(tmp_path):
    # as `tools.plan --dry-run` writes them for a tokenizer of more than 65,536 pieces
    tokens, _ = Mixture.open(write_synthetic_lock(tmp_path / "data", 4, 16, 128_256)).sequences(
        0, 4
    )
    assert 1 << 16 < tokens.max() < 128_256
