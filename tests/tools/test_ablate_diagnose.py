"""The diagnosis of a checkpoint: what it says of lanes follows from the streams by definition,
and of delays too.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from laneformer import LaneformerConfig
from laneformer.config import MODULES, hf_name
from tests.neighbours import build
from tools.ablate.diagnose import LaneWatch, losses, settings
from tools.check.reference import plain_model

SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_lanes": 4, "swa_layers": (), "vocab_size": 512, "max_position_embeddings": 32,
    "broadcast_delay": 2,
}  # fmt: skip
CONFIG = LaneformerConfig(**SMALL)
IDS = torch.arange(12).reshape(1, 12)


def test_a_stream_and_its_stale_part_are_what_every_lane_would_have_without_delay():
    model, streams, partials = build(CONFIG, None, 1).double(), [], []
    for layer in model.layers:
        layer.register_forward_hook(lambda m, i, out: streams.append(out[0]))
        for module in (layer.attention, layer.feed_forward):
            module.register_forward_hook(lambda m, i, out: partials.append(out))
    watch = LaneWatch(model)
    stale = []
    for layer in model.layers:
        layer.register_forward_hook(lambda m, inputs, out: stale.append(watch.stale()))
    model(IDS.flip(1))
    for recorded in (streams, partials, stale):  # what a batch leaves behind does not count in the next one
        recorded.clear()
    watch.sums.zero_()
    watch.positions = 0
    model(IDS)
    whole = model.tok_embeddings(IDS)[:, :, None]
    for i, row in enumerate(watch.rows()):
        whole = whole + sum(partials[2 * i + m].sum(2, keepdim=True) for m in range(len(MODULES)))
        assert torch.allclose(streams[i] + stale[i], whole.expand_as(streams[i]), rtol=0, atol=1e-12)
        cosines = torch.nn.functional.cosine_similarity(
            streams[i][:, :, :, None], streams[i][:, :, None], dim=-1
        )
        pairs = cosines[:, :, ~torch.eye(4, dtype=torch.bool)]
        assert row["cosine"] == pytest.approx(pairs.mean().item(), abs=1e-12)
        assert row["stale"] == pytest.approx((stale[i].norm(dim=-1) / streams[i].norm(dim=-1)).mean().item())
        assert (row["stale"] > 0) == (i >= CONFIG.broadcast_delay)  # earlier layers reduce at once


def test_one_lane_has_nothing_stale_and_hooks_change_nothing():
    model = build(dataclasses.replace(CONFIG, num_lanes=1), None, 1)
    before, watch = model(IDS), LaneWatch(model)
    assert torch.equal(model(IDS), before)
    watch.close()
    assert all(row["stale"] == 0 and row["own_share"] == pytest.approx(1) for row in watch.rows())
    assert not any(module._forward_hooks for module in model.modules())


def test_losses_at_another_delay_are_those_of_a_model_of_that_delay():
    weights, windows = build(CONFIG, None, 1).state_dict(), np.arange(10 * 13).reshape(10, 13)
    configs = settings(CONFIG)
    assert configs[2] == CONFIG
    assert len({(c.broadcast_delay, c.use_early_comm) for c in configs}) == 9
    for config in configs:
        own = build(config, None, 1)
        ids = torch.from_numpy(windows)
        each = torch.log_softmax(own(ids[:, :-1]), -1).gather(2, ids[:, 1:, None])
        assert losses(plain_model(config, weights, torch.float32), windows) == pytest.approx(
            (-each.mean((1, 2))).tolist(), rel=1e-5
        )


@pytest.mark.rotate
def test_the_command_reads_a_run_of_the_ablation(prepared_data: Path, tmp_path: Path):
    (tmp_path / "run").mkdir()
    weights = {hf_name(name): weight for name, weight in build(CONFIG, None, 1).state_dict().items()}
    save_file(weights, tmp_path / "run" / "model.safetensors")
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({"model_type": "laneformer", **CONFIG.to_dict()})
    )
    command = [
        sys.executable,
        "-m",
        "tools.ablate.diagnose",
        str(tmp_path / "run"),
        "--data",
        str(prepared_data),
    ]
    command += ["--windows", "2", "--out", str(tmp_path / "it.json"), "--page", str(tmp_path / "page.md")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "it.json").read_text())
    assert [len(result["layers"]), len(result["losses"])] == [4, 9]
    assert [row["difference"] for row in result["losses"] if row["as_trained"]] == [0.0]
    assert "## Inside a checkpoint: run\n" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "it.svg").read_text().lstrip().startswith("<?xml")
