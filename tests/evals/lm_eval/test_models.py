"""Our lm-eval model against PyTorch, lm-eval's own Hugging Face model and an endpoint,
on lm-eval's stock tasks.
"""

from __future__ import annotations

import gzip
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from evals.commands import read_command
from evals.lm_eval.__main__ import Questions, evaluate, figures_of, main, prompt_figures
from evals.lm_eval.models import ScorerLM
from evals.lm_eval.tasks import ARC_TASKS, check_packages, check_present, data_folder, expand_tasks
from evals.scorer import Answer, Source, fast_tokenizer
from evals.scorer.engine import EngineScorer
from records.evals import About
from records.items import read_items
from records.job import read_job
from tests.evals.lm_eval.lm_eval_assets import CONTEXT, QUESTIONS, export_tiny, toy_server, write_data
from tests.records.test_fields import check as check_fields

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.distributed is disabled")
PAIRS = [
    ("def main(", "self):"),
    ("def main(", "argument, other):\n"),
    ("", "import os\n"),
    ("class Path ", "object"),
    ("x = 1", " + 2"),
]


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model(hf_dir: Path) -> Iterator[ScorerLM]:
    opened = ScorerLM(hf_dir)
    yield opened
    opened.scorer.engine.close()


@pytest.fixture(scope="module")
def reference(hf_dir: Path) -> Reference:
    return Reference(hf_dir)


class Reference:
    """log p after every position in float64, and how far float32 arithmetic itself is from it."""

    def __init__(self, hf_dir: Path):
        options: dict[str, Any] = {"trust_remote_code": True}
        self.exact = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float64, **options)
        self.rounded = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32, **options)

    @torch.no_grad()
    def score(self, ids: list[int], start: int) -> tuple[float, bool, float]:
        """Sum of log p(ids[start:]), whether all are greedy, and the most a float32 sum may differ.

        A log-probability is off by up to twice its logits' error; other orders of summation may have a few
        times the error that PyTorch's happened to have; exp and the sum add about 1e-6 of the value. For n of
        them, n times that.
        """
        logits, float32 = (
            m(torch.tensor([ids])).logits[0, start - 1 : -1].double() for m in (self.exact, self.rounded)
        )
        log_p = torch.log_softmax(logits, -1)
        target = torch.tensor(ids[start:])
        allowed = len(target) * (8 * (logits - float32).abs().max().item() + 1e-6 * log_p.abs().max().item())
        chosen = log_p[torch.arange(len(target)), target]
        return chosen.sum().item(), bool((log_p.argmax(-1) == target).all()), allowed


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)]


def test_scores_are_pytorchs_log_softmax(model: ScorerLM, reference: Reference) -> None:
    answers = model.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    for (context, continuation), (score, greedy) in zip(PAIRS, answers, strict=True):
        before = len(model.tok_encode(context.rstrip())) if context else 1  # a space belongs to what follows
        ids = model.tok_encode(context + continuation)
        assert ids[0] == model.tokenizer.bos_token_id
        expected, expected_greedy, allowed = reference.score(ids, before)
        assert abs(score - expected) <= allowed
        assert greedy == expected_greedy
        other, _, _ = reference.score([*ids[:-1], (ids[-1] + 1) % 1024], before)
        assert abs(score - other) > 100 * allowed, "the comparison would not see one wrong id"
    assert model.scorer.engine.statistics.reused_tokens > 0
    assert model.loglikelihood(instances("loglikelihood", PAIRS[::-1]), disable_tqdm=True) == answers[::-1]


def test_a_greedy_continuation_is_called_greedy(model: ScorerLM) -> None:
    context = model.tok_encode("import ")
    ids = model.scorer.engine.generate(context, max_new_tokens=5, ignore_eos=True)
    other = [*ids[:-1], (ids[-1] + 1) % 1024]
    (_, yes), (_, no) = model._loglikelihood_tokens(
        [(None, context, ids), (None, context, other)], disable_tqdm=True
    )
    assert (yes, no) == (True, False)


