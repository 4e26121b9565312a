"""Packed documents against each alone: what `python -m tools.check train` asks of the layers themselves.

S sequence
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.utils import set_default_dtype

from laneformer import LaneformerConfig
from laneformer.titan.parallelize import checkpoint_and_compile
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from tools.check.gates import MARGIN
from train.job_config import load_job

Gates = dict[str, tuple[Any, Any, bool]]
BOS = 1
LENGTHS = (0.4, 0.25, 0.35)  # of the documents, in windows


def packed_documents(config: LaneformerConfig, flags: list[str], device: str) -> Gates:
    """Losses of packed documents with the job's kernels against each document alone, plain, in float32.

    flags: of the job. The same without the mask is the planted fault.
    """
    # weights of unit gain: with smaller ones what attention sees is lost in rounding
    config = dataclasses.replace(config, initializer_range=2 * config.hidden_size**-0.5)
    job = load_job([*flags, "--model.mask_documents"])
    chosen = LaneformerArgs(config=config)
    chosen.update_from_config(job)
    chosen = dataclasses.replace(chosen, config=config, bos_id=BOS)
    plain = dataclasses.replace(chosen, attention="sdpa", join_norm="plain", mask_documents=False)
    half = TORCH_DTYPE_MAP[job.training.mixed_precision_param]
    ids, ends = draw_documents(config, device)
    weights = build(plain, half, device).state_dict()
    truth, rounded = (
        alone(build(plain, dtype, device, weights), ids, ends) for dtype in (torch.float32, half)
    )
    allowed = MARGIN * float((rounded - truth).abs().max())
    gates: Gates = {}
    for name, masked in (
        ("packed documents against each alone", True),
        ("refuses: documents that see each other", False),
    ):
        model = build(dataclasses.replace(chosen, mask_documents=masked), half, device, weights)
        checkpoint_and_compile(model, copy.deepcopy(job))
        with torch.no_grad():
            error = float((model(ids[:, :-1], ids[:, 1:])[0].float() - truth).abs().max())
        gates[name] = error, allowed, (error <= allowed) == masked
    torch._dynamo.reset()
    return gates


def draw_documents(config: LaneformerConfig, device: str) -> tuple[Tensor, list[int]]:
    """Ids (1, S + 1), and where each document begins and the last one ends."""
    seq_len = config.max_position_embeddings
    ids = torch.randint(3, config.vocab_size, (1, seq_len + 1), generator=torch.Generator().manual_seed(0))
    ends = [0]
    for length in LENGTHS:
        ids[0, ends[-1]] = BOS
        ends.append(min(seq_len, ends[-1] + round(length * seq_len)))
    ends[-1] = seq_len
    return ids.to(device), ends


def build(
    arguments: LaneformerArgs, dtype: torch.dtype, device: str, weights: dict[str, Tensor] | None = None
) -> TitanLaneformer:
    with torch.device("meta"), set_default_dtype(dtype):
        model = TitanLaneformer(arguments)
    model.to_empty(device=device)
    model.init_weights() if weights is None else model.load_state_dict(weights)
    return model


@torch.no_grad()
def alone(model: TitanLaneformer, ids: Tensor, ends: list[int]) -> Tensor:
    """Losses (S,) in float32, each document in a window of its own."""
    parts = [
        model(ids[:, first:last], ids[:, first + 1 : last + 1])[0].float()
        for first, last in itertools.pairwise(ends)
    ]
    return torch.cat(parts)
