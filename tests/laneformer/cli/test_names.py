"""Tests of models by name: downloaded once from Hugging Face, and found in other programs' folders."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from laneformer.cli import main, names
from laneformer.cli.names import choose_gguf_file, display_name
from tests.laneformer.serve.endpoint import parse_table

COMMIT = hashlib.sha1(b"").hexdigest()
TALKER = "someone/talker-1B"
GENERATE = ["--prompt", "hi", "--threads=1", "--max-new-tokens=4", "--no-cache"]


def lay_out_hub(files, source, cache, patch) -> list[str]:
    """Replace Hugging Face by one repository with these files; return the list of downloads."""
    downloads = []

    def list_repo_files(_, repository):
        if repository != TALKER:
            raise OSError("there is no such repository\nand more")
        return files

    def snapshot_download(repository, **patterns):
        folder = cache / f"models--{repository.replace('/', '--')}"
        revision = folder / "snapshots" / COMMIT
        revision.mkdir(parents=True)
        # the library's own filter, and the layout of its cache
        for name in filter_repo_objects(files, **patterns):
            shutil.copy(source / name, revision)
            downloads.append(name)
        (folder / "refs").mkdir()
        (folder / "refs/main").write_text(COMMIT)
        return str(revision)

    patch.setattr(names.constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(names.huggingface_hub.HfApi, "list_repo_files", list_repo_files)
    patch.setattr(names.huggingface_hub, "snapshot_download", snapshot_download)
    return downloads


@pytest.mark.job
def test_a_name_is_fetched_once_listed_and_told_where_it_cannot_be(
    folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    files = [file.name for file in folder.iterdir() if file.is_file()]
    others = ["README.md", "original/model.safetensors"]
    downloads = lay_out_hub([*files, *others], folder, tmp_path / "cache", monkeypatch)
    printed = []
    # the second time, and as a small model, it is in the cache
    for flags in ([], ["--draft", TALKER]):
        main(["generate", TALKER, *GENERATE, *flags])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert sorted(downloads) == sorted(files), "once, and nothing else"
    main(["models", "--json"])
    assert TALKER in [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", "someone/else", *GENERATE])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "there is no such repository. Where" in error
    assert "hf download someone/else --local-dir else" in error


FILES = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("files", "quantisation", "chosen"),
    [
        (FILES, "", FILES[0]),
        (FILES, "q8_0", FILES[1]),
        (FILES, "BF16", FILES[2]),
        (["model.safetensors", "config.json"], "", None),
    ],
)
def test_which_file_of_a_repository(files, quantisation, chosen):
    assert choose_gguf_file("o/m", files, quantisation) == chosen
    with pytest.raises(ValueError, match="has no Q2_K; it has BF16, Q4_K_M, Q8_0"):
        choose_gguf_file("o/m", FILES, "Q2_K")


def test_a_file_in_parts_is_one_model(tmp_path, monkeypatch):
    # the first part is what the engine opens; it comes first, however the repository lists them
    downloads = []
    monkeypatch.setattr(names.huggingface_hub.HfApi, "list_repo_files", lambda *_: files)
    monkeypatch.setattr(
        names.huggingface_hub,
        "hf_hub_download",
        lambda _, name: downloads.append(name) or tmp_path / name,
    )
    files = ["m-BF16-00002-of-00002.gguf", "m-Q8_0.gguf", "m-BF16-00001-of-00002.gguf"]
    assert names.download_model("o/m", "bf16") == tmp_path / files[2]
    assert downloads == [files[2], files[0]]
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = tmp_path / ".lmstudio/models/o/m"
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_bytes(b"GGUF")
    models = {model.name: (model.path.name, model.bytes) for model in names.list_lm_studio()}
    assert models == {"o/m-BF16": (files[2], 8), "o/m-Q8_0": (files[1], 4)}


NAMES = """
SmolLM2-135M-Instruct.Q4_1.gguf | SmolLM2-135M-Instruct
m-IQ4_XS.gguf | m
o/Qwen3-0.6B | Qwen3-0.6B
smollm2:135m | smollm2
Q8_0.gguf | Q8_0
m-Q8_0-00001-of-00002.gguf | m
"""


@pytest.mark.parametrize(("path", "name"), parse_table(NAMES))
def test_what_clients_call_it(path, name):
    assert display_name(Path(path)) == name
