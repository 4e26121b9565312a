"""The user's own places. Without a home directory (a container's user has no entry in passwd) they are where nothing
can be: nothing is found there and nothing kept, and nobody has to ask.
"""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        return Path(os.devnull)


def user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or home() / ".cache") / "laneformer"
