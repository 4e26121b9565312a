"""Register the Laneformer with TorchTitan (`experimental.custom_import = "train.spec"`)."""

from __future__ import annotations

from torchtitan.protocols import model_converter, train_spec
from torchtitan.protocols.train_spec import TrainSpec

from laneformer.titan import float8
from laneformer.titan.parallelize import parallelize_laneformer
from laneformer.titan.spec import TitanLaneformer, model_args_by_flavor

from .data import build_mixture_loader
from .metrics import RunMetrics
from .optimizer import build_clamped_lr_schedulers, build_laneformer_optimizers
from .validate import HeldOutValidator

NAME = "laneformer"
SPEC = TrainSpec(
    model_cls=TitanLaneformer,
    model_args=model_args_by_flavor(),
    parallelize_fn=parallelize_laneformer,
    pipelining_fn=None,
    build_optimizers_fn=build_laneformer_optimizers,
    build_lr_schedulers_fn=build_clamped_lr_schedulers,
    build_dataloader_fn=build_mixture_loader,
    build_tokenizer_fn=None,
    # the model computes its losses itself, see titan/loss.py
    build_loss_fn=lambda *_, **__: None,
    build_validator_fn=HeldOutValidator,
    build_metrics_processor_fn=RunMetrics,
)


def register(spec: TrainSpec) -> None:
    """Make `spec` the meaning of `model.name = "laneformer"`."""
    # a second registration of one name is an error
    train_spec._extra_train_specs.pop(NAME, None)
    train_spec.register_train_spec(NAME, spec)


register(SPEC)
# TorchTitan's own has this name already; it looks for nn.Linear, and needs torchao
model_converter._registry_model_converter_cls[float8.NAME] = float8.Float8Converter
