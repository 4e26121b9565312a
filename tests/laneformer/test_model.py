"""The mathematics against two other writings of it: transformers' Llama, and the update table as plain loops."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from laneformer import Laneformer, LaneformerConfig
from laneformer.model import KVCache, LaneAttention, LaneRMSNorm, run_layers
from laneformer.positions import causal_mask, rope_table
from tests.laneformer.lane_reference import reference_logits, rms_norm
from tests.neighbours import Flushed

SMALL = {
    "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_lanes": 2, "sliding_window": 4, "swa_layers": (0, 1, 3),
    "max_position_embeddings": 64, "vocab_size": 40,
}  # fmt: skip
IDS = [3, 17, 39, 0, 8, 8, 25, 31, 2, 11]
HEADS = [
    {"lm_head_type": "vocab_parallel"},
    {"lm_head_type": "lane"},
    {"lm_head_type": "replicate"},
    {"lm_head_type": "replicate", "pre_norm_lane_agg": True},
]
UNIT_F32 = 2.0**-24  # half a unit in the last place of float32
# Float64 sums of a few hundred terms, six layers deep, on logits of order one: every operation is off by at
# most 2^-53 of its result, and even if 10^4 of them pulled one way 10^4 * 2^-53 is 1.1e-12. A wrong term is
# off by 1e-6 or more.
FLOAT64_TOLERANCE = 1e4 * 2.0**-53


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: object) -> Laneformer:
    """A small model whose every number matters: matrices far from tiny, norm scales far from one."""
    model = Laneformer(LaneformerConfig(**{**SMALL, **overrides})).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else noise / math.sqrt(p.shape[-1]))
    return model


def exact_rope(config: LaneformerConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The float64 table, so that the comparison in float64 does not wait on the float32 one of the model."""
    j = torch.arange(config.head_dim // 2, dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * config.rope_theta ** (
        -2 * j / config.head_dim
    )
    return angle.cos()[None, :, None], angle.sin()[None, :, None]


def lane_batched_logits(model: Laneformer, ids: list[int]) -> np.ndarray:
    positions = torch.arange(len(ids))
    embedding = model.tok_embeddings(torch.tensor([ids]))
    rope, masks = exact_rope(model.config, len(ids)), model.masks(positions, positions)
    with torch.no_grad():
        h, _ = run_layers(model.layers, model.config, embedding, rope, masks)
        return model.lm_head(h, model.norm)[0].numpy()


def transcribed(model: Laneformer, ids: list[int], plant: str = "") -> np.ndarray:
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    return reference_logits(model.config, weights, ids, plant)


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
@pytest.mark.parametrize("early", [True, False])
def test_forward_is_the_update_table(delay: int, early: bool) -> None:
    comms = [(True, True), (False, True), (True, False), (False, False)]
    for (attention, mlp), rebroadcast in itertools.product(comms, [False, True]):
        model = build(
            broadcast_delay=delay, use_early_comm=early, use_attention_comm=attention, use_mlp_comm=mlp,
            rebroadcast_early=rebroadcast,
        )  # fmt: skip
        difference = np.abs(lane_batched_logits(model, IDS) - transcribed(model, IDS)).max()
        assert difference < FLOAT64_TOLERANCE, (attention, mlp, rebroadcast)


@pytest.mark.parametrize("delay", [0, 1, 2, 4])
@pytest.mark.parametrize("first", [0, 1, 3, 5])
def test_late_upper_layers_and_the_flush_are_the_update_table(delay: int, first: int) -> None:
    """With heads that read the streams each in its own way, and early layers that exchange nothing."""
    for (flush, early), head in zip(itertools.product([True, False], repeat=2), HEADS, strict=True):
        joins = {"broadcast_delay": delay, "first_late_layer": first, "flush": flush, "use_early_comm": early}
        model = build(**joins, **head)
        difference = np.abs(lane_batched_logits(model, IDS) - transcribed(model, IDS)).max()
        assert difference < FLOAT64_TOLERANCE, (joins, head)
    for module in ("attention", "mlp"):
        model = build(**joins | {"flush": True, f"use_{module}_comm": False})
        assert np.abs(lane_batched_logits(model, IDS) - transcribed(model, IDS)).max() < FLOAT64_TOLERANCE


@pytest.mark.parametrize("early", [1, 2, 3, 4])
@pytest.mark.parametrize("first", [0, 2])
def test_a_number_of_early_sums_is_the_update_table(early: int, first: int) -> None:
    for delay in (1, 2, 3):
        joins = {
            "broadcast_delay": delay,
            "first_late_layer": first,
            "early_layers": early,
            "flush": early == 1,
        }
        model = build(**joins)
        difference = np.abs(lane_batched_logits(model, IDS) - transcribed(model, IDS)).max()
        assert difference < FLOAT64_TOLERANCE, joins


