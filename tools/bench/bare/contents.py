"""What tools/bench/bundle.py packs: machine code by card and compiler, shapes of the launches, and the
reference.
"""

from __future__ import annotations

import json
import zipfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.bare.driver import Failure

DESCRIPTION = "contents.json"
Facts = dict[str, Any]


class Contents:
    """A bundle that was opened. `card`, after `choose`: the packed card whose code this GPU runs."""

    def __init__(self, path: Path):
        self._zip = zipfile.ZipFile(path)
        self.description: Facts = json.loads(self.read(DESCRIPTION))
        self.effort: Facts = self.description["effort"]  # how often and how long (bundle.EFFORT)
        self.card: Facts = {}
        self.compiler, self.multiprocessors = "", 0  # of this GPU

    def read(self, name: str) -> bytes:
        return self._zip.read(name)

    def numbers(self, name: str, kind: str) -> array[Any]:
        """`kind`: a type code of `array`; the file is little-endian."""
        values = array(kind)
        values.frombytes(self.read(name))
        return values

    def choose(self, facts: Facts) -> Facts:
        """The largest packed card whose blocks and memory this GPU has, as {"card", "exact", "compiler"}."""
        cards: Sequence[Facts] = self.description["cards"]
        fitting = [card for card in cards if fits(card, facts)]
        if not fitting:
            packed = "; ".join(
                f"{c['name']} (sm_{c['architecture']}, {c['multiprocessors']} multiprocessors)" for c in cards
            )
            raise Failure(
                "unknown card",
                f"{facts['gpu']} is sm_{facts['architecture']} with {facts['multiprocessors']} multiprocessors; "
                f"code is packed for {packed}; pack it with tools.bench cuda --bundle FILE, or run tools.bench cuda",
            )
        self.card = max(fitting, key=lambda card: (card["multiprocessors"], card["architecture"]))
        compilers = sorted(map(int, self.card["compilers"]))
        loaded = [major for major in compilers if major <= facts["driver"] // 1000]
        if not loaded:
            there = f"{facts['driver'] // 1000}.{facts['driver'] % 1000 // 10}"
            raise Failure(
                "driver too old",
                f"it is for CUDA {there}, the code is of CUDA {compilers[0]}: update the driver, or pack with "
                f"nvidia-cuda-nvrtc-cu{facts['driver'] // 1000} installed",
            )
        self.compiler, self.multiprocessors = str(loaded[-1]), facts["multiprocessors"]
        same = all(self.card[name] == facts[name] for name in ("architecture", "multiprocessors"))
        return {"card": self.card["name"], "exact": same, "compiler": self.compiler}

    def model(self, name: str) -> Facts:
        return self.card["models"][name]

    def code(self, by_compiler: Facts) -> bytes:
        return self.read(by_compiler[self.compiler])


def fits(card: Facts, facts: Facts) -> bool:
    """Code for sm_90 and later is of one architecture; older code also runs on the later ones of its
    generation.
    """
    here, packed = facts["architecture"], card["architecture"]
    known = here == packed or (packed < here < 90 and packed // 10 == here // 10)
    return known and all(card[name] <= facts[name] for name in ("multiprocessors", "shared_bytes"))
