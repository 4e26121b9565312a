"""A made-up run that every test of the dashboard reads and none changes."""

from __future__ import annotations

import pytest

from tests.tools.dashboard import made_up_run


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return made_up_run.write_run(tmp_path_factory.mktemp("runs") / "made-up", steps=60)
