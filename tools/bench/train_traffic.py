"""Bytes and FLOPs of a training step as an H100 would run it, from the compiler's own schedule; needs no GPU.

    python -m tools.bench train-traffic --out docs/benchmarks/DATE-train-traffic.md
    python -m tools.bench train-traffic --flavor tiny --batch 2 --seq-len 128

One micro-batch of the job's model, prepared as `train` prepares it (compiled layers and loss, selective
checkpointing, bf16 parameters, FlexAttention where a layer has a window), is lowered forward and backward by
Inductor for sm_90; so is a dense Llama of the same shape, which is the same model with one lane.
`tools/bench/sm90.py` says how. Bytes and FLOPs are counted. Times are a model: they follow from the rates of
[training] in tools/cards.toml, which are assumptions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from laneformer.config import LaneformerConfig
from laneformer.flops import flops_per_token
from tools.bench import harness, sm90
from tools.bench.harness import Recipe, Result
from tools.cards import CASES, INPUTS
from tools.markdown import table
from tools.plan.speed import step_ms
from tools.plan.sums import DATASHEET
from train.job_config import load_job

FILE_START = """# Traffic of a training step

Each section is one run of its command: bytes and FLOPs of one micro-batch, counted in what Inductor generates for an
H100 (sm_90), and the tokens/s that follow from assumed rates. Nothing ran on a GPU: times are a model. W is the size of
the residual streams of all lanes, in bf16; elementwise kernels include norms and reductions."""

RATES = [name for name in INPUTS.rows if name.startswith("training.")]
PRODUCTS = ("product", "float8")
DENSE = ("--architecture.num_lanes", "1", "--architecture.broadcast_delay", "0")


@dataclass(kw_only=True)
class Options(harness.Options):
    """Count what a training step moves and computes on an H100, and model its tokens/s,
    beside a dense Llama's.
    """

    flavor: Literal["2b", "300m", "tiny"] = "2b"
    """Model shape."""
    batch: int = 4
    """Sequences of a micro-batch."""
    seq_len: int = 4096
    """Tokens per sequence."""
    float8: Recipe = "none"
    """Recipe of float8 products for w1, w2 and w3, in both models."""
    gpu: str = "h100"
    """GPU of the modelled times: h100, h200, a100 or another card of tools/cards.toml. Kernels are an H100's."""

    def check(self) -> None:
        """ValueError for a shape that cannot be lowered."""
        longest = LaneformerConfig.from_flavor(self.flavor).max_position_embeddings
        harness.check_at_least(self, batch=1, seq_len=2)
        if self.seq_len > longest:
            raise ValueError(f"seq_len = {self.seq_len} exceeds the {longest} positions of {self.flavor}")
        INPUTS.card(self.gpu, *DATASHEET)


def measure(options: Options, console: Any) -> Result:
    """Both models' layers, totals and tokens/s."""
    options.check()
    models, float8 = {}, harness.float8_flags(options.float8)
    for name, more in {"laneformer": (), "dense": DENSE}.items():
        with console.status(f"lowering {name}"):
            models[name] = summary(options, layers_of(count(options, *more, *float8)))
    ours, dense = (models[name]["tokens_per_s"] for name in models)
    config = LaneformerConfig.from_flavor(options.flavor)
    flops, peak = flops_per_token(config, options.seq_len), INPUTS.card(options.gpu).peak_flops
    return {
        "torch": torch.__version__, "flavor": options.flavor, "batch": options.batch, "seq_len": options.seq_len,
        "float8": options.float8, "gpu": options.gpu,
        "wide_bytes": 2 * options.batch * options.seq_len * config.num_lanes * config.hidden_size,
        "rates": {name: {case: INPUTS.at(name, case) for case in CASES} for name in RATES},
        "models": models, "ratio": {name: ours[name] / dense[name] for name in CASES},
        "mfu_percent": {
            name: {case: 100 * rate * flops / peak for case, rate in model["tokens_per_s"].items()}
            for name, model in models.items()
        },
    }  # fmt: skip


