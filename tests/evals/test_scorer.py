"""Tests of engine and Transformers scores against PyTorch in float64, prefixes kept or not."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from evals.scorer import (
    Answerer,
    Encoder,
    Prompt,
    Scorer,
    Scores,
    choose,
    open_scorer,
    resolve_device,
)
from evals.scorer import hf as hf_scorer
from evals.scorer.endpoint import scores_of as scores_of_choice
from evals.scorer.hf import TransformersScorer
from records.files import JsonObject
from tests.evals.core.core_assets import VOCAB, score_one, write_laneformer, write_llama
from tests.evals.reference import scores_of
from tests.laneformer.serve.conftest import start

# prompts whose prefixes meet in every way: same prompt again, longer, shorter, another, one token
SEQUENCES = [
    ([1, 5, 6, 7, 8, 9, 10], 4), ([1, 5, 6, 7, 8, 9, 10], 4), ([1, 5, 6, 7, 11, 12], 4), ([1, 5, 6, 7, 11, 12], 1),
    ([1, 5, 6, 7, 11, 12, 40, 41, 42], 6), ([1, 5], 1), ([1, 30, 31, 32], 3), ([1, *range(50, 120)], 60),
    ([1, *range(50, 110), 7, 8], 61),
]  # fmt: skip
ONE_MORE = ([1, *range(3, 131)], 1)  # than the context: the last id is only predicted
CPU = Answerer(device="cpu")
THROUGH_TRANSFORMERS = Answerer("transformers", "cpu")


class ModelFolder(NamedTuple):
    """A model folder, and the model that it holds."""

    folder: Path
    model: torch.nn.Module


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    written = {}
    for name, write, options in (
        ("laneformer", write_laneformer, {}),
        ("llama", write_llama, {}),
        ("mistral", write_llama, {"sliding_window": 8}),
    ):
        written[name] = ModelFolder(folder / name, write(folder / name, **options))
    return written


@pytest.fixture
def llama(models):
    return models["llama"]


def float32_error(model: torch.nn.Module, prompt: Prompt) -> float:
    """Return 8 times float32's own error on this model, at least 1e-6."""
    exact, rounded = (
        scores_of(model, *prompt, dtype).logprobs for dtype in (torch.float64, torch.float32)
    )
    # times 8, as sums are taken in another order
    return 8 * np.abs(rounded - exact).max() + 1e-6


def check_scores(model: torch.nn.Module, prompt: Prompt, scores: Scores):
    exact = scores_of(model, *prompt)
    assert (scores.logprobs.dtype, scores.greedy.dtype) == (np.float64, bool)
    assert scores.logprobs.shape == scores.greedy.shape == (len(prompt.ids) - prompt.start,)
    # float64 is the truth; what is allowed is float32's own rounding on this model
    assert np.abs(scores.logprobs - exact.logprobs).max() <= float32_error(model, prompt), prompt
    np.testing.assert_array_equal(scores.greedy, exact.greedy)


def check(scorer: Scorer, model: torch.nn.Module):
    prompts = [Prompt(*sequence) for sequence in (ONE_MORE, *SEQUENCES)]
    (together,) = scorer.score([prompts])
    for prompt, batched in zip(prompts, together, strict=True):
        check_scores(model, prompt, batched)
        check_scores(model, prompt, score_one(scorer, *prompt))
    ids, start = prompt
    other = scores_of(model, [*ids[: start - 2], 299, *ids[start - 1 :]], start)
    difference = np.abs(other.logprobs - batched.logprobs).max()
    # the comparison would not see another prefix
    assert difference > 100 * float32_error(model, prompt)


SCORERS = {
    "laneformer": (CPU, "engine", "fp32"),
    "laneformer in Transformers": (THROUGH_TRANSFORMERS, "transformers", "float32"),
    "llama": (CPU, "transformers", "float32"),
    "mistral": (CPU, "transformers", "float32"),
}


@pytest.mark.parametrize("name", SCORERS)
def test_scores_are_pytorchs(models, name, monkeypatch, capsys):
    # whether code may run
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    (answerer, backend, dtype), (folder, model) = SCORERS[name], models[name.split()[0]]
    scorer = open_scorer(folder, answerer)
    assert f"{backend} on cpu in {dtype} (" in capsys.readouterr().err
    about = (scorer.backend, scorer.device, scorer.dtype, scorer.max_length)
    assert about == (backend, "cpu", dtype, 128)
    assert (scorer.bos_id, scorer.eos_id) == (1, 2)
    check(scorer, model)
    scorer.close()


def spy_on_passes(scorer: TransformersScorer) -> list[tuple[int, int]]:
    """Record (prompts, tokens of each) of every pass."""
    passes: list[tuple[int, int]] = []
    forward = scorer._model.forward

    def spy(input_ids, **options):
        passes.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **options)

    scorer._model.forward = spy
    return passes


