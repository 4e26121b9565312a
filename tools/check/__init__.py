"""Checks against references, and of the source itself: `python -m tools.check NAME`."""