Passes = tuple[sm90.Graph, sm90.Graph]  # forward and backward


def layers_of(recorder: sm90.Recorder) -> list[Passes]:
    """Both passes of each layer, in order."""
    graphs: dict[str, list[sm90.Graph]] = {}
    for label, graph in recorder.calls:
        if label:
            graphs.setdefault(label, []).append(graph)
    layers = [(each[0], each[1]) for each in graphs.values()]  # a validation comes after them
    assert all(second.backward > first.backward for first, second in layers), "one graph in each direction"
    return layers


def summary(options: Options, layers: list[Passes]) -> Result:
    """Kinds of layers, sums of a micro-batch, and tokens/s by the model."""
    graphs = [graph for passes in layers for graph in passes]
    products = [
        (k.flops, k.bytes, k.kind == "float8")
        for graph in graphs
        for k in graph.kernels
        if k.kind in PRODUCTS
    ]
    moved = sum(graph.bytes("elementwise") for graph in graphs)
    config, card = LaneformerConfig.from_flavor(options.flavor), INPUTS.card(options.gpu)
    batch, seq_len = options.batch, options.seq_len
    ms = {case: step_ms(config, batch, seq_len, card, case, moved, products) for case in CASES}
    return {
        "kinds": kinds(layers), "elementwise_bytes": moved, "product_bytes": sum(size for _, size, _ in products),
        "flops": sum(flops for flops, *_ in products),
        "float8_flops": sum(flops for flops, _, float8 in products if float8),
        "peak_bytes": peak_bytes(layers, config.broadcast_delay),
        "ms": ms, "tokens_per_s": {name: 1e3 * batch * seq_len / sum(parts.values()) for name, parts in ms.items()},
    }  # fmt: skip


def peak_bytes(layers: list[Passes], delay: int) -> int:
    """The most that the layers' backward passes hold: kept activations, gradients on their way, temporaries."""
    kept = [backward.kept_bytes for _, backward in layers]
    incoming = [backward.incoming_bytes for _, backward in layers]
    held = []
    for i, (_, backward) in enumerate(layers):
        # of the last layer only the streams have a gradient; those of earlier partials wait for their layers
        waiting = sum(max(size - incoming[-1], 0) for size in incoming[max(i - delay + 1, 0) : i])
        held.append(sum(kept[: i + 1]) + incoming[i] + waiting + backward.peak_bytes)
    return max(held)


