"""Scores of the engine and of Transformers against PyTorch in float64, with and without prefixes kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evals.scorer import Encoder, Prompt, Scorer, Source, choose, common_prefix, devices_of, open_scorer
from evals.scorer import hf as hf_scorer
from evals.scorer.engine import EngineScorer
from evals.scorer.hf import TransformersScorer
from tests.evals.core.core_assets import VOCAB, score_one, write_laneformer, write_llama

# prompts whose prefixes meet in every way: same prompt again, longer, shorter, another, one token
SEQUENCES = [
    ([1, 5, 6, 7, 8, 9, 10], 4), ([1, 5, 6, 7, 8, 9, 10], 4), ([1, 5, 6, 7, 11, 12], 4), ([1, 5, 6, 7, 11, 12], 1),
    ([1, 5, 6, 7, 11, 12, 40, 41, 42], 6), ([1, 5], 1), ([1, 30, 31, 32], 3), ([1, *range(50, 120)], 60),
    ([1, *range(50, 110), 7, 8], 61),
]  # fmt: skip


@torch.no_grad()
def reference(
    model: torch.nn.Module, ids: list[int], start: int, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    """Plain log-softmax of one pass over all ids: log-probabilities of ids[start:], and whether
    each is the argmax.
    """
    found = model.to(dtype)(torch.tensor([ids]))
    logits = getattr(found, "logits", found)[0, start - 1 : -1].double().numpy()
    logp = logits - logits.max(1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(1, keepdims=True))
    rows = np.arange(len(ids) - start)
    return logp[rows, ids[start:]], logp.argmax(1) == ids[start:]


CPU = Source(device="cpu")


def check(scorer: Scorer, model: torch.nn.Module) -> None:
    together = [s for item in scorer.score([[Prompt(*each) for each in SEQUENCES]]) for s in item]
    for (ids, start), batched in zip(SEQUENCES, together, strict=True):
        exact, greedy = reference(model, ids, start, torch.float64)
        single, _ = reference(model, ids, start, torch.float32)
        # what float32 itself gets wrong on this model, times 8 as sums are taken in another order; 1e-6
        # for tiny ones
        allowed = 8 * np.abs(single - exact).max() + 1e-6
        for got in (score_one(scorer, ids, start), batched):
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
    scorer = open_scorer(tmp_path, CPU)
    assert isinstance(scorer, EngineScorer)
    assert (scorer.backend, scorer.device, scorer.dtype, scorer.max_length) == ("engine", "cpu", "fp32", 128)
    assert (scorer.bos_id, scorer.eos_id) == (1, 2)
    check(scorer, model)
    scorer.close()


@pytest.mark.parametrize("config", [{}, {"sliding_window": 8}], ids=["llama", "mistral, window 8"])
def test_transformers(tmp_path: Path, config: dict[str, int]) -> None:
    model = write_llama(tmp_path, **config)
    scorer = open_scorer(tmp_path, CPU)
    assert isinstance(scorer, TransformersScorer)
    assert (scorer.backend, scorer.device, scorer.dtype, scorer.max_length) == (
        "transformers",
        "cpu",
        "float32",
        128,
    )
    assert (scorer.bos_id, scorer.eos_id) == (1, 2)
    check(scorer, model)


def test_a_laneformer_through_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked whether the code in the folder may run."""
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    model = write_laneformer(tmp_path)
    scorer = open_scorer(tmp_path, Source("transformers", "cpu"))
    assert isinstance(scorer, TransformersScorer)
    check(scorer, model)


def read_by(scorer: TransformersScorer) -> list[tuple[int, int]]:
    """(prompts, tokens of each) of every pass from now on."""
    read: list[tuple[int, int]] = []
    forward = scorer._model.forward

    def spy(input_ids: torch.Tensor, **options: object) -> object:
        read.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **options)

    scorer._model.forward = spy
    return read