def test_bos_is_a_choice_that_is_never_doubled(model: ScorerLM) -> None:
    bos = model.tokenizer.bos_token_id
    assert model.tok_encode("x") == [bos, *model.tok_encode("x", add_special_tokens=False)]
    assert model.tok_encode("<s>x").count(bos) == 1
    model.add_bos = False
    try:
        assert bos not in model.tok_encode("x")
    finally:
        model.add_bos = True


def test_a_tokenizer_that_adds_no_bos_gets_one_as_lm_evals_model_does(
    hf_dir: Path, model: ScorerLM, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(hf_dir, tmp_path / "bare", ignore=shutil.ignore_patterns(".packed")))
    plain = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(plain | {"post_processor": None}))
    bare = ScorerLM(folder)
    assert bare.tokenizer.encode("x") == model.tok_encode("x", add_special_tokens=False)
    theirs = HFLM(str(folder), trust_remote_code=True, dtype="float32", add_bos_token=True, device="cpu")
    asked = instances("loglikelihood", PAIRS)
    ours = [score for score, _ in bare.loglikelihood(asked, disable_tqdm=True)]
    assert ours == [score for score, _ in model.loglikelihood(asked, disable_tqdm=True)]
    assert ours == pytest.approx([score for score, _ in theirs.loglikelihood(asked)], abs=1e-3)
    bare.add_bos = False
    without = [score for score, _ in bare.loglikelihood(asked, disable_tqdm=True)]
    assert np.abs(np.subtract(ours, without)).max() > 0.01, (
        "the comparison would not see a BOS that is missing"
    )
    bare.scorer.close()


def test_prompts_that_do_not_fit_are_counted(
    hf_dir: Path, model: ScorerLM, caplog: pytest.LogCaptureFixture
) -> None:
    text = "for name in names:\n" * 20
    short = ScorerLM(hf_dir, Source(max_length=64))
    requests = instances("loglikelihood", [("x", " = 1"), (text, " pass")])
    (_, _), (score, _) = short.loglikelihood(requests, disable_tqdm=True)
    assert short.cut_prompts == 1
    assert "1 prompts so far lost their head" in caplog.text
    kept = model.tok_encode(text + " pass")[-65:]
    continuation = len(model.tok_encode(text + " pass")) - len(model.tok_encode(text.rstrip()))
    expected = short.scorer.engine.logprobs(kept, start=65 - continuation)
    assert score == math.fsum(expected.tolist())
    short.generate_until(
        instances("generate_until", [(text, {"max_gen_toks": 8, "until": []})]), disable_tqdm=True
    )
    assert short.cut_prompts == 2
    with pytest.raises(ValueError, match="max_gen_toks = 64 leaves no room"):
        short.generate_until(instances("generate_until", [("x", {"max_gen_toks": 64})]), disable_tqdm=True)
    with pytest.raises(ValueError, match=r"a continuation of \d+ tokens does not fit"):
        short.loglikelihood(instances("loglikelihood", [("x", text)]), disable_tqdm=True)


def test_a_longer_context_than_the_configs_can_be_asked_for(hf_dir: Path, model: ScorerLM) -> None:
    longer = ScorerLM(hf_dir, Source(max_length=CONTEXT + 40))
    ids = (model.tok_encode("for name in names:\n") * CONTEXT)[: CONTEXT + 40]
    with pytest.raises(ValueError, match=f"more than the {CONTEXT + 1} that fit"):
        model.scorer.engine.logprobs(ids, start=len(ids) - 1)
    assert np.isfinite(longer.scorer.engine.logprobs(ids, start=CONTEXT)).all()
    np.testing.assert_array_equal(
        longer.scorer.engine.logprobs(ids[:50]), model.scorer.engine.logprobs(ids[:50])
    )