def kinds(layers: list[Passes]) -> list[Result]:
    """Layers that move and compute the same, together."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, (forward, backward) in enumerate(layers):
        row = {
            "forward_elementwise_bytes": forward.bytes("elementwise"),
            "backward_elementwise_bytes": backward.bytes("elementwise"),
            "product_bytes": sum(graph.bytes(kind) for graph in (forward, backward) for kind in PRODUCTS),
            "attention_bytes": forward.bytes("attention") + backward.bytes("attention"),
            "flops": forward.flops + backward.flops,
            "backward_peak_bytes": backward.peak_bytes,
        }
        alike.setdefault(tuple(row.items()), []).append(index)
    return [{"layers": found, **dict(row)} for row, found in alike.items()]


# --- counting
# -----------------------------------------------------------------------------------------------------


def count(options: Options, *more: str, validate: bool = False) -> sm90.Recorder:
    """Every compiled call of one micro-batch of the shipped job, forward and backward, and of its validation.

    `more`: further flags of `train`. No tensor has data.
    """
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.protocols.train_spec import get_train_spec
    from torchtitan.tools.utils import set_default_dtype

    from laneformer.titan.float8 import float8_of, use_float8
    from laneformer.titan.parallelize import checkpoint_and_compile

    recorder, job = sm90.Recorder(), load_job([
        "--job.config_file", str(harness.ROOT / "configs/phase1.toml"), "--model.flavor", options.flavor,
        "--training.seq_len", str(options.seq_len), *more,
    ])  # fmt: skip
    job.compile.backend = recorder.backend
    spec, dtype = get_train_spec(job.model.name), TORCH_DTYPE_MAP[job.training.mixed_precision_param]
    arguments: Any = spec.model_args[job.model.flavor]
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        arguments.update_from_config(job)  # chooses the kernels of a GPU
    torch._dynamo.reset()
    with FakeTensorMode(), attention_of_a_gpu():
        with set_default_dtype(dtype):  # as FSDP casts the parameters
            model: Any = spec.model_cls(arguments)
            if float8 := float8_of(job):
                use_float8(model, float8)
        checkpoint_and_compile(model, job)
        for index, layer in enumerate(model.layers):
            recorder.label_calls(layer, f"layer {index}")
        ids = torch.zeros(options.batch, options.seq_len, dtype=torch.int64)
        model(ids, ids).sum().backward()
        if validate:
            with torch.no_grad():
                model(ids, ids)
    return recorder


@contextlib.contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """Fake tensors are on the CPU, whose SDPA is another kernel, and for which FlexAttention
    has no backward pass.
    """
    from torch.nn.attention import flex_attention

    def flash(
        query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, **options: Any
    ) -> Tensor:
        assert is_causal
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]

    def any_device(*tensors: Tensor) -> None:
        """A function, which Dynamo traces, unlike a mock."""

    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", flash),
        mock.patch.object(flex_attention, "_validate_device", any_device),
    ):
        yield


# --- the report
# ---------------------------------------------------------------------------------------------------


def section(options: Options, result: Result) -> tuple[str, str]:
    """Title and body of one section of a benchmark file."""
    parts = [model_table(name, model, result["wide_bytes"]) for name, model in result["models"].items()]
    models = result["models"]
    parts_ms = models["laneformer"]["ms"]
    speeds = {f"{name}, tokens/s": model["tokens_per_s"] for name, model in models.items()}
    speeds |= {
        f"{name}, MFU in the bf16 peak, %": {case: f"{share:.1f}" for case, share in shares.items()}
        for name, shares in result["mfu_percent"].items()
    }
    speeds["lane tax, % of dense"] = {case: f"{100 * (1 - r):.1f}" for case, r in result["ratio"].items()}
    speeds |= {f"{part}, ms": {case: parts_ms[case][part] for case in CASES} for part in parts_ms["central"]}
    for title, rows in {
        "Assumed rates": result["rates"],
        f"The model of one {result['gpu']}": speeds,
    }.items():
        cells = [[name, *by_case.values()] for name, by_case in rows.items()]
        parts.append(f"{title}:\n\n{table(['', *CASES], cells)}")
    body = "\n\n".join(parts)
    shape = f"{result['batch']} x {result['seq_len']} tokens, W = {result['wide_bytes'] / 1e9:.3f} GB"
    float8 = "" if result["float8"] == "none" else f", float8 {result['float8']} for w1, w2, w3"
    return f"`{result['flavor']}`{float8}, {shape}, torch {result['torch']}", body


def model_table(name: str, model: Result, wide: int) -> str:
    columns = ["layers", "forward, W", "backward, W", "products, W", "TFLOPs", "backward holds, GB"]
    rows = [
        [", ".join(map(str, kind["layers"])), f"{kind['forward_elementwise_bytes'] / wide:.1f}",
         f"{kind['backward_elementwise_bytes'] / wide:.1f}", f"{kind['product_bytes'] / wide:.1f}",
         f"{kind['flops'] / 1e12:.2f}", f"{kind['backward_peak_bytes'] / 1e9:.2f}"]
        for kind in model["kinds"]
    ]  # fmt: skip
    moved, products, held = (model[key] / 1e9 for key in ("elementwise_bytes", "product_bytes", "peak_bytes"))
    return (
        f"{name}:\n\n{table(columns, rows)}\n\nAll layers: {1e9 * moved / wide:.0f} W = {moved:.0f} GB "
        f"elementwise, {products:.0f} GB in and out of products, {model['flops'] / 1e12:.1f} TFLOPs. What backward "
        f"passes need at once, kept activations included: {held:.1f} GB."
    )
