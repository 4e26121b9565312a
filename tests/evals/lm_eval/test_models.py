"""Tests of our lm-eval model against PyTorch, lm-eval's Hugging Face model and an endpoint."""

import itertools
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import langdetect
import numpy as np
import pytest

from evals.lm_eval.__main__ import Questions, main, summarize_prompts
from evals.lm_eval.tasks import expand_tasks
from evals.scorer import LOCAL, Answer, Answerer, load_tokenizer
from evals.scorer.engine import EngineScorer
from records.evals import About
from records.items import read_items
from tests.evals.core.core_assets import score_one
from tests.evals.lm_eval.lm_eval_assets import QUESTIONS, write_configs, write_tiny
from tests.laneformer.engine.assets import exact_blocks  # noqa: F401
from tests.records.lines import write_lines
from tests.records.test_fields import check as check_fields
from tests.tokenizer_assets import prompt_encoder

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:torch.distributed is disabled"
)
PAIRS = [
    ("def main(", "self):"),
    ("def main(", "argument, other):\n"),
    ("", "import os\n"),
    ("class Path ", "object"),
    ("x = 1", " + 2"),
]


def open_model(folder: Path, answerer: Answerer = LOCAL):
    from evals.lm_eval.models import ScorerLM

    return ScorerLM(folder, answerer)


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(hf_dir):
    opened = open_model(hf_dir)
    yield opened
    opened.scorer.close()


def requests_of(kind, arguments):
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=a, idx=i) for i, a in enumerate(arguments)
    ]


def score_pairs(model, pairs: list[tuple[str, str]] = PAIRS) -> list[tuple[float, bool]]:
    return model.loglikelihood(requests_of("loglikelihood", pairs), disable_tqdm=True)


def generate(model, prompt: str, **options) -> str:
    requests = requests_of("generate_until", [(prompt, options)])
    (text,) = model.generate_until(requests, disable_tqdm=True)
    return text


def test_scores_are_those_of_the_continuation(model):
    answers = score_pairs(model)
    for (context, continuation), (score, greedy) in zip(PAIRS, answers, strict=True):
        # a space belongs to what follows
        before = len(model.tok_encode(context.rstrip())) if context else 1
        scores = score_one(model.scorer, model.tok_encode(context + continuation), before)
        assert (score, greedy) == (math.fsum(scores.logprobs), scores.greedy.all())
    assert model.scorer.engine.statistics.reused_tokens > 0
    assert score_pairs(model, PAIRS[::-1]) == answers[::-1]
    context = model.tok_encode("import ")
    ids = model.scorer.engine.generate(context, max_new_tokens=5, ignore_eos=True)
    requests = [(None, context, ids), (None, context, [*ids[:-1], (ids[-1] + 1) % 1024])]
    assert [greedy for _, greedy in model._loglikelihood_tokens(requests, True)] == [True, False]


CHATS = [  # the last is a user's message, which an assistant's answer follows
    ["2 + 2?"],
    ["Hi", "Hello!", "Who are you?"],
    ["é 東", "…", "  two  spaces\n\nand lines"],
    ["x" * 60],
]


def test_bos_is_a_choice_and_in_a_conversation_the_templates(model, hf_dir, tmp_path, monkeypatch):
    bos = model.tokenizer.bos_token_id
    plain_ids = model.tok_encode("x", add_special_tokens=False)
    folder = Path(
        shutil.copytree(hf_dir, tmp_path / "bare", ignore=shutil.ignore_patterns(".packed"))
    )
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    # a tokenizer that adds no BOS by itself
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    bare = load_tokenizer(folder)
    assert bare.encode("x") == plain_ids
    for encoder in (model.tokenizer, bare):
        monkeypatch.setattr(model, "tokenizer", encoder)
        for text in ("x", "<s>x"):
            assert model.tok_encode(text) == [bos, *plain_ids]
    # monkeypatch restores it: `apply_chat_template` sets it to False
    monkeypatch.setattr(model, "add_bos", True)
    served = prompt_encoder(hf_dir)
    for texts in CHATS:
        roles = itertools.cycle(("user", "assistant"))
        turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
        prompt = model.apply_chat_template(turns)
        assert model.tok_encode(prompt) == served.encode(served.render(turns))
        continuing = model.apply_chat_template(
            [*turns, {"role": "assistant", "content": "It is"}], False
        )
        assert continuing == prompt + "It is"
    # a template may write it
    assert model.tok_encode("<s>" + prompt)[:2].count(bos) == 1
    assert bos not in model.tok_encode("x")