@pytest.mark.parametrize("write", [write_llama, write_laneformer])
def test_options_behind_a_long_prefix_are_read_in_two_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Any
) -> None:
    """The prefix once, then all options; equal to one by one, up to float32's rounding, and
    to float64's own answer.
    """
    model = write(tmp_path)
    scorer = TransformersScorer(tmp_path, "cpu")
    prefix = [1, *range(40, 90)]
    item = [
        Prompt([*prefix, *option], len(prefix)) for option in ([7, 8, 9], [7, 8], [10], [7], [11, 12, 13, 14])
    ]
    alone = [score_one(scorer, *prompt) for prompt in item]
    monkeypatch.setitem(hf_scorer.WORTH_A_PASS, "cpu", 100)
    read = read_by(scorer)
    (found,) = scorer.score([item])
    assert read == [(1, 50), (5, 4)], (
        "50 tokens of the prefix; five options behind it, the longest of 1 + 3 tokens"
    )
    for prompt, batched, single in zip(item, found, alone, strict=True):
        exact, greedy = reference(model, prompt.ids, prompt.start, torch.float64)
        rounded, _ = reference(model, prompt.ids, prompt.start, torch.float32)
        model.float()
        allowed = 8 * np.abs(rounded - exact).max() + 1e-6
        assert np.abs(batched.logprobs - exact).max() <= allowed
        assert np.abs(batched.logprobs - single.logprobs).max() <= 2 * allowed
        np.testing.assert_array_equal(batched.greedy, greedy)


def test_short_items_share_passes_of_similar_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path)
    scorer = TransformersScorer(tmp_path, "cpu")
    monkeypatch.setitem(hf_scorer.PASS_TOKENS, "cpu", 40)
    read = read_by(scorer)
    lengths = [5, 30, 6, 9, 6]
    found = list(scorer.score([[Prompt([1, *range(10, 9 + n)], 1)] for n in lengths]))
    assert [len(scores.logprobs) for (scores,) in found] == [n - 1 for n in lengths], (
        "in the order of the items"
    )
    assert read == [(4, 8), (1, 29)]


def test_passes_become_smaller_where_memory_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_llama(tmp_path)
    scorer = TransformersScorer(tmp_path, "cpu")
    fits, passes, score = 2, list[int](), scorer._score

    def small(prompts: Any, offset: int) -> Any:
        passes.append(len(prompts))
        if len(prompts) > fits:
            raise torch.OutOfMemoryError
        return score(prompts, offset)

    monkeypatch.setattr(scorer, "_score", small)
    check(scorer, model)
    assert max(passes) > fits
    fits = 0
    with pytest.raises(torch.OutOfMemoryError):
        score_one(scorer, [1, 5, 6], 1)


def test_a_model_whose_state_cannot_be_copied_reads_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_llama(tmp_path)
    monkeypatch.setitem(hf_scorer.WORTH_A_PASS, "cpu", 1)
    scorer = TransformersScorer(tmp_path, "cpu")
    scorer._keeps_prefix = False
    check(scorer, model)


@pytest.mark.rotate
def test_several_devices_share_the_items_and_change_nothing(tmp_path: Path) -> None:
    """Two processes on the CPU, as two GPUs would: the same scores in the same order, bit for
    bit by the engine.
    """
    write_laneformer(tmp_path)
    items = [[Prompt([1, 5, 6, 7 + i, 8], 3), Prompt([1, 5, 6, 9 + i], 3)] for i in range(40)]
    with_one, with_two = open_scorer(tmp_path, CPU), open_scorer(tmp_path, Source(device="cpu,cpu"))
    assert (with_two.backend, with_two.device, with_two.parallel) == ("engine", "cpu,cpu", 2)
    for one, two in zip(with_one.score(items), with_two.score(items), strict=True):
        for a, b in zip(one, two, strict=True):
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
            np.testing.assert_array_equal(a.greedy, b.greedy)
    asked = [(with_one, "The cat"), (with_two, "The cat"), (with_two, "The cat")]
    assert len({scorer.generate(text, 5).text for scorer, text in asked}) == 1
    with pytest.raises(ValueError, match="is required"):
        list(with_two.score([[Prompt([1], 0)]]))
    with_one.close()
    with_two.close()


def test_both_backends_score_a_rolling_text_alike(tmp_path: Path) -> None:
    """Every id once, in disjoint windows with all the context that fits."""
    model = write_laneformer(tmp_path)
    ids = [3 + (i * 7) % 200 for i in range(50)]
    whole = [1, *ids]
    expected = sum(
        reference(model, whole[max(0, end - 17) : end], begin - max(0, end - 17), torch.float64)[0].sum()
        for begin, end in ((1, 17), (17, 33), (33, 49), (49, 51))
    )
    for backend in ("engine", "transformers"):
        scorer = open_scorer(tmp_path, Source(backend, "cpu", max_length=16))  # type: ignore[arg-type]
        assert scorer.rolling(ids) == pytest.approx(expected, rel=1e-5)
        assert scorer.rolling([]) == 0
        scorer.close()


