"""Tests of text samples: greedy tokens, a seed that repeats, prompt files, the record."""

import json

import pytest

from evals.samples import BUILT_IN, main, read_prompts
from evals.scorer import Answerer, open_scorer
from laneformer import Engine
from records.evals import About
from records.files import read_lines
from tests.evals.core.core_assets import write_laneformer, write_llama
from tests.evals.reference import continue_greedily
from tests.records.lines import write_lines

CPU = Answerer(device="cpu")


def test_built_in_prompts_through_the_engine(folder, tmp_path):
    about = About(tmp_path / "evals.jsonl", 20, 4096, "phase1")
    record = main(folder, max_new_tokens=6, about=about, answerer=CPU)
    assert read_lines(tmp_path / "evals.jsonl") == [record]
    assert (record["kind"], record["step"], record["tokens_total"]) == ("samples", 20, 4096)
    assert [sample["name"] for sample in record["samples"]] == ["prose", "fact", "code", "chat"]
    with Engine.from_pretrained(folder, device="cpu") as engine:
        for prompt, sample in zip(read_prompts(BUILT_IN)[:3], record["samples"], strict=False):
            text = str(prompt["text"])
            assert sample["prompt"] == text
            assert sample["greedy"] == engine.generate_text(text, max_new_tokens=6)
            assert sample["sampled"] == engine.generate_text(
                text, max_new_tokens=6, temperature=0.8, seed=0
            )
    assert record["samples"][3]["prompt"].startswith("user: Why is the sky blue?")
    other = main(folder, max_new_tokens=6, seed=1, answerer=CPU)["samples"]
    for text, same in (("greedy", True), ("sampled", False)):
        assert ([s[text] for s in other] == [s[text] for s in record["samples"]]) == same


UNGREEDY = {
    "do_sample": True,
    "temperature": 0.1,
    "top_k": 1,
    "repetition_penalty": 9.0,
    "no_repeat_ngram_size": 1,
    "num_beams": 3,
    "min_new_tokens": 5,
    "suppress_tokens": [*range(3, 200)],
    "max_new_tokens": 2,
}


def test_both_backends_generate_the_models_own_tokens(folder, tmp_path):
    # whatever generation_config.json states
    model = write_laneformer(tmp_path / "hf")
    # sampling, penalties and beams that would change greedy tokens
    (tmp_path / "hf/generation_config.json").write_text(json.dumps({"eos_token_id": 2, **UNGREEDY}))
    for kind in ("engine", "transformers"):
        scorer = open_scorer(tmp_path / "hf", Answerer(kind, "cpu"))
        ids = scorer.encode("The cat looked at", special_tokens=True)
        text = scorer.text_after(ids, continue_greedily(model, ids, 8))
        assert (
            scorer.generate(ids, 8) == scorer.generate("The cat looked at", 8) == (text, "length")
        ), kind
        assert scorer.generate(ids, 8, [text[3:5]]) == (text[: text.index(text[3:5])], "stop"), kind
        with pytest.raises(ValueError, match="top_q"):
            scorer.generate(ids, 8, top_q=1)
        before = scorer.reused_tokens
        other = [*ids[:-3], *ids[:-3:-1]]
        text = scorer.text_after(other, continue_greedily(model, other, 8))
        assert scorer.generate(other, 8).text == text, kind
        # the prefix of the prompt before it
        assert scorer.reused_tokens - before == len(ids) - 3
        sampled = [scorer.generate(ids, 8, temperature=0.9, seed=seed) for seed in (0, 0, 1)]
        assert sampled[0] == sampled[1] != sampled[2]
        scorer.close()


def test_prompts_of_a_file_and_any_model(tmp_path):
    # no Laneformer and no chat template: Transformers, and no chat among built-in prompts
    write_llama(tmp_path / "hf")
    (tmp_path / "hf/chat_template.jinja").unlink()
    samples = main(tmp_path / "hf", max_new_tokens=2, answerer=CPU)["samples"]
    assert [sample["name"] for sample in samples] == ["prose", "fact", "code"]
    texts = {"a": "The cat", "b": "1 and 2", "": ""}
    prompts = write_lines(
        tmp_path / "x.jsonl", ({"name": n, "text": text} for n, text in texts.items())
    )
    prompts.write_text("\n" + prompts.read_text())
    record = main(tmp_path / "hf", prompts, max_new_tokens=3, answerer=CPU)
    assert {sample["name"]: sample["prompt"] for sample in record["samples"]} == texts
    assert (record["backend"], record["dtype"]) == ("transformers", "float32")


def test_bad_prompts_are_refused(folder, tmp_path):
    path = tmp_path / "prompts.jsonl"
    for text, reason in (
        ("", "holds no prompts"),
        ('{"name": "a", "text": "x"}\n{"name": "a", "text": "y"}', "two of one name"),
        ('{"text": "x"}', r'prompts.jsonl:1: not {"name", "text"}'),
        ('{"name": "a", "text": "x"}\n{"name": "b"}', "prompts.jsonl:2"),
        ('{"name": "a", "text": "x", "messages": []}', "prompts.jsonl:1"),
        ('{"name": "a"', "not JSON"),
        (
            json.dumps({"name": "long", "text": "cat " * 800}),
            "'long': a prompt of .* leaves no room .* context of 512",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=reason):
            main(folder, path, answerer=CPU)
