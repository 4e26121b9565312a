"""Bytes and FLOPs of a training step as an H100 would run it, from the compiler's own schedule; needs no GPU.

    python -m tools.bench train-traffic --out docs/benchmarks/DATE-train-traffic.md
    python -m tools.bench train-traffic --flavor tiny --batch 2 --seq-len 128

One micro-batch of the job's model, prepared as `train` prepares it (compiled layers and loss, selective checkpointing,
bf16 parameters, FlexAttention where a layer has a window), is lowered forward and backward by Inductor for sm_90; so is
TorchTitan's Llama of the same shape. `tools/bench/sm90.py` says how. Bytes and FLOPs are counted. Times are a model:
they follow from the rates of `RATES`, which are assumptions.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from laneformer.config import LaneformerConfig, flops_per_token
from tools.bench import harness, sm90
from tools.bench.harness import Result
from train.job_config import load_job

FILE_START = """# Traffic of a training step

Each section is one run of its command: bytes and FLOPs of one micro-batch, counted in what Inductor generates for an
H100 (sm_90), and the tokens/s that follow from assumed rates. Nothing ran on a GPU: times are a model. W is the size of
the residual streams of all lanes, in bf16; elementwise kernels include norms and reductions."""


@dataclass(frozen=True)
class Rates:
    """What one H100 is assumed to reach. `head_ms` and `step_ms` are of 16,384 tokens of the 2B model."""

    product_tflops: float
    """Matrix products, where their bytes are not the limit."""
    memory_tb_per_s: float
    """Elementwise kernels, and products whose bytes are the limit; the datasheet says 3.35."""
    attention_tflops: float
    """FlexAttention and flash attention, forward and backward; of the causal and windowed keys alone."""
    head_ms: float
    """Head and loss, whose products are computed twice."""
    step_ms: float
    """Optimizer, and communication that nothing hides."""


RATES = {
    "pessimistic": Rates(480, 2.5, 193, 40, 40),
    "middle": Rates(600, 2.8, 258, 32, 20),
    "optimistic": Rates(680, 3.0, 309, 28, 12),
}
REFERENCE_TOKENS = 16_384


@dataclass(kw_only=True)
class Options(harness.Options):
    """Count what a training step moves and computes on an H100, and model its tokens/s, beside a dense Llama's."""

    flavor: Literal["2b", "300m", "tiny"] = "2b"
    """Model shape."""
    batch: int = 4
    """Sequences of a micro-batch."""
    seq_len: int = 4096
    """Tokens per sequence."""

    def check(self) -> None:
        """ValueError for a shape that cannot be lowered."""
        longest = LaneformerConfig.from_flavor(self.flavor).max_position_embeddings
        if self.batch < 1 or not 2 <= self.seq_len <= longest:
            raise ValueError(f"batch = {self.batch} must be at least 1, seq_len = {self.seq_len} in 2 to {longest}")


def main(arguments: list[str] | None = None) -> None:
    harness.run("train-traffic", Options, measure, section, FILE_START, arguments)


def measure(options: Options, console: Any) -> Result:
    """Both models' layers, totals and tokens/s."""
    options.check()
    config = LaneformerConfig.from_flavor(options.flavor)
    models = {}
    for name, count in {"laneformer": count_laneformer, "llama": count_llama}.items():
        with console.status(f"lowering {name}"):
            models[name] = summary(config, options, layers_of(count(options), config.num_hidden_layers))
    ours, dense = (models[name]["tokens_per_s"] for name in ("laneformer", "llama"))
    return {
        "torch": torch.__version__, "flavor": options.flavor, "batch": options.batch, "seq_len": options.seq_len,
        "wide_bytes": wide_bytes(config, options), "rates": {n: dataclasses.asdict(r) for n, r in RATES.items()},
        "models": models, "ratio": {name: ours[name] / dense[name] for name in RATES},
    }  # fmt: skip


def wide_bytes(config: LaneformerConfig, options: Options) -> int:
    """W: the streams of all lanes in bf16."""
    return 2 * options.batch * options.seq_len * config.num_lanes * config.hidden_size


Passes = tuple[sm90.Graph, sm90.Graph]  # forward and backward


def layers_of(recorder: sm90.Recorder, count: int) -> list[Passes]:
    """Both passes of each layer; a recorder with a single layer stands for all of them."""
    seen = [
        [graph for label, graph in recorder.calls if label == f"layer {index}" and graph.backward == backward]
        for index in range(count)
        for backward in (False, True)
    ]
    if not any(seen[2:]):
        seen = seen[:2] * count
    assert all(len(graphs) == 1 for graphs in seen), "a layer is one graph in each direction"
    return [(forward[0], backward[0]) for forward, backward in zip(seen[::2], seen[1::2], strict=True)]


