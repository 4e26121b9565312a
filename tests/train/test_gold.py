"""Gold bits per byte in the loop: every item once on any number of ranks, as a plain model has it; paired changes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evals import gold
from evals.compare import compare, file_of
from evals.core.evaluate import Settings
from laneformer import Laneformer
from records.files import read_lines
from records.items import items_file, read_items
from records.job import JobSections
from tests.records.test_fields import check as check_fields
from tests.train.logged import EPSILON, STEPS, checkpoint_model, train_logged
from tests.train.runs import SEQ_LEN
from train.gold import GoldItems, gold_cost

BUNDLE = Path("evals/core/demo_bundle")


@pytest.fixture(scope="module")
def items(prepared_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("gold") / "gold.jsonl.gz"
    gold.main(prepared_data, BUNDLE, out, Settings(limit=4))
    return out


@torch.no_grad()
def plain_nats(model: Laneformer, line: dict[str, Any]) -> float:
    """Of the answer, given what stands before it: one prompt, float32 model, loss in float64."""
    ids = torch.tensor([line["ids"]])
    logits = model(ids[:, :-1]).double()[0, line["start"] - 1 :]
    return torch.nn.functional.cross_entropy(
        logits, ids[0, line["start"] :], reduction="sum"
    ).item()


@pytest.mark.rotate
def test_the_loop_measures_what_a_plain_model_has_and_goes_on_after_a_restart(
    items, phase1, tmp_path
):
    """Two shards of two lane ranks; then one rank from step 4 on."""
    run = tmp_path / "run"
    lanes = (
        "--parallelism.tensor_parallel_degree",
        "2",
        "--parallelism.data_parallel_shard_degree",
        "2",
    )
    rows = train_logged(run, phase1, "--validation.gold_items", str(items), *lanes, ranks=4)
    start, middle, last = read_lines(run / "evals.jsonl")
    assert [(r["step"], r["tokens_total"]) for r in (start, middle, last)] == [
        (0, 0),
        (3, rows[2]["tokens"]),
        (6, rows[5]["tokens"]),
    ]
    check_fields(last, None)
    asked, answered = read_items(items)[1], read_items(run / last["items"])[1]
    assert answered.keys() == asked.keys()
    model, expected = checkpoint_model(run, STEPS), dict[str, list[tuple[float, int]]]()
    for (task, number), line in asked.items():
        nats = plain_nats(model, line)
        # the logits' rounding, and that of a float32 sum of the answer's tokens
        assert abs(answered[task, number]["nats"] - nats) < 2 * SEQ_LEN * EPSILON * max(
            1.0, nats
        ), task
        expected.setdefault(task, []).append((nats / math.log(2), line["bytes"]))
    bits = {
        task: sum(b for b, _ in of) / sum(size for _, size in of) for task, of in expected.items()
    }
    measured = {task: each["gold_bits_per_byte"] for task, each in last["tasks"].items()}
    assert measured == pytest.approx(bits, rel=1e-5)
    assert last["gold_bits_per_byte"] == pytest.approx(np.mean([*bits.values()]), rel=1e-5)
    assert start["change"] is None
    paired = compare(*(file_of(f"{run}@{step}", "gold") for step in (3, 6)))
    names = ("bits_difference", "bits_standard_error")
    assert last["change"] == {"since": 3, **{name: paired[name] for name in names}}
    assert last["change"]["bits_difference"] < 0 < last["change"]["bits_standard_error"]

    shutil.rmtree(run / "checkpoint/step-6")
    train_logged(run, phase1, "--validation.gold_items", str(items), ranks=1)
    *_, again = records = read_lines(run / "evals.jsonl")
    assert [r["step"] for r in records] == [0, 3, 6, 6], "step 0 is measured at the start only"
    assert again["change"]["since"] == 3
    # two steps of AdamW apart, with gradients summed in another order: the bound of the tests of resuming
    assert abs(again["gold_bits_per_byte"] - last["gold_bits_per_byte"]) < 1e-4


def job(items: Path, data: Path, **training: int) -> Any:
    sections: Any = JobSections()
    sections.mixture.lock, sections.validation.gold_items = (
        str(data / "phase1.lock.json"),
        str(items),
    )
    sections.validation.freq = 500
    vars(sections.training).update({"global_batch_size": 1536, "seq_len": SEQ_LEN, **training})
    return sections


def test_the_share_of_the_compute_is_known_before(items, prepared_data, caplog):
    """A pass counts as a third of a sequence of a step."""
    count = len(read_items(items)[1])
    assert gold_cost(job(items, prepared_data)) == {
        "items": count,
        "share": count / (3 * 500 * 1536),
    }
    assert "raise validation.freq" not in caplog.text
    gold_cost(job(items, prepared_data, global_batch_size=1))
    assert "of the training; raise validation.freq" in caplog.text


def test_files_of_another_tokenizer_or_length_are_refused(items, prepared_data, tmp_path):
    with pytest.raises(
        ValueError, match=r"items of 3\d tokens, training.seq_len is 8; make it again with"
    ):
        GoldItems(job(items, prepared_data, seq_len=8))
    head, lines = read_items(items)
    other = tmp_path / "other.jsonl.gz"
    other.write_bytes(items_file(head | {"tokenizer_sha256": "ab"}, lines.values()))
    with pytest.raises(
        ValueError, match=r"another tokenizer than .*python -m evals.gold .* --bundle BUNDLE"
    ):
        GoldItems(job(other, prepared_data))


def test_the_command_writes_the_same_bytes_each_time(items, prepared_data, tmp_path):
    said = gold.main(prepared_data, BUNDLE, tmp_path / "gold.jsonl.gz", Settings(limit=4))
    assert (said["tasks"] >= 4, said["longest_tokens"] <= SEQ_LEN) == (True, True)
    assert (tmp_path / "gold.jsonl.gz").read_bytes() == items.read_bytes()
    with pytest.raises(ValueError, match="raise --max-length"):
        gold.main(prepared_data, BUNDLE, tmp_path / "none.jsonl.gz", max_length=1)
