"""Twenty steps of the real trainer give the losses that are kept per device kind; renewed only on purpose."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.train.golden_run import STEPS, golden_losses, golden_path

pytestmark = pytest.mark.skipif(
    not golden_path().is_file(), reason=f"no golden losses for this device yet ({golden_path().name}): renew them first"
)


def tolerance() -> list[float]:
    """Absolute, step by step: what another order of summation changed when the losses were kept, with a margin.

    `rounding` is a sample of a random walk: another machine rounds as differently as narrower vectors, two ranks or the
    compiler do here, but may fall on another side. Eight such differences, each at least one rounding of the loss
    itself, leave room for that.
    """
    golden = json.loads(golden_path().read_text())
    epsilon = torch.finfo(torch.float32).eps
    return [8 * max(r, epsilon * loss) for r, loss in zip(golden["rounding"], golden["losses"], strict=True)]


def disagreement(losses: list[float]) -> float:
    """The largest difference from the golden losses, in tolerances: at most 1 is agreement."""
    golden = json.loads(golden_path().read_text())["losses"]
    assert len(losses) == len(golden) == STEPS
    return max(abs(a - b) / t for a, b, t in zip(losses, golden, tolerance(), strict=True))


def test_golden_losses(tmp_path: Path) -> None:
    assert disagreement(golden_losses(tmp_path)) <= 1


def test_a_small_change_would_be_seen() -> None:
    """A learning rate one part in a thousand off, run when the losses were kept, is far outside of the tolerance."""
    golden = json.loads(golden_path().read_text())
    assert disagreement(golden["planted"]) > 10
    assert golden["losses"][-1] < golden["losses"][0] - 0.3, "a run that learns nothing would notice nothing"