def summary(config: LaneformerConfig, options: Options, layers: list[Passes]) -> Result:
    """Kinds of layers, sums of a micro-batch, and tokens/s by the model."""
    graphs = [graph for passes in layers for graph in passes]
    elementwise = sum(graph.bytes("elementwise") for graph in graphs)
    products = [kernel for graph in graphs for kernel in graph.kernels if kernel.kind == "product"]
    tokens = options.batch * options.seq_len
    tokens_per_s, times = {}, {}
    for name, rates in RATES.items():
        ms = times[name] = step_ms(config, options, rates, elementwise, products)
        tokens_per_s[name] = 1e3 * tokens / sum(ms.values())
    return {
        "kinds": kinds(layers), "elementwise_bytes": elementwise,
        "product_bytes": sum(kernel.bytes for kernel in products), "flops": sum(graph.flops for graph in graphs),
        "ms": times, "tokens_per_s": tokens_per_s,
    }  # fmt: skip


def kinds(layers: list[Passes]) -> list[Result]:
    """Layers that move and compute the same, together."""
    rows: list[Result] = []
    for index, (forward, backward) in enumerate(layers):
        row = {
            "forward_elementwise_bytes": forward.bytes("elementwise"),
            "backward_elementwise_bytes": backward.bytes("elementwise"),
            "product_bytes": forward.bytes("product") + backward.bytes("product"),
            "attention_bytes": forward.bytes("attention") + backward.bytes("attention"),
            "flops": forward.flops + backward.flops,
            "backward_peak_bytes": backward.peak_bytes,
        }
        same = next((known for known in rows if row.items() <= known.items()), None)
        if same is None:
            rows.append({"layers": [index], **row})
        else:
            same["layers"].append(index)
    return rows


def step_ms(
    config: LaneformerConfig, options: Options, rates: Rates, elementwise: int, products: list[sm90.Kernel]
) -> dict[str, float]:
    """The model: milliseconds of one micro-batch by part, one after the other."""
    tokens, share = options.batch * options.seq_len, config_share(config, options)
    counts = config.parameter_count()
    matrices = counts["total"] - counts["embedding"] - counts["norms"]
    attention = tokens * (flops_per_token(config, options.seq_len) - 6 * matrices)
    product_s = sum(
        max(kernel.flops / rates.product_tflops, kernel.bytes / rates.memory_tb_per_s) for kernel in products
    )
    return {
        "products": product_s / 1e9,
        "elementwise": elementwise / rates.memory_tb_per_s / 1e9,
        "attention": attention / rates.attention_tflops / 1e9,
        "head": rates.head_ms * share,
        "step": rates.step_ms * share,
    }


def config_share(config: LaneformerConfig, options: Options) -> float:
    """Size of this head and micro-batch, as a part of the one that `Rates` speaks of."""
    reference = LaneformerConfig.from_flavor("2b")
    tokens = options.batch * options.seq_len / REFERENCE_TOKENS
    return tokens * config.parameter_count()["lm_head"] / reference.parameter_count()["lm_head"]


# --- counting -----------------------------------------------------------------------------------------------------


def count_laneformer(options: Options) -> sm90.Recorder:
    """Every compiled call of one micro-batch, forward and backward, of the job's own model."""
    from laneformer.titan.parallelize import checkpoint_and_compile

    recorder, job = sm90.Recorder(), shipped_job(options)
    job.compile.backend = recorder.backend

    def step(model: Any, ids: Tensor) -> None:
        checkpoint_and_compile(model, job)
        for index, layer in enumerate(model.layers):
            recorder.label_calls(layer, f"layer {index}")
        recorder.label_calls(model.norm, "norm")
        model(ids, ids).sum().backward()

    on_fake_tensors(job, options, step)
    return recorder


def count_llama(options: Options) -> sm90.Recorder:
    """The same of one layer of TorchTitan's Llama, prepared as TorchTitan does; they are all alike."""
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra import parallelize

    import tools.bench.llama

    one_layer = ("--architecture.num_hidden_layers", "1", "--architecture.swa_layers", "0")
    recorder, job = sm90.Recorder(), shipped_job(options, *one_layer)
    job.model.name, job.compile.backend = tools.bench.llama.NAME, recorder.backend
    saved = parallelize._op_sac_save_list

    def step(model: Any, ids: Tensor) -> None:
        apply_ac(model, job.activation_checkpoint, model_compile_enabled=True, op_sac_save_list=saved)
        (layer,) = model.layers.values()
        layer.compile(backend=recorder.backend, fullgraph=True)
        recorder.label_calls(layer, "layer 0")
        model(ids).sum().backward()

    on_fake_tensors(job, options, step)
    return recorder