def test_prompts_that_do_not_fit_are_cut_with_a_warning_and_counted(hf_dir, model):
    text = "for name in names:\n" * 20
    short = open_model(hf_dir, Answerer(max_length=64))
    with pytest.warns(UserWarning, match="prompts lose their head: the context is 64"):
        _, (score, _) = score_pairs(short, [("x", " = 1"), (text, " pass")])
    ids = model.tok_encode(text + " pass")
    # the context of 64, and the last id, which is only predicted
    start = 65 - len(ids) + len(model.tok_encode(text.rstrip()))
    assert score == math.fsum(short.scorer.engine.logprobs(ids[-65:], start=start).tolist())
    with pytest.warns(UserWarning, match="prompts lose their head"):
        generate(short, text, max_gen_toks=8, until=[])
    with pytest.raises(ValueError, match="max_gen_toks = 64 leaves no room"):
        generate(short, "x", max_gen_toks=64)
    with pytest.raises(ValueError, match=r"a continuation of \d+ tokens does not fit"):
        score_pairs(short, [("x", text)])
    short.scorer.close()
    # in a record, of the prompts that lm-eval reports
    samples = [{"arguments": [("x", " y"), (text, {"max_gen_toks": 10})]}]
    room = len(ids)
    for length, cut in ((room + 10, 0), (room, 1), (1, 2)):
        view = SimpleNamespace(
            max_length=length, max_scored_ids=length + 1, tok_encode=model.tok_encode
        )
        assert summarize_prompts(view, samples)["cut"] == cut


def test_generation_ends_where_the_task_says(model):
    prompt = "def f(x):\n"
    write = model.scorer.engine.generate_text
    whole = write(prompt, max_new_tokens=40)
    stop = whole[5:8]
    sampled = {"temperature": 1.5, "top_k": 40}
    for expected, limit, options in (
        (whole, 40, {"until": [], "do_sample": False, "temperature": 0.7}),
        (whole[: whole.index(stop)], 40, {"until": [stop, "never"]}),
        (write(prompt, max_new_tokens=2), 2, {"until": [""]}),
        (write(prompt, max_new_tokens=40, **sampled), 40, {"do_sample": True, **sampled}),
    ):
        assert generate(model, prompt, max_gen_toks=limit, **options) == expected
    with pytest.raises(ValueError, match="unknown option 'top_q'; did you mean 'top_"):
        generate(model, prompt, top_q=1)


OWN_TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {rows}}}
test_split: train
{rest}
"""
OWN_TASKS = {
    "chosen": """output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc}]""",
    "rolled": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
metric_list: [{metric: bits_per_byte}]""",
    "written": """output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{question}}"
generation_kwargs: {max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
- {name: strict, filter: [{function: regex, regex_pattern: "#### (.*)"}, {function: take_first}]}
- {name: loose, filter: [{function: regex, regex_pattern: "(.*)"}, {function: take_first}]}""",
}


@pytest.mark.job
def test_task_files_of_ones_own_are_answered_and_go_on_when_they_end_in_the_middle(
    hf_dir, model, tmp_path, monkeypatch
):
    # scored requests are kept in one piece, generated texts one by one; the bytes are the same
    rows = [
        {"question": question, "choices": texts, "gold": gold}
        for question, texts, gold in QUESTIONS
    ]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    for name, rest in OWN_TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(OWN_TASK.format(name=name, rows=path, rest=rest))
    monkeypatch.chdir(tmp_path)
    # --data changes the working directory
    assert expand_tasks("chosen.yaml") == [str(tmp_path / "chosen.yaml")]
    own_tasks = Questions(",".join(f"{name}.yaml" for name in OWN_TASKS))
    whole = main(
        hf_dir, own_tasks, Answerer("engine", "cpu"), About(tmp_path / "whole/evals.jsonl", 3)
    )
    check_own_tasks(whole, tmp_path / "whole", model)
    generate = EngineScorer.generate
    most_texts = 2
    prompts = []

    def interrupt(self, ids, *args, **sampling):
        if len(prompts) == most_texts:
            raise KeyboardInterrupt
        prompts.append(ids)
        return generate(self, ids, *args, **sampling)

    monkeypatch.setattr(EngineScorer, "generate", interrupt)
    about = About(tmp_path / "again/evals.jsonl", 3)
    with pytest.raises(KeyboardInterrupt):
        main(hf_dir, own_tasks, about=about)
    monkeypatch.setattr(EngineScorer, "_score", lambda self, prompt: pytest.fail("all are scored"))
    most_texts = len(QUESTIONS)
    record = main(hf_dir, own_tasks, about=about)
    # only what is left
    assert len({*map(tuple, prompts)}) == len(prompts) == len(QUESTIONS)
    items = [tmp_path / "again" / record["items"], tmp_path / "whole" / whole["items"]]
    assert items[0].read_bytes() == items[1].read_bytes()
    assert record["tasks"] == whole["tasks"]
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["evals.jsonl", "items"]


