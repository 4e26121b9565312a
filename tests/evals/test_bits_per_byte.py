"""Tests of bits per byte against sums by hand, token bytes, and held-out windows."""

import json
import math

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer
from tokenizers.models import BPE

from evals.bits_per_byte import (
    bits_per_byte,
    count_token_bytes,
    load_token_bytes,
    load_windows,
    main,
)
from evals.items import Partial
from evals.scorer import Answerer, Prompt, Scores
from laneformer.hf.tokenizer import tokenizer_from_sentencepiece
from records.evals import About
from records.files import read_lines
from tests.laneformer.hf.hf_assets import sentencepiece_model
from tests.records.test_fields import check as check_fields

VOCAB = 8
TOKEN_BYTES = np.array([0, 0, 0, 1, 1, 2, 3, 7])  # <unk>, BOS, EOS, two byte tokens, three pieces


class Unigram:
    """A model that ignores the context: p(token) is fixed, so every sum can be done by hand."""

    def __init__(self, vocab=VOCAB):
        weights = np.arange(1, vocab + 1, dtype=np.float64)
        self.log_p = np.log(weights / weights.sum())

    backend, device, dtype = "unigram", "cpu", "float32"

    def one(self, prompt):
        logprobs = self.log_p[np.asarray(prompt.ids[prompt.start :])]
        return Scores(logprobs.astype(np.float32).astype(np.float64), np.zeros(0))

    def score(self, items):
        for item in items:
            yield [self.one(prompt) for prompt in item]

    def close(self):
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


def score(scorer, windows: np.ndarray, token_bytes: np.ndarray):
    whole = bits_per_byte(scorer, {"web": windows}, {"web": "general"}, token_bytes, Partial())
    assert whole["bits_per_byte"] == whole["sources"]["web"]["bits_per_byte"]
    return whole["sources"]["web"]


def test_sums_by_hand():
    # the total of all sources is that of their windows together
    scorer = Unigram()
    windows = {"web": windows_of(1), "code": windows_of(3, count=9)}
    for rows in windows.values():
        figures = score(scorer, rows, TOKEN_BYTES)
        expected = by_hand(rows, scorer, TOKEN_BYTES)
        assert (figures["bits_per_byte"], figures["loss"]) == pytest.approx(expected, rel=TOLERANCE)
        assert (figures["tokens"], figures["bytes"]) == (
            rows[:, 1:].size,
            TOKEN_BYTES[rows[:, 1:]].sum(),
        )
    whole = bits_per_byte(
        scorer, windows, {"web": "general", "code": "code"}, TOKEN_BYTES, Partial()
    )
    together = score(scorer, np.concatenate(list(windows.values())), TOKEN_BYTES)
    for figure in ("bits_per_byte", "loss"):
        assert whole[figure] == together[figure]
    assert [source["category"] for source in whole["sources"].values()] == ["general", "code"]


def test_scores_that_mean_nothing_are_refused(tmp_path):
    class Short(Unigram):
        def one(self, prompt):
            return super().one(Prompt(prompt.ids, prompt.start + 1))

    with pytest.raises(ValueError, match="gave 15 log-probabilities"):
        score(Short(), windows_of(1), TOKEN_BYTES)
    with pytest.raises(ValueError, match="no text to score"):
        score(Unigram(), np.full((2, 5), 2), TOKEN_BYTES)
    for bad in (math.nan, -math.inf):
        scorer = Unigram()
        scorer.log_p[3] = bad
        with pytest.raises(ValueError, match="not finite"):
            score(scorer, np.full((1, 4), 3), TOKEN_BYTES)
    with pytest.raises(ValueError, match=r"holds no <source>/source\.json"):
        load_windows(tmp_path, None)


def test_the_command_on_real_held_out_text(data_folder, tmp_path, monkeypatch):
    tokenizer_from_sentencepiece(data_folder / "tokenizer.model").save(
        str(tmp_path / "tokenizer.json")
    )
    token_bytes = load_token_bytes(tmp_path, data_folder)
    scorer = Unigram(len(token_bytes))
    answerers = []
    monkeypatch.setattr(
        "evals.bits_per_byte.open_scorer",
        lambda folder, answerer: answerers.append(answerer) or scorer,
    )
    about = About(tmp_path / "evals.jsonl")
    on_gpu = Answerer("transformers", "cuda")
    record = main(tmp_path, data_folder, limit=4, answerer=on_gpu, about=about)
    assert answerers == [on_gpu]
    assert read_lines(tmp_path / "evals.jsonl") == [record]
    check_fields(record, None)
    windows, categories = load_windows(data_folder, 4)
    assert set(record["sources"]) == set(windows) == {"web", "code", "math"}
    for name, source in record["sources"].items():
        expected = by_hand(windows[name], scorer, token_bytes)
        assert (source["bits_per_byte"], source["loss"]) == pytest.approx(expected, rel=TOLERANCE)
        assert source["category"] == categories[name]


def test_a_model_with_another_tokenizer_is_refused(data_folder, tmp_path):
    content = json.loads(tokenizer_from_sentencepiece(data_folder / "tokenizer.model").to_str())
    vocab = content["model"]["vocab"]
    # two pieces of unequal length, so that the counts of bytes differ
    a, b = [piece for piece, id_ in vocab.items() if id_ in (300, 450)]
    assert len(a) != len(b)
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="is not the tokenizer of"):
        load_token_bytes(tmp_path, data_folder)


# the bytes of a text's tokens add up to the bytes of the text, whatever is in it

TEXTS = (
    "plain words, 1234 and punctuation.",
    "  two leading spaces,  two  inside, two at the end  ",
    "def f(x):\n\treturn x  # tab\r\n\n\n",
    "Größe, naïve façade, ½ × ™ … “quotes”",
    "Привет, мир · γειά σου · שלום · مرحبا",
    "你好，世界 こんにちは 안녕하세요",
    "😀 👩‍👩‍👧‍👦 🏴󠁧󠁢󠁥󠁮󠁧󠁿 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "e\u0301 combining, \u00a0nbsp, \u200b zero width, \ufeff BOM, \x01 control, \x7f",
    "<s> </s> <unk> <0x41> in the text are only letters",
    "\n",
    "",
)


def test_bytes_of_tokens_are_the_bytes_of_the_text(tmp_path):
    path = tmp_path / "tokenizer.model"
    for add_dummy_prefix in (True, False):
        path.write_bytes(sentencepiece_model(add_dummy_prefix))
        processor = sentencepiece.SentencePieceProcessor(str(path))
        counts = count_token_bytes(path)
        # control tokens and byte tokens
        assert counts[:259].tolist() == [0] * 3 + [1] * 256
        assert (counts[3:] > 0).all()
        for text in TEXTS:
            ids = processor.encode(text, add_bos=True, add_eos=True)
            # a Llama 2 tokenizer prepends a space
            expected = len(text.encode()) + (add_dummy_prefix and text != "")
            assert counts[ids].sum() == expected, (text, ids)


def test_pieces_without_known_bytes_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(BPE({"a": 0}, [])).save(str(path))
    with pytest.raises(ValueError, match="neither byte fallback"):
        count_token_bytes(path)
