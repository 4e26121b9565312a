"""Set the shipped trainer up for late layers (`experimental.custom_import = "tools.delay_a_model.spec"`).

The teacher is the dense model's layers from `first_late_layer` of `[late]` on, the student starts
as a copy; all else is shared and frozen, with `lora_rank` the layers' matrices too. The loss of a
token is KL(teacher || student).
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
from torchtitan.config import JobConfig

from laneformer import LaneformerConfig
from laneformer.hf.export import load_weights
from laneformer.model import LaneAttention, LaneFeedForward, run_layers
from laneformer.titan.attention import TitanAttention
from laneformer.titan.layer import TitanLayer
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from train.spec import SPEC, register

from .adapter import SCALES, adapt, names_in_late_layers
from .job_config import Late
from .lanes import LateLayer, late_model, late_streams, logits_of, shares


@dataclass
class LateArgs(LaneformerArgs):
    late: Late = field(default_factory=Late)

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        self.late = job_config.late
        dense = Path(self.late.dense, "model.json").read_text(encoding="utf-8")
        self.config = LaneformerConfig.from_dict(json.loads(dense))
        super().update_from_config(job_config, **kwargs)


class CallingAttention(TitanAttention):
    # by calls of the matrices: each can have a change of its own
    project = LaneAttention.project


class LateTitanLayer(LateLayer, TitanLayer):
    """The trainer's modules, joined as `LateLayer` does; their matrices can have changes."""

    def __init__(self, config: LaneformerConfig, layer: int):
        super().__init__(config, layer)
        self.attention, self.feed_forward = CallingAttention(config, layer), LaneFeedForward(config)


class LateLaneformer(TitanLaneformer):
    """The student; a list hides the teacher from the parameters and checkpoints."""

    def __init__(self, model_args: LateArgs):
        super().__init__(model_args)
        self.late = model_args.late
        self.teacher: list[nn.Module] = []
        first = self.late.first_late_layer
        for i in range(self.config.num_hidden_layers):
            self.layers[i] = (TitanLayer if i < first else LateTitanLayer)(self.config, i)
        # first everything is frozen, then what is trained is freed
        self.requires_grad_(False)
        if self.late.lora_rank:
            self.adapters = adapt(self, self.late)
            for name in names_in_late_layers(self.config, self.late, SCALES):
                self.get_parameter(name).requires_grad_()
        else:
            self.layers[first:].requires_grad_()

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        """Initialise as TorchTitan does, before a checkpoint is loaded, and read the teacher."""
        super().init_weights(buffer_device)
        # here, as there is a device now
        weights = load_weights(Path(self.late.dense, "checkpoint", "step-0"), self.config)
        teacher = late_model(self.config, weights).layers[self.late.first_late_layer :]
        self.teacher = list(teacher.to(self.norm.weight.device))

    def begin_step(self, step: int) -> None:
        layers = self.layers[self.late.first_late_layer :]
        late_shares = shares(step, len(layers), self.late.anneal_steps)
        layer: Any
        for layer, share in zip(layers, late_shares, strict=True):
            layer.late = share

    def from_embedding(
        self, embedding: Tensor, cos_sin: Any, masks: Any, labels: Tensor | None, *unused: Any
    ) -> Tensor:
        """Return logits (B, S, V), or with labels (B, S) the KL of every token.

        Of a label, only whether it counts matters.
        """
        first, late = self.late.first_late_layer, self.late
        lower, upper, above = self.layers[:first], self.layers[first:], masks[first:]
        # frozen, so computed once for teacher and student
        h, _ = run_layers(
            lower, self.config, embedding, cos_sin, masks[:first], share_equal_streams=True
        )
        logits = logits_of(self, late_streams(upper, h, cos_sin, above, late.delay), late.flush)
        if labels is None:
            return logits
        with torch.no_grad():
            # in place, so that it is done once
            teacher = [layer.to(h.dtype) for layer in self.teacher]
            dense = logits_of(self, late_streams(teacher, h, cos_sin, above, 0), late.flush)
        logsumexps = logits.logsumexp(-1)
        head: Any = self.lm_head
        # the trainer's diagnostics read the largest logit and log-sum-exps from here
        head.logit_stats = logsumexps.detach().flatten(), logits.detach().amax(-1).flatten()
        guess, truth = logits - logsumexps[..., None], dense.log_softmax(-1)
        divergence = F.kl_div(guess, truth, reduction="none", log_target=True).sum(-1)
        return torch.where(labels == IGNORE_INDEX, 0.0, divergence)


ARGS = {flavor: LateArgs(config=args.config) for flavor, args in SPEC.model_args.items()}
register(replace(SPEC, model_cls=LateLaneformer, model_args=ARGS))
