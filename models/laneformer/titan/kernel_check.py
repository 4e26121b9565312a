"""At the start of a job: do the kernels that it chose compute what the plain layer does?

A layer of the job's own shapes, prepared as the job prepares its layers (so that Inductor's cache can serve the job
what is compiled here), goes forward and backward with the chosen kernels. The reference is the plain layer,
eager, with SDPA, in the next wider type, with emulated float8 products if the job has such. How far the job's
type may be from it is not guessed: the plain layer in that type shows it. All rows of the micro-batch are
equal, so the reference computes one.

What fails on any rank is replaced on all of them. Which part it was is found by leaving parts out: the first
combination that holds has given up what was wrong.

    B local batch   S sequence   L lanes   D hidden
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import set_default_dtype

from ..config import LaneformerConfig
from ..positions import rope_table
from .attention import training_masks
from .float8 import NAME, use_float8
from .fused_layer import FusedLayer
from .layer import TitanLayer
from .private_torch import forget_compiled

MARGIN = 4.0  # another order of summation changes a rounding error's value, hardly its size
LONGEST = 4096  # positions; SDPA may materialize the scores of one row
WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}
SETTINGS = {
    "compiled": "compile.enable",
    "attention": "model.attention",
    "join_norm": "model.join_norm",
    "float8": NAME,
}
Prepare = Callable[[Any, JobConfig], None]


class Kernels(NamedTuple):
    """What computes a layer."""

    compiled: bool
    attention: str
    join_norm: str
    float8: str = "none"  # or "scaled", or "emulated", which is plain mathematics and no kernel


def plain_like(kernels: Kernels) -> Kernels:
    """The plain layer that computes the same."""
    return Kernels(False, "sdpa", "plain", "none" if kernels.float8 == "none" else "emulated")


def fallbacks(wanted: Kernels) -> Iterator[Kernels]:
    """`wanted`, then with less and less of it; FlexAttention is no kernel unless it is compiled.

    Products that fail in float8 are bfloat16's: to emulate them takes longer than that.
    """
    simplest = plain_like(wanted)
    if wanted.float8 == "scaled":
        simplest = simplest._replace(float8="none")
    choices = [dict.fromkeys((asked, plain)) for asked, plain in zip(wanted, simplest, strict=True)]
    for kernels in map(Kernels._make, itertools.product(*choices)):
        if kernels.compiled or kernels.attention == "sdpa" or not wanted.compiled:
            yield kernels


def with_working_kernels(model: Any, job: JobConfig, prepare: Prepare) -> Any:
    """The (meta) model, or one like it without the kernels that fail here, as `model.fallback` and a warning say.

    prepare: what the job does to a model's layers, `checkpoint_and_compile`. Without a GPU and with the plain
    kernels there is nothing to check. Raises RuntimeError where the plain layer fails as well.
    """
    compiled = job.compile.enable and "model" in job.compile.components
    float8 = "none" if model.float8 is None else "emulated" if model.float8.emulate else "scaled"
    wanted = Kernels(compiled, model.model_args.attention, model.model_args.join_norm, float8)
    plain = plain_like(wanted)
    model.fallback = ""
    on_gpu = torch.cuda.is_available()
    probed = probes(model, job, wanted)
    if wanted == plain or not probed or (wanted[1:] == plain[1:] and not on_gpu):
        return model
    started, first = time.perf_counter(), ""
    device = torch.accelerator.current_accelerator() if on_gpu else None
    check = LayerCheck(model, job, prepare, device or torch.device("cpu"))
    for kernels in fallbacks(wanted):
        found = on_any_rank(check.problem(kernels, probed), check.device)
        if not found:
            break
        logger.warning(f"Kernels {_words(kernels)} fail in one layer: {found}")
        first = first or found
    else:
        raise RuntimeError(f"a layer of this job fails with every kernel, the plain ones included: {first}")
    forget_compiled()  # the job's shapes are the first that its layers see
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
    logger.info(f"Kernels {_words(kernels)} checked in {time.perf_counter() - started:.1f} s")
    if kernels == wanted:
        return model
    given_up = [name for name in Kernels._fields if getattr(kernels, name) != getattr(wanted, name)]
    instead = ", ".join(f"{SETTINGS[name]} = {getattr(kernels, name)}" for name in given_up)
    fallback = (
        f"{_words(wanted)} failed in one layer: {first}; this job trains with {instead} instead, more slowly"
    )
    logger.warning(f"Kernels {fallback}")
    if not kernels.compiled:
        job.compile.components = [part for part in job.compile.components if part != "model"]
    model = check.build(kernels, TORCH_DTYPE_MAP[job.training.dtype])
    model.fallback = fallback
    return model


def _words(kernels: Kernels) -> str:
    named = {name: value for name, value in kernels._asdict().items() if value != "none"}
    return ", ".join(f"{SETTINGS[name]} = {value}" for name, value in named.items())


def probes(model: Any, job: JobConfig, wanted: Kernels) -> list[int]:
    """The layers that use most of the kernels: one with a mask, one that adds delayed outputs; often the same."""
    config: LaneformerConfig = model.config

    def masked(layer: int) -> bool:
        window = config.window(layer)
        inside = window is not None and window < job.training.seq_len
        return wanted.attention != "sdpa" and (inside or job.model.mask_documents)

    def delayed(layer: int) -> int:
        return config.adds_delayed(layer, "attention") + config.adds_delayed(layer, "mlp")

    ours = [i for i, layer in enumerate(model.layers) if type(layer) in (TitanLayer, FusedLayer)]
    keys = (lambda i: (masked(i), delayed(i))), (lambda i: (delayed(i), masked(i)))
    return sorted({max(ours, key=key) for key in keys}) if ours else []


def on_any_rank(problem: str, device: torch.device) -> str:
    """The problem of one rank that has one, equal on all ranks, and its number; "" if none has. One all-reduce."""
    if not dist.is_initialized():
        return problem
    failed = torch.tensor(dist.get_rank() + 1 if problem else 0, device=device)
    dist.all_reduce(failed, dist.ReduceOp.MAX)
    rank, said = int(failed) - 1, [problem]
    if rank < 0:
        return ""
    dist.broadcast_object_list(said, src=rank, device=device)
    return f"{said[0]} (on rank {rank})"


class LayerCheck:
    """One job's layers on this rank's device, by kernels."""

    def __init__(self, model: Any, job: JobConfig, prepare: Prepare, device: torch.device):
        self.model, self.job, self.prepare, self.device = model, job, prepare, device
        self.dtype = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
        self.seq_len = min(job.training.seq_len, LONGEST)
        self.rows = job.training.local_batch_size
        self.truths: dict[tuple[int, Kernels], tuple[dict[str, Tensor], float]] = {}

    def problem(self, kernels: Kernels, layers: list[int]) -> str:
        """Why these kernels cannot be used: an exception, or what is wrong by how much; "" if all is well."""
        try:
            for layer in layers:
                expected, allowed = self.truth(layer, plain_like(kernels))
                errors = relative_errors(self.results(layer, kernels, self.dtype, self.rows), expected)
                name = max(
                    errors, key=lambda each: float("inf") if errors[each] != errors[each] else errors[each]
                )
                if not errors[name] <= allowed:
                    return f"{name} of layer {layer} is off by {errors[name]:.2g}, {allowed:.2g} is allowed"
        except Exception as problem:
            return f"{type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
        return ""

    def truth(self, layer: int, plain: Kernels) -> tuple[dict[str, Tensor], float]:
        """The plain layer's results in the wider type, and the error that is allowed."""
        key = layer, plain
        if key not in self.truths:
            expected = self.results(layer, plain, WIDER[self.dtype], 1)
            rounded = relative_errors(self.results(layer, plain, self.dtype, 1), expected)
            self.truths[key] = expected, MARGIN * max(*rounded.values(), torch.finfo(self.dtype).eps)
        return self.truths[key]

    def build(self, kernels: Kernels, dtype: torch.dtype) -> Any:
        """A model like the job's on the meta device."""
        arguments = dataclasses.replace(
            self.model.model_args, attention=kernels.attention, join_norm=kernels.join_norm
        )
        with torch.device("meta"), set_default_dtype(dtype):
            model = type(self.model)(arguments)
            if kernels.float8 != "none":
                use_float8(
                    model, dataclasses.replace(self.model.float8, emulate=kernels.float8 == "emulated")
                )
        return model

    def results(self, layer: int, kernels: Kernels, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
        """By name: outputs and gradients of the inputs for the first row, gradients of the weights over the rows."""
        model = self.build(kernels, dtype)
        model.layers = nn.ModuleList([model.layers[layer]])
        job = copy.deepcopy(self.job)
        job.compile.enable = kernels.compiled
        if kernels != plain_like(kernels):
            self.prepare(model, job)
        module = model.layers[0].to_empty(device=self.device)
        generator = torch.Generator(self.device).manual_seed(layer)

        def draw(shape: Sequence[int], std: float = 1.0, mean: float = 0.0) -> Tensor:
            drawn = mean + std * torch.randn(*shape, generator=generator, device=self.device)
            return drawn.to(self.dtype).to(dtype)  # the same numbers in the wider type

        with torch.no_grad():
            for name, parameter in module.named_parameters():
                scale = name.endswith("norm.weight")  # scales that are all one would hide a missing one
                std, mean = (0.2, 1.0) if scale else (parameter.shape[-1] ** -0.5, 0.0)
                parameter.copy_(draw(parameter.shape, std, mean))
        inputs = self._inputs(layer, draw, rows)
        outputs = self._forward(module, layer, kernels, inputs)
        gradients = [draw((1, *out.shape[1:])).expand_as(out) for out in outputs.values()]
        torch.autograd.backward(list(outputs.values()), gradients)
        found = {name: out[0].detach() for name, out in outputs.items()}
        found |= {f"the gradient of {name}": x.grad[0] for name, x in inputs.items() if x.grad is not None}
        for name, parameter in module.named_parameters():
            plain = name.replace("_checkpoint_wrapped_module.", "")
            assert parameter.grad is not None, f"{plain} has no gradient"
            found[f"the gradient of {plain}"] = parameter.grad / rows
        return found

    def _inputs(self, layer: int, draw: Callable[..., Tensor], rows: int) -> dict[str, Tensor]:
        """Streams, and the delayed outputs that this layer adds; all rows equal."""
        config: LaneformerConfig = self.model.config
        wide = 1, self.seq_len, config.num_lanes, config.hidden_size
        narrow = 1, self.seq_len, 1, config.hidden_size
        drawn = {"the streams": draw(narrow if config.equal_streams(layer) else wide)}
        for module in ("attention", "mlp"):
            if config.adds_delayed(layer, module):
                drawn[f"delayed {module}"] = draw(wide)
        return {name: x.repeat(rows, 1, 1, 1).requires_grad_() for name, x in drawn.items()}

    def _forward(self, module: nn.Module, layer: int, kernels: Kernels, inputs: dict[str, Tensor]) -> Any:
        config: LaneformerConfig = self.model.config
        h = inputs["the streams"]
        ids = torch.zeros(h.shape[:2], dtype=torch.int64, device=self.device)
        documents = None
        if self.job.model.mask_documents:  # two, of unequal length
            documents = ids + (torch.arange(self.seq_len, device=self.device) >= self.seq_len // 3)
        mask = training_masks(config, ids, kernels.attention, documents)[layer]
        rope = rope_table(config, torch.arange(self.seq_len, device=self.device))
        delayed = inputs.get("delayed attention"), inputs.get("delayed mlp")
        streams, partials = module(h, delayed, rope, mask)
        outputs = {
            "the streams": streams,
            "the attention's output": partials[0],
            "the MLP's output": partials[1],
        }
        return {name: out for name, out in outputs.items() if out is not None}


def relative_errors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference of each tensor, in units of its largest element."""
    assert found.keys() == expected.keys(), f"results {sorted(found)} where {sorted(expected)} are expected"
    return {
        name: float((found[name].to(wide.dtype) - wide).abs().max() / wide.abs().max())
        for name, wide in expected.items()
    }