def test_a_flushed_model_is_the_sum_of_all_outputs() -> None:
    """By its definition: the head reads the embedding and every output of every lane, and all streams are equal."""
    model = build(broadcast_delay=2, first_late_layer=3, flush=True)
    defined = Flushed(model.config).double()
    defined.load_state_dict(model.state_dict())
    ids = torch.tensor([IDS])
    assert (model(ids) - defined(ids)).abs().max() < FLOAT64_TOLERANCE
    at = torch.arange(len(IDS))
    h, left = run_layers(
        model.layers,
        model.config,
        model.tok_embeddings(ids),
        rope_table(model.config, at),
        model.masks(at, at),
    )
    assert h.shape[2] == model.config.num_lanes
    assert torch.equal(h, h[:, :, :1].expand_as(h))
    assert not left


@pytest.mark.parametrize("head", HEADS, ids=lambda head: "-".join(map(str, head.values())))
@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_heads_norm_scales_and_lanes(head: dict, replicated: bool, lanes: int) -> None:
    model = build(num_lanes=lanes, num_key_value_heads=4, replicated_rmsn_scale=replicated, **head)
    assert np.abs(lane_batched_logits(model, IDS) - transcribed(model, IDS)).max() < FLOAT64_TOLERANCE


@pytest.mark.parametrize(
    "switch", ["use_early_comm", "use_attention_comm", "use_mlp_comm", "rebroadcast_early"]
)
def test_every_switch_changes_the_logits(switch: str) -> None:
    default = getattr(LaneformerConfig(**SMALL), switch)
    one, other = build(), build(**{switch: not default})
    assert np.abs(lane_batched_logits(one, IDS) - lane_batched_logits(other, IDS)).max() > 1e-3


@pytest.mark.parametrize("plant", ["remote", "delay", "window", "flush", "border"])
@pytest.mark.parametrize("early", [True, False])
def test_planted_errors_are_noticed(plant: str, early: bool) -> None:
    own = {"flush": {"flush": True}, "border": {"first_late_layer": 3}}.get(plant, {})
    model = build(broadcast_delay=2, use_early_comm=early, **own)
    difference = np.abs(lane_batched_logits(model, IDS) - transcribed(model, IDS, plant)).max()
    assert difference > 1e6 * FLOAT64_TOLERANCE


