"""Tests of the Transformers classes against the plain model, on this environment's Transformers."""

from __future__ import annotations

import pytest
import torch

from laneformer import Laneformer
from laneformer.config import hf_name
from laneformer.hf.configuration_laneformer import LaneformerHFConfig
from laneformer.hf.modeling_laneformer import LaneformerForCausalLM
from tests.laneformer.hf.hf_assets import FLOAT32_TOLERANCE, VOCAB_SIZE, random_model, small_config

# even if 10^4 operations pulled one way; a wrong angle is off by 1e-3
FLOAT64_TOLERANCE = 10 * 1e4 * 2.0**-53


def wrap(plain: Laneformer) -> LaneformerForCausalLM:
    model = LaneformerForCausalLM(LaneformerHFConfig(**plain.config.to_dict())).eval()
    model.load_state_dict({hf_name(name): weight for name, weight in plain.state_dict().items()})
    return model


@pytest.fixture(scope="module")
def plain():
    return random_model()


@pytest.fixture(scope="module")
def model(plain):
    return wrap(plain)


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, VOCAB_SIZE, (2, 40), generator=torch.Generator().manual_seed(1))


HEADS = [{"lm_head_type": "lane"}, {"lm_head_type": "replicate", "pre_norm_lane_agg": True}]


@pytest.mark.parametrize(
    "overrides", [{}, {"swa_layers": ()}, {"replicated_rmsn_scale": False}, *HEADS], ids=str
)
@torch.no_grad()
def test_logits_are_the_plain_models(ids, overrides):
    plain = random_model(**overrides)
    assert (wrap(plain)(ids).logits - plain(ids)).abs().max() <= FLOAT32_TOLERANCE


@torch.no_grad()
def test_embeddings_and_chosen_positions(model, plain, ids):
    expected = model(ids).logits
    assert torch.equal(model(inputs_embeds=plain.tok_embeddings(ids)).logits, expected)
    for count, positions in ((1, [-1]), (3, [-3, -2, -1]), (torch.tensor([3, 5]), [3, 5])):
        logits = model(ids, logits_to_keep=count).logits
        assert (logits - expected[:, positions]).abs().max() <= FLOAT32_TOLERANCE
    assert isinstance(model(ids, return_dict=False), tuple)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()


def test_loss(model, plain, ids):
    labels = ids.clone()
    labels[:, :5] = -100
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            plain(ids)[:, 4:-1].flatten(0, 1), ids[:, 5:].flatten()
        )
        assert model(ids, labels=labels).loss == pytest.approx(float(expected), rel=1e-5)
        # with gradient accumulation the Trainer divides by the tokens of all micro-batches
        summed = model(ids, labels=labels, num_items_in_batch=7).loss
        assert summed == pytest.approx(float(expected) * labels[:, 5:].numel() / 7, rel=1e-5)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(plain, ids, use_reentrant):
    gradients = []
    for checkpointing in (False, True):
        model = wrap(plain).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        output = model(ids, labels=ids)
        output.loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    for name, expected in gradients[0].items():
        # the same sums, run twice
        assert torch.allclose(gradients[1][name], expected, rtol=1e-4, atol=1e-6), name


def test_initialisation_is_that_of_training():
    config = small_config()
    trained = Laneformer(config)
    trained.init_weights()
    fresh = LaneformerForCausalLM(LaneformerHFConfig(**config.to_dict()))
    for name, weight in trained.state_dict().items():
        assert torch.equal(fresh.get_parameter(hf_name(name)), weight), name


@pytest.mark.parametrize("kind", ["full", "all"])
def test_rope_by_kind_of_layer_survives_the_folder(tmp_path, ids, kind):
    # the logits are the plain model's, at once and token by token
    scaling = {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "layers": kind,
    }
    reference = random_model(rope_scaling=scaling, window_rope_theta=500.0, nope_layers=(4,))
    config = reference.config
    wrap(reference).save_pretrained(tmp_path)
    loaded = LaneformerForCausalLM.from_pretrained(tmp_path).eval().double()
    assert loaded.config.to_lanes() == config
    assert loaded.config.to_lanes().ropes == config.ropes
    with torch.no_grad():
        expected = reference.double()(ids)
        assert (loaded(ids).logits - expected).abs().max() < FLOAT64_TOLERANCE
        cache, steps = None, []
        for position in range(ids.shape[1]):
            out = loaded(ids[:, position : position + 1], past_key_values=cache, use_cache=True)
            cache, steps = out.past_key_values, [*steps, out.logits]
        assert (torch.cat(steps, 1) - expected).abs().max() < FLOAT64_TOLERANCE


@torch.no_grad()
def test_one_graph(model, ids):
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(ids).logits, model(ids).logits)


def test_refusals(model, ids):
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(ValueError, match=f"{name} = True is not available"):
            model(ids, **{name: True})
    with pytest.raises(ValueError, match="cannot resize the vocabulary from 1024 to 1025"):
        model.resize_token_embeddings(VOCAB_SIZE + 1)
    assert model.resize_token_embeddings(VOCAB_SIZE) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="attn_implementation = 'eager' is not available"):
        LaneformerForCausalLM._from_config(model.config, attn_implementation="eager")
    with pytest.raises(ValueError, match="vocab_size = 1023 is not divisible by num_lanes = 8"):
        LaneformerHFConfig(vocab_size=1023)
