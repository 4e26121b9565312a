"""How the lane matrices are cut among ranks: no rank may be left without data."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# in a process of its own, as TorchTitan has to be taught about CPUs before it is imported
CUT = """
import json, sys, torch
from train.cpu import patch_torch_for_cpu
if not torch.accelerator.is_available(): patch_torch_for_cpu()
from laneformer import Laneformer, LaneformerConfig
from laneformer.titan.parallelize import shard_dimension
with torch.device("meta"):
    model = Laneformer(LaneformerConfig.from_flavor("2b"))
cuts = {}
for degree in map(int, sys.argv[1:]):
    cuts[degree] = {n: [shard_dimension(p.shape, degree), list(p.shape)] for n, p in model.named_parameters()}
print(json.dumps(cuts))
"""


@pytest.fixture(scope="module")
def cuts() -> dict[str, dict[str, list]]:
    done = subprocess.run(
        [sys.executable, "-c", CUT, "8", "16", "192"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("degree", ["8", "16", "192"])
def test_every_rank_gets_an_equal_part_of_every_tensor(cuts: dict[str, dict[str, list]], degree: str) -> None:
    for name, (dimension, shape) in cuts[degree].items():
        # the embedding's 32,000 rows and the norms' 3,072 scales: 32,000 = 192 x 166.7 is cut along the hidden axis
        assert shape[dimension] % int(degree) == 0, f"{name} {shape} is cut unevenly along {dimension}"


def test_eight_shards_are_the_eight_lanes(cuts: dict[str, dict[str, list]]) -> None:
    lane_matrices = {name: cut for name, cut in cuts["8"].items() if len(cut[1]) == 3}
    assert len(lane_matrices) == 15 * 7 + 1
    assert all(dimension == 0 for dimension, _ in lane_matrices.values())
    assert any(dimension != 0 for dimension, _ in cuts["192"].values()), "a lane axis of 8 cannot feed 192 ranks"
