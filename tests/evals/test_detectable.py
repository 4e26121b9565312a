"""The smallest change that figures detect, on runs whose effect and noise are known."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from evals.detectable import detectable, main, read_runs, smallest_change
from records.items import write_items

SLOPE, NOISE = -0.1, 0.01  # of bits per byte, by setting and by seed
ITEMS = 40


def test_the_change_is_the_one_that_half_of_all_pairs_show() -> None:
    """From 200 runs: pairs of runs so far apart exceed what 95% of equal pairs stay below, one time in two."""
    draw = random.Random(0)
    settings = [i % 5 for i in range(200)]
    found = smallest_change(settings, [2 + SLOPE * x + draw.gauss(0, NOISE) for x in settings])
    assert found["change"] == pytest.approx(1.96 * math.sqrt(2) * NOISE / abs(SLOPE), rel=0.2)
    limit = found["change"] * abs(found["slope"])

    def pairs(apart: float) -> float:
        changes = (SLOPE * apart + draw.gauss(0, NOISE) - draw.gauss(0, NOISE) for _ in range(4000))
        return sum(abs(change) > limit for change in changes) / 4000

    assert pairs(0) == pytest.approx(0.05, abs=0.025)
    assert pairs(found["change"]) == pytest.approx(0.5, abs=0.1)
    assert smallest_change(settings, [draw.gauss(0, NOISE) for _ in settings])["change"] is None


def write_run(folder: Path, setting: float, draw: random.Random) -> Path:
    """A run of one evaluation: accuracy is chance, gold bits and text show the setting."""
    folder.mkdir(parents=True)
    lines = [
        {
            "task": "copa", "item": i, "group": "", "right": draw.random() < 0.5, "losses": [], "gold": 0,
            "nats": 8 + SLOPE * setting + draw.gauss(0, 5 * NOISE), "bytes": 4,
        }
        for i in range(ITEMS)
    ]  # fmt: skip
    head = {"kind": "core", "step": 10, "data_sha256": "ab"}
    core = {
        "kind": "core",
        "step": 10,
        "seconds": 40.0,
        "items": write_items(folder / "evals.jsonl", head, lines),
    }
    value = 2 + SLOPE * setting + draw.gauss(0, NOISE)
    text = {"kind": "bits_per_byte", "step": 10, "seconds": 20.0, "bits_per_byte": value}
    earlier = text | {"step": 5, "bits_per_byte": 9.0}
    (folder / "evals.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (core, text, earlier)))
    return folder


def test_figures_of_runs_at_equal_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw = random.Random(1)
    words = [f"{write_run(tmp_path / f'{x}-{i}', x, draw)}={x}" for x in (0, 1, 2) for i in range(4)]
    found = detectable(read_runs(words))
    assert (found["runs"], found["share_of_items"]) == (12, 0.5), "half of the items take as long as the text"
    figures = found["figures"]
    assert figures.keys() == {"accuracy", "gold bits per byte", "bits per byte"}, (
        "of CORE a task alone is none"
    )
    assert figures["accuracy"]["change"] is None
    # in a run of its own: t of 10 degrees of freedom, and the noise of 12 runs, known to a fifth
    expected = 2.228 * math.sqrt(2) * NOISE / abs(SLOPE)
    assert figures["bits per byte"]["change"] == pytest.approx(expected, rel=0.5)
    gold = 1 / 4 / math.log(2)  # bits per byte of a nat over four bytes
    noise = 5 * NOISE * gold / math.sqrt(ITEMS / 2)
    assert figures["gold bits per byte"]["residual"] == pytest.approx(noise, rel=0.5)
    assert figures["gold bits per byte"]["slope"] == pytest.approx(SLOPE * gold, rel=0.2)
    main(words)
    said = capsys.readouterr()
    assert json.loads(said.out) == found
    assert "slope not known" in said.err


def test_runs_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="runs/a is not RUN=VALUE"):
        read_runs(["runs/a"])
    with pytest.raises(ValueError, match=r"no record of core: run evals\.core on its last checkpoint"):
        detectable([(tmp_path, 1.0)])
    for settings in ([1, 2], [1, 1, 1]):
        with pytest.raises(ValueError, match="3 runs and 2 settings are needed"):
            smallest_change(settings, [0.0] * len(settings))
