"""What torch.compile would run on an H100, seen without one: Inductor's kernels for sm_90, and
the bytes of each.

A model's own forward and backward pass runs on fake tensors, which have shapes and no data, through Dynamo,
AOTAutograd and its partitioner as in training. These tensors are on the CPU, since autograd of a build
without CUDA has no CUDA device. Each graph moves to a fake CUDA device before it enters Inductor, which fuses
and writes Triton code for an H100's properties. Nothing is compiled further, and nothing is executed.

The bytes of a kernel are the scheduler's: of every buffer that it reads or writes, what it touches,
once. A kernel that reads a buffer twice is taken to find it in the cache; values that stay in
registers are not buffers.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tools.cards import INPUTS

CUDA = torch.device("cuda", 0)
CARD = INPUTS.card("h100")
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=CARD.multiprocessors,
    total_memory=int(CARD.memory_bytes), warp_size=CARD.warp_threads,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, max_threads_per_block=1024,
    shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=CARD.shared_kib * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10, L2_cache_size=50 * 2**20, gcnArchName="",
)  # fmt: skip
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
FLOAT8_PRODUCT = "laneformer.scaled_product"


@dataclass(frozen=True)
class Kernel:
    """One launch: bytes read and written in device memory, and the FLOPs of a matrix product."""

    name: str
    kind: str  # "elementwise" (Triton, with reductions), "product" or "float8" (cuBLAS), or "attention"
    bytes: int
    flops: int = 0


@dataclass
class Graph:
    """One graph that Inductor lowered."""

    backward: bool
    kernels: list[Kernel] = field(default_factory=list)
    peak_bytes: int = (
        0  # held at once of what it allocates, outputs included, less what it has freed of its inputs
    )
    incoming_bytes: int = 0  # gradients that enter a backward pass
    kept_bytes: int = 0  # what a backward pass needs from the forward pass, parameters excluded
    code: str = ""

    def bytes(self, kind: str) -> int:
        return sum(kernel.bytes for kernel in self.kernels if kernel.kind == kind)

    @property
    def flops(self) -> int:
        return sum(kernel.flops for kernel in self.kernels)


class Recorder:
    """A backend of torch.compile that lowers every graph and records each of its calls under the
    label of that time.
    """

    def __init__(self) -> None:
        self.label = ""
        self.calls: list[tuple[str, Graph]] = []

    def label_calls(self, module: Any, label: str) -> None:
        """Record what the compiled `module` runs under `label`, its backward pass too."""
        compiled = module._compiled_call_impl

        def call(*arguments: Any, **options: Any) -> Any:
            self.label = label
            try:
                return compiled(*arguments, **options)
            finally:
                self.label = ""

        module._compiled_call_impl = call

    def backend(self, module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Give this to torch.compile; the compiled function returns tensors of the
        right shapes, without data.
        """
        from torch._inductor.compile_fx import compile_fx

        weights = {f"primals_{i + 1}" for i, t in enumerate(inputs) if isinstance(t, torch.nn.Parameter)}
        labels: list[str] = []  # the backward passes of a graph that layers share come in the opposite order

        def lower_one(
            module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any
        ) -> Callable[[list[Any]], list[Any]]:
            graph = lower(module, inputs, weights, **options)
            outputs = next(iter(module.graph.find_nodes(op="output"))).args[0]
            values = [node.meta["val"] if isinstance(node, torch.fx.Node) else node for node in outputs]

            def run(arguments: list[Any]) -> list[Any]:
                arguments.clear()
                label = labels.pop() if graph.backward else self.label
                if not graph.backward:
                    labels.append(label)
                self.calls.append((label, graph))
                return [_empty_like(v, v.device) if isinstance(v, Tensor) else v for v in values]

            run._boxed_call = True  # type: ignore[attr-defined]
            return run

        inner: Any = lower_one
        compiled: Any = compile_fx(module, inputs, inner_compile=inner)
        return compiled


