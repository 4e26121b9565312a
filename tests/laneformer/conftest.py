"""What the tests of the CUDA kernels share: one folder of emulated builds, each of which costs seconds."""

from __future__ import annotations

import pytest

from tests.proofs import CACHE


@pytest.fixture(scope="session")
def cuda_builds():
    """A folder for built kernels, kept from run to run: each is named by a hash of all that decides it."""
    return CACHE / "emulated"
