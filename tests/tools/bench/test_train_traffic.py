"""Bytes of a training step: counted as by hand, and held; every graph of the shipped model
becomes code for sm_90.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses import FakeTensorMode

from laneformer import LaneformerConfig
from laneformer.titan.float8 import RECIPES, quantize, scaled_product
from tools.bench import harness, sm90, train_traffic
from tools.bench.__main__ import main
from tools.cards import INPUTS
from tools.plan import speed, sums

JOBS = ("configs/*.toml", "tools/cards.toml")  # what the shipped jobs and the cards say

OPTIONS = train_traffic.Options()
CONFIG = LaneformerConfig.from_flavor(OPTIONS.flavor)
W = 2 * OPTIONS.batch * OPTIONS.seq_len * CONFIG.num_lanes * CONFIG.hidden_size
ROWS, WIDE = 256, 512
E4M3 = torch.float8_e4m3fn
ONE = 2 * ROWS * WIDE  # bytes of a (ROWS, WIDE) tensor in bf16


def lowered(function, *inputs: tuple[int, ...]) -> list[sm90.Kernel]:
    """The kernels of a compiled function of bf16 tensors of these shapes."""
    recorder = sm90.Recorder()
    torch._dynamo.reset()
    with FakeTensorMode(), torch.no_grad():
        tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in inputs]
        torch.compile(function, backend=recorder.backend, fullgraph=True)(*tensors)
    return [kernel for _, graph in recorder.calls for kernel in graph.kernels]


def norm(x: Tensor) -> Tensor:
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True))).bfloat16()


@torch.library.custom_op("tests::opaque", mutates_args=())
def opaque(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    raise NotImplementedError


@opaque.register_fake
def _(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0])


@pytest.mark.parametrize(
    ("function", "shapes", "streams"),
    [
        (lambda x, y: x + y, [(ROWS, WIDE)] * 2, 3),
        (
            lambda x, y: ((x + y).relu() * y, x - y),
            [(ROWS, WIDE)] * 2,
            4,
        ),  # one kernel: two read, two written
        (norm, [(ROWS, WIDE)], 2),  # twice read, once from memory
        (
            lambda x: x[:, : WIDE // 2] + 1,
            [(ROWS, WIDE)],
            1,
        ),  # half of what it reads from, half as much written
        (lambda x: x.expand(ROWS, WIDE) + 1, [(1, WIDE)], 1 + 1 / ROWS),  # a broadcast row is read once
        (opaque, [(ROWS, WIDE)] * 2, 3 + 1 / WIDE),  # an operation that the compiler cannot look into
    ],
    ids=["add", "fused", "norm", "slice", "broadcast", "opaque"],
)
def test_elementwise_bytes_by_hand(function, shapes: list[tuple[int, ...]], streams: float) -> None:
    kernels = lowered(function, *shapes)
    assert {kernel.kind for kernel in kernels} == {"elementwise"}
    assert sum(kernel.bytes for kernel in kernels) == streams * ONE


def test_products_by_hand() -> None:
    kernels = lowered(lambda x, w: torch.bmm(x.expand(4, -1, -1), w).relu(), (1, ROWS, WIDE), (4, WIDE, 64))
    product, relu = kernels
    result = 2 * 4 * ROWS * 64
    assert (product.kind, product.flops) == ("product", 2 * 4 * ROWS * WIDE * 64)
    assert product.bytes == ONE + 2 * 4 * WIDE * 64 + result, "a broadcast operand is read once"
    assert (relu.kind, relu.bytes) == ("elementwise", 2 * result)


def test_float8_products_by_hand() -> None:
    """Each operand is read once, in bf16, for its scales and its values."""
    recipe = RECIPES["rowwise"]

    def product(x: Tensor, w: Tensor) -> Tensor:
        scales = recipe.scale(x, E4M3), recipe.scale(w, E4M3)
        values = (quantize(each, scale, E4M3) for each, scale in zip((x, w), scales, strict=True))
        return scaled_product(*values, *scales, torch.bfloat16, True, False)

    kernels = lowered(product, (4, ROWS, WIDE), (4, 64, WIDE))
    (found,) = (kernel for kernel in kernels if kernel.kind == "float8")
    assert found.flops == 2 * 4 * ROWS * WIDE * 64
    rows = 4 * (ROWS + 64)
    assert found.bytes == rows * (WIDE + 4) + 2 * 4 * ROWS * 64, "values and scales once, and the result"
    made = sum(kernel.bytes for kernel in kernels if kernel.kind == "elementwise")
    assert made == rows * (2 * WIDE + WIDE + 4), "one kernel for scale and values of each operand"


@triton.jit
def doubled(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, 2 * tl.load(x + at))


def test_a_kernel_of_the_models_own_counts_as_elementwise() -> None:
    @torch.library.triton_op("tests::doubled", mutates_args=())
    def double(x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        torch.library.wrap_triton(doubled)[(x.numel() // 256,)](x, y, 256)
        return y

    kernels = lowered(double, (ROWS, WIDE))
    assert [(kernel.kind, kernel.bytes) for kernel in kernels] == [("elementwise", 2 * ONE)]


@pytest.mark.rotate
@pytest.mark.parametrize("recipe", ["none", "rowwise"])
def test_the_command(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    two_layers = ("--architecture.num_hidden_layers", "2", "--architecture.swa_layers", "0")
    count = train_traffic.count
    monkeypatch.setattr(train_traffic, "count", lambda options, *more: count(options, *more, *two_layers))
    out = tmp_path / "traffic.md"
    shape = ["--flavor", "tiny", "--batch", "1", "--seq-len", "64", "--float8", recipe]
    main(["train-traffic", *shape, "--json", "--out", str(out)])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    ours, dense = result["models"]["laneformer"], result["models"]["dense"]
    assert (
        ours["flops"]
        == dense["flops"]
        == 6 * 64 * 2 * LaneformerConfig.from_flavor("tiny").parameter_count()["layer"]
    )
    assert ours["elementwise_bytes"] > 0
    in_float8 = 0 if recipe == "none" else 6 * 64 * 2 * 3 * 128 * 512
    assert ours["float8_flops"] == dense["float8_flops"] == in_float8
    assert ours["tokens_per_s"]["pessimistic"] < ours["tokens_per_s"]["optimistic"]
    said = out.read_text()
    assert "Assumed rates" in said
    assert "lane tax" in said


# --- the shipped model
# ----------------------------------------------------------------------------------------------

# Streams (W, of all lanes, in bf16) that the elementwise kernels of a layer move, forward and backward:
# what docs/benchmarks holds. Another pass over the streams would cost a layer at least one W, so half of
# one is the margin.
STREAMS = {
    **dict.fromkeys((0, 1), (4.3, 7.3)),  # one stream stands for all lanes
    2: (9.0, 16.5),
    3: (11.7, 18.9),
    **dict.fromkeys(range(4, 13), (13.7, 20.9)),
    **dict.fromkeys((13, 14), (13.7, 16.9)),  # their partials go nowhere else
}
MARGIN = 0.5


@pytest.fixture(scope="module")
def shipped() -> sm90.Recorder:
    """One micro-batch of configs/phase1.toml, and one of its validation."""
    return train_traffic.count(OPTIONS, validate=True)


@pytest.mark.proof(*JOBS)
def test_every_graph_of_the_shipped_job_becomes_triton_code(shipped: sm90.Recorder) -> None:
    """fullgraph is the trainer's; what Inductor cannot lower raises."""
    labels = [label for label, _ in shipped.calls]
    assert set(labels) == {f"layer {i}" for i in STREAMS} | {""}, "layers; besides them, norm and loss"
    for label in set(labels) - {""}:
        passes = [graph.backward for name, graph in shipped.calls if name == label]
        assert passes == [False, True, False], "forward, backward, validation"
    for _, graph in shipped.calls:
        assert "async_compile.triton" in graph.code
        assert "cc=90" in graph.code