@pytest.mark.parametrize("name", ["llama", "laneformer"])
def test_options_behind_a_long_prefix_are_read_in_two_passes(models, monkeypatch, name):
    # the prefix once, then all options
    folder, model = models[name]
    scorer = TransformersScorer(folder, "cpu")
    prefix = [1, *range(40, 90)]
    options = [[7, 8, 9], [7, 8], [10], [7], [11, 12, 13, 14]]
    item = [Prompt([*prefix, *option], len(prefix)) for option in options]
    monkeypatch.setitem(hf_scorer.WORTH_A_PASS, "cpu", 100)
    passes = spy_on_passes(scorer)
    (together,) = scorer.score([item])
    # 50 tokens of the prefix; five options, the longest of 1 + 3 tokens
    assert passes == [(1, 50), (5, 4)]
    for prompt, scores in zip(item, together, strict=True):
        check_scores(model, prompt, scores)


def test_passes_become_smaller_where_memory_ends(llama, monkeypatch):
    scorer = TransformersScorer(llama.folder, "cpu")
    fits = 2
    passes = []
    score = scorer._score

    def score_few(prompts, offset):
        passes.append(len(prompts))
        if len(prompts) > fits:
            raise torch.OutOfMemoryError
        assert not offset
        return score(prompts, offset)

    monkeypatch.setitem(hf_scorer.WORTH_A_PASS, "cpu", 1)
    # a model whose state cannot be copied reads every prompt whole
    monkeypatch.setattr(scorer, "_keeps_prefix", False)
    monkeypatch.setattr(scorer, "_score", score_few)
    check(scorer, llama.model)
    assert max(passes) > fits
    fits = 0
    with pytest.raises(torch.OutOfMemoryError):
        score_one(scorer, [1, 5, 6], 1)


def test_both_backends_score_a_rolling_text_alike(models):
    folder, model = models["laneformer"]
    ids = [3 + (i * 7) % 200 for i in range(50)]
    expected = 0.0
    # every id once, in disjoint windows with all the context that fits
    for begin, end in ((1, 17), (17, 33), (33, 49), (49, 51)):
        first = max(0, end - 17)
        expected += scores_of(model, [1, *ids][first:end], begin - first).logprobs.sum()
    for backend in ("engine", "transformers"):
        scorer = open_scorer(folder, Answerer(backend, "cpu", max_length=16))
        assert scorer.rolling(ids) == pytest.approx(expected, rel=1e-5)
        assert scorer.rolling([]) == 0
        scorer.close()


def test_a_server_says_what_the_engine_says(models):
    folder = models["laneformer"].folder
    # keys and values in fp32, as the scorer has them on the CPU
    server = start(folder, engine={"dtype": "fp32", "kv_dtype": "fp32"})
    # a server's context is a token shorter, as it adds one to what it scores
    ours = open_scorer(folder, Answerer("engine", "cpu", max_length=127))
    served = Answerer(base_url=f"{server.url}/v1", model="tiny", max_length=128, concurrency=3)
    theirs = open_scorer(folder, served)
    about = (theirs.backend, theirs.device, theirs.dtype, theirs.max_scored_ids)
    assert about == ("endpoint", served.base_url, None, 127)
    items = [[Prompt(*sequence)] for sequence in SEQUENCES] + [
        [Prompt([1, 5, 6], 2), Prompt([1, 5, 7, 8], 2)]
    ]
    for a, b in zip(ours.score(items), theirs.score(items), strict=True):
        np.testing.assert_equal(a, b)
    assert ours.rolling([*range(3, 60)]) == theirs.rolling([*range(3, 60)])
    assert ours.generate([1, 5, 6], 9) == theirs.generate([1, 5, 6], 9)
    assert server.stop() == 0, server.output()


TOP = [None, {"5": -1.0}, {"7": -0.5}, {"9": -1.0}]
WHOLE = {"token_logprobs": [None, -1.0, -2.0, -1.0], "top_logprobs": TOP}
BROKEN = [  # what a server gives in place of all scores of a prompt of three ids
    {},
    WHOLE | {"token_logprobs": [None, -1.0, -2.0]},
    WHOLE | {"top_logprobs": [None, {}, {}, {}]},
    WHOLE | {"top_logprobs": [None, None, {"7": -0.5}, {"9": -1.0}]},
    WHOLE | {"token_logprobs": [None, -1.0, "-2", -1.0]},
    WHOLE | {"token_logprobs": [None, -1.0, float("nan"), -1.0]},
    WHOLE | {"token_logprobs": [None, True, True, True]},
    WHOLE | {"token_logprobs": 7},
    WHOLE | {"top_logprobs": dict.fromkeys("abcd")},
    WHOLE | {"top_logprobs": [None, [1], 2, "3"]},
    7,
    [WHOLE],
]
NO_TEXTS: list[JsonObject] = [{}, {"text": 7}, {"message": {}}]
CHOICES = [  # for one prompt
    [], [{}], [{"index": 1}], [{"index": 0}, {"index": 1}], [{"index": 0}] * 2, [{"index": []}], ["text"], 7,
    {"index": 0},
]  # fmt: skip


