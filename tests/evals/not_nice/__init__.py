"""The watcher at the tests' own priority: at the lowest, which it gives itself, it would wait for all other tests on
a machine that is busy with them.
"""

from __future__ import annotations

import os
from pathlib import Path

FOLDERS = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
NOT_NICE = {"PYTHONPATH": os.pathsep.join(filter(None, FOLDERS))}  # of the environment
