"""Tests of CORE from task accuracies: a public result, errors by hand, no partial mean."""

import math
from typing import Any

import pytest

from evals.core.evaluate import VERSIONS, aggregate, center_accuracy, summarize_task
from evals.core.tasks import TASKS
from evals.intervals import Z95, wilson
from tests.evals.core.core_assets import task

# accuracies in TASKS' order, CORE v1 and v2: google/gemma-2b in exp_data/evals of
# mlfoundations/dclm
GEMMA_2B = (
    0.694184422492981, 0.4106133937835693, 0.7071502208709717, 0.7420033812522888, 0.45392492413520813,
    0.7799999713897705, 0.5904995799064636, 0.7894450426101685, 0.3880000114440918, 0.6371045708656311,
    0.7018522024154663, 0.831501841545105, 0.6479873657226562, 0.25699999928474426, 0.25217390060424805,
    0.44924241304397583, 0.4571428596973419, 0.125, 0.5436140298843384, 0.4256545305252075, 0.7492354512214661,
    0.29600000381469727,
)  # fmt: skip
CORE = (0.4334530946631591, 0.41524569073374634)


def figures_of(accuracies: dict[str, float], error: float = 0.0) -> dict[str, dict[str, Any]]:
    """Make what `aggregate` reads, as `summarize_task` would."""
    chosen = {t.label: t for t in TASKS if t.label in accuracies}
    return {
        label: {f"centered_{v}": center_accuracy(t, accuracies[label], v) for v in VERSIONS}
        | {"standard_error": error}
        for label, t in chosen.items()
    }


def name_tasks(accuracies: tuple[float, ...]) -> dict[str, float]:
    return dict(zip([t.label for t in TASKS], accuracies, strict=True))


def test_core_of_published_accuracies():
    core = aggregate(figures_of(name_tasks(GEMMA_2B)))
    # 22 float64 values below 1 and their mean: 1e-12 is thousands of roundings of 1e-16
    assert (core["core_v1"], core["core_v2"]) == pytest.approx(CORE, abs=1e-12)
    # planted: with one answer more of copa's 100 it is another number
    more = name_tasks(GEMMA_2B) | {"copa": GEMMA_2B[5] + 0.01}
    assert abs(aggregate(figures_of(more))["core_v1"] - CORE[0]) > 1e-4


def test_categories_are_means_of_their_tasks():
    categories = aggregate(figures_of(name_tasks(GEMMA_2B)))["categories"]
    # baselines of v1: 0 of squad and coqa, 62 % of boolq
    reading = [0.5436140298843384, 0.4256545305252075, (0.7492354512214661 - 0.62) / 0.38]
    assert categories["reading"]["centered_v1"] == pytest.approx(sum(reading) / 3, abs=1e-12)
    assert {name: c["tasks"] for name, c in categories.items()} == {
        "language": 6,
        "world": 4,
        "commonsense": 4,
        "symbolic": 5,
        "reading": 3,
    }


def test_a_missing_task_leaves_no_core():
    for label in ("squad", "copa"):
        accuracies = name_tasks(GEMMA_2B)
        del accuracies[label]
        core = aggregate(figures_of(accuracies))
        assert [core[name] for name in ("core_v1", "core_v2", "core_v1_se", "core_v2_se")] == [
            None
        ] * 4
        without_mean = [name for name, c in core["categories"].items() if c["centered_v1"] is None]
        assert without_mean == [task(label).category]


def answers(right: dict[str, list[bool]]):
    return [
        {"group": g, "right": r, "nats": 1.0, "bytes": 2}
        for g, group in right.items()
        for r in group
    ]


def test_standard_errors_by_hand():
    for right, count in ((0, 4), (4, 4), (3000, 10_000), (3, 4)):
        rows = answers({"": [i < right for i in range(count)]})
        figures = summarize_task(task("commonsense_qa"), rows, n_total=1221)
        low, high = figures["interval"]
        assert figures["accuracy"] == right / count
        assert 0 <= low < high <= 1
        # Wilson's interval solves (p - accuracy)^2 = z^2 p (1 - p) / n; at 0 and 1 both sides are 0
        for p in (low, high):
            allowed = Z95**2 * p * (1 - p) / count
            assert (p - right / count) ** 2 == pytest.approx(allowed, rel=1e-12, abs=1e-15)
        assert figures["standard_error"] == pytest.approx((high - low) / 2 / Z95, rel=1e-12)
    assert figures["centered_v1"] == pytest.approx((0.75 - 0.2) / 0.8, rel=1e-15)
    assert figures["centered_v2"] == pytest.approx((0.75 - 0.403) / 0.597, rel=1e-15)
    assert (figures["n"], figures["n_total"], figures["shots"]) == (4, 1221, 10)
    # each error divided by 1 - baseline, then root of the sum of squares over 22
    errors = [0.01 / (1 - t.baseline_v2 / 100) for t in TASKS]
    core = aggregate(figures_of(name_tasks(GEMMA_2B), error=0.01))
    assert core["core_v2_se"] == pytest.approx(
        math.sqrt(sum(e * e for e in errors)) / 22, rel=1e-12
    )


def test_groups_weigh_the_same_whatever_their_size():
    figures = summarize_task(
        task("jeopardy"), answers({"science": [True], "words": [True] + [False] * 3}), n_total=2117
    )
    assert figures["accuracy"] == pytest.approx((1 + 0.25) / 2, rel=1e-15)
    halves = [wilson(1, 1)[1], wilson(1, 4)[1]]
    assert figures["standard_error"] == pytest.approx(math.hypot(*halves) / 2 / Z95, rel=1e-12)
