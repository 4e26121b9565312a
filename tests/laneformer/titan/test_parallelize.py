"""Tests that checkpointing and compile change a step's cost but not its result, and of equal shards."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition, nop
from torch._dynamo.backends.common import aot_autograd

from laneformer import Laneformer, LaneformerConfig
from laneformer.titan import layer as layer_module
from laneformer.titan.parallelize import apply_selective_checkpointing, shard_dimension
from laneformer.titan.products import lower_keep_to_nothing
from tests.laneformer.titan.titan_assets import (
    ROUNDING,
    SHAPE,
    build,
    draw_tokens,
    largest_difference,
    train,
)
from tools.plan import sums as plan_sums

CONFIG = LaneformerConfig.from_flavor("tiny", **SHAPE)
SEQ_LEN = 64


@pytest.fixture(scope="module")
def tokens():
    return draw_tokens(CONFIG, SEQ_LEN)


def count_saved_values(model, tokens) -> float:
    """Return the distinct float32 values per token that autograd saves in the layers."""
    # not those of the embedding, last norm and head
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tensors = {}

    def hold(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            tensors[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    class Stop(Exception):
        pass

    def stop(*_):
        raise Stop

    handle = model.lm_head.register_forward_pre_hook(stop)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t), pytest.raises(Stop):
        model(tokens[:, :-1], tokens[:, 1:])
    handle.remove()
    return sum(t.untyped_storage().nbytes() for t in tensors.values()) / 4 / tokens[:, 1:].numel()


@pytest.mark.proof
@pytest.mark.parametrize("early", [False, True])
def test_compiled_is_eager_and_keeps_what_the_plan_says(tokens, early):
    # layers, last norm and loss compiled by Inductor under selective checkpointing, as in the 2B
    # configs; early: the first layer's streams are equal in all lanes
    torch._dynamo.reset()
    config = dataclasses.replace(CONFIG, use_early_comm=early)
    eager, compiled = build(config), build(config)
    apply_selective_checkpointing(compiled)
    for module in (*compiled.layers, compiled.norm):
        module.compile(fullgraph=True)
    lower_keep_to_nothing()
    compiled.lm_head.compile_backend = "inductor"
    assert largest_difference(train(compiled, tokens), train(eager, tokens)) < ROUNDING

    job = plan_sums.Job(
        config=config,
        seq_len=SEQ_LEN,
        steps=1,
        global_batch=2,
        local_batch=2,
        shard=1,
        replicate=1,
        checkpointing="selective",
        reshard=True,
        checkpoint_interval=1,
        keep_latest=1,
        keep_every=0,
    )
    planned = sum(plan_sums.count_kept_values(job, i) for i in range(CONFIG.num_hidden_layers))
    # besides what the plan counts: a softmax denominator a head, and per sequence the mask, rope
    # and token ids
    extra = CONFIG.num_hidden_layers * CONFIG.num_attention_heads + SEQ_LEN + 4 * CONFIG.head_dim
    assert planned <= count_saved_values(compiled, tokens) <= planned + extra
    wide = CONFIG.num_lanes * CONFIG.hidden_size
    assert extra < wide / 2, "one stream more in a layer would be seen"


def backward_products(model, tokens) -> list[int]:
    """Return the matrix products in each layer's backward graph after partitioning, last layer first."""
    products = (torch.ops.aten.bmm.default, torch.ops.aten.mm.default)
    torch._dynamo.reset()
    counts = []

    def count(graph, _):
        counts.append(sum(node.target in products for node in graph.graph.nodes))
        return make_boxed_func(graph)

    apply_selective_checkpointing(model)
    backend = aot_autograd(
        fw_compiler=nop, bw_compiler=count, partition_fn=min_cut_rematerialization_partition
    )
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    train(model, tokens)
    return counts


@pytest.mark.job
def test_no_product_is_computed_twice(tokens, monkeypatch):
    # each of a layer's four products needs two for its gradients; wo is recomputed where the
    # streams are not saved
    # a layer of equal streams, and one of lanes
    config = dataclasses.replace(CONFIG, use_early_comm=True)
    assert backward_products(build(config), tokens) == [8, 8]
    monkeypatch.setattr(layer_module, "keep", lambda x: x)
    assert backward_products(build(config), tokens) == [9, 9]


def test_every_rank_gets_an_equal_part_of_every_tensor():
    # eight shards have one lane each; 32,000 rows are no multiple of 192, so they are split along
    # the hidden axis
    with torch.device("meta"):
        model = Laneformer(LaneformerConfig.from_flavor("2b"))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    lane_matrices = [name for name, shape in shapes.items() if len(shape) == 3]
    assert len(lane_matrices) == 15 * 7 + 1
    for degree in (8, 16, 192):
        cuts = {name: shard_dimension(shape, degree) for name, shape in shapes.items()}
        for name, dimension in cuts.items():
            assert shapes[name][dimension] % degree == 0, (
                f"{name} is cut unevenly along {dimension}"
            )
        assert all(cuts[name] == 0 for name in lane_matrices) == (degree == 8)
