"""Tests that twenty steps of the real trainer give the losses kept for the device kind.

Without kept losses for a GPU, the reference is the same job compiled: other kernels, the same sums.
"""

from __future__ import annotations

import json

import pytest
import torch

from records.files import read_json
from tests.train.golden_run import PLANTED, ROOT, STEPS, golden_losses, golden_path

pytestmark = pytest.mark.job
CPU = read_json(ROOT / "tests/train/golden/cpu.json")
# losses, tolerances
Reference = tuple[list[float], list[float]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    has_golden = golden_path().is_file()
    golden = json.loads(golden_path().read_text()) if has_golden else CPU
    losses = (
        golden["losses"]
        if has_golden
        else golden_losses(tmp_path_factory.mktemp("golden"), "--compile.enable")
    )
    # `rounding` samples a random walk: another machine rounds as differently as narrower vectors,
    # two ranks or the compiler do here, but may fall on another side; 8 such differences, each at
    # least one rounding of the loss, leave room for that, 8 times more on another device
    epsilon, factor = torch.finfo(torch.float32).eps, 8 if has_golden else 64
    return losses, [
        factor * max(r, epsilon * x) for r, x in zip(golden["rounding"], losses, strict=True)
    ]


def disagreement(losses: list[float], reference: Reference) -> float:
    """Return the largest difference from the reference in tolerances; at most 1 is agreement."""
    assert len(losses) == len(reference[0]) == STEPS
    return max(abs(a - b) / tolerance for a, b, tolerance in zip(losses, *reference, strict=True))


def test_golden_losses(reference, tmp_path):
    losses = golden_losses(tmp_path)
    assert disagreement(losses, reference) <= 1
    # a run that learns nothing would notice nothing
    assert losses[-1] < losses[0] - 0.3


def test_a_small_change_is_seen(reference, tmp_path):
    # A learning rate one part in a thousand off is far outside of the tolerance.
    assert disagreement(golden_losses(tmp_path, *PLANTED), reference) > 10
