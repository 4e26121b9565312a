"""Training of the head for multi-token prediction: inputs, labels, loss and acceptance.

    B batch   S sequence   L lanes   D hidden   K steps, the tokens drafted after the next one

Step k at position t gets the tokens up to t+k and predicts token t+k+1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from ..config import LaneformerConfig
from ..model import deliver, run_layers
from ..mtp import draft_mask
from ..positions import rope_table
from .attention import document_blocks
from .loss import IGNORE_INDEX

VALIDATED_STEPS = 3  # positions whose acceptance is measured, whatever the number trained


@dataclass
class DraftTraining:
    steps: int = 1
    loss_weight: float = 0.3
    final_loss_weight: float = 0.1
    lower_at_step: int = 0
    freeze_base: bool = False

    @classmethod
    def of(cls, job_config: Any, config: LaneformerConfig) -> DraftTraining:
        """Read the job's section; raise ValueError without a head to train, or with a draft vocabulary."""
        section = job_config.mtp
        if section.freeze_base and not config.num_nextn_predict_layers:
            raise ValueError(
                "mtp.freeze_base = true leaves nothing to train without a head; set "
                "architecture.num_nextn_predict_layers = 1"
            )
        if config.draft_vocab_size:
            raise ValueError(
                f"draft_vocab_size = {config.draft_vocab_size} is chosen when a model is exported "
                "(python -m tools.export_hf --draft-vocab-size N); the head is trained on all tokens: use 0"
            )
        total = job_config.lr_scheduler.total_steps or job_config.training.steps
        lower_at = round(section.lower_at * total)
        return cls(
            section.steps,
            section.loss_weight,
            section.final_loss_weight,
            lower_at,
            section.freeze_base,
        )

    def weight(self, step: int) -> float:
        return self.loss_weight if step <= self.lower_at_step else self.final_loss_weight


@dataclass
class Drafted:
    """Results of the head's last forward pass, without gradients."""

    losses: Tensor  # (K, B, S), 0 where ignored
    labels: Tensor  # (K, B, S)
    # (K, B, S) bool, in validation: drafts 1 to k are the model's own choices
    accepted: Tensor | None


def losses_with_drafts(
    model: Any,
    embedding: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    masks: list[Any],
    labels: Tensor,
    label_count: int | None,
    documents: Tensor | None,
    attention_documents: Tensor | None,
) -> Tensor:
    """Return the model's losses (B, S) with the drafts' weighted gradients; fill `model.drafted`.

    Args:
        masks: One a layer, the head's last.
        documents: Of each token, (B, S).
        attention_documents: The same where attention is restricted to documents.
    """
    training, config, head = model.model_args.mtp, model.config, model.lm_head
    steps = training.steps if model.training else VALIDATED_STEPS
    # a frozen base keeps nothing for the backward pass
    with torch.set_grad_enabled(torch.is_grad_enabled() and not training.freeze_base):
        h, tail = run_layers(
            model.layers, config, embedding, cos_sin, masks[:-1], share_equal_streams=True
        )
        losses = head(h.expand(-1, -1, config.num_lanes, -1), model.norm, labels, label_count)
        delivered = deliver(h, tail, config)
    logit_stats, likeliest_ids = head.logit_stats, head.likeliest_ids
    positions = torch.arange(labels.shape[1], device=labels.device)
    ropes = [cos_sin, *(rope_table(config, positions + step) for step in range(1, steps))]
    later = [
        step_mask(step, positions, masks[-1], attention_documents) for step in range(2, steps + 1)
    ]
    outputs = model.mtp(delivered, embedding, ropes, [masks[-1], *later])
    targets = torch.stack(
        [step_labels(labels, documents, model.model_args.bos_id, k) for k in range(1, steps + 1)]
    )
    count = None if label_count is None else steps * label_count
    drafts = head(torch.cat(outputs), None, targets.flatten(0, 1), count).view(targets.shape)
    accepted = (
        None
        if model.training
        else count_accepted(likeliest_ids, head.likeliest_ids.view(targets.shape))
    )
    head.logit_stats = logit_stats  # diagnostics are about the model's own logits
    model.drafted = Drafted(drafts.detach(), targets, accepted)
    weighted_drafts = model.draft_weight * drafts.sum(0)
    # the drafts' value cancels, their gradient does not
    return losses + weighted_drafts - weighted_drafts.detach()


def step_labels(labels: Tensor, documents: Tensor | None, bos_id: int | None, step: int) -> Tensor:
    """Return the labels of step k, from the model's labels (B, S).

    Args:
        documents: Of the tokens, (B, S); None if not known.
    """
    # k places earlier; labels past the window's end or of another document are ignored
    targets = labels.roll(-step, 1)
    targets[:, -step:] = IGNORE_INDEX
    if documents is None:
        return targets
    begins_document = torch.eq(labels[:, -1:], -1 if bos_id is None else bos_id)
    next_document = documents[:, -1:] + begins_document.to(documents.dtype)
    label_documents = torch.cat([documents[:, 1:], next_document], 1).roll(-step, 1)
    return torch.where(label_documents == documents, targets, IGNORE_INDEX)


def step_mask(
    step: int, positions: Tensor, first: Any, documents: Tensor | None
) -> Tensor | BlockMask:
    """Return step k's mask (S, k S), k at least 2."""
    if isinstance(first, BlockMask) and documents is not None:
        return document_blocks(documents, step=step)
    visible = draft_mask(len(positions), step, positions.device)
    if documents is None:
        return visible
    return visible & (documents[:, None, :, None] == documents.repeat(1, step)[:, None, None, :])


def count_accepted(likeliest_ids: Tensor, drafted: Tensor) -> Tensor:
    """Return whether steps 1 to k agree with the model, (K, B, S).

    Args:
        likeliest_ids: Likeliest ids by the model, (B, S).
        drafted: By each step, (K, B, S).
    """
    agree = torch.stack([ids == likeliest_ids.roll(-k, 1) for k, ids in enumerate(drafted, 1)])
    return agree.cumprod(0).bool()