def test_a_server_without_all_scores_is_refused(llama, monkeypatch):
    prompt = Prompt([1, 5, 6], 1)
    scores = scores_of_choice({"logprobs": WHOLE}, prompt)
    assert (scores.logprobs.tolist(), scores.greedy.tolist()) == ([-1, -2], [True, False])
    for short in BROKEN:
        with pytest.raises(
            ValueError, match=r"the server gave \d log-probabilities for a prompt of 3"
        ):
            scores_of_choice({"logprobs": short}, prompt)
    scorer = open_scorer(llama.folder, Answerer(base_url="http://127.0.0.1:9/v1"))
    for choices in CHOICES:
        monkeypatch.setattr(scorer, "_post", lambda *_, choices=choices: {"choices": choices})
        with pytest.raises(
            ValueError, match=r"127.0.0.1:9/v1.* (returned no choice|gave choices .* for 1 prompts)"
        ):
            score_one(scorer, [1, 5, 6], 1)
    for choice in NO_TEXTS:
        monkeypatch.setattr(scorer, "_post", lambda *_, choice=choice: {"choices": [choice]})
        with pytest.raises(ValueError, match="returned a choice without text"):
            scorer.generate("x", 9)
    monkeypatch.setattr(scorer, "_post", lambda *_: {"choices": [{"text": "half \ud83d. x"}]})
    assert scorer.generate("x", 9, ["x"]) == ("half ?. ", "stop")


def test_a_model_without_finite_logits_is_stopped_before_it_is_asked(tmp_path):
    model = write_llama(tmp_path)
    for value in (float("nan"), float("inf")):
        model.model.norm.weight.data[3] = value
        model.save_pretrained(tmp_path)
        with pytest.raises(
            ValueError, match="gives logits that are not finite: its weights are damaged"
        ):
            open_scorer(tmp_path, THROUGH_TRANSFORMERS)


def test_texts_become_the_same_ids_in_both(llama):
    from transformers import AutoTokenizer

    ours = Encoder(llama.folder)
    theirs = AutoTokenizer.from_pretrained(llama.folder)
    for text in ("", "The cat", " a", "\nAnswer: 12", "x  y"):
        plain, special = (
            theirs(text, add_special_tokens=add)["input_ids"] for add in (False, True)
        )
        assert [ours.encode(text)] * 2 == ours.encode_each([text, text]) == [plain] * 2
        assert ours.encode(text, special_tokens=True) == special == [1, *plain]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (1, 2)


@pytest.mark.parametrize(("driver", "gpus"), [(False, 0), (True, 0), (True, 2)])
def test_auto_is_the_gpu_where_one_is_visible(models, monkeypatch, driver, gpus):
    folder = models["laneformer"].folder
    monkeypatch.setattr("laneformer.engine.device.has_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    expected = ("transformers", "cuda:0", "a GPU") if gpus else ("engine", "cpu", "no GPU")
    backend, device, why = choose(folder)
    assert (backend, device) == expected[:2]
    assert f"{expected[2]} is visible" in why
    assert (resolve_device("auto"), resolve_device("cpu")) == (device, "cpu")
    if not gpus:
        with pytest.raises(
            ValueError, match=r"device = 'cuda': no GPU is visible .* use device = 'auto'"
        ):
            open_scorer(folder, Answerer(device="cuda"))
        return
    assert [resolve_device(name) for name in ("cuda:1", "cuda")] == ["cuda:1", "cuda:0"]
    with pytest.raises(ValueError, match="choose auto, cpu, cuda:0, cuda:1"):
        resolve_device("cuda:0,cuda:2")
    with pytest.raises(ValueError, match="Transformers runs on one device"):
        choose(folder, Answerer(device="cuda:0,cuda:1"))


def test_bad_input(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json does not exist"):
        open_scorer(tmp_path)
    write_llama(tmp_path)
    # which reads a Llama, too
    in_8_bits = open_scorer(tmp_path, Answerer("engine", "cpu", dtype="int8"))
    assert in_8_bits.dtype == "int8"
    in_8_bits.close()
    for answerer, reason in (
        (Answerer("transformers", "cpu", dtype="int8"), "dtype = 'int8'"),
        (Answerer(dtype="int8", base_url="http://127.0.0.1:9"), "dtype = 'int8'"),
    ):
        with pytest.raises(ValueError, match=reason):
            open_scorer(tmp_path, answerer)
    scorer = open_scorer(tmp_path, CPU)
    for wrong in (([1, 2], 0), ([1, 2], 3), ([1] * 130, 1)):
        with pytest.raises(ValueError, match="1 <= start <= ids <= 129 is required"):
            score_one(scorer, *wrong)
    # an option without a token of its own
    assert len(score_one(scorer, [1, 2], 2).logprobs) == 0
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "laneformer", "vocab_size": VOCAB})
    )
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="export the model with it"):
        Encoder(tmp_path)
