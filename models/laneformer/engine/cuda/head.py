"""The model's own head for multi-token prediction on GPUs (model.py: MTPHead): a model of one layer beside the model's.

The kernel of passes is compiled once more with the block's layer and the rows that drafts are scored with, for weights,
keys, values and words of their own. It begins with streams instead of embeddings (block.cuh: publish_entry): those
that the model's pass has left in its words, so the model's kernels do nothing for it but send the partial
outputs that no layer was left for.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...config import DRAFT_IDS, EMBEDDING, HEAD, MTP, LaneformerConfig
from ...tensors import Tensor
from ..decoder import RequestFailed, Sampling, Unanswered
from .geometry import Geometry, Machine
from .memory import GATES, DeviceMemory
from .planning import plan
from .structures import Column

GREEDY = Sampling(top_p=1.0)  # what the kernel draws by, which nobody asks for


def rows_of(config: LaneformerConfig, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """The ids that each lane scores, int64 (L, rows); -1 where a lane has fewer.

    Lanes whose streams are the same share them out evenly; else a lane scores its part of the vocabulary.
    ValueError for a list that is none.
    """
    lanes = config.num_lanes
    if not config.draft_vocab_size:
        return np.arange(config.vocab_size).reshape(lanes, -1)
    ids = np.asarray(tensors[DRAFT_IDS].values, np.int64)
    if ids[0] < 0 or ids[-1] >= config.vocab_size or (np.diff(ids) <= 0).any():
        raise ValueError(f"{DRAFT_IDS} must be ids below {config.vocab_size} in ascending order, each once")
    if config.equal_delivered_streams and config.replicated_rmsn_scale:
        return ids.reshape(lanes, -1)
    first = config.vocab_size // lanes * np.arange(1, lanes)
    parts = np.split(ids, np.searchsorted(ids, first))
    most = max(map(len, parts))
    return np.stack([np.pad(part, (0, most - len(part)), constant_values=-1) for part in parts])


def block_config(config: LaneformerConfig, rows: int) -> LaneformerConfig:
    """A model of the block alone, whose lanes wait for each other, with so many rows of the head a lane."""
    return dataclasses.replace(
        config, num_hidden_layers=1, broadcast_delay=0, use_attention_comm=True, use_mlp_comm=True, swa_layers=(),
        nope_layers=(), num_nextn_predict_layers=0, draft_vocab_size=0, vocab_size=rows * config.num_lanes,
        first_late_layer=0, early_layers=0, flush=False,
    )  # fmt: skip


def plan_block(
    builds: Sequence[Geometry], tensors: Mapping[str, Tensor], machine: Machine
) -> tuple[list[Geometry], np.ndarray]:
    """The block's builds, and `rows_of`: on the multiprocessors, with the warps and chunks, for the columns of the
    model's. None where the model has no head, or, with a warning, where the block does not fit.
    """
    if not builds or not (config := builds[0].config).num_nextn_predict_layers:
        return [], np.empty((0, 0))
    rows = rows_of(config, tensors)
    names = ("devices", "warps", "chunk_bytes", "blocks_per_lane", "columns", "prefetch_chunks", "half")

    def of(model: Geometry) -> Geometry:
        cut: dict[str, Any] = {name: getattr(model, name) for name in names}
        own = plan(block_config(config, rows.shape[1]), model.dtype, machine, **cut)
        return dataclasses.replace(own, model=model)

    try:
        return [of(model) for model in builds], rows
    except ValueError as error:
        warnings.warn(f"the model's own head drafts nothing on this GPU: {error}", stacklevel=6)
        return [], rows


def block_tensors(tensors: Mapping[str, Tensor], rows: np.ndarray) -> dict[str, Tensor]:
    """Those of `block_config`'s model, and the gates; rows that nobody scores are zeros."""
    layer = f"{MTP}layer."
    found = {name.replace(layer, "layers.0."): tensors[name] for name in tensors if name.startswith(layer)}
    found |= {name: tensors[MTP + name] for name in ("norm.weight", *GATES)}
    head, ids = tensors[HEAD], rows.ravel()
    values = head.values.reshape(-1, head.values.shape[-1])[ids]
    values[ids < 0] = 0
    return {**found, HEAD: Tensor(head.dtype, values.reshape(*rows.shape, -1)), EMBEDDING: tensors[EMBEDDING]}


class BlockMemory(DeviceMemory):
    """The memory of the block on the device of `model`, whose embedding and table of angles it shares."""

    def __init__(
        self, geometry: Geometry, tensors: Mapping[str, Tensor], model: DeviceMemory, sequences: int
    ):
        super().__init__(geometry, tensors, model.index, model.device, sequences, model)
        self.model = model
        self.start = (model, list[int]())

    def go_on_from(self, memory: DeviceMemory, origins: Sequence[int]) -> None:
        """The next pass's columns take the streams of these columns of the last pass over that memory."""
        self.start = (memory, [*origins])

    def arguments(self, inboxes: Sequence[torch.Tensor], limit_s: float = 10.0) -> Any:
        p, (memory, origins) = super().arguments(inboxes, limit_s), self.start
        p.streams = memory.lane_words.data_ptr()
        p.tail = None if memory is self else self.model.inbox.data_ptr()
        p.origins[: len(origins)] = origins
        return p


class HeadPasses:
    """Passes of the block, launched as the model's are, by a PassDecoder. ids: that it drafts, ascending."""

    def __init__(
        self, model: Any, builds: list[Geometry], tensors: Mapping[str, Tensor], rows: np.ndarray,
        sequences: int,
    ):  # fmt: skip
        held = block_tensors(tensors, rows)
        self.block = copy.copy(model)
        self.block.builds, self.block.geometry, self.block.passes = builds, builds[-1], 0
        self._memories = [BlockMemory(builds[-1], held, m, sequences) for m in model.memories]
        self.block.memories = [*self._memories]
        self.block.load()
        self.model, self.ids = model, rows[rows >= 0]
        places = torch.from_numpy(np.flatnonzero(rows.ravel() >= 0))
        device = model.memories[0].device
        self._places = places.to(device)
        self._logits = torch.empty(builds[-1].columns, rows.size, device=device)

    @property
    def weight_bytes(self) -> tuple[int, int]:
        """That a draft reads: of the block, and of its rows of the head."""
        g = self.block.geometry
        matrix = g.matrix("head")
        rows = g.config.num_lanes * matrix.rows * matrix.columns * g.number_bytes
        return sum(memory.weight_bytes for memory in self.block.memories) - rows, rows

    def run(
        self, columns: Sequence[tuple[int, int, int]], origins: Sequence[int], chained: bool, rows: Sequence[int]
    ) -> np.ndarray:  # fmt: skip
        """Columns (the token after a position, the position, its sequence) that go on from those of `origins`, of the
        model's last pass, or if chained of the block's. float32 (rows, ids): the logits of these columns.
        """
        for own, memory in zip(
            self._memories, self.block.memories if chained else self.model.memories, strict=True
        ):
            own.go_on_from(memory, origins)
        self.block.run([Column(*column, sampling=GREEDY) for column in columns], logits=self._logits)
        return self._logits[list(rows)].index_select(1, self._places).cpu().numpy()

    def fails(self) -> str:
        """Why a pass after one of the model's does not end with numbers; the test at load."""
        try:
            finite = np.isfinite(self.run([(0, 0, 0)], [0], False, [0])).all()
        except RequestFailed as error:
            if isinstance(error, Unanswered):
                raise
            return str(error)
        return "" if finite else "its logits are no numbers"