def test_rolling_scores_every_token_once(hf_dir: Path, reference: Reference) -> None:
    short = ScorerLM(hf_dir, Source(max_length=16))
    text = "for name in names:\n    print(name)\n" * 4
    ids = [short.prefix_token_id, *short.tok_encode(text, add_special_tokens=False)]
    assert len(ids) > 33
    windows = [
        (ids[:17], 1)
    ]  # 16 ids predict 16; the last window has all the context it can and scores what is left
    for first in range(17, len(ids), 16):
        end = min(first + 16, len(ids))
        windows.append((ids[end - 17 : end], 17 - (end - first)))
    sums = [reference.score(window, start) for window, start in windows]
    (got,) = short.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True)
    assert abs(got - sum(s for s, _, _ in sums)) <= sum(allowed for _, _, allowed in sums)
    assert short.cut_prompts == 0


def test_generation_ends_where_the_task_says(model: ScorerLM) -> None:
    prompt = "def f(x):\n"
    whole = model.scorer.engine.generate_text(prompt, max_new_tokens=40)
    stop = whole[5:8]

    def generate(**options: Any) -> str:
        (text,) = model.generate_until(instances("generate_until", [(prompt, options)]), disable_tqdm=True)
        return text

    assert generate(max_gen_toks=40, until=[], do_sample=False, temperature=0.7) == whole
    assert generate(max_gen_toks=40, until=[stop, "never"]) == whole[: whole.index(stop)]
    assert generate(max_gen_toks=2, until=[""]) == model.scorer.engine.generate_text(prompt, max_new_tokens=2)
    sampled = generate(max_gen_toks=40, do_sample=True, temperature=1.5, top_k=40)
    assert sampled == model.scorer.engine.generate_text(prompt, max_new_tokens=40, temperature=1.5, top_k=40)
    with pytest.raises(ValueError, match="unknown option 'top_q'; did you mean 'top_"):
        generate(top_q=1)


def test_chat_prompts_may_begin_the_answer(model: ScorerLM) -> None:
    turns = [{"role": "user", "content": "2 + 2?"}]
    opened = model.apply_chat_template(turns)
    begun = model.apply_chat_template(
        [*turns, {"role": "assistant", "content": "It is"}], add_generation_prompt=False
    )
    assert begun == opened + "It is"


@pytest.mark.job
def test_stock_tasks_are_asked_through_the_chat_template(model: ScorerLM, hf_dir: Path, data: Path) -> None:
    served = ScorerLM(hf_dir)
    options: dict[str, Any] = {"num_fewshot": 0, "apply_chat_template": True}
    with toy_server(served.scorer.engine) as url, data_folder(data, ARC_TASKS):
        ours = evaluate(model, ["arc_easy"], hf_dir, **options)
        endpoint = ScorerLM(hf_dir, Source(base_url=url))
        theirs = evaluate(endpoint, ["arc_easy"], hf_dir, **options)
    (context, choice), *_ = ours["samples"]["arc_easy"][0]["arguments"]
    question = f"Question: {QUESTIONS[0][0]}\nAnswer:"
    assert context == model.apply_chat_template([{"role": "user", "content": question}])
    assert choice.strip() == QUESTIONS[0][1][0]
    for asked in (model, endpoint):
        for text in (context, "<s>" + context):  # other templates write BOS themselves
            assert asked.tok_encode(text)[:2].count(model.tokenizer.bos_token_id) == 1
    assert ours["results"] == theirs["results"]


def scores_of(result: dict[str, Any]) -> dict[tuple[str, int], np.ndarray]:
    """log p of every choice of every question, float64 (choices,)."""
    return {
        (name, sample["doc_id"]): np.array([answer[0] for answer in sample["filtered_resps"]])
        for name, samples in result["samples"].items()
        for sample in samples
    }


@pytest.fixture(scope="module")
def in_process(model: ScorerLM, hf_dir: Path, data: Path) -> dict[str, Any]:
    with data_folder(data, ARC_TASKS):
        return evaluate(model, ARC_TASKS, hf_dir, num_fewshot=0)


