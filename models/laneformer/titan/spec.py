"""The Laneformer as a TorchTitan model: arguments by flavor, FLOPs for MFU, construction, init.

B batch   S sequence   D hidden   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchtitan.config import JobConfig
from torchtitan.protocols.model import BaseModelArgs

from ..config import FLAVORS, MTP, LaneformerConfig
from ..flops import flops_per_token
from ..initialization import init_parameter
from ..lanes import Lanes
from ..model import Laneformer, run_layers
from ..positions import rope_table
from ..supports import refuse_unsupported
from .attention import document_ids, training_masks
from .float8 import Float8, check_shapes, float8_of
from .fused_layer import FusedLayer
from .lane_axis import check_lane_axis
from .layer import TitanLayer
from .loss import TitanHead
from .mtp import Drafted, DraftTraining, losses_with_drafts


@dataclass
class LaneformerArgs(BaseModelArgs):
    config: LaneformerConfig = field(default_factory=LaneformerConfig)
    init_seed: int = 0
    attention: str = "sdpa"
    join_norm: str = "plain"
    mask_documents: bool = False
    # the id that begins a document, which `mask_documents` needs; the data says which it is
    bos_id: int | None = None
    mtp: DraftTraining = field(default_factory=DraftTraining)

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        section = vars(job_config.architecture)
        overrides = {key: value for key, value in section.items() if value is not None}
        self.config = LaneformerConfig.from_dict({**self.config.to_dict(), **overrides})
        refuse_unsupported(self.config, "training")
        self.init_seed = job_config.debug.seed or 0
        self.attention = choose_attention(job_config)
        check_lane_axis(self.config, job_config)
        self.join_norm = choose_join_norm(job_config)
        self.mask_documents = job_config.model.mask_documents
        self.mtp = DraftTraining.of(job_config, self.config)
        longest = self.config.max_position_embeddings
        if job_config.training.seq_len > longest:
            raise ValueError(
                f"training.seq_len = {job_config.training.seq_len} exceeds max_position_embeddings = {longest} "
                f"of flavor {job_config.model.flavor!r}; use at most {longest}"
            )
        if float8_of(job_config) is not None:
            check_shapes(
                self.config, job_config.training.local_batch_size * job_config.training.seq_len
            )

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        return sum(p.numel() for p in model.parameters()), flops_per_token(self.config, seq_len)


def choose_attention(job_config: JobConfig) -> str:
    kind = job_config.model.attention
    if kind == "auto":
        compiled = job_config.compile.enable and "model" in job_config.compile.components
        # FlexAttention needs to be compiled for a GPU
        return "flex" if compiled and torch.cuda.is_available() else "sdpa"
    return kind


def choose_join_norm(job_config: JobConfig) -> str:
    kind = job_config.model.join_norm
    if kind == "auto":
        # the kernels need all lanes
        has_all_lanes = job_config.parallelism.tensor_parallel_degree == 1
        kind = "triton" if has_all_lanes and torch.cuda.is_available() else "plain"
    return kind


def model_args_by_flavor() -> dict[str, LaneformerArgs]:
    return {name: LaneformerArgs(config=LaneformerConfig.from_flavor(name)) for name in FLAVORS}


class TitanLaneformer(Laneformer):
    """The model with the constructor and `init_weights` of TorchTitan's ModelProtocol."""

    float8: Float8 | None = None  # set by its converter
    fallback = ""  # why its kernels were replaced; set by kernel_check

    def __init__(self, model_args: LaneformerArgs):
        config = model_args.config
        super().__init__(config, FusedLayer if model_args.join_norm == "triton" else TitanLayer)
        self.model_args, self.lanes = model_args, Lanes(config.num_lanes)
        self.lm_head = TitanHead(config)
        self.draft_weight = model_args.mtp.weight(1)
        self.drafted: Drafted | None = None
        if model_args.mtp.freeze_base:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(name.startswith(MTP))

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        documents: Tensor | None = None,
        label_count: int | None = None,
    ) -> Tensor:
        """Return logits (B, S, V) of token ids (B, S); with labels (B, S) the loss of every token, (B, S).

        Args:
            documents: The document of each token, integers (B, S); by default, with `mask_documents`, one
                begins at each `bos_id`.
            label_count: See TitanHead.
        """
        # positions go on across documents: within one, RoPE depends on their differences only
        cos_sin = rope_table(self.config, torch.arange(input_ids.shape[1], device=input_ids.device))
        bos_id, masked = self.model_args.bos_id, self.model_args.mask_documents
        if documents is None and masked and bos_id is None:
            raise ValueError(
                "mask_documents needs model_args.bos_id, the id that begins a document"
            )
        # the drafts' labels stay within a document even where attention does not
        if documents is None and bos_id is not None and (masked or self.mtp is not None):
            documents = document_ids(input_ids, bos_id)
        # documents that the caller gives restrict attention, except for a model with drafts, whose
        # documents may be there for the labels alone
        attention_documents = documents if masked or self.mtp is None else None
        masks = training_masks(
            self.config, input_ids, self.model_args.attention, attention_documents
        )
        embedding = self.tok_embeddings(input_ids)
        if self.mtp is None or labels is None:
            layers = masks[: self.config.num_hidden_layers]
            return self.from_embedding(embedding, cos_sin, layers, labels, label_count)
        return losses_with_drafts(
            self, embedding, cos_sin, masks, labels, label_count, documents, attention_documents
        )

    def from_embedding(
        self,
        embedding: Tensor,
        cos_sin: tuple[Tensor, Tensor],
        masks: Any,
        labels: Tensor | None,
        label_count: int | None,
    ) -> Tensor:
        """Return what `forward` does, from embeddings (B, S, D); models with other streams override it.

        Args:
            masks: One a layer; a block mask passes through the layers to TitanAttention.
        """
        h, _ = run_layers(
            self.layers,
            self.config,
            embedding,
            cos_sin,
            masks,
            share_equal_streams=True,
            lanes=self.lanes,
        )
        return self.lm_head(h.expand(-1, -1, self.lanes.here, -1), self.norm, labels, label_count)

    def begin_step(self, step: int) -> None:
        """Prepare an optimizer step, counted from 1."""
        self.draft_weight = self.model_args.mtp.weight(step)

    def init_weights(self, buffer_device: torch.device | None = None) -> None:  # type: ignore[override]
        """Draw every parameter by `init_seed`, as TorchTitan calls it; `buffer_device` is unused."""
        for name, parameter in self.named_parameters():
            # checkpointed layers have a wrapper in their names, which must not change the numbers
            # drawn
            plain_name = name.replace("_checkpoint_wrapped_module.", "")
            init_parameter(self.config, plain_name, parameter, self.model_args.init_seed)
