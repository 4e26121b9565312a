"""Lanes on several ranks: the lanes as an axis of a training job's mesh (TorchTitan's "tp").

The rank that owns a lane has its keys, values, heads, MLP rows and stream, which divides a sequence's
activations by the ranks. Ranks exchange only sums of partial outputs.

    B batch   S sequence   L lanes of this rank   D hidden   N tokens (B*S)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from ..config import LaneformerConfig
from ..lanes import LaneLinear, LaneRMSNorm, Lanes
from ..model import LMHead
from .private_torch import start_reduction, wait_for_reduction

OPTION = "parallelism.tensor_parallel_degree"


class _Start(torch.autograd.Function):
    """Start an all-reduce; the backward pass waits for the one that `_Arrive`'s backward started."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return start_reduction(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return wait_for_reduction(gradient), None


class _Arrive(torch.autograd.Function):
    """Wait for the all-reduce of `_Start`; nothing else may read its tensor before."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, group: str) -> Tensor:
        ctx.group = group
        return wait_for_reduction(started)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return start_reduction(gradient, ctx.group), None


class LaneAxis(Lanes):
    """This rank's lanes among those of a one-dimensional mesh."""

    def __init__(self, total: int, mesh: DeviceMesh):
        super().__init__(total)
        self.here = total // mesh.size()
        self.first = mesh.get_local_rank() * self.here
        self.group = mesh.get_group().group_name

    def sum(self, partial: Tensor) -> Tensor:
        return _Arrive.apply(_Start.apply(_sum_own_lanes(partial), self.group), self.group)

    # the sum starts when the partial outputs exist and is received `broadcast_delay` layers later;
    # in the backward pass the gradients' sum has as long
    def send(self, partial: Tensor) -> Any:
        return partial, _Start.apply(_sum_own_lanes(partial), self.group)

    def receive(self, in_flight: Any, first_only: bool = False) -> Tensor:
        partial, reduction = in_flight
        return _Arrive.apply(reduction, self.group) - (partial[:, :, :1] if first_only else partial)

    def combine_softmax(
        self, logsumexps: Tensor, max_logits: Tensor, label_logits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Combine values (N,) of this rank's part of the vocabulary into those of all of it.

        Returns:
            Log-sum-exp, largest logit, and the label's logit (in `label_logits` 0 where it is another rank's).
        """
        max_logit = wait_for_reduction(start_reduction(max_logits, self.group, "max"))
        sums = torch.stack([(logsumexps - max_logit).exp(), label_logits])
        denominator, label_logit = wait_for_reduction(start_reduction(sums, self.group))
        return denominator.log() + max_logit, max_logit, label_logit


def _sum_own_lanes(partial: Tensor) -> Tensor:
    return partial if partial.shape[2] == 1 else partial.sum(2, keepdim=True)


def check_lane_axis(config: LaneformerConfig, job_config: Any) -> None:
    """Raise ValueError where a job's lanes cannot be spread over several ranks."""
    degree, lanes = job_config.parallelism.tensor_parallel_degree, config.num_lanes
    if degree == 1:
        return
    if lanes % degree:
        choices = ", ".join(str(n) for n in range(1, lanes + 1) if lanes % n == 0)
        raise ValueError(
            f"{OPTION} = {degree} does not divide num_lanes = {lanes}; choose from {choices}"
        )
    kernels = "plain" if job_config.model.join_norm == "auto" else job_config.model.join_norm
    requirements: dict[str, tuple[Any, Any, str]] = {
        "lm_head_type": (
            config.lm_head_type,
            "vocab_parallel",
            "every other head needs all lanes' streams in one place",
        ),
        "num_nextn_predict_layers": (
            config.num_nextn_predict_layers,
            0,
            "train the head that drafts afterwards",
        ),
        "model.join_norm": (
            kernels,
            "plain",
            "the kernels need all lanes; set join_norm = 'plain'",
        ),
        "model.converters": (job_config.model.converters, [], "float8 products are of all lanes"),
    }
    for name, (value, required, why) in requirements.items():
        if value != required:
            raise ValueError(
                f"{OPTION} = {degree} is not possible with {name} = {value!r}: {why}; or set {OPTION} = 1"
            )


def shard_lanes(model: Any, mesh: DeviceMesh) -> None:
    """Let a model of all lanes compute this rank's alone, in place.

    Parameters become DTensors, which checkpoints, optimizer and FSDP read; the model's own code
    computes with plain tensors. So from here on

    1. every parameter NAME is a DTensor, cut along its lane axis or replicated;
    2. `module.NAME` no longer is the parameter but `module.local_NAME` (`redirect_to_local`);
    3. before each forward pass, after FSDP has gathered the parameters, a hook sets `local_NAME`
       (`localize_before_forward`, called by parallelize once the layers are compiled).
    """
    axis = LaneAxis(model.config.num_lanes, mesh)
    for module in model.modules():
        if isinstance(getattr(module, "lanes", None), Lanes):
            module.lanes = axis
        for name, parameter in list(module.named_parameters(recurse=False)):
            # what has a lane axis is cut along it, the rest is on every rank
            placement = Shard(0) if is_owned_by_lanes(module, parameter) else Replicate()
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(shard, requires_grad=parameter.requires_grad)
            )
            redirect_to_local(module, name)


def is_owned_by_lanes(module: nn.Module, parameter: Tensor) -> bool:
    return isinstance(module, LaneLinear | LMHead) or (
        isinstance(module, LaneRMSNorm) and parameter.dim() == 2
    )


def redirect_to_local(module: nn.Module, name: str) -> None:
    """Let reading `module.name` give `local_name`: by a subclass, as the parameter itself is an attribute."""
    kind, local = type(module), f"local_{name}"
    module.__class__ = type(
        f"Local{kind.__name__}", (kind,), {name: property(lambda module: getattr(module, local))}
    )


def localize_before_forward(*units: nn.Module) -> None:
    """Before each forward pass of a unit, set `local_NAME` of its modules: this rank's part, a plain tensor."""
    for unit in units:
        # outside of compiled code, whose backward pass could not keep a mesh
        unit.register_forward_pre_hook(torch.compiler.disable(_localize))


def _localize(unit: nn.Module, inputs: Any) -> None:
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            assert isinstance(parameter, DTensor), f"{name} is on no mesh"
            (placement,) = parameter.placements
            # a rank has the whole gradient of what it alone owns (a lane's stream, partial output and
            # matrices). Of what all ranks have (embedding, sums, equal streams, norm scales) it has
            # its own lanes' part: a sum's backward pass, or FSDP for parameters, adds the parts
            gradient = placement if placement.is_shard() else Partial()
            # not by setattr, which takes it for a parameter
            vars(module)[f"local_{name}"] = parameter.to_local(grad_placements=[gradient])
