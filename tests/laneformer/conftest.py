"""A fixture for the tests of the CUDA kernels: one folder of emulated builds."""

from __future__ import annotations

import pytest

from tests.proofs import CACHE


@pytest.fixture(scope="session")
def cuda_builds():
    """Return a folder for built kernels, kept between runs."""
    # a build costs seconds; its name is a hash of all that determines it
    return CACHE / "emulated"
