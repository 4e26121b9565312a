"""The light reader of job files against TorchTitan's parser: the same values, defaults and flags included."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from records.job import JobSections, read_job

ROOT = Path(__file__).resolve().parents[2]
# not the ablation, nor the conversions, whose tool takes its own tables out before the trainer reads the rest
JOBS = [
    path for path in (ROOT / "configs").glob("*.toml")
    if "[job]" in (text := path.read_text()) and "[delay]" not in text
]  # fmt: skip
CONFIGS = sorted(str(path.relative_to(ROOT)) for path in JOBS)
FLAGS = ["--resilience.skip-steps", "9", "--training.steps=5", "--evals.in_loop", "--metrics.no-enable_wandb"]
# in a process of its own: TorchTitan keeps global state
LOAD = """
import json, sys
from train.job_config import patch_torch_for_cpu
patch_torch_for_cpu()
from torchtitan.config import ConfigManager
flags = json.loads(sys.argv[1])
read = [ConfigManager().parse_args(["--job.config_file", path, *flags]).to_dict() for path in sys.argv[2:]]
print(json.dumps(read))
"""


def parsed(*configs: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", LOAD, json.dumps(FLAGS), *configs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.job
def test_it_agrees_with_torchtitan_in_every_value(tmp_path: Path) -> None:
    """On the shipped job files, and on one that leaves everything to the defaults."""
    bare = tmp_path / "bare.toml"
    bare.write_text(
        '[job]\ncustom_config_module = "train.job_config"\n[experimental]\ncustom_import = "train.spec"\n'
    )
    paths = [*CONFIGS, str(bare)]
    assert len(paths) >= 5
    for path, heavy in zip(paths, parsed(*paths), strict=True):
        light = json.loads(json.dumps(asdict(read_job(["--job.config_file", str(ROOT / path), *FLAGS]))))
        assert light["evals"]["in_loop"] is True
        for section, values in light.items():
            assert values == {key: heavy[section][key] for key in values}, f"{path} [{section}]"


@pytest.mark.job
@pytest.mark.parametrize(
    ("key", "flags"), [("unclean_policy", []), ("on_bad_step", ["--resilience.unclean-policy", "skip"])]
)
def test_the_former_name_of_a_key_is_read_by_both(tmp_path: Path, key: str, flags: list[str]) -> None:
    """In the job file, and as a flag that overrides it; the warning names the new key."""
    path = tmp_path / "job.toml"
    text = (ROOT / "configs/debug_phase1.toml").read_text()
    path.write_text(text.replace('on_bad_step = "rollback"', f'{key} = "{"stop" if flags else "skip"}"'))
    arguments = ["--job.config_file", str(path), *flags]
    with pytest.warns(FutureWarning, match=r"unclean_policy is now called resilience\.on_bad_step"):
        assert read_job(arguments).resilience.on_bad_step == "skip"
    command = [sys.executable, "-m", "train.job_config", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    resolved = tomllib.loads(done.stdout)["resilience"]
    assert resolved["on_bad_step"] == "skip"
    assert "unclean_policy" not in resolved
    assert "is now called resilience.on_bad_step" in done.stderr


def test_it_needs_neither_torch_nor_any_package_of_ours() -> None:
    program = "import sys, records.job; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"torch", "torchtitan", "laneformer", "train", "data_mixtures"} & set(done.stdout.split())


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    with pytest.raises(ValueError, match=r"job\.toml does not exist"):
        read_job(["--job.config_file", str(path)])
    path.write_text("[job\n")
    with pytest.raises(ValueError, match=r"job\.toml is not valid TOML"):
        read_job(["--job.config_file", str(path)])
    path.write_text("")
    assert read_job(["--job.config_file", str(path)]) == JobSections()
