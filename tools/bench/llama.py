"""TorchTitan's own Llama as the rival of tools.bench.train: the Laneformer's shape and parameter count, our data.

Loaded by `experimental.custom_import = "tools.bench.llama"`. Model, attention, activation checkpointing, compile, FSDP
and loss are TorchTitan's, untouched. On one device it goes under FSDP as well, as the Laneformer does, for the same
mixed precision. Optimizer and loader are ours, for both.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
from torchtitan.models.llama3.infra.parallelize import apply_fsdp
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from laneformer.config import LaneformerConfig
from laneformer.titan import LaneformerArgs, model_args_by_flavor
from laneformer.titan.spec import flops_per_token
from train.data import build_mixture_loader
from train.metrics import build_run_metrics
from train.optimizer import build_laneformer_optimizers

NAME = "bench_llama3"


@dataclass
class LlamaArgs(TransformerModelArgs):
    """A dense Llama of a Laneformer's shape; `config` is that Laneformer."""

    config: LaneformerConfig = field(default_factory=LaneformerConfig)

    def update_from_config(self, job_config: JobConfig, **kwargs: Any) -> None:
        ours = LaneformerArgs(config=self.config)
        ours.update_from_config(job_config)
        self.config = c = ours.config
        self.dim, self.n_layers, self.vocab_size = c.hidden_size, c.num_hidden_layers, c.vocab_size
        self.n_heads, self.n_kv_heads, self.rope_theta = c.num_attention_heads, c.num_key_value_heads, c.rope_theta
        # TorchTitan's MLP is floor(8/3 D), times this factor, rounded down again
        self.ffn_dim_multiplier, self.multiple_of = c.intermediate_size / int(8 * c.hidden_size / 3) + 1e-9, 1
        super().update_from_config(job_config, **kwargs)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """FLOPs by the Laneformer's convention: causal keys only, every layer full."""
        import dataclasses

        dense = dataclasses.replace(self.config, swa_layers=())
        return sum(p.numel() for p in model.parameters()), flops_per_token(dense, seq_len)


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """TorchTitan's, and FSDP on a mesh of one where there is one device."""
    model = parallelize_llama(model, parallel_dims, job_config)
    if not parallel_dims.fsdp_enabled:
        training = job_config.training
        dtypes = (TORCH_DTYPE_MAP[d] for d in (training.mixed_precision_param, training.mixed_precision_reduce))
        apply_fsdp(model, parallel_dims.world_mesh, *dtypes, pp_enabled=False)
    return model


register_train_spec(
    NAME,
    TrainSpec(
        model_cls=Transformer,
        model_args={name: LlamaArgs(config=args.config) for name, args in model_args_by_flavor().items()},
        parallelize_fn=parallelize,
        pipelining_fn=None,
        build_optimizers_fn=build_laneformer_optimizers,
        build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=build_mixture_loader,
        build_tokenizer_fn=None,
        build_loss_fn=build_cross_entropy_loss,
        build_metrics_processor_fn=build_run_metrics,
    ),
)