def lower(module: torch.fx.GraphModule, inputs: Sequence[Any], weights: set[str], **options: Any) -> Graph:
    """Inductor's schedule and code of an AOTAutograd graph, on a fake H100.

    `weights`: names of inputs that are parameters. `options`: those of compile_fx_inner.
    """
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.graph import GraphLowering

    graph = Graph(backward=options.get("is_backward", False))

    def stop_here(self: GraphLowering) -> SimpleNamespace:
        graph.code = self.codegen()[0].value
        graph.kernels = list(filter(None, map(_kernel, self.scheduler.nodes)))
        entering = {name: _bytes(buffer) for name, buffer in self.graph_inputs.items() if name not in weights}
        graph.incoming_bytes = sum(size for name, size in entering.items() if name.startswith("tangents"))
        graph.kept_bytes = sum(entering.values()) - graph.incoming_bytes
        graph.peak_bytes = _peak_bytes(self, graph.code, entering)
        return SimpleNamespace(call=None, __file__="")

    module = copy.deepcopy(module)  # Inductor's passes change it, and AOTAutograd still needs its own
    with _fake_h100(), mock.patch.object(GraphLowering, "compile_to_module", stop_here):
        compile_fx_inner(module, _move_to_cuda(module, inputs), **options)
    return graph


