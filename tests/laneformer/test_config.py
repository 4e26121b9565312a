"""Tests of the config: published sizes, join rules, and errors that name the value and the fix."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from laneformer import Laneformer, LaneformerConfig
from laneformer.config import FLAVORS, LM_HEAD_TYPES, hf_name, plain_name
from laneformer.joins import MODULES, Join
from laneformer.ropes import LLAMA3_KEYS
from laneformer.supports import refuse_unsupported

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
PUBLISHED_2B = 15 * 141_557_760 + 2 * 98_304_000 + 31 * 3072


def test_2b_has_exactly_the_published_parameters():
    config = LaneformerConfig.from_flavor("2b")
    assert config.parameter_count()["total"] == PUBLISHED_2B == 2_320_069_632


BORROWED = {"head_dim": 24, "attention_bias": True, "qk_norm": True, "tie_word_embeddings": True}
DRAFTS = {"num_nextn_predict_layers": 1}


@pytest.mark.parametrize("flavor", sorted(FLAVORS))
@pytest.mark.parametrize(
    "fields",
    [
        *({"lm_head_type": head} for head in LM_HEAD_TYPES),
        {"replicated_rmsn_scale": False},
        DRAFTS,
        DRAFTS | {"draft_vocab_size": 2048, "replicated_rmsn_scale": False},
        BORROWED,
        BORROWED | {"lm_head_type": "replicate"},
    ],
    ids=str,
)
def test_shapes_and_counts_are_those_of_the_model(flavor, fields):
    # the dictionary also survives JSON
    config = LaneformerConfig.from_flavor(flavor, **fields)
    with torch.device("meta"):
        model = Laneformer(config)
    state, sizes = model.state_dict(), {name: p.numel() for name, p in model.named_parameters()}
    assert config.tensor_shapes() == {name: tuple(tensor.shape) for name, tensor in state.items()}
    assert config.parameter_count()["total"] == sum(sizes.values())
    assert config.parameter_count()["mtp"] == sum(
        n for name, n in sizes.items() if name.startswith("mtp.")
    )
    assert {plain_name(hf_name(name)) for name in state} == set(state)
    assert LaneformerConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"num_attention_heads": 30}, r"heads = 30 is not divisible by num_lanes = 8; use 24 or 32"),
    ({"vocab_size": 32001}, r"size = 32001 is not divisible by num_lanes = 8; use 32000 or 32008"),
    ({"hidden_size": 3104}, r"head dimension 97 is odd"),
    ({"num_key_value_heads": 24}, r"heads = 32 is not a multiple of num_key_value_heads = 24"),
    ({"num_lanes": 0}, r"num_lanes = 0 must be a positive integer"),
    ({"hidden_size": 3072.0}, r"hidden_size = 3072.0 must be a positive integer"),
    ({"broadcast_delay": -1}, r"broadcast_delay = -1 must be an integer >= 0"),
    ({"first_late_layer": 15}, r"first_late_layer = 15 must be 0 to 14"),
    ({"norm_eps": 0.0}, r"norm_eps = 0.0 must be a number greater than 0"),
    ({"swa_layers": (0, 15)}, r"swa_layers holds \[15\], but the layers are 0 to 14"),
    ({"lm_head_type": "tied"}, r"lm_head_type = 'tied' is unknown; choose from"),
    ({"pre_norm_lane_agg": True}, r"needs lm_head_type = 'replicate', not 'vocab_parallel'"),
    (
        {"tie_word_embeddings": True, "lm_head_type": "lane"},
        r"tie_word_embeddings needs lm_head_type",
    ),
    ({"head_dim": 33}, r"head dimension 33 is odd"),
    ({"rope_scaling": {"factor": 8.0}}, r"rope_scaling lacks \['low_freq_factor'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "type = 'linear'; choose from 'llama3' and 'yarn'"),
    (
        {"rope_scaling": {**YARN, "layer": "full"}},
        r"unknown keys \['layer'\]; choose from .*'layers'",
    ),
    ({"rope_scaling": {**YARN, "layers": "some"}}, r"'some' .* choose from \('all', 'full'\)"),
    (
        {"rope_scaling": {**YARN, "factor": "8"}},
        "factor = '8' in rope_scaling must be a number great",
    ),
    (
        {"rope_scaling": {**YARN, "truncate": "False"}},
        "truncate = 'False' .* must be true or false",
    ),
    ({"window_rope_theta": 0.0}, "window_rope_theta = 0.0 must be a number gre"),
    (
        {"rope_scaling": dict.fromkeys(LLAMA3_KEYS, 1.0), "window_rope_theta": 1e4},
        "with no rope_scaling",
    ),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2 is not supported; use 0 or 1"),
    (DRAFTS | {"lm_head_type": "lane"}, "not supported with lm_head_type = 'lane'; use"),
    (DRAFTS | {"tie_word_embeddings": True}, "not supported with a tied head; use"),
    (DRAFTS | {"draft_vocab_size": 1001}, "= 1001 must be a multiple of num_lanes = 8"),
    ({"draft_vocab_size": 8000}, "= 8000 must be .* 0 without a head that drafts"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSALS)
def test_bad_values_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        LaneformerConfig(**overrides)


def test_parts_that_know_nothing_of_other_families_name_it():
    config = LaneformerConfig.from_flavor("tiny")
    refuse_unsupported(config, "training")
    with pytest.raises(
        ValueError, match=r"does not support head_dim = 24, attention_bias.*qk.*, tie"
    ):
        refuse_unsupported(LaneformerConfig.from_flavor("tiny", **BORROWED), "training")


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="unknown flavor '3b'; choose from"):
        LaneformerConfig.from_flavor("3b")
    with pytest.raises(ValueError, match="unknown config key 'num_lane'; did you mean 'num_lanes'"):
        LaneformerConfig.from_dict({"num_lane": 8})


# fields; how the first layers join; the layers that broadcast and those that add what is delayed.
# The outputs of the last layers never reach the other lanes.
PART_WAITS = {"broadcast_delay": 3, "early_layers": 1}
JOINS: list[tuple[dict[str, Any], list[Join], range, range]] = [
    ({}, [Join.PRESENT] * 2 + [Join.PAST], range(2, 13), range(4, 15)),
    (
        {"first_late_layer": 9, "flush": True},
        [Join.PRESENT] * 9 + [Join.PAST] * 6,
        range(9, 13),
        range(11, 15),
    ),
    (PART_WAITS, [Join.PRESENT] + [Join.NO_REDUCE] * 2 + [Join.PAST], range(1, 12), range(4, 15)),
    (
        PART_WAITS | {"use_early_comm": False},
        [Join.NO_REDUCE] * 3 + [Join.PAST],
        range(12),
        range(3, 15),
    ),
]


@pytest.mark.parametrize(("fields", "joins", "broadcast", "delayed"), JOINS)
def test_joins_of_the_published_model(fields, joins, broadcast, delayed):
    # config.json omits fields that change nothing
    config = LaneformerConfig.from_flavor("2b", **fields)
    for module in MODULES:
        assert [config.join(i, module) for i in range(len(joins))] == joins
        assert [i for i in range(15) if config.broadcasts(i, module)] == list(broadcast)
        assert [i for i in range(15) if config.adds_delayed(i, module)] == list(delayed)
    assert not {"flush", "first_late_layer", "early_layers"} & LaneformerConfig().to_dict().keys()


def test_windows_of_the_published_model():
    config = LaneformerConfig.from_flavor("2b")
    assert [config.window(i) for i in range(15)] == [2048] * 10 + [None] * 5
