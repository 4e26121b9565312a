"""Run tests of bit equality on the best instruction set below AMX, whose blocks round differently."""

from tests.laneformer.engine.assets import exact_blocks  # noqa: F401
