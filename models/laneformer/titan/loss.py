"""Cross-entropy from the streams, with the logits of one chunk of tokens at a time.

    N tokens   L lanes   D hidden   v = V / L, the slice of the vocabulary that a lane scores

The logits of a batch would be the largest tensor of a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..config import LaneformerConfig
from ..lanes import LaneRMSNorm, Lanes
from ..model import LMHead
from .lane_axis import LaneAxis

IGNORE_INDEX = -100  # TorchTitan's, and PyTorch's default
# the 2B model's chunk: 2048 x 32000 logits; enough rows to fill a GPU's matrix units
CHUNK_TOKENS = 2048


def softmax_parts(logits: Tensor, labels: Tensor, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the softmax's log-sum-exps, largest logits, and the labels' logits; each (n,).

    Args:
        logits: (L, n, v), of the vocabulary from id `first` on. A label outside of it has logit 0.
    """
    lanes, count, slice_size = logits.shape
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    max_logit = wide.amax((0, 2))
    logsumexp = (wide - max_logit[None, :, None]).exp().sum((0, 2)).log() + max_logit
    index = labels - first
    is_own = (index >= 0) & (index < lanes * slice_size)
    index = torch.where(is_own, index, 0)
    label_logits = wide[
        index // slice_size, torch.arange(count, device=labels.device), index % slice_size
    ]
    return logsumexp, max_logit, torch.where(is_own, label_logits, 0.0)


def logits_gradient(
    logits: Tensor,
    logsumexp: Tensor,
    labels: Tensor,
    gradient: Tensor,
    z_loss_weight: float = 0.0,
    first: int = 0,
) -> Tensor:
    """Return d loss / d logits (L, n, v) in the logits' dtype.

    Args:
        gradient: Of each token's loss, (n,).
        z_loss_weight: Factor of the squared log-sum-exp in the loss.
        first: First id of the logits' part of the vocabulary.
    """
    lanes, _, slice_size = logits.shape
    wide = logits.to(logsumexp.dtype)
    columns = torch.arange(first, first + lanes * slice_size, device=labels.device).view(
        lanes, 1, slice_size
    )
    one_hot = columns == labels[None, :, None]
    weight = torch.where(labels == IGNORE_INDEX, 0.0, gradient)
    softmax = (wide - logsumexp[None, :, None]).exp()
    if z_loss_weight:
        # the log-sum-exp's gradient is the softmax, too
        softmax = softmax * (1 + 2 * z_loss_weight * logsumexp)[None, :, None]
    return ((softmax - one_hot.to(wide.dtype)) * weight[None, :, None]).to(logits.dtype)


@functools.cache
def _compile(function: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, fullgraph=True) if backend else function


