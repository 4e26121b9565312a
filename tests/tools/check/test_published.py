"""Tests that folders with published spellings are read and equal the code that they bring."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from laneformer import LaneformerConfig
from laneformer.engine.folder import config_of, read_checkpoint
from laneformer.hf.load_folder import import_folder
from tests.tools.check.published_assets import OLDER, write_published
from tools.check import published
from tools.check.published import Options

EXPECTED = LaneformerConfig(
    hidden_size=48, intermediate_size=80, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=4,
    num_lanes=4, broadcast_delay=2, max_position_embeddings=96, vocab_size=120, sliding_window=7,
    swa_layers=(0, 1, 2), rebroadcast_early=True,
)  # fmt: skip


def make_config(**changes: Any) -> LaneformerConfig:
    return LaneformerConfig.from_dict({**EXPECTED.to_dict(), **changes})


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as published": ({}, {}),
    "norms per lane, windows at the end": (
        {"replicated_rmsn_scale": False, "sliding_window_n_layers": -2},
        {"replicated_rmsn_scale": False, "swa_layers": (3, 4)},
    ),
    "early layers apart": ({"use_early_comm": False}, {"use_early_comm": False}),
    # early layers never exchange either, where no layer does
    "no exchange": (
        {"use_comm": False, "use_early_comm": False},
        {"use_attention_comm": False, "use_mlp_comm": False, "use_early_comm": False},
    ),
}


def run_check(folder: Path, **options: Any) -> dict[str, Any]:
    # beyond the window of 7, so that it matters
    check_options = Options(str(folder), positions=24, prompts=2, new_tokens=8, **options)
    return published.check(check_options, Console(quiet=True))


@pytest.mark.parametrize(
    "name", ["as published", *(pytest.param(n, marks=pytest.mark.job) for n in list(CASES)[1:])]
)
def test_engine_modeling_code_and_the_folder_s_own_code_agree(tmp_path, name):
    # the folder has the older spellings, our config the newer ones: both must mean the same model
    spelled, means = CASES[name]
    folder = write_published(
        tmp_path / name.replace(" ", "_").replace(",", ""), make_config(**means), **spelled
    )
    report = run_check(folder, trust_remote_code=True)
    assert report["failed"] == []
    assert report["published_code"] == "LaneformerTPForCausalLM"
    assert report["greedy"]["same"] == 2


def test_what_the_spellings_mean():
    for spelled, means in CASES.values():
        assert config_of({**OLDER, **spelled}) == make_config(**means)
    assert config_of({**OLDER, "unclamped_layers": [1]}).swa_layers == (0, 2)
    assert config_of({**OLDER, "num_key_value_heads": None}).num_key_value_heads == 8
    assert (
        config_of({**OLDER, "sliding_window": None, "sliding_window_n_layers": 0}).swa_layers == ()
    )
    shorter = OLDER.copy()
    del shorter["lm_head_type"], shorter["broadcast_delay"]
    assert config_of(shorter).lm_head_type == "replicate", "the older class's default"
    assert config_of({**shorter, "rebroadcast_early": False}).rebroadcast_early is False
    newer = {**EXPECTED.to_dict(), "model_type": "laneformer", "use_comm": True}
    assert config_of(newer) == EXPECTED


def test_what_has_no_new_spelling_is_refused():
    for changes, message in (
        ({"use_comm": False}, "use_comm = False with use_early_comm = True is not supported"),
        (
            {"lm_head_type": "lane"},
            "lm_head_type = 'lane' of laneformer_tp scores all lanes at once",
        ),
        ({"sliding_window": None}, "sliding_window is missing, but some layers have one"),
        ({"attn_mask_type": "prefix"}, "attn_mask_type = 'prefix' is not supported"),
    ):
        with pytest.raises(ValueError, match=message):
            config_of({**OLDER, **changes})


def test_the_folder_s_code_runs_only_when_it_is_trusted(tmp_path):
    folder = write_published(tmp_path / "hf", EXPECTED)
    (folder / "modeling_laneformer.py").write_text("raise RuntimeError('this code runs')")
    report = run_check(folder)
    assert (report["failed"], report["published_code"]) == ([], None)
    with pytest.raises(ValueError, match="does not load: this code runs"):
        run_check(folder, trust_remote_code=True)


def test_a_difference_is_found(tmp_path):
    # the folder's code adds early layers' outputs again, its config.json states otherwise
    folder = write_published(tmp_path / "differs", EXPECTED, rebroadcast_early=False)
    report = run_check(folder, trust_remote_code=True)
    assert "logits: published code" in report["failed"]


def test_import_reads_the_older_spellings(tmp_path):
    config = make_config(replicated_rmsn_scale=False)
    folder = write_published(tmp_path / "hf", config, replicated_rmsn_scale=False)
    import_folder(folder, tmp_path / "run")
    assert (
        LaneformerConfig.from_dict(json.loads((tmp_path / "run/model.json").read_text())) == config
    )
    assert read_checkpoint(folder).tensors.keys() == config.tensor_shapes().keys()
