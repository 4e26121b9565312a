"""Twenty steps of the real trainer give the losses that are kept per device kind; renewed only on purpose.

On a GPU for which none are kept, the reference is the same job compiled: other kernels, the same sums.
"""

from __future__ import annotations

import json

import pytest
import torch

from records.files import read_json
from tests.train.golden_run import PLANTED, ROOT, STEPS, golden_losses, golden_path

pytestmark = pytest.mark.job
CPU = read_json(ROOT / "tests/train/golden/cpu.json")
Reference = tuple[list[float], list[float]]  # losses, tolerances


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Absolute tolerance, step by step: what another order of summation changed when the losses
    were kept, times 8.

    `rounding` is a sample of a random walk: another machine rounds as differently as narrower vectors,
    two ranks or the compiler do here, but may fall on another side. Eight such differences, each at
    least one rounding of the loss itself, leave room for that; eight times more where the rounding is
    not this device's own.
    """
    kept = golden_path().is_file()
    golden = json.loads(golden_path().read_text()) if kept else CPU
    losses = (
        golden["losses"]
        if kept
        else golden_losses(tmp_path_factory.mktemp("golden"), "--compile.enable")
    )
    epsilon, factor = torch.finfo(torch.float32).eps, 8 if kept else 64
    return losses, [
        factor * max(r, epsilon * x) for r, x in zip(golden["rounding"], losses, strict=True)
    ]


def disagreement(losses: list[float], reference: Reference) -> float:
    """The largest difference from the reference, in tolerances: at most 1 is agreement."""
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
