"""Run `laneformer` as `python -m laneformer.cli`."""

from . import main

main()
