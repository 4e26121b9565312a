"""Scores of the engine and of Transformers against PyTorch in float64, with and without prefixes kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from evals.scorer import (
    EngineScorer,
    Scorer,
    TransformersScorer,
    common_prefix,
    open_encoder,
    open_scorer,
    uses_engine,
    visible_device,
)
from tests.evals.core.core_assets import VOCAB, write_laneformer, write_llama

# prompts whose prefixes meet in every way: same prompt again, longer, shorter, another, one token
SEQUENCES = [
    ([1, 5, 6, 7, 8, 9, 10], 4), ([1, 5, 6, 7, 8, 9, 10], 4), ([1, 5, 6, 7, 11, 12], 4), ([1, 5, 6, 7, 11, 12], 1),
    ([1, 5, 6, 7, 11, 12, 40, 41, 42], 6), ([1, 5], 1), ([1, 30, 31, 32], 3), ([1, *range(50, 120)], 60),
    ([1, *range(50, 110), 7, 8], 61),
]  # fmt: skip


@torch.no_grad()
def reference(model: torch.nn.Module, ids: list[int], start: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Plain log-softmax of one pass over all ids: log-probabilities of ids[start:], and whether each is the argmax."""
    found = model.to(dtype)(torch.tensor([ids]))
    logits = getattr(found, "logits", found)[0, start - 1 : -1].double().numpy()
    logp = logits - logits.max(1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(1, keepdims=True))
    rows = np.arange(len(ids) - start)
    return logp[rows, ids[start:]], logp.argmax(1) == ids[start:]


def check(scorer: Scorer, model: torch.nn.Module) -> None:
    for ids, start in SEQUENCES:
        exact, greedy = reference(model, ids, start, torch.float64)
        single, _ = reference(model, ids, start, torch.float32)
        # what float32 itself gets wrong on this model, times 8 as sums are taken in another order; 1e-6 for tiny ones
        allowed = 8 * np.abs(single - exact).max() + 1e-6
        got = scorer.score(ids, start)
        assert got.logprobs.dtype == np.float64
        assert got.greedy.dtype == bool
        assert got.logprobs.shape == got.greedy.shape == (len(ids) - start,)
        assert np.abs(got.logprobs - exact).max() <= allowed, (ids, start)
        np.testing.assert_array_equal(got.greedy, greedy)
    wrong, _ = reference(model, [*ids[: start - 2], 299, *ids[start - 1 :]], start, torch.float64)
    assert np.abs(wrong - exact).max() > 100 * allowed, "the comparison would not see another prefix"
    model.float()


def test_engine(tmp_path: Path) -> None:
    model = write_laneformer(tmp_path)
    scorer = open_scorer(tmp_path, device="cpu")
    assert isinstance(scorer, EngineScorer)
    assert (scorer.name, scorer.max_length, scorer.bos_id, scorer.eos_id) == ("engine fp32", 128, 1, 2)
    check(scorer, model)
    scorer.close()


@pytest.mark.parametrize("config", [{}, {"sliding_window": 8}], ids=["llama", "mistral, window 8"])
def test_transformers(tmp_path: Path, config: dict[str, int]) -> None:
    model = write_llama(tmp_path, **config)
    scorer = open_scorer(tmp_path, device="cpu")
    assert isinstance(scorer, TransformersScorer)
    assert (scorer.name, scorer.max_length, scorer.bos_id, scorer.eos_id) == ("transformers float32", 128, 1, 2)
    check(scorer, model)


def test_a_laneformer_through_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked whether the code in the folder may run."""
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    model = write_laneformer(tmp_path)
    scorer = open_scorer(tmp_path, device="cpu", kind="transformers")
    assert isinstance(scorer, TransformersScorer)
    check(scorer, model)


def test_kept_prefixes_are_not_read_again(tmp_path: Path) -> None:
    write_llama(tmp_path)
    scorer = TransformersScorer(tmp_path, "cpu")
    read: list[int] = []
    forward = scorer._model.forward
    scorer._few_logits = False  # the spy's signature is not the model's

    def spy(input_ids: torch.Tensor, **options: object) -> object:
        read.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **options)

    scorer._model.forward = spy
    for ids, start in [([1, 5, 6, 7, 8], 4), ([1, 5, 6, 7, 9, 10], 4), ([1, 5, 3], 1), ([1, 5, 3], 2)]:
        scorer.score(ids, start)
    assert read == [4, 2, 2, 1]


def test_a_model_whose_state_cannot_be_cut_reads_everything(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    scorer = TransformersScorer(tmp_path, "cpu")
    scorer._keeps_prefix = False
    check(scorer, model)


def test_texts_become_the_same_ids_in_both(tmp_path: Path) -> None:
    write_laneformer(tmp_path)
    ours, theirs = open_encoder(tmp_path), open_encoder(tmp_path, "transformers")
    for text in ("", "The cat", " a", "\nAnswer: 12", "x  y"):
        assert ours.encode(text) == theirs.encode(text)
        assert (
            ours.encode(text, special_tokens=True)
            == theirs.encode(text, special_tokens=True)
            == [1, *ours.encode(text)]
        )
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_id, theirs.eos_id) == (1, 2)


def test_auto_is_the_gpu_where_one_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher beside the run on a GPU of its own uses it; asking for one that is not there is refused in words."""
    write_laneformer(tmp_path)
    for driver, gpu, device in [(False, False, "cpu"), (True, False, "cpu"), (True, True, "cuda")]:
        monkeypatch.setattr("laneformer.engine.device.has_driver", lambda driver=driver: driver)
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        assert visible_device("auto") == device
        assert uses_engine(tmp_path, "auto") == (device == "cpu"), (
            "Transformers on a GPU, until the engine has run on one"
        )
        assert visible_device("cpu") == "cpu"
        if gpu:
            assert visible_device("cuda:1") == "cuda:1"
        else:
            with pytest.raises(ValueError, match=r"device = 'cuda': no GPU is visible .* use device = 'auto'"):
                open_scorer(tmp_path, "cuda")


def test_common_prefix() -> None:
    assert [common_prefix(a, b) for a, b in [([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([4], [5])]] == [
        0,
        2,
        1,
        0,
    ]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        open_scorer(tmp_path)
    write_llama(tmp_path)
    open_scorer(tmp_path, kind="engine", device="cpu").close()  # a Llama, which the engine reads too
    with pytest.raises(ValueError, match="kind = 'onnx' is unknown"):
        open_scorer(tmp_path, kind="onnx")  # type: ignore[arg-type]
    scorer = open_scorer(tmp_path, device="cpu")
    for ids, start in [([1, 2], 0), ([1, 2], 2), ([1] * 130, 1)]:
        with pytest.raises(ValueError, match="1 <= start < ids <= 129 is required"):
            scorer.score(ids, start)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "laneformer", "vocab_size": VOCAB}))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="export the model with it"):
        open_encoder(tmp_path)


def test_one_id_more_than_the_context_is_only_predicted(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    ids = [1, *range(3, 131)]
    scores = open_scorer(tmp_path, device="cpu").score(ids, 1)
    assert scores.logprobs.shape == (128,)
    exact, _ = reference(model, ids, 1, torch.float64)
    assert np.abs(scores.logprobs - exact).max() < 1e-4