def shipped_job(options: Options, *more: str) -> Any:
    """configs/phase1.toml with another shape, and the attention kernel that a GPU would get."""
    return load_job([
        "--job.config_file", str(harness.ROOT / "configs/phase1.toml"), "--model.flavor", options.flavor,
        "--model.attention", "flex", "--training.seq_len", str(options.seq_len), *more,
    ])  # fmt: skip


def on_fake_tensors(job: Any, options: Options, step: Callable[[Any, Tensor], None]) -> None:
    """Build the job's model in its compute dtype and call step(model, ids); no tensor has data."""
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.protocols.train_spec import get_train_spec

    spec = get_train_spec(job.model.name)
    arguments: Any = spec.model_args[job.model.flavor]
    arguments.update_from_config(job)
    dtype = torch.get_default_dtype()
    with FakeTensorMode(), attention_of_a_gpu():
        try:
            torch.set_default_dtype(TORCH_DTYPE_MAP[job.training.mixed_precision_param])
            model = spec.model_cls(arguments)
        finally:
            torch.set_default_dtype(dtype)
        step(model, torch.zeros(options.batch, options.seq_len, dtype=torch.int64))


@contextlib.contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """Fake tensors are on the CPU, whose SDPA is another kernel, and for which FlexAttention has no backward pass."""
    from torch.nn.attention import flex_attention

    def flash(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False, **options: Any) -> Tensor:
        assert is_causal
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True)[0]

    def any_device(*tensors: Tensor) -> None:
        """A function, which Dynamo traces, unlike a mock."""

    with (
        mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", flash),
        mock.patch.object(flex_attention, "_validate_device", any_device),
    ):
        yield


# --- the report ---------------------------------------------------------------------------------------------------


def section(options: Options, result: Result) -> tuple[str, str]:
    """Title and body of one section of a benchmark file."""
    parts = [model_table(name, model, result["wide_bytes"]) for name, model in result["models"].items()]
    rates = [
        [field.name, *(str(result["rates"][name][field.name]) for name in RATES)] for field in dataclasses.fields(Rates)
    ]
    speeds = [
        *([f"{name}, tokens/s", *(f"{model['tokens_per_s'][n]:,.0f}" for n in RATES)]
          for name, model in result["models"].items()),
        ["laneformer / llama", *(f"{result['ratio'][name]:.2f}" for name in RATES)],
        *([f"{part}, ms", *(f"{result['models']['laneformer']['ms'][name][part]:.0f}" for name in RATES)]
          for part in result["models"]["laneformer"]["ms"]["middle"]),
    ]  # fmt: skip
    body = "\n\n".join([
        *parts,
        f"Assumed rates:\n\n{harness.table(['', *RATES], rates)}",
        f"The model, a micro-batch:\n\n{harness.table(['', *RATES], speeds)}",
    ])  # fmt: skip
    shape = f"{result['batch']} x {result['seq_len']} tokens, W = {result['wide_bytes'] / 1e9:.3f} GB"
    return f"`{result['flavor']}`, {shape}, torch {result['torch']}", body


def model_table(name: str, model: Result, wide: int) -> str:
    columns = ["layers", "forward, W", "backward, W", "products, W", "TFLOPs", "backward holds, GB"]
    rows = [
        [", ".join(map(str, kind["layers"])), f"{kind['forward_elementwise_bytes'] / wide:.1f}",
         f"{kind['backward_elementwise_bytes'] / wide:.1f}", f"{kind['product_bytes'] / wide:.1f}",
         f"{kind['flops'] / 1e12:.2f}", f"{kind['backward_peak_bytes'] / 1e9:.2f}"]
        for kind in model["kinds"]
    ]  # fmt: skip
    moved, flops = model["elementwise_bytes"], model["flops"]
    return (
        f"{name}:\n\n{harness.table(columns, rows)}\n\nAll layers: {moved / wide:.0f} W = {moved / 1e9:.0f} GB "
        f"elementwise, {model['product_bytes'] / 1e9:.0f} GB in and out of products, {flops / 1e12:.1f} TFLOPs."
    )


if __name__ == "__main__":
    main()
