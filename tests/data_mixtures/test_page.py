"""Test of the commands of docs/data.md: the 2B run's loop, against a hub of small files."""

from __future__ import annotations

import re
import shutil

import pytest

from data_mixtures import recipe_file
from data_mixtures.mixture import Mixture
from data_mixtures.stages import pipeline
from tests.data_mixtures.conftest import ROOT, code_blocks, run_shell
from tests.data_mixtures.stages import fake_hub
from tests.data_mixtures.stages.hub_assets import write_parquet
from tests.data_mixtures.stages.shuffle_assets import tokenizer_model

FOLDER = ROOT / "data_mixtures"
SMALL = """
seq_len = 32
windows_per_shard = 40
valid_per_10000 = 1000
tokenizer = "tokenizer.model"
sources = "sources.toml"
[keep]
cc2-mq = 0.5
[phase1]
cc2-mq = 3
cc2-mhq = 1
[phase2]
cc2-mq = 1
cc2-mhq = 1
"""


def commands() -> str:
    (block,) = (code for _, code in code_blocks("data.md") if "stage()" in code)
    return block


def test_the_loop_has_all_sources_and_all_stages():
    (names,) = re.findall(r'sources="(.*?)"', commands(), re.S)
    assert sorted(names.split()) == sorted(
        source.name for source in recipe_file.load(FOLDER / "nemotron.toml").sources
    )
    stages = re.findall(r"^ *stage (\w+)(?:.*--stage (\w+))?", commands(), re.M)
    # near copies are sought over all sources at once, so `dedup` does not fit a loop over sources;
    # the recipe has none
    looped = [name for name in pipeline.TO_SHARDS if name != "dedup"]
    assert [name for name, _ in stages if name != "free"] == [*looped, "manifest", "verify"]
    # the loop frees each stage's files once the next stage has read them
    freed = [freed for name, freed in stages if name == "free"]
    assert freed == list(pipeline.CONSUMER_OF)


@pytest.mark.rotate
def test_the_commands_prepare_both_phases_and_free_what_is_read(tmp_path, monkeypatch):
    hub = tmp_path / "hub"
    for folder, first in (("Medium-Quality", 0), ("Medium-High-Quality", 5000)):
        for number in range(2):
            write_parquet(
                hub / f"nvidia/Nemotron-CC-v2/{folder}/part_{number}.parquet",
                first + 300 * number,
                300,
            )
    # the commit that sources.toml pins
    monkeypatch.setattr(fake_hub, "COMMIT", "229a2e7" + "1" * 33)
    recipes = tmp_path / "data_mixtures"
    recipes.mkdir()
    shutil.copy(FOLDER / "sources.toml", recipes)
    (recipes / "nemotron.toml").write_text(SMALL)
    (recipes / "tokenizer.model").write_bytes(tokenizer_model())
    script = re.sub(r'sources=".*?"', 'sources="cc2-mq cc2-mhq"', commands(), flags=re.S)
    script = script.replace("--workers 16", "--workers 1")
    with fake_hub.FakeHub(hub) as server:
        printed = run_shell(script, tmp_path, HF_ENDPOINT=server.url, HF_HOME=str(tmp_path))
    assert "0 damaged" in printed
    data = tmp_path / "data/nemotron"
    for phase in ("phase1", "phase2"):
        assert Mixture.open(data / f"{phase}.lock.json").sequences(0, 4)[0].shape == (4, 33)
    folders_with_parquet = {file.parts[len(data.parts)] for file in data.rglob("*.parquet")}
    assert not folders_with_parquet, "raw text and documents are freed"