class ChunkedCrossEntropy(torch.autograd.Function):
    """Losses (N,) of streams (N, L, D) under a vocabulary-parallel head (L, v, D); labels int64 (N,).

    Also returns log-sum-exps and largest logits (N,). The losses leave the z-loss out, their gradients
    contain it. With `axis`, streams, head and gradients are those of its lanes; losses are over the whole
    vocabulary.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        labels: Tensor,
        chunk: int,
        backend: str | None,
        z_loss_weight: float = 0.0,
        axis: LaneAxis | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        function = _compile(softmax_parts, backend)
        ctx.first = 0 if axis is None else axis.first * weight.shape[1]
        parts = [
            function(torch.bmm(part.transpose(0, 1), weight.mT), label, ctx.first)
            for part, label in zip(x.split(chunk), labels.split(chunk), strict=True)
        ]
        logsumexps, max_logits, label_logits = (
            torch.cat(chunks) for chunks in zip(*parts, strict=True)
        )
        if axis is not None:
            logsumexps, max_logits, label_logits = axis.combine_softmax(
                logsumexps, max_logits, label_logits
            )
        losses = torch.where(labels == IGNORE_INDEX, 0.0, logsumexps - label_logits)
        ctx.save_for_backward(x, weight, labels, logsumexps)
        ctx.mark_non_differentiable(logsumexps, max_logits)
        ctx.chunk, ctx.backend, ctx.z_loss_weight = chunk, backend, z_loss_weight
        return losses, logsumexps, max_logits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, labels, logsumexps = ctx.saved_tensors
        function = _compile(logits_gradient, ctx.backend)
        x_gradient = torch.empty_like(x)
        # summed over the chunks in float32 at least: in bfloat16 every chunk would round the sum
        # again
        weight_gradient = torch.zeros(weight.shape, dtype=logsumexps.dtype, device=weight.device)
        trains_head, row = ctx.needs_input_grad[1], 0  # a frozen head has no gradient
        for part, label, logsumexp, gradient in zip(
            *(t.split(ctx.chunk) for t in (x, labels, logsumexps, gradients[0])), strict=True
        ):
            rows = part.transpose(0, 1)
            # computed again: the forward pass keeps one number a token
            logits = torch.bmm(rows, weight.mT)
            d_logits = function(logits, logsumexp, label, gradient, ctx.z_loss_weight, ctx.first)
            x_gradient[row : row + len(part)] = torch.bmm(d_logits, weight).transpose(0, 1)
            if trains_head:
                weight_gradient += torch.bmm(d_logits.mT, rows)
            row += len(part)
        d_weight = weight_gradient.to(weight.dtype) if trains_head else None
        return x_gradient, d_weight, None, None, None, None, None


class TitanHead(LMHead):
    """The model's head; with labels it returns losses instead of logits."""

    def __init__(self, config: LaneformerConfig):
        super().__init__(config)
        self.lanes, self.chunk_tokens = Lanes(config.num_lanes), CHUNK_TOKENS
        # set by parallelize when compile.components has "loss"
        self.compile_backend: str | None = None
        self.z_loss_weight = 0.0  # set by the trainer
        # log-sum-exps and largest logits (N,) of the last losses
        self.logit_stats: tuple[Tensor, Tensor] | None = None
        # in evaluation of a model with drafts: likeliest ids (B, S)
        self.likeliest_ids: Tensor | None = None
        self.keeps_likeliest = config.num_nextn_predict_layers > 0

    def forward(
        self,
        h: Tensor,
        norm: LaneRMSNorm | None,
        labels: Tensor | None = None,
        label_count: int | None = None,
    ) -> Tensor:
        """Return logits (B, S, V) of streams (B, S, L, D), or with labels (B, S) the losses (B, S).

        `labels` stand where LMHead takes the embedding: a head that is trained is never tied. One
        method for both, since FSDP gathers the weights for a module's `forward` alone.

        Losses are float32 or wider.

        Args:
            norm: None where the streams are normed.
            label_count: Number of labels that are not ignored, if known, to skip whole chunks of ignored ones.
        """
        assert self.weight is not None, "a model that is trained has a head of its own"
        if norm is not None:
            h = norm(h.sum(2, keepdim=True) if self.sum_before_norm else h)
        axis = self.lanes if isinstance(self.lanes, LaneAxis) else None
        if labels is None:
            assert axis is None, "no rank has all lanes' logits; with labels there are losses"
            return self.score(h, self.weight)
        if self.keeps_likeliest and not self.training:
            self.likeliest_ids = self.likeliest(h.detach())
        (x, weight), targets, rows = self.as_one_product(h, self.weight), labels.flatten(), None
        if label_count is not None:
            count = -(-max(label_count, 1) // self.chunk_tokens) * self.chunk_tokens
            if count < len(targets):
                # the rows with a label first, then ignored ones up to whole chunks: every chunk has the
                # compiled shape
                rows = (targets == IGNORE_INDEX).to(torch.uint8).argsort(stable=True)[:count]
                x, targets = x.index_select(0, rows), targets[rows]
        options = self.chunk_tokens, self.compile_backend, self.z_loss_weight, axis
        parts = ChunkedCrossEntropy.apply(x, weight, targets, *options)
        if rows is not None:
            parts = [part.new_zeros(labels.numel()).index_copy(0, rows, part) for part in parts]
        losses, logsumexps, max_logits = parts
        self.logit_stats = logsumexps.detach(), max_logits.detach()
        return losses.view(labels.shape)

    def as_one_product(self, h: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return x (N, L, D) and weight (L, v, D) of a vocabulary-parallel head with the same logits.

        Heads of the other kinds, which sum over lanes, become one with a single lane.
        """
        x = h.flatten(0, 1)
        if self.kind == "vocab_parallel":
            return x, weight
        if self.kind == "replicate":
            return x.mean(1, keepdim=True), weight[None]
        owned = x.unflatten(-1, (x.shape[1], -1)).diagonal(dim1=1, dim2=2)  # (N, D/L, L)
        return owned.mT.flatten(1)[:, None], weight.transpose(0, 1).flatten(1)[None]

    @torch.no_grad()
    def likeliest(self, x: Tensor) -> Tensor:
        """Return the ids with the largest logits, int64 (B, S), of normed streams (B, S, L, D)."""
        assert self.weight is not None
        rows = x.flatten(0, 1).split(self.chunk_tokens)
        return torch.cat([self.score(part[None], self.weight)[0].argmax(-1) for part in rows]).view(
            x.shape[:2]
        )
