"""Tests of RULER's eleven stock tasks at both lengths, and of refusals where lm-eval would hang."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from evals.lm_eval.__main__ import Questions, main, parse_lengths
from evals.lm_eval.needles import counts, find_needles
from evals.lm_eval.tasks import (
    ARC_TASKS,
    RULER_TASKS,
    check_room,
    expand_tasks,
    load_tasks,
    select_documents,
    use_data_folder,
)
from laneformer.hf.tokenizer import write_tokenizer
from records.evals import About
from records.files import read_lines
from tests.evals.lm_eval.lm_eval_assets import QUESTIONS, write_data, write_tiny
from tests.laneformer.hf.hf_assets import sentencepiece_model

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:torch.distributed is disabled"
)
NEEDLES = [task for task in RULER_TASKS if task.startswith("niah")]
# that do not split numbers: with fewer pieces, common words do not fit 4,096 tokens
PIECES = {"vocab_size": 4096, "split_digits": False}


def write_pieces(folder: Path, **options) -> Path:
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(**options))
    write_tokenizer(folder / "tokenizer.model", folder, 4224)
    return folder


@pytest.fixture(scope="module")
def long_pieces(tmp_path_factory):
    return write_pieces(tmp_path_factory.mktemp("long"), **PIECES)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def one_document(monkeypatch):
    # it makes 500, a minute's work
    from lm_eval.tasks import _yaml_loader
    from lm_eval.tasks.ruler import vt_utils

    for file, name in (
        ("niah_utils", "generate_samples"),
        ("vt_utils", "sys_vartrack_w_noise_random"),
        ("cwe_utils", "sys_word_pair_random"),
        ("fwe_utils", "sys_kwext"),
    ):
        module = _yaml_loader._load_module_with_cache(
            Path(vt_utils.__file__).with_name(f"{file}.py")
        )
        original = getattr(module, name)

        def make_one(*arguments, original=original, **options):
            return original(*arguments, **{**options, "num_samples": 1})

        monkeypatch.setattr(module, name, make_one)


@pytest.mark.rotate
@pytest.mark.usefixtures("one_document")
def test_all_eleven_tasks_are_scored_at_both_lengths(data, tmp_path, monkeypatch):
    # the model answers as the engine does, but knows what is asked for in 2,048 tokens
    from evals.lm_eval.models import ScorerLM

    generate = ScorerLM.generate_until

    def know_half(self, requests, disable_tqdm=False):
        pairs = zip(requests, generate(self, requests, disable_tqdm), strict=True)
        answers = [" and ".join(request.doc["outputs"]) for request in requests]
        return [
            answer if request.doc["max_length"] == 2048 else text
            for (request, text), answer in zip(pairs, answers, strict=True)
        ]

    monkeypatch.setattr(ScorerLM, "generate_until", know_half)
    hf_dir = tmp_path / "hf"
    about = About(tmp_path / "evals.jsonl", 7, phase="phase1")
    write_tiny(hf_dir, context=4224, **PIECES)
    record = main(hf_dir, Questions("ruler", limit=1, data=data), about=about)
    assert read_lines(tmp_path / "evals.jsonl") == [record]
    assert (record["kind"], record["haystack"], record["add_bos"]) == ("lm_eval", "offline", True)
    assert record["ruler"]["2048"] == dict.fromkeys(RULER_TASKS, 1.0)
    assert record["ruler"]["4096"].keys() == set(RULER_TASKS)
    # a random model knows no answer
    assert max(record["ruler"]["4096"].values()) < 0.5
    for prompts in record["prompts"].values():
        # one of each length
        assert prompts["documents"] == 2
        assert 2048 < prompts["longest_tokens"] <= record["max_length"] == 4224
    assert record["cut_prompts"] == 0
    # lm-eval's essays begin alike
    assert 0 < record["reused_tokens"] < record["prompt_tokens"]
    ruler_counts = record["ruler_counts"]["2048"]
    assert ruler_counts["documents"] == dict.fromkeys(RULER_TASKS, 1)
    for task, parts in ruler_counts["depths"].items():
        needles = 4 if task in ("niah_multiquery", "niah_multivalue") else 1
        assert [*map(sum, zip(*parts, strict=True))] == [needles, needles]
    assert ruler_counts["depths"].keys() == set(NEEDLES)


def test_needles_are_counted_at_their_depth():
    # the needle begins at character 99 of 200
    text = "A special magic number is hidden. " + "x" * 65 + "1234567" + "x" * 94
    document = {"input": text, "outputs": ["1234567"]}
    assert find_needles(document, "it is 1234567.") == [(0.495, True)]
    assert find_needles(document, "it is 123456.") == [(0.495, False)]
    assert find_needles({"input": "no needle 1", "outputs": ["1"]}, "1") == []
    depths = (0, 0.05, 0.1, 0.999, 1.0)
    lines = [{"task": "a", "length": 512, "needles": [[depth, depth > 0.5]]} for depth in depths]
    lines += [{"task": "b", "length": 512, "needles": []}, {"task": "arc_easy"}]
    assert counts(lines, [512, 1024]) == {
        "512": {
            "documents": {"a": 5, "b": 1},
            "depths": {"a": [[0, 2], [0, 1], *[[0, 0]] * 7, [2, 2]]},
        }
    }


@pytest.mark.rotate
@pytest.mark.usefixtures("one_document")
def test_documents_are_drawn_from_the_seeds(long_pieces, data):
    def draw():
        _, (task,) = load_tasks(["ruler_vt"], [1024], long_pieces)
        return [document["input"] for document in task.eval_docs]

    with use_data_folder(data, ["ruler_vt"]):
        assert draw() == draw()


@pytest.mark.job
def test_lengths_at_which_lm_eval_would_hang_are_refused(long_pieces, tmp_path):
    short_pieces = write_pieces(tmp_path)
    for task, lengths, folder, reason in (
        (
            "ruler_vt",
            [2048, 4096],
            short_pieces,
            " .* its worked example takes 5.. tokens, .* at most 500",
        ),
        (
            "ruler_cwe",
            [2048, 4096],
            short_pieces,
            r" at a length of 4096: .* takes [45]\d\d\d tokens",
        ),
        ("ruler_vt", [512, 2048], long_pieces, " at a length of 512"),
    ):
        with pytest.raises(ValueError, match=f"{task} cannot be generated{reason}"):
            load_tasks([task], lengths, folder)
    # needles are shortened until they fit, and come to an end at any length
    check_room(NEEDLES, [512], short_pieces)


def test_a_limit_counts_each_length():
    documents = [{"max_length": length} for length in (2048, 4096) for _ in range(5)]
    task = SimpleNamespace(eval_docs=documents)
    assert select_documents(task, 2) == [0, 1, 5, 6]
    assert select_documents(task, None) == list(range(10))
    task.eval_docs = [{"question": "x"}] * 3
    assert select_documents(task, 2) == [0, 1]


def test_names_and_lengths():
    assert expand_tasks("arc_easy, ruler") == ["arc_easy", *RULER_TASKS]
    assert parse_lengths("2048,4096") == [2048, 4096]
    for names in ("arc_easy,", "ruler,niah_single_1"):
        with pytest.raises(ValueError, match="empty or repeated name"):
            expand_tasks(names)
    for lengths in ("4096,2048", "many", "100", ""):
        with pytest.raises(ValueError, match="ascending token counts"):
            parse_lengths(lengths)


def test_data_of_another_folder_is_never_taken(data, tmp_path):
    # `datasets` keeps what it has prepared under the data set's name, which folders share
    other = write_data(tmp_path, [("Which is wet?", ["water", "sand"], 0)])
    for folder, count in ((data, len(QUESTIONS)), (other, 1), (data, len(QUESTIONS))):
        with use_data_folder(folder, ["arc_easy"]):
            _, (task,) = load_tasks(["arc_easy"], [2048], tmp_path)
            assert len(task.eval_docs) == count


def test_missing_data_is_named(tmp_path):
    for tasks, name in (
        (ARC_TASKS, "allenai/ai2_arc"),
        (RULER_TASKS, "baber/paul_graham_essays"),
        (["gsm8k"], "openai/gsm8k"),
        (["ifeval"], "google/IFEval"),
    ):
        reason = f"download the data set {name} from the hub"
        with pytest.raises(ValueError, match=reason), use_data_folder(tmp_path, tasks):
            pass
    assert not list(tmp_path.iterdir())
