"""TorchTitan's own Llama, trained by TorchTitan's own trainer: the baseline of `tools.bench train`.

    torchrun ... -m tools.bench.llama --job.config_file X.toml --model.name
    bench_llama3 [--section.key value ...]

Trainer, model, loss and metrics are TorchTitan's, untouched. Shape and parameter count are the Laneformer's; optimizer
and data are the same for both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

if not torch.accelerator.is_available():
    from train.job_config import patch_torch_for_cpu

    patch_torch_for_cpu()  # before torchtitan is imported

from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
from torchtitan.models.llama3.infra.parallelize import apply_fsdp
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.train import Trainer
from torchtitan.train import main as titan_main

from laneformer.config import LaneformerConfig
from laneformer.flops import flops_per_token
from laneformer.titan.spec import LaneformerArgs, model_args_by_flavor
from train.data import Batch, build_mixture_loader
from train.spec import SPEC

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
        self.n_heads, self.n_kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.rope_theta = c.rope_theta
        # TorchTitan's MLP is floor(8/3 D), times this factor, rounded down again
        self.ffn_dim_multiplier, self.multiple_of = (
            c.intermediate_size / int(8 * c.hidden_size / 3) + 1e-9,
            1,
        )
        super().update_from_config(job_config, **kwargs)

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Count FLOPs by the Laneformer's convention: causal keys only, every layer full."""
        dense = dataclasses.replace(self.config, swa_layers=())
        return sum(p.numel() for p in model.parameters()), flops_per_token(dense, seq_len)


class TokenLoader:
    """Our batches without their sources."""

    # TorchTitan's trainer passes every input to the model
    def __init__(self, **arguments: Any):
        self.loader = build_mixture_loader(**arguments)

    def __iter__(self) -> Iterator[Batch]:
        return (({"input": inputs["input"]}, labels) for inputs, labels in self.loader)


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Apply TorchTitan's, and FSDP on a mesh of one where there is one device."""
    model = parallelize_llama(model, parallel_dims, job_config)
    if not parallel_dims.fsdp_enabled:  # for the mixed precision that the Laneformer has
        training = job_config.training
        names = training.mixed_precision_param, training.mixed_precision_reduce
        dtypes = (TORCH_DTYPE_MAP[name] for name in names)
        apply_fsdp(model, parallel_dims.world_mesh, *dtypes, pp_enabled=False)
    return model


register_train_spec(
    NAME,
    dataclasses.replace(
        SPEC,  # of which the optimizer and its schedule stay
        model_cls=Transformer,
        model_args={
            name: LlamaArgs(config=args.config) for name, args in model_args_by_flavor().items()
        },
        parallelize_fn=parallelize,
        build_dataloader_fn=TokenLoader,
        build_loss_fn=build_cross_entropy_loss,
        build_validator_fn=None,
        build_metrics_processor_fn=None,
        state_dict_adapter=None,
    ),
)

if __name__ == "__main__":
    titan_main(Trainer)
