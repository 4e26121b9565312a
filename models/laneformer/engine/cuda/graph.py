"""The version "graph": each pass of one column replays a captured graph of kernels (graph.cu).

It is the baseline of the kernel of passes, and decodes where that kernel cannot be resident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...joins import MODULES, Join
from .geometry import Geometry
from .launch import Kernels
from .memory import DeviceMemory
from .passes import PassRunner
from .structures import MAX_COLUMNS, GraphState


class GraphRunner(PassRunner):
    version = "graph"

    def _load(self) -> None:
        kernels = Kernels(self.version, self.geometry, self.devices[0])
        kernels.load(*sorted({name for name, *_ in graph_launches(self.geometry)}))
        self.kernels = [[kernels]]

    def _hold(self, memories: list[DeviceMemory]) -> None:
        super()._hold(memories)
        self._graph = self._capture()

    def _capture(self) -> torch.cuda.CUDAGraph:
        argument: Any = self._arguments([], 0, None)[0]
        torch.cuda.synchronize(self.devices[0])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._streams[0], capture_error_mode="thread_local"):
            for name, layer, module, blocks in graph_launches(self.geometry):
                step = type(argument).from_buffer_copy(argument)
                step.layer, step.module = layer, module
                self.kernels[0][0].launch(name, step, blocks)
        return graph

    def _launch(self, arguments: Sequence[Any]) -> None:
        order = arguments[0].order
        state = torch.frombuffer(bytearray(GraphState.of(order)), dtype=torch.uint8)
        with torch.cuda.stream(self._streams[0]):
            self.memories[0].graph[: len(state)].copy_(state)
            for _ in range(1 + order.extra_passes):
                self._graph.replay()


RUNNERS: dict[str, type[PassRunner]] = {"passes": PassRunner, "graph": GraphRunner}


def graph_launches(geometry: Geometry) -> list[tuple[str, int, int, int]]:
    """(kernel, layer, module, blocks) of one pass, in order."""
    config, blocks = geometry.config, geometry.blocks
    last, kernels = (config.num_hidden_layers - 1, 1), list[tuple[str, int, int, int]]()
    for layer in range(config.num_hidden_layers):
        for module, names in enumerate((("qkv", "attention", "output"), ("gate_up", "down"))):
            kernels += [(name, layer, 0, blocks) for name in names]
            flushes = geometry.flush_points and (layer, module) == last
            if (
                flushes or config.join(layer, MODULES[module]) == Join.PRESENT
            ):  # when all lanes have sent
                kernels.append(("join_now", layer, module, blocks))
    return [*kernels, ("head", 0, 0, blocks), ("choose", 0, 0, min(blocks, MAX_COLUMNS))]
