"""The shipped trainer for late layers (`experimental.custom_import = "tools.delay_a_model.spec"`, `[late]`).

Layers below `first_late_layer` stay as they are, so their output is computed once for teacher and student. The
teacher is the dense model's upper layers, the student starts as a copy of them; embedding, final norm and head
are shared and frozen. With `lora_rank` so are the layers' matrices, and what is trained is the adapter. The loss
of a token is KL(teacher || student) of the prediction of the next one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig

from laneformer import LaneformerConfig
from laneformer.hf.export import load_weights
from laneformer.model import LaneAttention, LaneFeedForward, run_layers
from laneformer.titan.attention import TitanAttention
from laneformer.titan.layer import TitanLayer
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from train.spec import SPEC, register

from .adapter import adapt, scales
from .job_config import Late
from .lanes import LateLayer, late_model, late_streams, logits_of, set_shares, shares


@dataclass
class LateArgs(LaneformerArgs):
    late: Late = field(default_factory=Late)
    teacher_dtype: str = "float32"

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        self.late = job_config.late
        self.teacher_dtype = job_config.training.mixed_precision_param
        dense = Path(self.late.dense, "model.json").read_text(encoding="utf-8")
        self.config = LaneformerConfig.from_dict(json.loads(dense))
        super().update_from_config(job_config, **kwargs)


class LateTitanLayer(LateLayer, TitanLayer):
    """The trainer's modules, joined as `LateLayer` does."""


class AdaptedAttention(TitanAttention):
    project = LaneAttention.project  # by calls of the matrices: each has a change of its own


class AdaptedLayer(LateTitanLayer):
    """A layer whose matrices can have changes (adapter.py)."""

    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__(config, layer)
        self.attention, self.feed_forward = AdaptedAttention(config, layer), LaneFeedForward(config)


class LateLaneformer(TitanLaneformer):
    """The student; the teacher stands in a list, so that it is no part of the parameters or of a checkpoint."""

    def __init__(self, model_args: LateArgs):
        super().__init__(model_args)
        self.late, self.teacher_dtype = model_args.late, TORCH_DTYPE_MAP[model_args.teacher_dtype]
        self.teacher: list[nn.Module] = []
        first, depth = self.late.first_late_layer, self.config.num_hidden_layers
        adapted = self.late.first_adapted if self.late.lora_rank else depth
        kinds = (
            [TitanLayer] * first + [LateTitanLayer] * (adapted - first) + [AdaptedLayer] * (depth - adapted)
        )
        self.layers = nn.ModuleList(kind(self.config, i) for i, kind in enumerate(kinds))
        self.requires_grad_(False)
        if self.late.lora_rank:
            self.adapters = adapt({i: self.layers[i] for i in range(adapted, depth)}, self.late.lora_rank)
            for name in scales(self.config, self.late):
                self.get_parameter(name).requires_grad_()
        else:
            self.layers[first:].requires_grad_()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        """TorchTitan's, before a checkpoint is loaded; the teacher is read here, once there is a device."""
        super().init_weights(buffer_device)
        weights = load_weights(Path(self.late.dense, "checkpoint", "step-0"), self.config)
        upper = late_model(self.config, weights).layers[self.late.first_late_layer :]
        self.teacher = list(upper.to(self.norm.weight.device, self.teacher_dtype))

    def begin_step(self, step: int) -> None:
        layers = self.layers[self.late.first_late_layer :]
        now = shares(step, len(layers), self.late.anneal_steps, self.late.layers_at_once)
        set_shares(layers, now)

    def from_embedding(
        self,
        embedding: Tensor,
        rope: tuple[Tensor, Tensor],
        masks: Any,
        labels: Tensor | None,
        trained: int | None,
    ) -> Tensor:
        """Logits (B, S, V), or with labels (B, S) the KL of every token; of a label, only whether it counts matters."""
        first, late = self.late.first_late_layer, self.late
        below, above = masks[:first], masks[first:]
        h, _ = run_layers(self.layers[:first], self.config, embedding, rope, below, share_equal_streams=True)
        logits = logits_of(self, late_streams(self.layers[first:], h, rope, above, late.delay), late.end)
        if labels is None:
            return logits
        with torch.no_grad():
            dense = logits_of(self, late_streams(self.teacher, h, rope, above, 0), late.end)
        denominators = logits.logsumexp(-1)
        head: Any = self.lm_head
        head.seen = denominators.detach().flatten(), logits.detach().amax(-1).flatten()
        guess, truth = logits - denominators[..., None], dense.log_softmax(-1)
        divergence = F.kl_div(guess, truth, reduction="none", log_target=True).sum(-1)
        return torch.where(labels == IGNORE_INDEX, 0.0, divergence)


ARGS = {flavor: LateArgs(config=args.config) for flavor, args in SPEC.model_args.items()}
register(replace(SPEC, model_cls=LateLaneformer, model_args=ARGS))
