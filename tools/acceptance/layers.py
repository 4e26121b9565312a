"""What `python -m tools.check train` asks of the layers themselves: documents in one window, and the kernels' bytes/s.

B batch   S sequence   L lanes   D hidden   W bytes of the streams (B, S, L, D)
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.tools.utils import set_default_dtype

from laneformer import LaneformerConfig
from laneformer.titan.parallelize import checkpoint_and_compile
from laneformer.titan.spec import LaneformerArgs, TitanLaneformer
from tools.cards import INPUTS
from tools.check.gates import MARGIN
from train.job_config import load_job

Gates = dict[str, tuple[Any, Any, bool]]
BOS = 1
LENGTHS = (0.4, 0.25, 0.35)  # of the documents, in windows
REPEATS = 20
# W that each kernel reads and writes: titan/join_norm_kernels.py, docs/decisions/training.md
STREAMS = {"norm": 2, "join": 4, "join and norm": 5, "norm, backward": 4, "join, backward": 4,
           "join and norm, backward": 7}  # fmt: skip


def documents(config: LaneformerConfig, flags: list[str], device: str) -> Gates:
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


def kernel_rates(config: LaneformerConfig, batch: int, device: str) -> Gates:
    """TB/s of each fused kernel, against the pessimistic share of the card's bandwidth in train-traffic's model.

    Not measured without a GPU, or on a card that tools/cards.toml does not know.
    """
    card = INPUTS.card_of_device(torch.cuda.get_device_name()) if device == "cuda" else None
    if card is None:
        return {f"{name}, TB/s": (None, None, True) for name in STREAMS}
    shape = batch, config.max_position_embeddings, config.num_lanes, config.hidden_size
    h, partial, delayed, gradient = (
        torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4)
    )
    weight, eps = torch.ones(config.hidden_size, device=device, dtype=torch.bfloat16), config.norm_eps
    ops = torch.ops.laneformer
    streams, _, rstd = ops.join_norm(h, partial, delayed, weight, eps)
    backward = ops.join_norm_backward
    calls: dict[str, Callable[[], Any]] = {
        "norm": lambda: ops.rms_norm(h, weight, eps),
        "join": lambda: ops.join(h, partial, delayed),
        "join and norm": lambda: ops.join_norm(h, partial, delayed, weight, eps),
        "norm, backward": lambda: backward(gradient, h, None, streams, weight, rstd, False),
        "join, backward": lambda: backward(gradient, None, h, None, None, None, True),
        "join and norm, backward": lambda: backward(gradient, h, partial, streams, weight, rstd, True),
    }  # fmt: skip
    wide = h.numel() * h.element_size()
    least = INPUTS.at("training.memory_share", "pessimistic") * card.bandwidth_bytes_per_s / 1e12
    rates = {name: STREAMS[name] * wide / seconds(call) / 1e12 for name, call in calls.items()}
    return {f"{name}, TB/s": (rate, least, rate >= least) for name, rate in rates.items()}


def seconds(call: Callable[[], Any]) -> float:
    """Median of one call on the GPU."""
    call()
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