@pytest.mark.job
def test_choices_are_those_of_lm_evals_hugging_face_model(
    in_process: dict[str, Any], model: ScorerLM, reference: Reference, hf_dir: Path, data: Path
) -> None:
    """The same bf16 weights, float32 arithmetic: a choice may differ only where both
    scores' roundings explain it.
    """
    theirs = HFLM(str(hf_dir), trust_remote_code=True, dtype="float32", add_bos_token=True, device="cpu")
    with data_folder(data, ARC_TASKS):
        hugging_face = evaluate(theirs, ARC_TASKS, hf_dir, num_fewshot=0)
    ours, other, ties = scores_of(in_process), scores_of(hugging_face), 0
    assert ours.keys() == other.keys()
    assert len(ours) == 2 * len(QUESTIONS)
    for name, samples in in_process["samples"].items():
        for sample in samples:
            exact = [
                reference.score(model.tok_encode(context + choice), len(model.tok_encode(context)))
                for context, choice in sample["arguments"]
            ]
            values, allowed = np.array([e[0] for e in exact]), np.array([e[2] for e in exact])
            mine, its = ours[name, sample["doc_id"]], other[name, sample["doc_id"]]
            assert (np.abs(mine - values) <= allowed).all()
            assert (np.abs(its - values) <= allowed).all()
            assert np.ptp(values) > 100 * allowed.max(), "the choices are too close to tell models apart"
            if mine.argmax() != its.argmax():
                ties += 1
                assert abs(values[mine.argmax()] - values[its.argmax()]) <= 2 * allowed.max()
    assert ties or in_process["results"] == hugging_face["results"]


def test_stock_arc_asks_what_it_should(in_process: dict[str, Any], model: ScorerLM) -> None:
    sample = in_process["samples"]["arc_easy"][1]
    question, texts, gold = QUESTIONS[1]
    assert [tuple(a) for a in sample["arguments"]] == [
        (f"Question: {question}\nAnswer:", f" {text}") for text in texts
    ]
    assert sample["target"] in (gold, str(gold))
    right = [
        int(s["filtered_resps"].index(max(s["filtered_resps"]))) for s in in_process["samples"]["arc_easy"]
    ]
    accuracy = np.mean([choice == gold for choice, (_, _, gold) in zip(right, QUESTIONS, strict=True)])
    figures = figures_of(in_process, model, (2048,))
    assert figures["tasks"]["arc_easy"]["acc"] == accuracy
    assert (figures["ruler"], figures["cut_prompts"], figures["prompts"]["arc_easy"]["documents"]) == (
        {},
        0,
        5,
    )


@pytest.mark.job
@pytest.mark.parametrize("concurrency", [1, 3])
def test_an_endpoint_gives_the_in_process_result(
    in_process: dict[str, Any], model: ScorerLM, hf_dir: Path, data: Path, concurrency: int
) -> None:
    served = ScorerLM(hf_dir)
    with toy_server(served.scorer.engine) as url, data_folder(data, ARC_TASKS):
        endpoint = ScorerLM(hf_dir, Source(base_url=url, concurrency=concurrency))
        assert (endpoint.max_length, endpoint.scoring_room) == (CONTEXT, CONTEXT - 1)
        result = evaluate(endpoint, ARC_TASKS, hf_dir, num_fewshot=0)
        request = ("def f(x):\n", {"max_gen_toks": 9, "until": [], "temperature": 0.0, "do_sample": False})
        (text,) = endpoint.generate_until(instances("generate_until", [request]))
        long = instances(
            "loglikelihood_rolling", [("for name in names:\n" * 8,)]
        )  # two more ids: BOS and a new one
        rolled = ScorerLM(hf_dir, Source(base_url=url, max_length=18)).loglikelihood_rolling(long)
    assert rolled == ScorerLM(hf_dir, Source(max_length=16)).loglikelihood_rolling(long)
    assert [text] == model.generate_until(instances("generate_until", [request]))
    assert result["results"] == in_process["results"]
    theirs, ours = scores_of(result), scores_of(in_process)
    for key in ours:
        np.testing.assert_array_equal(theirs[key], ours[key])


