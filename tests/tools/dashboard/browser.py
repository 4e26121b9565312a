"""A real browser without a window, for tests of pages; they skip themselves where there is none."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--v=0",
)  # fmt: skip


def browse(address: str, profile: Path, width: int = 1440, wait_ms: int = 8000) -> tuple[str, list[str]]:
    """(the page's DOM after wait_ms of its own time, the lines on the browser's console)."""
    flags = [*FLAGS, f"--window-size={width},1200", f"--virtual-time-budget={wait_ms}", f"--user-data-dir={profile}"]
    command = [str(CHROMIUM), *flags, "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stdout, re.findall(r'CONSOLE.*?"(.*)", source', done.stderr)
