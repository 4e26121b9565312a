"""The GPUs that people have: what the planner is told of each, and what a driver would refuse.

Multiprocessors: NVIDIA's data sheets and architecture white papers; limits of a multiprocessor: "Technical
specifications per compute capability" in the CUDA C++ programming guide.
"""

from __future__ import annotations

from dataclasses import dataclass

from laneformer.engine.cuda.geometry import Machine

# of a multiprocessor: KiB of shared memory, KiB that one block may use, threads; the registers are
# 65,536 on all
LIMITS = {
    80: (164, 163, 2048), 86: (100, 99, 1536), 89: (100, 99, 1536), 90: (228, 227, 2048), 100: (228, 227, 2048),
    120: (100, 99, 1536),
}  # fmt: skip
REGISTERS = 65_536


@dataclass(frozen=True)
class Card:
    multiprocessors: int
    architecture: int

    @property
    def shared_total(self) -> int:
        return 1024 * LIMITS[self.architecture][0]

    @property
    def shared_block(self) -> int:
        return 1024 * LIMITS[self.architecture][1]

    @property
    def threads(self) -> int:
        return LIMITS[self.architecture][2]

    @property
    def machine(self) -> Machine:
        return Machine(self.multiprocessors, self.shared_block, self.architecture)


CARDS = {
    "A100 40 GB, 80 GB": Card(108, 80), "A10": Card(72, 86), "RTX 3090": Card(82, 86), "L4": Card(58, 89),
    "L40S": Card(142, 89), "RTX 4090": Card(128, 89), "H100 SXM, NVL, H200, GH200": Card(132, 90),
    "H100 PCIe": Card(114, 90), "H100 MIG 2g": Card(32, 90), "B200": Card(148, 100), "RTX 5090": Card(170, 120),
}  # fmt: skip
