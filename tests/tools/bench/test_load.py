"""The load benchmark on a small model: every start and read is timed, and first starts use nothing that was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from laneformer.engine.cpu.packed import PackedWeights
from tests.laneformer.engine.assets import random_model, small_config, write_folder
from tools.bench.__main__ import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    return write_folder(tmp_path / "hf", random_model(small_config(), dtype="bf16"))


def test_starts_are_compared_with_reads_of_the_same_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page, mapped = tmp_path / "page.md", list[bool]()
    load = PackedWeights.load
    monkeypatch.setattr(PackedWeights, "load", lambda *args: mapped.append(load(*args)) or mapped[-1])
    main(["load", str(folder), "--rounds", "3", "--threads", "1", "--json", "--out", str(page)])
    found = json.loads(capsys.readouterr().out)
    assert all(seconds > 0 for each in found["rounds"] for seconds in each.values())
    assert mapped == [False, *[True] * 3], "one packs and keeps, one a round maps; first starts do neither"
    (packed,) = (folder / ".packed").glob("*.bin")
    assert found["file_bytes"] == packed.stat().st_size
    assert found["own_bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for start, read, ratio in (("first_disk_s", "own_disk_read_s", "first_disk_over_read"),
                               ("first_cached_s", "own_cached_read_s", "first_cached_over_read")):  # fmt: skip
        assert found[ratio] == sorted(each[start] / each[read] for each in found["rounds"])[1]
    ratios = [(each["load_s"] + each["first_token_s"]) / each["read_s"] for each in found["rounds"]]
    assert (found["start_over_read"], found["start_over_read_worst"]) == (sorted(ratios)[1], max(ratios))
    assert f"| {found['first_disk_over_read']:.2f} |" in page.read_text().splitlines()[-1]


def test_without_a_packed_file_it_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 0}))
    with pytest.raises(SystemExit) as stopped:
        main(["load", str(folder)])
    assert stopped.value.code == 2
    assert f"load: {folder} keeps no packed weights" in capsys.readouterr().err