@pytest.mark.parametrize("missing", [1, 9999])
def test_a_server_without_all_scores_is_refused(hf_dir: Path, missing: int) -> None:
    served = ScorerLM(hf_dir)
    with toy_server(served.scorer.engine, missing) as url:
        endpoint = ScorerLM(hf_dir, Source(base_url=url))
        with pytest.raises(ValueError, match=r"the server gave \d+ log-probabilities for a prompt of"):
            endpoint.loglikelihood(instances("loglikelihood", PAIRS[:1]))


def test_cuts_of_recorded_prompts_are_counted(model: ScorerLM) -> None:
    text = "word " * 40
    ids = len(model.tok_encode(text))
    samples = [{"arguments": [("x", " y"), (text, {"max_gen_toks": 10})]}]

    def cut(max_length: int) -> int:
        view: Any = SimpleNamespace(
            max_length=max_length, scoring_room=max_length + 1, tok_encode=model.tok_encode
        )
        return prompt_figures(view, samples)["cut"]

    assert (cut(ids + 10), cut(ids + 9), cut(1)) == (0, 1, 2)


TASK = """task: mine
dataset_path: json
dataset_kwargs: {{data_files: {rows}}}
test_split: train
{rest}
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]"""
ROLLING = """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]"""


@pytest.mark.job
@pytest.mark.parametrize("backend", ["engine", "transformers"])
def test_task_files_of_ones_own(
    hf_dir: Path, tmp_path: Path, backend: Any, monkeypatch: pytest.MonkeyPatch, reference: Reference
) -> None:
    """A choice and a rolling task, which once crashed after all the work; by a relative path, to the record."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": q, "choices": c, "gold": g}) + "\n" for q, c, g in QUESTIONS)
    )
    (tmp_path / "choice.yaml").write_text(TASK.format(rows=rows, rest=CHOICE))
    (tmp_path / "rolling.yaml").write_text(TASK.format(rows=rows, rest=ROLLING).replace("mine", "rolled"))
    monkeypatch.chdir(tmp_path)
    asked = Questions("choice.yaml,rolling.yaml")
    assert expand_tasks("choice.yaml") == [str(tmp_path / "choice.yaml")], (
        "--data changes the working directory"
    )
    record = main(hf_dir, asked, Source(backend, "cpu"), About(tmp_path / "out/evals.jsonl", 3))
    assert 0 <= record["tasks"]["mine"]["acc"] <= 1
    check_fields(record, None)
    assert (record["backend"], record["device"], record["cut_prompts"]) == (backend, "cpu", 0)
    assert record["haystack"] is None, "of RULER alone"
    tokenizer = ScorerLM(hf_dir)
    expected = size = 0.0
    for question, _, _ in QUESTIONS:
        ids = [tokenizer.prefix_token_id, *tokenizer.tok_encode(question, add_special_tokens=False)]
        expected += reference.score(ids, 1)[0]
        size += len(question.encode())
    bits = -expected / size / math.log(2)
    assert record["tasks"]["rolled"]["bits_per_byte"] == pytest.approx(
        bits, rel=1e-2 if backend != "engine" else 1e-5
    )
    head, lines = read_items(tmp_path / "out" / record["items"])
    right = [line["right"] for (task, _), line in lines.items() if task == "mine"]
    assert np.mean(right) == record["tasks"]["mine"]["acc"]
    assert head["model_sha256"] == record["model_sha256"]


GENERATED = """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{question}}"
generation_kwargs: {max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
- {name: strict, filter: [{function: regex, regex_pattern: "#### (.*)"}, {function: take_first}]}
- {name: loose, filter: [{function: regex, regex_pattern: "(.*)"}, {function: take_first}]}"""


def test_generated_answers_are_scored_by_every_filter(
    hf_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As gsm8k: lm-eval's exact_match is NumPy's, once left out of the record; filters
    once counted as documents.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": question}) + "\n" for question, _, _ in QUESTIONS))
    (tmp_path / "task.yaml").write_text(TASK.format(rows=rows, rest=GENERATED))
    record = main(hf_dir, Questions(str(tmp_path / "task.yaml")), about=About(tmp_path / "evals.jsonl", 3))
    scores = {f"exact_match,{name}{kind}": 0.0 for name in ("strict", "loose") for kind in ("", "_stderr")}
    assert record["tasks"]["mine"] == scores
    assert record["prompts"]["mine"]["documents"] == len(QUESTIONS)
    lines = gzip.decompress((tmp_path / record["items"]).read_bytes()).splitlines()
    assert len(lines) == 1 + len(QUESTIONS)
    assert "strict" in capsys.readouterr().err


def test_gsm8k_as_the_job_of_sft_asks_it(
    hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the chat template, from local files: examples are earlier turns, and the number is scored."""
    (command,) = [
        read_command(line)
        for line in read_job(["--job.config_file", "configs/sft.toml"]).evals.commands
        if "gsm8k" in line
    ]
    assert command[2] == [
        "--tasks",
        "gsm8k",
        "--chat-template",
        "--limit",
        "200",
        "--data",
        "benchmarks/lm_eval",
        "--overlap",
        "data/nemotron",
    ]
    folder = tmp_path / "openai/gsm8k"
    folder.mkdir(parents=True)
    for split, first in (("train", 10), ("test", 20)):
        rows = [{"question": f"{n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(first, first + 6)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    readme = folder / "README.md"
    readme.write_text(f"---\nconfigs:\n- config_name: main\n  data_files:\n{files}---\n")
    asked: list[str] = []

    def generate(self: EngineScorer, ids: list[int], *args: Any, **sampling: Any) -> Answer:
        asked.append(self._tokenizer.decode(ids, skip_special_tokens=False))
        return Answer("So it is.\n#### 21", "stop")

    monkeypatch.setattr(EngineScorer, "generate", generate)
    questions = Questions("gsm8k", limit=2, chat_template=True, data=tmp_path)
    out = tmp_path / "out/evals.jsonl"
    record = main(hf_dir, questions, Source(device="cpu", max_length=2048), About(out, 3))
    check_fields(record, None)
    assert (record["chat_template"], record["cut_prompts"]) == (True, 0)
    assert record["tasks"]["gsm8k"]["exact_match,strict-match"] == 0.5, "20 + 1 is 21, 21 + 1 is not"
    _, lines = read_items(out.parent / record["items"])
    assert [line["right"] for line in lines.values()] == [True, False]
    assert len(asked) == 2
    for text, n in zip(sorted(asked), (20, 21), strict=True):
        assert (text.count("#### 1"), text.count(">user<")) == (5, 6), "five examples"
        end = fast_tokenizer(hf_dir).apply_chat_template(
            [{"role": "user", "content": f"Question: {n} + 1?\nAnswer:"}],
            tokenize=False, add_generation_prompt=True,
        ).partition("Question:")[2]  # fmt: skip
        assert text.replace("</s> ", "</s>").endswith(end), "but for the space of decoding"
    readme.unlink()
    with pytest.raises(ValueError, match=r"openai/gsm8k/README\.md is missing"):
        main(hf_dir, questions)


@pytest.mark.job
def test_ifeval_as_the_job_of_sft_asks_it(
    hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval's own task and checks of instructions, through the chat template, from local files."""
    with pytest.raises(ValueError, match=r"google/IFEval/ifeval_input_data\.jsonl is missing"):
        check_present(tmp_path, ["ifeval"])
    with monkeypatch.context() as bare:
        bare.setattr("evals.lm_eval.tasks.is_installed", lambda name: name != "langdetect")
        with pytest.raises(ValueError, match=r"ifeval needs langdetect: pip install 'lm-eval\[ifeval\]'"):
            check_packages(["ifeval"])
    (tmp_path / "google/IFEval").mkdir(parents=True)
    rows = [
        {"key": i, "prompt": f"Write about {what} without any commas.", "kwargs": [{}, {"language": "en"}],
         "instruction_id_list": ["punctuation:no_comma", "language:response_language"]}
        for i, what in enumerate(("rivers", "towns"))
    ]  # fmt: skip
    (tmp_path / "google/IFEval/ifeval_input_data.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in rows)
    )
    essays = tmp_path / "baber/paul_graham_essays"
    essays.mkdir(parents=True)
    (essays / "train.jsonl").write_text(
        json.dumps({"text": "One sentence. And another one. The third."}) + "\n"
    )

    def generate(self: EngineScorer, ids: list[int], *args: Any, **sampling: Any) -> Answer:
        asked = self._tokenizer.decode(ids, skip_special_tokens=False)
        assert asked.count(">user<") == 1
        comma = "," if "rivers" in asked else ""
        return Answer(f"What begins between the mountains{comma} ends at the shore of the wide sea.", "stop")

    monkeypatch.setattr(EngineScorer, "generate", generate)
    questions = Questions("ifeval", limit=2, chat_template=True, data=tmp_path)
    out = tmp_path / "out/evals.jsonl"
    record = main(hf_dir, questions, Source(device="cpu", max_length=2048), About(out, 3))
    assert record["tasks"]["ifeval"]["prompt_level_strict_acc"] == 0.5
    _, lines = read_items(out.parent / record["items"])
    assert [line["right"] for line in lines.values()] == [False, True]


@pytest.mark.job
def test_an_evaluation_that_ends_in_the_middle_goes_on(
    hf_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored requests are kept in one piece, generated texts one by one; the answers are the same to the byte."""
    rows, asked = tmp_path / "rows.jsonl", list[str]()
    rows.write_text(
        "".join(json.dumps({"question": q, "choices": c, "gold": g}) + "\n" for q, c, g in QUESTIONS)
    )
    (tmp_path / "a.yaml").write_text(TASK.format(rows=rows, rest=CHOICE))
    (tmp_path / "b.yaml").write_text(TASK.format(rows=rows, rest=ROLLING).replace("mine", "rolled"))
    (tmp_path / "c.yaml").write_text(TASK.format(rows=rows, rest=GENERATED).replace("mine", "written"))
    questions = Questions(",".join(str(tmp_path / f"{name}.yaml") for name in "abc"))
    whole = main(hf_dir, questions, about=About(tmp_path / "whole/evals.jsonl", 3))
    most = 2  # of the generated texts

    score, generate = EngineScorer.score, EngineScorer.generate

    def scored(self: EngineScorer, left: Any) -> Any:
        asked.append("score")
        return score(self, left)

    def generated(self: EngineScorer, *args: Any, **sampling: Any) -> Any:
        if asked.count("generate") == most:
            raise KeyboardInterrupt
        asked.append("generate")
        return generate(self, *args, **sampling)

    monkeypatch.setattr(EngineScorer, "score", scored)
    monkeypatch.setattr(EngineScorer, "generate", generated)
    out = tmp_path / "again/evals.jsonl"
    with pytest.raises(KeyboardInterrupt):
        main(hf_dir, questions, about=About(out, 3))
    assert asked.count("score") == 1 + len(QUESTIONS), "choices in one stream, then the rolling texts"
    asked.clear()
    most = 99
    record = main(hf_dir, questions, about=About(out, 3))
    assert asked == ["score"] + ["generate"] * (len(QUESTIONS) - 2), (
        "a stream without items, and what is left"
    )
    assert (out.parent / record["items"]).read_bytes() == (tmp_path / "whole" / whole["items"]).read_bytes()
    assert record["tasks"] == whole["tasks"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["evals.jsonl", "items"]


@pytest.mark.job
def test_what_cannot_run_is_one_line(hf_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"lm-eval has no arc_eazy, .*nearest: arc_easy"):
        main(hf_dir, Questions("arc_eazy,arc_easy"))
    with pytest.raises(ValueError, match=r"the task file mine\.yaml does not exist"):
        main(hf_dir, Questions("mine.yaml"))
    with pytest.raises(ValueError, match="no GPU is visible here"):
        main(hf_dir, Questions("arc_easy"), Source(device="cuda"))
