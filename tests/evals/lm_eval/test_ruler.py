"""RULER's eleven stock tasks at both lengths, and what is refused because lm-eval would not come to an end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import _yaml_loader
from lm_eval.tasks.ruler import vt_utils

import evals.lm_eval.models
from evals.lm_eval.__main__ import load_tasks, main
from evals.lm_eval.models import EngineLM
from evals.lm_eval.offline_tasks import RULER_TASKS, data_folder
from evals.lm_eval.ruler_room import check_room
from laneformer.hf.tokenizer import write_tokenizer
from records.evals import About
from records.run import read_run
from tests.evals.lm_eval.lm_eval_assets import export_tiny, write_data
from tests.laneformer.hf.hf_assets import sentencepiece_model
from tools.dashboard.scores import ruler_card

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,096 pieces that do not split numbers: with fewer, common words do not fit 4,096 tokens."""
    return export_tiny(tmp_path_factory.mktemp("ruler"), context=4224, vocab_size=4096, split_digits=False)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


class HalfRight(EngineLM):
    """Answers as the engine does, but knows what is asked for in 2,048 tokens."""

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        found = super().generate_until(requests, disable_tqdm)
        documents: list[Any] = [request.doc for request in requests]
        return [
            " and ".join(document["outputs"]) if document["max_length"] == 2048 else text
            for document, text in zip(documents, found, strict=True)
        ]


@pytest.fixture
def one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """lm-eval makes 500 documents of each task and length, a minute's work; here it makes one."""
    for file, name in (
        ("niah_utils", "generate_samples"),
        ("vt_utils", "sys_vartrack_w_noise_random"),
        ("cwe_utils", "sys_word_pair_random"),
        ("fwe_utils", "sys_kwext"),
    ):
        module = _yaml_loader._load_module_with_cache(Path(vt_utils.__file__).with_name(f"{file}.py"))
        original = getattr(module, name)

        def fewer(*arguments: Any, original: Any = original, **options: Any) -> list[dict]:
            return original(*arguments, **{**options, "num_samples": 1})

        monkeypatch.setattr(module, name, fewer)


def test_all_eleven_tasks_are_scored_at_both_lengths(
    hf_dir: Path,
    data: Path,
    tmp_path: Path,
    one_document: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(evals.lm_eval.models, "EngineLM", HalfRight)
    (tmp_path / "metrics.jsonl").touch()
    main(hf_dir, "ruler", limit=1, data=data, about=About(tmp_path / "evals.jsonl", 7, phase="phase1"))
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads((tmp_path / "evals.jsonl").read_text())
    assert (record["kind"], record["haystack"], record["add_bos"]) == ("lm_eval", "offline", True)
    assert record["protocol"].endswith("with BOS")
    assert len(record["data_sha256"]) == len(record["tokenizer_sha256"]) == 64
    assert record["ruler"]["2048"] == dict.fromkeys(RULER_TASKS, 1.0)
    assert record["ruler"]["4096"].keys() == set(RULER_TASKS)
    assert max(record["ruler"]["4096"].values()) < 0.5, "a random model knows no answer"
    for prompts in record["prompts"].values():
        assert prompts["documents"] == 2, "one of each length"
        assert 2048 < prompts["longest_tokens"] <= record["max_length"] == 4224
    assert record["cut_prompts"] == 0
    card = ruler_card(read_run(tmp_path))
    assert card.count("<td>100.0 %</td>") == len(RULER_TASKS)
    assert "missing" not in card


def inputs(name: str, folder: Path, data: Path) -> list[str]:
    with data_folder(data, [name]):
        _, (task,) = load_tasks([name], [1024], folder)
        return [document["input"] for document in task.eval_docs]


def test_documents_are_drawn_from_the_seeds(hf_dir: Path, data: Path, one_document: None) -> None:
    first = inputs("ruler_vt", hf_dir, data)
    assert first == inputs("ruler_vt", hf_dir, data)


@pytest.fixture(scope="module")
def short_pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of 1,024 pieces."""
    folder = tmp_path_factory.mktemp("short")
    (folder / "tokenizer.model").write_bytes(sentencepiece_model())
    write_tokenizer(folder / "tokenizer.model", folder, 4224)
    return folder


def test_what_lm_eval_would_try_for_ever_is_refused(hf_dir: Path, short_pieces: Path) -> None:
    with pytest.raises(ValueError, match=r"ruler_vt cannot be made: .* 500 tokens for its worked .* it takes 5"):
        load_tasks(["ruler_vt"], [2048, 4096], short_pieces)
    with pytest.raises(ValueError, match=r"ruler_cwe cannot be made at a length of 4096: .* take 4\d\d\d tokens"):
        load_tasks(["ruler_cwe"], [2048, 4096], short_pieces)
    with pytest.raises(ValueError, match="ruler_vt cannot be made at a length of 512"):
        load_tasks(["ruler_vt"], [512, 2048], hf_dir)
    check_room([name for name in RULER_TASKS if name.startswith("niah")], [512], short_pieces)  # these come to an end
