"""Silence the warnings of libraries at every start that a user can do nothing about."""

from __future__ import annotations

import logging
import warnings

WARNINGS = (
    # the losses of head and model are views; the trainer adds them up and changes none in place
    r"FSDP2-wrapped module \(FSDP(LaneRMSNorm, FSDPTitanHead|TitanLaneformer)\) returned a view tensor",
    # on a CPU: weights are drawn by our own generator, which a test compares with one process
    "DTensor random operators may not have complete support on cpu device mesh",
    r"DTensor manual_seed\(\) may not have complete support on cpu device mesh",
    # of torch 2.13, which renames it; older versions that we support lack the new name
    "`torch.distributed.all_gather_into_tensor` is deprecated",
    # of torch 2.14, which renames what TorchTitan 0.2.2 calls
    r"`torch\.distributed\.distributed_c10d\._set_pg_timeout` is deprecated",
    # TorchTitan makes groups of mesh dimensions of size 1 fake: nothing there can time out
    "Set timeout is now only supported for either nccl or gloo",
)
LOG_LINES = (
    # TorchTitan looks for a GPU's peak in vain; metrics.jsonl has no mfu on a CPU
    "Error running lspci: ",
    "Peak flops undefined for: cpu, fallback to A100",
    # torchrun sets it, and TorchTitan to what comm.* of the job file says
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING] = ",
)


def silence() -> None:
    """Leave out these warnings and log lines of this process."""
    for words in WARNINGS:
        warnings.filterwarnings("ignore", message=words)
    logging.getLogger().addFilter(lambda record: not record.getMessage().startswith(LOG_LINES))
