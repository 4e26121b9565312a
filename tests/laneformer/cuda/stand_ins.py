"""`LoopPasses`, which runs passes with the plain PyTorch model instead of the CUDA engine's kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import torch

from laneformer import Laneformer
from laneformer.engine import device
from laneformer.engine.cuda import graph
from laneformer.engine.cuda.caches import Caches
from laneformer.engine.cuda.decoder import CudaDecoder
from laneformer.engine.cuda.passes import Look, PassRunner
from laneformer.engine.cuda.planning import plan
from laneformer.engine.cuda.prefill import logits_of
from laneformer.engine.cuda.structures import Column
from laneformer.engine.decoder import Collected, Ended, Request
from laneformer.model import run_layers
from laneformer.positions import rope_table
from tests.laneformer.cuda.harness import SMALL, as_read, plain_model


def passes_of(engine):
    """Return the object that runs an engine's passes: one of those below, or a GPU's PassRunner."""
    return cuda_of(engine).executor.passes


def answers(executor, requests: Iterable[Request]) -> list[Collected]:
    """Return all results, with as many requests at once as there is room for."""
    most, waiting = executor.passes.sequences, [replace(r, quiet=True) for r in requests]
    tickets, collected = list[int](), dict[int, Collected]()
    while waiting or len(collected) < len(tickets):
        room = most - (len(tickets) - len(collected))
        tickets += executor.schedule.join(waiting[:room])
        waiting = waiting[room:]
        for ticket, first, tokens, scores, ended in executor.schedule.collect(60):
            collected[ticket] = Collected(ticket, first, tokens, scores, Ended(*ended))
    return [collected[ticket] for ticket in tickets]


def cuda_of(engine) -> CudaDecoder:
    decoder = engine._open()
    assert isinstance(decoder, CudaDecoder)
    return decoder


def pretend_gpu(monkeypatch, decoder, devices=1):
    """Pretend that there are GPUs, whose passes run on what `decoder` returns."""
    monkeypatch.setitem(graph.RUNNERS, "passes", decoder)
    monkeypatch.setattr(device, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)


class LoopCaches(Caches):
    """The ids whose keys and values each cache would have."""

    def __init__(self, memory):
        super().__init__([memory])
        self.ids: dict[int, list[int]] = {}

    def _copy(self, source: int, target: int, count):
        assert len(self.ids[source]) >= count
        self.ids[target] = self.ids[source][:count]


class LoopPasses(PassRunner):
    """Passes of up to five columns by the PyTorch model, with its logits and greedy tokens."""

    def __init__(self, config, tensors, dtype: str, devices=(), cache_bytes=None):
        self.config, self.devices = config, devices
        self.geometry = dataclasses.replace(plan(config, dtype, SMALL, warps=2), columns=5)
        self.model: Laneformer = plain_model(config, tensors, "bf16" if dtype == "int8" else dtype)
        numbers = 5 * self.geometry.lanes_per_device * self.geometry.kv_lane
        memory = SimpleNamespace(geometry=self.geometry, kv=torch.zeros(numbers, dtype=torch.int16))
        memory.device, memory.weight_bytes = "cpu", 1
        self._hold([memory])
        self.caches = LoopCaches(memory)

    @torch.inference_mode()
    def read(self, ids: Sequence[int], cache, position, first_row) -> Iterator[torch.Tensor]:
        ids_of_cache = self.caches.ids[cache] = [*self.caches.ids.get(cache, [])[:position], *ids]
        assert len(ids_of_cache) == position + len(ids), "keys and values are missing"
        if first_row < len(ids_of_cache):
            yield self.logits_after(ids_of_cache)[first_row:]

    def logits_after(self, ids: Sequence[int]) -> torch.Tensor:
        """Return logits (len(ids), V) in float32."""
        # layers in 16 bits and the head's sums in float32, as on a GPU
        positions = torch.arange(len(ids))
        embedding = self.model.tok_embeddings(torch.tensor([ids]))
        masks = self.model.masks(positions, positions)
        cos_sin = rope_table(self.config, positions)
        h, _ = run_layers(self.model.layers, self.config, embedding, cos_sin, masks)
        return torch.cat([*logits_of(as_read(self.model), h)])

    @torch.inference_mode()
    def run(
        self,
        columns: Sequence[Column],
        extra_passes: int = 0,
        logits: torch.Tensor | None = None,
        look: Look | None = None,
    ) -> list[list[int]]:
        assert 1 <= len(columns) <= 5
        rows, running = [self._pass(columns, logits)], [True] * len(columns)
        # each pass takes the tokens of the last one; a sequence that has drawn a stop token rests
        for passed in range(extra_passes):
            running = [
                runs and t not in c.stops[: c.stop_count]
                for runs, t, c in zip(running, rows[-1], columns, strict=True)
            ]
            if not any(running) or (look is not None and look(rows)):
                break
            following = [
                Column(token, column.position + 1 + passed, column.sequence)
                for token, column in zip(rows[-1], columns, strict=True)
            ]
            tokens = iter(
                self._pass([c for c, runs in zip(following, running, strict=True) if runs], None)
            )
            rows.append([next(tokens) if runs else -1 for runs in running])
        return rows

    def _pass(self, columns: Sequence[Column], logits: torch.Tensor | None) -> list[int]:
        self.passes += 1
        tokens, cached_ids = list[int](), self.caches.ids
        for i, column in enumerate(columns):
            ids = cached_ids.get(column.sequence, [])
            assert len(ids) >= column.position, "keys and values are missing"
            # a column overwrites all that its sequence had from there on
            ids = cached_ids[column.sequence] = [*ids[: column.position], column.token]
            row = self.logits_after(ids)[-1]
            tokens.append(int(row.argmax()))
            if logits is not None:
                logits[i] = row
        return tokens