def _move_to_cuda(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Change the devices of a graph, in place, and return inputs to match."""
    from torch._guards import detect_fake_mode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    for node in module.graph.nodes:
        node.args, node.kwargs = torch.fx.node.map_aggregate(
            (node.args, node.kwargs), lambda value: CUDA if isinstance(value, torch.device) else value
        )
    mode = detect_fake_mode(inputs)
    assert mode is not None, "AOTAutograd traces fake tensors"
    with mode:
        moved = [_empty_like(value, CUDA) if isinstance(value, Tensor) else value for value in inputs]
    FakeTensorProp(module, mode).propagate_dont_convert_inputs(*moved)
    module.recompile()
    return moved


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


# --- what the scheduler knows of a kernel
# -------------------------------------------------------------------------


def _kernel(node: Any) -> Kernel | None:
    """What one node of Inductor's schedule launches; None for what was optimized away."""
    from torch._inductor import ir, scheduler

    if isinstance(node, scheduler.NopKernelSchedulerNode):
        return None
    if not node.is_extern():  # a template is FlexAttention's
        return Kernel(node.get_name(), "attention" if node.is_template() else "elementwise", _touched(node))
    call = node.node
    if isinstance(call, ir.MultiOutput):  # one result of the call that it names
        kind = _kind(call.inputs[0])
        return None if kind == "float8" else Kernel(node.get_name(), kind, _bytes(call))
    # a library's kernel, or one of the model's own: its operands and its result, each once
    operands = [operand for operand in call.inputs if isinstance(operand, ir.IRNode)]
    results = [] if isinstance(call.layout, ir.NoneLayout | ir.MultiOutputLayout) else [call]
    kind = _kind(call)
    if kind == "float8":
        # those that Inductor names apart belong to the call, too: their bytes may hide behind the FLOPs
        results = call.outputs or results
    size = sum(map(_bytes, [*operands, *results]))
    flops = 0
    if kind == "product":
        flops = 2 * _numel(call) * _int(operands[-1].get_size()[-2])
    elif kind == "float8":  # of (N, M, K) and (N, O, K)
        flops = 2 * _numel(operands[0]) * _int(operands[1].get_size()[-2])
    return Kernel(_operation(call), kind, size, flops)


def _operation(call: Any) -> str:
    return str(call.python_kernel_name or call.op_overload)


def _kind(call: Any) -> str:
    name = _operation(call)
    if name.removeprefix("extern_kernels.") in PRODUCTS:
        return "product"
    if FLOAT8_PRODUCT in name:
        return "float8"
    return "attention" if "attention" in name else "elementwise"


def _touched(node: Any) -> int:
    """Bytes that a Triton kernel touches in device memory; what it consumes of its own
    results does not count.
    """
    from torch._inductor.virtualized import V

    gone = V.graph.removed_buffers | V.graph.inplaced_to_remove
    written = {dep.name for dep in node.read_writes.writes}
    touched: Counter[str] = Counter()
    for dep in {
        *node.read_writes.writes,
        *(dep for dep in node.read_writes.reads if dep.name not in written),
    }:
        if dep.name not in gone and V.graph.try_get_buffer(dep.name) is not None:
            touched[dep.name] += dep.numbytes_hint()
    return sum(min(size, _bytes(V.graph.try_get_buffer(name))) for name, size in touched.items())


def _numel(buffer: Any) -> int:
    """Elements in memory: a broadcast axis, of stride 0, has one."""
    stride = buffer.maybe_get_stride() or [1] * len(buffer.get_size())
    return math.prod(_int(size) for size, step in zip(buffer.get_size(), stride, strict=True) if step != 0)


def _int(size: Any) -> int:
    from torch._inductor.virtualized import V

    return int(V.graph.sizevars.optimization_hint(size))


def _bytes(buffer: Any) -> int:
    is_tensor = hasattr(buffer, "has_tensor_output") and buffer.has_tensor_output()
    return _numel(buffer) * buffer.get_dtype().itemsize if is_tensor else 0


ALLOCATE = re.compile(r"\s+(buf\d+) = (?:empty_strided|torch\.ops|buf\d+\[)")
REUSE = re.compile(r"\s+(buf\d+) = .*; del (\w+)  # reuse")
FREE = re.compile(r"\s+del (\w+)$")


def _peak_bytes(graph: Any, code: str, inputs: dict[str, int]) -> int:
    """What a graph holds at most beyond `inputs`, which it frees, read off the lines of its code in order."""
    held, peak = dict(inputs), 0
    for line in code.splitlines():
        if found := REUSE.match(line):
            held[found[1]] = held.pop(found[2], 0)
        elif found := FREE.match(line):
            held.pop(found[1], None)
        elif found := ALLOCATE.match(line):
            held[found[1]] = _bytes(graph.try_get_buffer(found[1]))
        peak = max(peak, sum(held.values()))
    return peak - sum(inputs.values())


# --- the fake device
# ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _fake_h100() -> Iterator[None]:
    """PyTorch, Inductor and Triton see one H100, whatever the machine has."""
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor import config, scheduler
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    flex: Any = importlib.import_module(
        "torch._higher_order_ops.flex_attention"
    )  # its package hides the module
    permute, state = flex._permute_strides, torch.zeros(16, dtype=torch.uint8)

    asked = SimpleNamespace(  # what Triton asks of a driver before it compiles
        get_current_target=lambda: GPUTarget("cuda", 10 * H100.major + H100.minor, H100.warp_size),
        get_current_device=lambda: 0, get_active_torch_device=lambda: CUDA,
    )  # fmt: skip

    def properties(device: Any = None) -> Any:
        return H100

    def permute_strides(out: Tensor, strides: tuple[int, ...]) -> Tensor:
        # its copy_ would enter the device
        return _empty_like(permute(_empty_like(out, torch.device("cpu")), strides), out.device)

    fakes: dict[str, Any] = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_properties": properties, "get_device_capability": lambda device=None: (H100.major, H100.minor),
        "synchronize": lambda device=None: None, "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0, "get_rng_state": lambda device=None: state,
        "set_rng_state": lambda new, device=None: None,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        for owner in (CudaInterface, CudaInterface.Worker):
            stack.enter_context(mock.patch.object(owner, "get_device_properties", staticmethod(properties)))
        stack.enter_context(mock.patch.object(scheduler, "has_triton", return_value=True))
        stack.enter_context(mock.patch.object(flex, "_permute_strides", permute_strides))
        stack.enter_context(mock.patch.object(driver, "_active", asked))
        stack.enter_context(config.patch(force_disable_caches=True, compile_threads=1))
        yield
