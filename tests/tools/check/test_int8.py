"""The check of int8 weights from the command line, on real held-out text and a small model."""

from __future__ import annotations

import json

import numpy as np
import pytest

from evals.bits_per_byte import bits_per_byte, load_windows, matching_token_bytes
from evals.scorer.engine import EngineScorer
from laneformer import Engine, LaneformerConfig
from laneformer.hf.tokenizer import tokenizer_from_sentencepiece
from tests.laneformer.engine.assets import random_model, write_folder
from tools.check import engine as check_engine


@pytest.mark.job
def test_a_folder_is_checked_and_measured(prepared_data, tmp_path, capsys):
    tokenizer_from_sentencepiece(prepared_data / "tokenizer.model").save(str(tmp_path / "tokenizer.json"))
    vocab = -(-len(matching_token_bytes(tmp_path, prepared_data)) // 8) * 8
    config = LaneformerConfig.from_flavor("tiny", num_hidden_layers=2, swa_layers=(0,), vocab_size=vocab)
    write_folder(tmp_path, random_model(config))
    with pytest.raises(SystemExit) as ended:
        check_engine.main(
            [str(tmp_path), "--against", "int8", "--data", str(prepared_data), "--windows", "1"]
        )
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert (ended.value.code, report["ok"]) == (0, True)
    assert "KL(bf16 || int8)" in printed.err
    windows, categories = load_windows(prepared_data, 1)
    kl, same = [], []
    with (
        Engine.from_pretrained(tmp_path, dtype="bf16", kv_dtype="fp32") as half,
        Engine.from_pretrained(tmp_path, dtype="int8", kv_dtype="fp32") as small,
    ):
        for window in np.concatenate(list(windows.values())):
            p, q = (e.logits(window[:-1].tolist()).astype(np.float64) for e in (half, small))
            p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (p, q))
            kl.append((np.exp(p) * (p - q)).sum(1).mean())
            same.append((p.argmax(1) == q.argmax(1)).mean())
        for engine in (half, small):
            scorer = EngineScorer(tmp_path, dtype=engine.dtype)
            scored = bits_per_byte(scorer, windows, categories, matching_token_bytes(tmp_path, prepared_data))
            assert report["bits_per_byte"][engine.dtype] == scored["bits_per_byte"]
            assert report["weight_bytes"][engine.dtype] == engine.weight_bytes
    # a difference of float64 log-probabilities of size 10, so with 1e-15 of error, over the figure's own size
    assert report["kl"] == pytest.approx(np.mean(kl), abs=1e-13)
    assert report["kl"] > 1e-10
    assert report["same_best_id"] == pytest.approx(np.mean(same), rel=1e-12)


def test_mistakes_end_with_a_message(prepared_data, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        check_engine.main([str(tmp_path), "--against", "int8", "--data", str(tmp_path)])
    assert ended.value.code == 2
    assert "check_engine: " in capsys.readouterr().err
