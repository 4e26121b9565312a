"""Make a job as the supervisor reads it, without a file."""

from __future__ import annotations

import pytest

from records.job import JobSections


@pytest.fixture
def job(tmp_path):
    job = JobSections()
    job.job.dump_folder = str(tmp_path / "run")
    job.run.mkdir()
    return job
