"""Run pytest with a core whose instruction set `amx` is emulated, as on a machine that has it.

    python -m tests.laneformer.engine.on_emulated_tiles CORE ARGUMENTS...

CORE is the module that CMake built.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

NAME = "laneformer.engine.cpu._core"


def use_core(path: str):
    spec = importlib.util.spec_from_file_location(NAME, path)
    sys.modules[NAME] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[NAME])


if __name__ == "__main__":
    use_core(sys.argv[1])
    sys.exit(pytest.main(sys.argv[2:]))
