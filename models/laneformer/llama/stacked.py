"""A folder's experts, which are a tensor each, as one of all of them, which is made when it is asked for."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from ..tensors import Tensor

EXPERT = re.compile(r"(?P<stem>.*\.experts)\.(?P<number>\d+)\.(?P<rest>.*)")


class StackedExperts(Mapping[str, Tensor]):
    """`layer.experts.0.part`, `layer.experts.1.part`, ... as `layer.experts.part`, (E, ...); others as they are.

    ValueError where an expert is missing, or of another shape or type than the first.
    """

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors
        numbers: dict[str, dict[int, str]] = defaultdict(dict)
        for name in tensors:
            if match := EXPERT.fullmatch(name):
                numbers[f"{match['stem']}.{match['rest']}"][int(match["number"])] = name
        self.experts = {name: [of[i] for i in sorted(of)] for name, of in numbers.items()}
        for name, of in numbers.items():
            if missing := set(range(max(of) + 1)) - of.keys():
                raise ValueError(f"{name}: the experts {sorted(missing)} are missing")
            kinds = {(tensors[own].dtype, tensors[own].values.shape) for own in of.values()}
            if len(kinds) > 1:
                raise ValueError(
                    f"{name}: experts differ, such as {' and '.join(map(str, sorted(kinds)[:2]))}"
                )
        self.shapes = {name: self._shape(name) for name in self}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.experts:
            return self.tensors[name]
        of = [self.tensors[own] for own in self.experts[name]]
        return Tensor(of[0].dtype, np.stack([tensor.values for tensor in of]))

    def __iter__(self) -> Iterator[str]:
        yield from self.experts
        yield from (name for name in self.tensors if not EXPERT.fullmatch(name))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def type_of(self, name: str) -> str:
        """What the tensor of this name comes as, without stacking it."""
        return self.tensors[self.experts.get(name, [name])[0]].dtype

    def _shape(self, name: str) -> tuple[int, ...]:
        of = self.experts.get(name)
        return (len(of), *self.tensors[of[0]].values.shape) if of else self.tensors[name].values.shape
