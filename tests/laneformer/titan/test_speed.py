"""Masks, kernels, checkpointing and compile change the cost of a step, never what it computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from laneformer import LaneformerConfig
from laneformer.config import BOS
from laneformer.titan import LaneformerArgs, TitanLaneformer
from laneformer.titan.parallelize import apply_selective_checkpointing, keeps
from tools.plan import sums as plan_sums

# a windowed layer and a full one; the second receives the first one's outputs, delayed
CONFIG = LaneformerConfig.from_flavor(
    "tiny", hidden_size=64, intermediate_size=256, num_hidden_layers=2, num_lanes=8, num_attention_heads=8,
    num_key_value_heads=8, sliding_window=24, swa_layers=(0,), broadcast_delay=1, use_early_comm=False, vocab_size=512,
)  # fmt: skip
SEQ_LEN = 64


def build(kind: str = "sdpa", mask_documents: bool = False) -> TitanLaneformer:
    model = TitanLaneformer(LaneformerArgs(config=CONFIG, attention=kind, mask_documents=mask_documents))
    model.init_weights()
    return model


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(3, 512, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens[:, :-1], tokens[:, 1:])


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_is_sdpa(tokens: torch.Tensor) -> None:
    """Forward only: PyTorch has no backward of FlexAttention on CPUs. The same sums in another order."""
    tokens = tokens.clone()
    tokens[0, 20] = tokens[1, 40] = BOS
    rounding = 100 * torch.finfo(torch.float32).eps
    for documents in (False, True):
        plain = losses(build("sdpa", documents), tokens)
        assert (losses(build("flex", documents), tokens) - plain).abs().max() < rounding * plain.max()
    narrower = build("flex")
    narrower.config = dataclasses.replace(CONFIG, sliding_window=CONFIG.sliding_window - 1)
    assert (losses(narrower, tokens) - losses(build(), tokens)).abs().max() > 1e3 * rounding


def test_a_document_does_not_see_the_one_before(tokens: torch.Tensor) -> None:
    first, second = tokens.clone(), tokens.clone()
    for batch in (first, second):
        batch[:, 30] = BOS
    second[:, :30] = second[:, :30].flip(1)
    masked, open_ = build(mask_documents=True), build()
    after = slice(30, None)
    assert torch.equal(losses(masked, first)[:, after], losses(masked, second)[:, after])
    assert not torch.equal(losses(open_, first)[:, after], losses(open_, second)[:, after])


def test_checkpointing_keeps_what_is_narrow() -> None:
    """Of a layer's matrices the 2B model keeps five products, and computes the two that fan in again."""
    layer_shapes = LaneformerConfig()
    d, f, lanes = layer_shapes.hidden_size, layer_shapes.intermediate_size, layer_shapes.num_lanes
    kv = layer_shapes.head_dim * layer_shapes.num_key_value_heads
    inner_outer = {"wq": (d, d // lanes), "wk": (d, kv // lanes), "w1": (d, f // lanes), "wo": (d // lanes, d),
                   "w2": (f // lanes, d)}  # fmt: skip
    kept = {
        name: keeps(torch.ops.aten.bmm.default, torch.empty(lanes, 1, a, device="meta"),
                    torch.empty(lanes, a, b, device="meta"))
        for name, (a, b) in inner_outer.items()
    }  # fmt: skip
    assert kept == {"wq": True, "wk": True, "w1": True, "wo": False, "w2": False}
    assert not keeps(torch.ops.aten.mul.Tensor, torch.empty(1))


def step(model: TitanLaneformer, tokens: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    found = model(tokens[:, :-1], tokens[:, 1:])
    found.sum().backward()
    gradients = {n.replace("_checkpoint_wrapped_module.", ""): p.grad for n, p in model.named_parameters()}
    return found.detach(), gradients


def kept_values_per_token(model: TitanLaneformer, tokens: torch.Tensor) -> float:
    """Distinct float32 values, per token, that autograd keeps of the layers (not of embedding, norm and head)."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, torch.Tensor] = {}

    def hold(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    handle = model.lm_head.register_forward_pre_hook(stop)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t), pytest.raises(Stop):
        model(tokens[:, :-1], tokens[:, 1:])
    handle.remove()
    return sum(t.untyped_storage().nbytes() for t in held.values()) / 4 / tokens[:, 1:].numel()


@pytest.mark.slow
def test_compiled_is_eager_and_keeps_what_the_plan_says(tokens: torch.Tensor) -> None:
    """Layers, last norm and loss compiled by inductor under selective checkpointing, as the 2B configs do."""
    eager, compiled = build(), build()
    apply_selective_checkpointing(compiled)
    for module in (*compiled.layers, compiled.norm):
        module.compile(fullgraph=True)
    compiled.lm_head.compile_backend = "inductor"
    wanted, wanted_gradients = step(eager, tokens)
    found, gradients = step(compiled, tokens)
    rounding = 100 * torch.finfo(torch.float32).eps  # fused kernels sum in another order, layer after layer
    assert (found - wanted).abs().max() < rounding * wanted.max()
    for name, gradient in wanted_gradients.items():
        assert (gradients[name] - gradient).abs().max() < rounding * gradient.abs().max(), name

    job = plan_sums.Job(config=CONFIG, seq_len=SEQ_LEN, steps=1, global_batch=2, local_batch=2, shard=1, replicate=1,
                        checkpointing="selective", reshard=True, checkpoint_interval=1, keep_latest=1,
                        keep_every=0)  # fmt: skip
    planned = sum(plan_sums.kept_per_token(job, i) for i in range(CONFIG.num_hidden_layers))
    # besides what the plan counts: a softmax denominator a head, and per sequence the mask, rope and token ids
    extra = CONFIG.num_hidden_layers * CONFIG.num_attention_heads + SEQ_LEN + 4 * CONFIG.head_dim
    assert planned <= kept_values_per_token(compiled, tokens) <= planned + extra
    wide = CONFIG.num_lanes * CONFIG.hidden_size
    assert extra < wide / 2, "one stream more in a layer would be seen"
