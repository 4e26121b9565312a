"""The comparison of encoders: equal ids are counted, another encoder's are found, texts are not alike."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.tokenizer_assets import byte_level, save
from tools.bench import encode

TEXTS = ["def f(x):\n    return 1 + 23456\n", "It's a naïve 日本語 text, isn't it?\n\n", "a  b\t\tc   \n" * 9]


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    given = [(n > 1, each) for n in range(4) for each in TEXTS]
    monkeypatch.setattr(encode, "documents", lambda size: iter(given))
    monkeypatch.setattr(encode, "SPELLED", 1000)
    monkeypatch.setattr(encode, "stage_rate", lambda model, texts: 1.0)
    monkeypatch.setattr(encode, "shard_rates", lambda model, texts: {"text to shards": 2.0})
    return save(byte_level(TEXTS * 20, ["<s>", "</s>"]), tmp_path)


def measured(model: Path) -> dict[str, Any]:
    return encode.measure(encode.Options(model=model, every=2), Console(quiet=True))


def test_equal_ids_are_counted_and_tiktoken_is_made_of_the_file(model: Path) -> None:
    found = measured(model)
    assert found["differ"] == 0
    assert found["counts"]["documents"] == 12
    assert found["counts"]["documents by tokenizers"] == 6, "one of two, and none because tiktoken differs"
    assert found["counts"]["bytes not repeated"] * 2 == found["counts"]["bytes"]
    assert "12" in encode.section(encode.Options(model=model), found)[1]


def test_an_encoder_of_other_ids_is_found(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = encode.tokenizer.load(model)
    fast = exact.fast
    assert fast is not None

    def wrong(texts: Any) -> tuple[np.ndarray, np.ndarray]:
        tokens, lengths = fast(texts)
        tokens[-1] += 1
        return tokens, lengths

    exact.__dict__["fast"] = wrong
    monkeypatch.setattr(encode.tokenizer, "load", lambda path: exact)
    assert measured(model)["differ"] == 1


def test_what_is_repeated_is_varied_and_each_content_is_read_once(tmp_path: Path, monkeypatch) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text("one 1\ntwo 2\nthree 3\n" + ("x" if name == "b" else ""))
    monkeypatch.setattr(encode, "ROOTS", (str(tmp_path),))
    found = list(islice(encode.documents(10**6), 6))
    assert [again for again, _ in found] == [0, 0, 1, 1, 2, 2]
    assert len({content for _, content in found}) > 4, "repeats are varied"
    assert len(encode.varied("a 1\nb 2\n", random.Random(1))) == 8


def test_a_run_goes_on_and_special_tokens_are_spelled(model: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(encode, "SPELLED", 4)
    options = encode.Options(model=model, every=2, state=tmp_path / "state.json")
    asked = [content for _, content in encode.texts(options)]
    assert sum("<s>" in each or "</s>" in each for each in asked) == 3, "one of four"
    compared, whole = [], encode.Comparison.compare
    monkeypatch.setattr(encode, "BATCH_BYTES", 60)

    def stopped(found: Any, made: Any, peer: Any, batch: list[str], every: int) -> None:
        if len(compared) >= 6:
            raise KeyboardInterrupt
        compared.extend(batch)
        whole(found, made, peer, batch, every)

    with monkeypatch.context() as patch:
        patch.setattr(encode.Comparison, "compare", stopped)
        with pytest.raises(KeyboardInterrupt):
            encode.measure(options, Console(quiet=True))
    found = encode.measure(options, Console(quiet=True))
    assert 6 <= len(compared) < 12
    assert found["counts"]["documents"] == 12
    assert found["counts"]["bytes"] == sum(len(each.encode()) for each in asked)
    assert found["differ"] == 0
