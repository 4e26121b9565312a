"""The long-context experiment: its documents, the whole path at toy size: data, trunk, branch,
score, report, resume.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
import unicodedata
from collections.abc import Iterable
from pathlib import Path

import pytest
import sentencepiece
import tomli_w
import torch

from laneformer import Laneformer, LaneformerConfig
from records.events import STOPPED, read_outcome
from records.files import read_lines
from tests.train.runs import ask
from tools.long_context import __main__ as command
from tools.long_context import run
from tools.long_context.data import count_tokens, processor, task_texts
from tools.long_context.figure import draw
from tools.long_context.measure import answers, loss_by_position, without_keys
from tools.long_context.plan import Plan
from tools.long_context.report import control, effects, ends, rises
from tools.long_context.tasks import CHAINS, HOPS, KINDS, NAMES, VALUES, document, sign

ROOT = Path(__file__).parents[2]
TINY = {
    "job": str(ROOT / "configs/ablation_job.toml"),
    "seeds": [0], "task_percent": 60, "delays": [1],
    "shape": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "num_lanes": 2, "sliding_window": 8, "vocab_size": 640},
    "layouts": {"last": [1]},
    "ropes": {"yarn_full": {"rope_scaling": {"rope_type": "yarn", "layers": "full"}}},
    "stages": [{"seq_len": 256, "tokens": 4096, "batch_tokens": 2048, "learning_rate": 1e-3},
               {"seq_len": 512, "tokens": 4096, "batch_tokens": 2048, "learning_rate": 1e-3}],
    "scored": {"256": 1, "512": 1},
}  # fmt: skip


def made_up_text(folder: Path) -> Path:
    draw, path = random.Random(0), folder / "text.jsonl"
    words = ["".join(draw.choices("etaoinshrdlu", k=2 + n % 7)) for n in range(300)]
    lines = ["\n".join(" ".join(draw.choices(words, k=6)) for _ in range(60)) for _ in range(200)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    return path


SIGNS = {sign(name, what): (name, what) for name in NAMES for what in (*VALUES, *NAMES)}


def follow(lines: Iterable[str], name: str) -> tuple[str, int]:
    """The value of a name by the facts alone, and how many signs lead to it."""
    told = dict(SIGNS[line] for line in lines if line in SIGNS)
    hops = 0
    while name in told:
        name, hops = told[name], hops + 1
    return name, hops


@pytest.mark.parametrize("kind", KINDS)
def test_questions_have_the_answers_that_the_facts_give(kind: str) -> None:
    seen, length = set(), lambda line: len(line.split())
    for seed in range(40):
        each = document(kind, seed, 250, length, told=False)
        assert not [line for line in each.lines if line.startswith("?")]
        assert 245 < length(each.text) + len(each.questions) <= 250
        for question in each.questions:
            assert follow(each.lines, question.name) == (question.value, question.hops)
            seen.add(question.hops)
        trained = document(kind, seed, 250, length, told=True)
        asked = [at for at, line in enumerate(trained.lines) if line.startswith("?")]
        assert (len(asked) == CHAINS * HOPS) if kind == "hops" else (len(asked) > 20)
        for at in asked:  # what is asked can be answered from what stands before
            mark, name, value = trained.lines[at]
            assert (mark, follow(trained.lines[:at], name)[0]) == ("?", value)
    assert seen == (set(range(1, HOPS + 1)) if kind == "hops" else {1})


def test_a_sign_is_one_character_and_no_other_sign() -> None:
    assert len(SIGNS) == len(NAMES) * (len(VALUES) + len(NAMES))
    assert all(len(each) == 1 and unicodedata.normalize("NFKC", each) == each for each in SIGNS)
    scripts = [{unicodedata.name(letter).split()[0] for letter in letters} for letters in (NAMES, VALUES)]
    assert scripts == [{"GREEK"}, {"CYRILLIC"}]  # of one script a tokenizer joins a name and its value


def test_the_shipped_plan() -> None:
    plan = Plan.read(ROOT / "configs/long_context.toml")
    jobs = [job for group in plan.groups() for job in group]
    assert len(jobs) == 6 * (1 + 4 * 2)
    assert len({job.name for job in jobs}) == len(jobs)
    configs = {job.name: LaneformerConfig(**job.model) for job in jobs}
    last = configs["delay2-interleaved-seed0-yarn_full-stage2"]
    assert (last.max_position_embeddings, len(last.ropes)) == (4096, 2)
    assert last.rope_scaling["factor"] == 16  # type: ignore[index]
    assert configs["delay0-last_third-seed0-nope_full-stage1"].nope_layers == (4, 5)
    assert plan.stages[1].tokens == plan.stages[2].tokens == 0.05 * plan.stages[0].tokens


def test_keys_are_lost_where_all_is_seen() -> None:
    model = Laneformer(LaneformerConfig(**TINY["shape"], swa_layers=[0], broadcast_delay=0))  # type: ignore[arg-type]
    model.init_weights()
    broken = without_keys(model, 0)
    lanes = [[bool(weight.any()) for weight in layer.attention.wk.weight] for layer in broken.layers]
    assert lanes == [[True, True], [False, True]]
    assert all(layer.attention.wk.weight.any() for layer in model.layers)


def tokenizer_of_tasks(folder: Path) -> Path:
    """Trained as data_mixtures.prepare does, on task documents alone."""
    texts = list(task_texts(256, 60_000, functools.partial(count_tokens, None)))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "tokenizer"), vocab_size=640,
        model_type="bpe", byte_fallback=True, minloglevel=2,
    )  # fmt: skip
    return folder / "tokenizer.model"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_scored_has_the_tokens_that_training_has(kind: str, tmp_path: Path) -> None:
    tokenizer = processor(tokenizer_of_tasks(tmp_path))
    each = document(kind, 7, 250, functools.partial(count_tokens, tmp_path / "tokenizer.model"), told=False)
    ids, places = answers(each, tmp_path / "phase1.lock.json")
    assert len(ids) <= 251  # the beginning's token is not the document's
    whole = " ".join([each.text, *(question.line for question in each.questions)])
    assert ids[1:] == tokenizer.encode(whole)
    assert [tokenizer.id_to_piece(ids[at]) for at, _ in places] == [q.value for q in each.questions]


def test_intervals_and_verdicts() -> None:
    low, high = ends(8, 10)
    assert (low, high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    whole = {f"{kind}-256": {"1": [90, 100, 30.0]} for kind in KINDS}
    broken = {f"{kind}-256": {"1": [40, 100, 200.0]} for kind in KINDS}
    assert control([{"answered": whole, "control": broken}], 256).count("| found |") == 3
    assert control([{"answered": whole, "control": whole}], 256).count("NOT FOUND") == 3
    near = {"0-64": 3.0, "64-256": 2.0, "256-1024": 2.5}
    late, well = ({"name": name, "loss_near": near, "loss_by_position": near | {"256-1024": x}}
                  for name, x in (("late", 2.6), ("well", 2.4)))  # fmt: skip
    assert "each: late at 256-1024 (2.600, 2.500)." in rises([late, well], 256)


def test_the_loss_with_little_context_is_that_of_short_windows(tmp_path: Path) -> None:
    tokenizer_of_tasks(tmp_path)
    shape = {**TINY["shape"], "swa_layers": [], "initializer_range": 0.5}  # type: ignore[dict-item]
    torch.manual_seed(0)
    model = Laneformer(LaneformerConfig(**shape))
    model.init_weights()
    text, lock = made_up_text(tmp_path), tmp_path / "phase1.lock.json"
    loss = functools.partial(loss_by_position, model, text, lock, [16, 48, 56])
    whole, near = loss(), loss(context=16)  # 56 is no multiple of it
    assert whole.keys() == near.keys() == {"0-16", "16-48", "48-56"}
    assert (near["0-16"], loss(context=56)) == (pytest.approx(whole["0-16"]), pytest.approx(whole))
    assert near["16-48"] != pytest.approx(whole["16-48"], abs=1e-3)
    assert near["48-56"] != pytest.approx(whole["48-56"], abs=1e-3)


def test_ropes_of_one_trunk_count_once_where_trunks_differ() -> None:
    results = [
        {"delay": delay, "layout": "last", "seed": seed, "rope": rope,
         "answered": {f"{kind}-256": {"1": [90 - 10 * delay - i, 100, 20.0 + 10 * delay]} for kind in KINDS}}
        for delay in (0, 2) for seed in (0, 1, 2) for i, rope in enumerate(("theta", "yarn"))
    ]  # fmt: skip
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in effects(results, 256).splitlines()]
    assert ["delay", "2 - 0", "recall", "3", "-0.200 ± 0.000", "+0.200 ± 0.000"] in lines
    assert ["rope", "yarn - theta", "keys", "6", "-0.010 ± 0.000", "+0.000 ± 0.000"] in lines


@pytest.mark.rotate
def test_an_interrupted_experiment_ends_and_its_run_has_saved(tmp_path: Path) -> None:
    plan = {**TINY, "stages": [{**TINY["stages"][0], "tokens": 300_000}, TINY["stages"][1]]}  # type: ignore[index]
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(plan))
    text, out, log, pid = made_up_text(tmp_path), tmp_path / "out", tmp_path / "log", tmp_path / "pid"
    trained = out / "runs/delay1-last-seed0"

    def interrupt() -> None:
        until = time.monotonic() + 240
        while not (trained / "metrics.jsonl").exists():
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.01)
        os.kill(int(pid.read_text()), signal.SIGINT)

    words = [
        sys.executable,
        "-m",
        "tools.long_context",
        str(tmp_path / "plan.toml"),
        "--out",
        str(out),
        "--text",
        str(text),
    ]
    job = {"command": words, "environment": {}, "log": str(log), "pid": str(pid)}
    assert ask(job, interrupt) == 130, log.read_text()
    assert "interrupted; the same command goes on" in log.read_text()
    outcome = read_outcome(trained)
    assert outcome is not None
    assert outcome["code"] == STOPPED
    assert (trained / f"checkpoint/step-{outcome['step']}").exists()


@pytest.mark.rotate
def test_the_whole_path_and_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = made_up_text(tmp_path)
    (tmp_path / "plan.toml").write_text(tomli_w.dumps(TINY))
    monkeypatch.chdir(ROOT)
    page = tmp_path / "page.md"
    out = Path(os.path.relpath(tmp_path / "out"))  # as people give it
    options = command.Options(tmp_path / "plan.toml", out, text, page=page)
    command.main(options)
    first, second = read_lines(tmp_path / "out/results.jsonl")
    assert (first["stage"], second["stage"], second["rope"]) == (0, 1, "yarn_full")
    assert first["answered"].keys() == second["answered"].keys()
    assert second["answered"].keys() == {f"{kind}-{n}" for kind in KINDS for n in (256, 512)}
    assert list(second["loss_by_position"]) == ["0-8", "8-256", "256-512"]
    lineage = json.loads((tmp_path / "out/runs" / second["name"] / "lineage.json").read_text())
    assert lineage["parent"].endswith("runs/delay1-last-seed0/checkpoint/step-2")
    assert "2 of 2 runs" in page.read_text()
    assert page.with_suffix(".svg").read_text().lstrip().startswith("<?xml")
    plan = command.Plan.read(options.config)
    plan.delays.append(3)  # none of its runs is over
    draw([first, second], plan, tmp_path / "more.svg")
    draw([first], plan, tmp_path / "trunk.svg")
    assert (tmp_path / "more.svg").exists()
    assert not (tmp_path / "trunk.svg").exists()
    assert not list((tmp_path / "out/runs").glob("*/checkpoint"))
    monkeypatch.setattr(run, "train", lambda *_, **__: 1 / 0)
    command.main(options)  # nothing is left to train
    kept = (
        (tmp_path / "out/results.jsonl").read_text().replace('"learning_rate": 0.001', '"learning_rate": 0.1')
    )
    (tmp_path / "out/results.jsonl").write_text(kept)
    with pytest.raises(ValueError, match="holds results of another stage_of; choose another --out"):
        command.main(options)
