"""The ablation's corpus: pinned wheels, the same text wherever it is made."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from data_mixtures import recipe_file
from examples import wheels_corpus
from tests.examples.test_corpus import MODULE


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """A wheel with these files; its line of a requirements file, pinned by hash."""
    path, info = folder / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
    content = {f"{name}/{file}": text for file, text in files.items()} | {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\n",
        f"{info}/RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in content.items():
            archive.writestr(file, text)
    return f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    modules = {f"m{i}.py": MODULE.replace("twice", f"{i} times") for i in range(9)}
    lines = [
        wheel(wheels, "sympy", {**modules, "tests/test_m.py": MODULE}),
        wheel(wheels, "django", modules),
    ]
    (tmp_path / "wheels.txt").write_text("".join(lines))
    monkeypatch.setattr(wheels_corpus, "PINNED", tmp_path / "wheels.txt")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def write_corpus(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.jsonl")}


@pytest.mark.rotate
def test_the_same_bytes_in_any_folder(tmp_path, wheels, monkeypatch):
    wheels_corpus.main(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    wheels_corpus.main(Path("some/where else"))
    here = write_corpus(tmp_path / "here")
    assert here == write_corpus(tmp_path / "some/where else")
    for name in ("web", "code", "qa"):
        assert len(here[f"{name}.jsonl"].splitlines()) == 9, "tests are left out"
    assert json.loads(here["web.jsonl"].splitlines()[0])["text"].startswith("sympy.m")
    assert sorted(here) == [
        "code.jsonl",
        "math.jsonl",
        "multilingual.jsonl",
        "qa.jsonl",
        "web.jsonl",
    ]


def test_another_file_than_the_pinned_one_is_refused_and_leaves_nothing(tmp_path, wheels):
    wheel(wheels, "django", {"other.py": MODULE})
    with pytest.raises(
        SystemExit, match=r"wheels.txt could not be downloaded(?s:.)*django"
    ) as refused:
        wheels_corpus.main(tmp_path / "out")
    assert "PIP_FIND_LINKS=FOLDER" in str(refused.value)
    assert not write_corpus(tmp_path / "out")
    assert not list(tmp_path.glob("out/.wheels/site-packages*"))


def test_every_pin_has_a_hash_and_every_package_a_pin():
    text = wheels_corpus.PINNED.read_text()
    lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
    assert all(flag.startswith("--hash=sha256:") for _, flag in lines)
    assert {pin.partition("==")[0] for pin, _ in lines} == {
        *wheels_corpus.PROSE,
        *wheels_corpus.CODE,
    }
    assert recipe_file.load(Path("data_mixtures/ablation.toml")).corpus == "examples.wheels_corpus"


# What is published was trained on that of 2026-11-23, 431e7b20c760: docs/benchmarks says what has changed since.
DATA = "eac5c54fa379a667f032c88b271ad2d77755c6d97af3df3750ef38329d09a692"


@pytest.mark.rotate
def test_every_machine_prepares_the_same_data(tmp_path):
    command = [sys.executable, "-m", "data_mixtures.prepare", "data_mixtures/ablation.toml"]
    command += ["--out", str(tmp_path)]
    outcome = subprocess.run(command, capture_output=True, text=True)
    if "could not be downloaded" in outcome.stderr + outcome.stdout:
        pytest.skip("no package index")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    prepared = json.loads((tmp_path / "phase1.lock.json").read_text())["fingerprint"]
    assert prepared == DATA