@pytest.mark.proof(*JOBS)
def test_a_step_moves_no_more_bytes_than_it_did(shipped: sm90.Recorder) -> None:
    for layer, (forward, backward) in enumerate(train_traffic.layers_of(shipped)):
        moved = [graph.bytes("elementwise") / W for graph in (forward, backward)]
        limits = [streams + MARGIN for streams in STREAMS[layer]]
        assert all(m <= limit for m, limit in zip(moved, limits, strict=True)), (
            f"layer {layer} moves {moved} W, forward and backward; it did {STREAMS[layer]}"
        )


@pytest.fixture(scope="module")
def in_float8() -> sm90.Recorder:
    return train_traffic.count(OPTIONS, *harness.float8_flags("rowwise"))


@pytest.mark.proof(*JOBS)
@pytest.mark.parametrize("gpu", ["h100", "h200"])
@pytest.mark.parametrize("float8", ["", "rowwise"])
def test_the_plan_knows_what_was_counted(request: pytest.FixtureRequest, float8: str, gpu: str) -> None:
    recorder: sm90.Recorder = request.getfixturevalue("in_float8" if float8 else "shipped")
    options = dataclasses.replace(OPTIONS, gpu=gpu)
    counted = train_traffic.summary(options, train_traffic.layers_of(recorder))
    job = sums.Job(
        config=CONFIG, seq_len=OPTIONS.seq_len, steps=1, global_batch=OPTIONS.batch, local_batch=OPTIONS.batch,
        shard=1, float8=float8,
    )  # fmt: skip
    held = sums.memory(job)["kept_activations"] + sums.WIDE_IN_BACKWARD[float8] * W
    assert counted["peak_bytes"] <= held <= counted["peak_bytes"] + MARGIN * W
    modelled = speed.tokens_per_s(CONFIG, OPTIONS.batch, OPTIONS.seq_len, INPUTS.card(gpu), float8)
    for name, rate in counted["tokens_per_s"].items():
        assert modelled[name] == pytest.approx(rate, rel=0.02), "the plan does not know the bytes of products"