def check_own_tasks(record, folder: Path, model):
    check_fields(record, None)
    assert (record["backend"], record["device"], record["cut_prompts"]) == ("engine", "cpu", 0)
    # of RULER alone
    assert record["haystack"] is None
    texts = [question for question, _, _ in QUESTIONS]
    nats = sum(
        model.scorer.rolling(model.tok_encode(text, add_special_tokens=False)) for text in texts
    )
    filters = [
        f"exact_match,{name}{kind}" for name in ("strict", "loose") for kind in ("", "_stderr")
    ]
    # exact_match is NumPy's
    assert record["tasks"]["written"] == dict.fromkeys(filters, 0.0)
    # filters are no documents
    assert record["prompts"]["written"]["documents"] == len(QUESTIONS)
    _, lines = read_items(folder / record["items"])
    assert len(lines) == 3 * len(QUESTIONS)
    right = [line["right"] for (task, _), line in lines.items() if task == "chosen"]
    assert np.mean(right) == record["tasks"]["chosen"]["acc"]
    bits = -nats / sum(len(text.encode()) for text in texts) / math.log(2)
    assert record["tasks"]["rolled"]["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def answer_with(monkeypatch, text_after) -> list[str]:
    """Make the engine's scorer answer `text_after(prompt)`; return the prompts."""
    prompts: list[str] = []

    def generate(self, ids, *args, **sampling):
        prompts.append(self._tokenizer.decode(ids, skip_special_tokens=False))
        return Answer(text_after(prompts[-1]), "stop")

    monkeypatch.setattr(EngineScorer, "generate", generate)
    return prompts


def ask_in_chat(hf_dir: Path, task: str, data: Path) -> tuple[dict[str, Any], list[bool | None]]:
    """Score two documents; return the record, and whether each answer was right."""
    questions = Questions(task, limit=2, chat_template=True, data=data)
    about = About(data / "out/evals.jsonl", 3)
    record = main(hf_dir, questions, Answerer(device="cpu", max_length=2048), about)
    check_fields(record, None)
    assert (record["chat_template"], record["add_bos"], record["cut_prompts"]) == (True, False, 0)
    _, lines = read_items(data / "out" / record["items"])
    return record, [line["right"] for line in lines.values()]


def test_gsm8k_through_the_chat_template(hf_dir, tmp_path, monkeypatch):
    rows = [{"question": f"{n} + 1?", "answer": f"It is.\n#### {n + 1}"} for n in range(10, 26)]
    write_configs(tmp_path / "openai/gsm8k", {"main": {"train": rows[:6], "test": rows[10:]}})
    prompts = answer_with(monkeypatch, lambda prompt: "So it is.\n#### 21")
    record, right = ask_in_chat(hf_dir, "gsm8k", tmp_path)
    # 20 + 1 is 21, 21 + 1 is not
    assert record["tasks"]["gsm8k"]["exact_match,strict-match"] == 0.5
    assert right == [True, False]
    for text, n in zip(sorted(prompts), (20, 21), strict=True):
        # five examples
        assert (text.count("#### 1"), text.count(">user<")) == (5, 6)
        end = text.partition(f"Question: {n} + 1?\nAnswer:")[2]
        assert end == "</s> <|start_header_id|>assistant<|end_header_id|>\n\n"


@pytest.mark.job
def test_ifeval_through_the_chat_template(hf_dir, tmp_path, monkeypatch):
    # lm-eval's own task and checks of instructions, from local files
    checks = ["punctuation:no_comma", "language:response_language"]
    instructions = {"kwargs": [{}, {"language": "en"}], "instruction_id_list": checks}
    prompts = [f"Write about {subject} without any commas." for subject in ("rivers", "towns")]
    rows = [{"key": i, "prompt": prompt, **instructions} for i, prompt in enumerate(prompts)]
    write_lines(tmp_path / "google/IFEval/ifeval_input_data.jsonl", rows)
    essay = {"text": "One sentence. And another one. The third."}
    write_lines(tmp_path / "baber/paul_graham_essays/train.jsonl", [essay])

    def write_with_a_comma_on_rivers(prompt):
        comma = "," if "rivers" in prompt else ""
        return f"What begins between the mountains{comma} ends at the shore of the wide sea."

    prompts_read = answer_with(monkeypatch, write_with_a_comma_on_rivers)
    record, right = ask_in_chat(hf_dir, "ifeval", tmp_path)
    assert record["tasks"]["ifeval"]["prompt_level_strict_acc"] == 0.5
    for text in ("Die man in the house", "Guten hello", "no, yes", "I am a test.", "test test"):
        # IFEval's library draws from a seed
        assert len({langdetect.detect(text) for _ in range(30)}) == 1
    assert right == [False, True]
    assert [prompt.count(">user<") for prompt in prompts_read] == [1, 1]


def test_what_cannot_run_is_one_line(hf_dir, monkeypatch):
    import lm_eval.tasks

    class FewTasks:  # indexing all of them takes half a minute
        all_tasks = ("arc_easy", "hellaswag")

        def __init__(self, **options):
            pass

    monkeypatch.setattr(lm_eval.tasks, "TaskManager", FewTasks)
    for names, reason in (
        ("arc_eazy,arc_easy", r"lm-eval has no arc_eazy, .*nearest: arc_easy"),
        ("mine.yaml", r"the task file mine\.yaml does not exist"),
    ):
        with pytest.raises(ValueError, match=reason):
            main(hf_dir, Questions(names))