def test_rope_table_is_exact_to_its_float32_angle() -> None:
    """The angle is a product of roundings: frequency (power and reciprocal, some units)
    times position, then cos.
    """
    config = LaneformerConfig.from_flavor("2b")
    cos, sin = rope_table(config, torch.arange(config.max_position_embeddings))
    exact_cos, exact_sin = exact_rope(config, config.max_position_embeddings)
    position = torch.arange(config.max_position_embeddings)[None, :, None, None]
    frequency = config.rope_theta ** (
        -2 * torch.arange(config.head_dim // 2, dtype=torch.float64) / config.head_dim
    )
    # exponent off by one unit times ln(theta) in the result, power 2, reciprocal 1, product 1; cos and
    # sin 2 themselves
    bound = (math.log(config.rope_theta) + 4) * UNIT_F32 * position * frequency + 2 * UNIT_F32
    assert ((cos - exact_cos).abs() <= bound).all()
    assert ((sin - exact_sin).abs() <= bound).all()


def test_rope_scaling_stretches_long_wavelengths_only() -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = LaneformerConfig(**{**SMALL, "hidden_size": 64, "rope_scaling": scaling})
    llama = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=64,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **scaling},
    )  # fmt: skip
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.arange(64)
    expected, _ = LlamaRotaryEmbedding(llama)(torch.zeros(1), positions[None])
    cos, _ = rope_table(config, positions)
    # both are float32 of the same formula, in another order: some units of an angle of at most 64
    assert (cos[0, :, 0] - expected[0, :, : config.head_dim // 2]).abs().max() <= 64 * 8 * UNIT_F32
    plain, _ = rope_table(LaneformerConfig(**{**SMALL, "hidden_size": 64}), positions)
    assert (cos - plain).abs().max() > 0.1


def llama_weights(model: Laneformer) -> dict[str, torch.Tensor]:
    """The same weights in Llama's layout: lanes joined, and pairs (2j, 2j+1) of wq and wk moved to
    (j, j + d/2).
    """
    c, own = model.config, model.state_dict()
    rows = lambda w: w.flatten(0, 1)  # noqa: E731  (L, out/L, in) -> (out, in)
    columns = lambda w: w.permute(1, 0, 2).flatten(1)  # noqa: E731  (L, out, in/L) -> (out, in)
    halves = lambda w: rows(w).unflatten(0, (-1, c.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)  # noqa: E731
    head = {"vocab_parallel": rows, "replicate": lambda w: w, "lane": columns}[c.lm_head_type]
    out = {
        "model.embed_tokens.weight": own["tok_embeddings.weight"],
        "model.norm.weight": own["norm.weight"],
        "lm_head.weight": head(own["lm_head.weight"]),
    }
    for i in range(c.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        for name, new, lay in [
            ("attention.wq", "self_attn.q_proj", halves), ("attention.wk", "self_attn.k_proj", halves),
            ("attention.wv", "self_attn.v_proj", rows), ("attention.wo", "self_attn.o_proj", columns),
            ("feed_forward.w1", "mlp.gate_proj", rows), ("feed_forward.w2", "mlp.down_proj", columns),
            ("feed_forward.w3", "mlp.up_proj", rows), ("attention_norm", "input_layernorm", lambda w: w),
            ("ffn_norm", "post_attention_layernorm", lambda w: w),
        ]:  # fmt: skip
            out[f"{theirs}{new}.weight"] = lay(own[f"{ours}{name}.weight"])
    return out


def llama_of(model: Laneformer) -> LlamaForCausalLM:
    c = model.config
    config = LlamaConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads, num_key_value_heads=c.num_key_value_heads, vocab_size=c.vocab_size,
        rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_position_embeddings, tie_word_embeddings=False,
        attn_implementation="sdpa", rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    llama = LlamaForCausalLM(config).double().eval()
    missing = llama.load_state_dict(llama_weights(model), strict=False)
    assert not missing.unexpected_keys
    assert not [key for key in missing.missing_keys if "rotary" not in key]
    if c.pre_norm_lane_agg:  # L equal streams are summed: the norm of L h is that of h with eps / L^2
        llama.model.norm.variance_epsilon = c.norm_eps / c.num_lanes**2
    return llama


def float32_norm_bound(model: Laneformer, ids: torch.Tensor) -> float:
    """How far apart logits can be when the norms are computed in float32, worst case, to first order.

    A float32 RMSNorm of D elements is off by at most (D / 2 + 6) units, relative, in each element: D /
    2 from the sum of D squares under the root, the rest from the casts, squares, the root and the
    product. The logits move by at most the sum over all elements of |d logit / d element| * |element| *
    that; the derivatives are taken in float64, and summed over the lanes, which all hold the same
    stream and so the same error.
    """
    outputs: list[torch.Tensor] = []
    norms = [module for module in model.modules() if isinstance(module, LaneRMSNorm)]
    hooks = [norm.register_forward_hook(lambda *call: outputs.append(call[2])) for norm in norms]
    logits = model(ids)
    for hook in hooks:
        hook.remove()
    unit = (model.config.hidden_size / 2 + 6) * UNIT_F32
    worst = 0.0
    for logit in logits[0, -1]:  # the last position: the most sums behind it
        gradients = torch.autograd.grad(logit, outputs, retain_graph=True)
        moved = sum(
            float((g * x).sum(2).abs().sum().detach()) for g, x in zip(gradients, outputs, strict=True)
        )
        worst = max(worst, unit * moved)
    return worst


@pytest.mark.parametrize("head", HEADS, ids=lambda head: "-".join(map(str, head.values())))
@pytest.mark.parametrize("lanes", [1, 2])
def test_delay_zero_is_llama(head: dict, lanes: int) -> None:
    model = build(num_lanes=lanes, broadcast_delay=0, swa_layers=(), **head)
    llama, ids = llama_of(model), torch.tensor([IDS])
    theirs = llama.model.rotary_emb(torch.zeros(1, dtype=torch.float64), torch.arange(len(IDS))[None])[0]
    half = model.config.head_dim // 2
    # the float32 RoPE tables are the same numbers, so only Llama's float32 norms can differ from
    # our float64 ones
    assert torch.equal(
        rope_table(model.config, torch.arange(len(IDS)))[0][:, :, 0], theirs[..., :half].float()
    )
    with torch.no_grad():
        expected = llama(ids).logits[0, -1]
        difference = float((model(ids)[0, -1] - expected).abs().max())
        windowed = build(num_lanes=lanes, broadcast_delay=0, swa_layers=(0,), **head)
        wrong = float((windowed(ids)[0, -1] - expected).abs().max())
    bound = float32_norm_bound(model, ids)
    assert difference <= bound, (difference, bound)
    assert bound < 1e-3 < wrong  # the bound is tight enough to see one layer's window


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("chunks", [[1] * 10, [3, 1, 4, 2], [6, 4], [4, 6], [9, 1]])
def test_cached_decoding_is_the_full_forward(delay: int, chunks: list[int]) -> None:
    """The window is 4, so every split crosses its edge."""
    model, ids = build(broadcast_delay=delay), torch.tensor([IDS, IDS[::-1]])
    cache = KVCache(model.config.num_hidden_layers)
    with torch.no_grad():
        pieces = [model(part, cache) for part in ids.split(chunks, 1)]
        full = model(ids)
    assert (torch.cat(pieces, 1) - full).abs().max() < FLOAT64_TOLERANCE
    assert cache.length == len(IDS)


def test_causal_mask() -> None:
    q, k = torch.arange(3, 5), torch.arange(5)
    assert causal_mask(q, k, None).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert causal_mask(q, k, 2).int().tolist() == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


@pytest.mark.parametrize("head", HEADS, ids=lambda head: "-".join(map(str, head.values())))
@pytest.mark.parametrize("replicated", [True, False])
@pytest.mark.parametrize("delay", [0, 2, 9])
def test_gradients_reach_every_lane_of_every_parameter(head: dict, replicated: bool, delay: int) -> None:
    model = build(broadcast_delay=delay, replicated_rmsn_scale=replicated, use_early_comm=delay != 9, **head)
    ids = torch.arange(SMALL["vocab_size"])[None]
    torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:]).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert torch.isfinite(p.grad).all(), name
        rows = p.grad[:-1] if name == "tok_embeddings.weight" else p.grad  # the last token is a target only
        slices = rows.flatten(1) if rows.dim() > 1 else rows[:, None]
        assert (slices.abs().sum(1) > 0).all(), name


def test_norm_is_that_of_the_definition() -> None:
    norm = LaneRMSNorm(LaneformerConfig(**SMALL, replicated_rmsn_scale=False)).double()
    x = torch.randn(2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = np.array(
        [rms_norm(x[lane].numpy(), norm.weight.detach().numpy(), lane, norm.eps) for lane in range(2)]
    )
    assert np.abs(norm(x).detach().numpy() - expected).max() < FLOAT64_TOLERANCE


def initialised(seed: int, **overrides: object) -> dict[str, torch.Tensor]:
    model = Laneformer(LaneformerConfig.from_flavor("tiny", **overrides))
    model.init_weights(seed)
    return model.state_dict()


def test_init_is_a_function_of_seed_and_name() -> None:
    first, again, other = initialised(0), initialised(0), initialised(1)
    deeper = initialised(0, num_hidden_layers=7)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert name.endswith("norm.weight") or not torch.equal(value, other[name]), name
    assert torch.equal(first["layers.3.attention.wq.weight"], deeper["layers.3.attention.wq.weight"])
    assert not torch.equal(first["layers.0.attention.wq.weight"], first["layers.1.attention.wq.weight"])


def test_init_has_the_stated_deviations() -> None:
    sigma, layers = 0.02, 6
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    cut = math.sqrt(1 - 6 * density / math.erf(3 / math.sqrt(2)))  # deviation of a normal cut at three sigma
    for name, value in initialised(0).items():
        if name.endswith("norm.weight"):
            assert (value == 1).all(), name
            continue
        stated = sigma / math.sqrt(2 * layers) if name.endswith(("wo.weight", "w2.weight")) else sigma
        # the deviation of n draws is itself off by about 1 / sqrt(2 n); five of those
        assert abs(value.double().std() / (stated * cut) - 1) < 5 / math.sqrt(2 * value.numel()), name
        assert value.abs().max() <= 3 * stated * (1 + UNIT_F32), name


def test_attention_compiles_for_any_length():
    """Where lengths are symbolic, as after a second one, so is every comparison of them."""
    attention = LaneAttention(LaneformerConfig.from_flavor("tiny"), 0)
    compiled = torch.compile(attention.attend, fullgraph=True, dynamic=True, backend="eager")
    for length in (8, 16, 1):
        query, key = torch.randn(2, 8, length, 16), torch.randn(2, 4, length, 16)
        assert torch.equal(compiled(query, key, key, None), attention.attend(query, key, key, None))
