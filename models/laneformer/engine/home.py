"""The user's home and cache directories."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        # no home directory (a container's user without an entry in passwd): below this path nothing
        # can exist or be written, so callers need no special case
        return Path(os.devnull)


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "laneformer"
