"""The light reader of job files against TorchTitan's parser: the same values, defaults and flags included."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from records.job import JobSections, read_job

ROOT = Path(__file__).resolve().parents[2]
# not the ablation
JOBS = [path for path in (ROOT / "configs").glob("*.toml") if "[job]" in path.read_text()]
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in JOBS)
FLAGS = [
    "--resilience.skip-steps",
    "9",
    "--training.steps=5",
    "--evals.in_loop",
    "--metrics.no-enable_wandb",
]
# in a process of its own: TorchTitan keeps global state
LOAD = """
import json, sys
from train.job_config import patch_torch_for_cpu
patch_torch_for_cpu()
from torchtitan.config import ConfigManager
print(json.dumps([ConfigManager().parse_args(job).to_dict() for job in json.loads(sys.argv[1])]))
"""


@pytest.mark.job
def test_it_agrees_with_torchtitan_in_every_value(tmp_path):
    # On the shipped job files, and on one that leaves everything to the defaults.
    bare = tmp_path / "bare.toml"
    bare.write_text(
        '[job]\ncustom_config_module = "train.job_config"\n[experimental]\ncustom_import = "train.spec"\n'
    )
    assert len(CONFIGS) >= 4
    jobs = [["--job.config_file", path, *FLAGS] for path in (*CONFIGS, str(bare))]
    command = [sys.executable, "-c", LOAD, json.dumps(jobs)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    for job, heavy in zip(jobs, json.loads(process.stdout.splitlines()[-1]), strict=True):
        light = json.loads(json.dumps(asdict(read_job(job))))
        assert light["evals"]["in_loop"] is True
        for section, values in light.items():
            assert values == {key: heavy[section][key] for key in values}, f"{job} [{section}]"


def test_it_needs_neither_torch_nor_any_package_of_ours():
    program = (
        "import sys, records.job; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    )
    modules = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True).split()
    assert not {"torch", "torchtitan", "laneformer", "train", "data_mixtures"} & set(modules)


def test_files_that_cannot_be_read_are_named(tmp_path):
    path = tmp_path / "job.toml"
    for missing, says in ((path, r"job\.toml does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(ValueError, match=says):
            read_job(["--job.config_file", str(missing)])
    path.write_text("[job\n")
    with pytest.raises(ValueError, match=r"job\.toml is not valid TOML"):
        read_job(["--job.config_file", str(path)])
    path.write_text("")
    assert read_job(["--job.config_file", str(path)]) == JobSections()
