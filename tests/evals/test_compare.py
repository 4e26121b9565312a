"""Two checkpoints on the same items: paired differences by hand, and files that cannot be compared."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from evals.compare import compare, main
from evals.intervals import paired
from evals.items import read_items, write_items

HEAD = {"kind": "core", "step": 1, "protocol": "nanochat", "data_sha256": "ab", "limit": 4}


def write(folder: Path, right: list[bool], nats: list[float], **head: Any) -> Path:
    answers = [
        {"task": "copa", "item": i, "right": r, "losses": [n, None], "nats": n, "bytes": 4}
        for i, (r, n) in enumerate(zip(right, nats, strict=True))
    ]
    return folder / str(write_items(folder / "evals.jsonl", HEAD | head, answers))


def test_a_paired_difference_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path, [True, False, False, True], [1.0, 2.0, 3.0, 2.0], step=1)
    b = write(tmp_path, [True, True, True, False], [1.0, 1.0, 2.0, 2.0], step=2)
    (row,) = compare(a, b)["tasks"].values()
    assert (row["n"], row["a"], row["b"], row["difference"]) == (4, 0.5, 0.75, 0.25)
    assert (row["only_a"], row["only_b"]) == (1, 2)
    # 3 items differ, +1 +1 -1, and 0; half an item more of each outcome: sums of 1 and 4 over 6
    assert row["standard_error"] == pytest.approx(math.sqrt((4 / 6 - (1 / 6) ** 2) / 6), rel=1e-12)
    assert row["bits_difference"] == pytest.approx(-2 / math.log(2) / 16, rel=1e-12)
    # differences of 0, -1, -1, 0 nats: their standard deviation is 1/2, of 4 items
    assert row["bits_standard_error"] == pytest.approx(0.5 / 2 / math.log(2) / 4, rel=1e-12)
    main(a, b)
    assert json.loads(capsys.readouterr().out) == compare(a, b)
    assert read_items(a)[1]["copa", 2]["losses"] == [3.0, None]


def test_what_both_find_hard_cancels() -> None:
    """The error is the spread of the difference of imagined pairs, well below that of two
    scores on their own.
    """
    draw = random.Random(0)

    def pair() -> tuple[list[float], list[float]]:
        hard = [draw.random() for _ in range(200)]
        first = [float(draw.random() < h) for h in hard]
        return first, [1.0 if draw.random() < 0.05 else x for x in first]  # the same model, a little better

    found = [paired(*pair(), added=1) for _ in range(200)]
    mean = sum(d for d, _ in found) / 200
    spread = math.sqrt(sum((d - mean) ** 2 for d, _ in found) / 199)
    # the standard deviation of 200 draws is off by 5 %; the added item makes the error a little larger
    assert sum(e for _, e in found) / 200 == pytest.approx(spread, rel=0.2)
    assert spread < 0.5 * math.sqrt(2 * 0.25 / 200)
    assert paired([1.0, 0.0], [1.0, 0.0], added=1)[1] > 0.2, "two items without a difference are not certain"


def test_other_items_are_refused(tmp_path: Path) -> None:
    a = write(tmp_path, [True], [1.0])
    for head in ({"data_sha256": "cd"}, {"protocol": "dclm"}):
        with pytest.raises(ValueError, match=f"were not asked the same: {next(iter(head))} "):
            compare(a, write(tmp_path, [True], [1.0], **head))
    with pytest.raises(ValueError, match="which are not the same ones"):
        compare(a, write(tmp_path, [True, False], [1.0, 1.0]))
    (tmp_path / "x").write_text("no")
    with pytest.raises(ValueError, match="is no file of items"):
        compare(a, tmp_path / "x")