def test_the_log_says_what_answers_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_laneformer(tmp_path)
    open_scorer(tmp_path).close()
    assert "engine on cpu in fp32 (a Laneformer, no GPU is visible)" in capsys.readouterr().err


def test_texts_become_the_same_ids_in_both(tmp_path: Path) -> None:
    write_laneformer(tmp_path)
    from transformers import AutoTokenizer

    ours, theirs = Encoder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("", "The cat", " a", "\nAnswer: 12", "x  y"):
        plain, special = (theirs(text, add_special_tokens=add)["input_ids"] for add in (False, True))
        assert [ours.encode(text)] * 2 == ours.encode_each([text, text]) == [plain] * 2
        assert ours.encode(text, special_tokens=True) == special == [1, *plain]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


def test_auto_is_the_gpu_where_one_is_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A watcher beside the run on a GPU of its own uses it; asking for one that is not there
    is refused in words.
    """
    write_laneformer(tmp_path)
    for driver, gpu in [(False, False), (True, False), (True, True)]:
        monkeypatch.setattr("laneformer.engine.device.has_driver", lambda driver=driver: driver)
        monkeypatch.setattr(torch.cuda, "is_available", lambda gpu=gpu: gpu)
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpu=gpu: 2 * gpu)
        devices = ["cuda:0", "cuda:1"] if gpu else ["cpu"]
        assert devices_of("auto") == devices
        backend, used, why = choose(tmp_path)
        assert (backend, used) == ("transformers" if gpu else "engine", devices)
        assert ("a GPU is visible" if gpu else "no GPU is visible") in why
        assert devices_of("cpu") == ["cpu"]
        if gpu:
            assert devices_of("cuda:1") == ["cuda:1"]
            assert devices_of("cuda") == devices
            with pytest.raises(ValueError, match="choose auto, or a list of cpu, cuda:0, cuda:1"):
                devices_of("cuda:0,cuda:2")
        else:
            with pytest.raises(
                ValueError, match=r"device = 'cuda': no GPU is visible .* use device = 'auto'"
            ):
                open_scorer(tmp_path, Source(device="cuda"))


def test_common_prefix() -> None:
    assert [
        common_prefix(a, b) for a, b in [([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([4], [5])]
    ] == [
        0,
        2,
        1,
        0,
    ]


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        open_scorer(tmp_path)
    write_llama(tmp_path)
    opened = open_scorer(
        tmp_path, Source("engine", "cpu", dtype="int8")
    )  # a Llama, which the engine reads too
    assert opened.dtype == "int8"
    opened.close()
    with pytest.raises(ValueError, match="backend = 'onnx' is unknown"):
        open_scorer(tmp_path, Source("onnx"))  # type: ignore[arg-type]
    for source in (
        Source("transformers", "cpu", dtype="int8"),
        Source(dtype="int8", base_url="http://127.0.0.1:9"),
    ):
        with pytest.raises(ValueError, match="dtype = 'int8'"):
            open_scorer(tmp_path, source)
    scorer = open_scorer(tmp_path, CPU)
    for ids, start in [([1, 2], 0), ([1, 2], 3), ([1] * 130, 1)]:
        with pytest.raises(ValueError, match="1 <= start <= ids <= 129 is required"):
            score_one(scorer, ids, start)
    assert len(score_one(scorer, [1, 2], 2).logprobs) == 0, "an option without a token of its own"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "laneformer", "vocab_size": VOCAB}))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="export the model with it"):
        Encoder(tmp_path)


def test_one_id_more_than_the_context_is_only_predicted(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    ids = [1, *range(3, 131)]
    scores = score_one(open_scorer(tmp_path, CPU), ids, 1)
    assert scores.logprobs.shape == (128,)
    exact, _ = reference(model, ids, 1, torch.float64)
    assert np.abs(scores.logprobs - exact).max() < 1e-4
