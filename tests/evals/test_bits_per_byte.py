"""Bits per byte against sums done by hand, and on real held-out windows through the command."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from evals.bits_per_byte import bits_per_byte, load_windows, main, matching_token_bytes, score_windows
from evals.scorer import Prompt, Scores, Source
from laneformer.hf.tokenizer import tokenizer_from_sentencepiece
from records.evals import About
from tests.records.test_fields import check as check_fields

VOCAB = 8
TOKEN_BYTES = np.array([0, 0, 0, 1, 1, 2, 3, 7])  # <unk>, BOS, EOS, two byte tokens, three pieces


class Unigram:
    """A model that ignores the context: p(token) is fixed, so every sum can be done by hand."""

    def __init__(self, vocab: int = VOCAB):
        weights = np.arange(1, vocab + 1, dtype=np.float64)
        self.log_p = np.log(weights / weights.sum())

    backend, device, dtype = "unigram", "cpu", "float32"

    def one(self, prompt: Prompt) -> Scores:
        found = self.log_p[np.asarray(prompt.ids[prompt.start :])]
        return Scores(found.astype(np.float32).astype(np.float64), np.zeros(0))

    def score(self, items: Iterable[Sequence[Prompt]]) -> Iterator[list[Scores]]:
        for item in items:
            yield [self.one(prompt) for prompt in item]

    def close(self) -> None:
        pass


def by_hand(windows: np.ndarray, scorer: Unigram, token_bytes: np.ndarray) -> tuple[float, float]:
    targets = [int(t) for window in windows for t in window[1:]]
    bits = math.fsum(-scorer.log_p[t] / math.log(2) for t in targets if token_bytes[t])
    loss = math.fsum(-scorer.log_p[t] for t in targets) / len(targets)
    return bits / int(sum(token_bytes[t] for t in targets)), loss


def windows_of(seed: int, count: int = 5, length: int = 17) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, (count, length)).astype(np.uint16)


# the scorer's float32 log-probabilities are off by at most half a unit of 2**-24 each, relative; a
# mean keeps that
TOLERANCE = 2**-24


def test_a_source_against_sums_by_hand() -> None:
    windows, scorer = windows_of(1), Unigram()
    got = score_windows(scorer, windows, TOKEN_BYTES)
    bits, loss = by_hand(windows, scorer, TOKEN_BYTES)
    assert got["bits_per_byte"] == pytest.approx(bits, rel=TOLERANCE)
    assert got["loss"] == pytest.approx(loss, rel=TOLERANCE)
    assert got["tokens"] == 5 * 16
    assert got["bytes"] == TOKEN_BYTES[windows[:, 1:].astype(int)].sum()
    # planted: a BOS that counts as a byte is far outside the tolerance
    wrong = TOKEN_BYTES + (np.arange(VOCAB) == 1)
    assert score_windows(scorer, windows, wrong)["bits_per_byte"] != pytest.approx(bits, rel=1e-3)


def test_the_total_is_that_of_all_windows_together() -> None:
    windows = {"web": windows_of(2, count=3), "code": windows_of(3, count=9)}
    got = bits_per_byte(Unigram(), windows, {"web": "general", "code": "code"}, TOKEN_BYTES)
    together = score_windows(Unigram(), np.concatenate(list(windows.values())), TOKEN_BYTES)
    # sums of the same float64 numbers in another order
    assert got["bits_per_byte"] == pytest.approx(together["bits_per_byte"], rel=1e-12)
    assert got["loss"] == pytest.approx(together["loss"], rel=1e-12)
    assert [source["category"] for source in got["sources"].values()] == ["general", "code"]


def test_a_uniform_model_over_bytes_needs_8_bits() -> None:
    class Uniform(Unigram):
        def one(self, prompt: Prompt) -> Scores:
            return Scores(np.full(len(prompt.ids) - prompt.start, -math.log(256)), np.zeros(0))

    windows = np.random.default_rng(0).integers(0, 256, (4, 33))
    assert score_windows(Uniform(), windows, np.ones(256, dtype=int))["bits_per_byte"] == pytest.approx(
        8, rel=1e-12
    )


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_scores_that_are_no_numbers_are_refused(bad: float) -> None:
    scorer = Unigram()
    scorer.log_p[3] = bad
    with pytest.raises(ValueError, match="not finite"):
        score_windows(scorer, np.full((1, 4), 3), TOKEN_BYTES)


def test_one_score_too_few_is_refused() -> None:
    class Short(Unigram):
        def one(self, prompt: Prompt) -> Scores:
            return super().one(Prompt(prompt.ids, prompt.start + 1))

    with pytest.raises(ValueError, match="gave 15 log-probabilities"):
        score_windows(Short(), windows_of(1), TOKEN_BYTES)


def test_windows_without_text_are_refused() -> None:
    with pytest.raises(ValueError, match="no text to score"):
        score_windows(Unigram(), np.full((2, 5), 2), TOKEN_BYTES)


def test_the_command_on_real_held_out_text(
    prepared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tokenizer_from_sentencepiece(prepared_data / "tokenizer.model")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    token_bytes = matching_token_bytes(tmp_path, prepared_data)
    scorer = Unigram(len(token_bytes))
    asked: list[Source] = []

    def opened(folder: Path, source: Source) -> Unigram:
        asked.append(source)
        return scorer

    monkeypatch.setattr("evals.bits_per_byte.open_scorer", opened)
    out, on_gpu = tmp_path / "evals.jsonl", Source("transformers", "cuda")
    record = main(tmp_path, prepared_data, limit=4, source=on_gpu, about=About(out, 3, 99, "phase1"))
    assert asked == [on_gpu]
    assert record == json.loads(out.read_text())
    check_fields(record, None)
    windows, categories = load_windows(prepared_data, 4)
    assert set(record["sources"]) == set(windows) == {"web", "code", "math"}
    for name, source in record["sources"].items():
        bits, loss = by_hand(windows[name], scorer, token_bytes)
        assert source["bits_per_byte"] == pytest.approx(bits, rel=TOLERANCE)
        assert source["loss"] == pytest.approx(loss, rel=TOLERANCE)
        assert source["category"] == categories[name]
    assert (record["kind"], record["step"], record["tokens_total"], record["phase"]) == (
        "bits_per_byte",
        3,
        99,
        "phase1",
    )
    assert len(record["data_sha256"]) == len(record["tokenizer_sha256"]) == 64


def test_a_model_with_another_tokenizer_is_refused(prepared_data: Path, tmp_path: Path) -> None:
    tokenizer = tokenizer_from_sentencepiece(prepared_data / "tokenizer.model")
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    a, b = [piece for piece, id_ in vocab.items() if id_ in (300, 450)]
    assert len(a) != len(b)
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is not the tokenizer of"):
        matching_token_bytes(tmp_path, prepared_data)


def test_a_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no <source>/source\.json"):
        load_windows(tmp_path, None)
