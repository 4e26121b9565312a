"""Models by name: fetched from a hub that speaks Hugging Face's protocol, and found where other programs keep them."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from laneformer.cli import main, names
from laneformer.cli.names import choose_gguf_file, display_name, locate_model

COMMIT = hashlib.sha1(b"").hexdigest()
TALKER = "someone/talker-1B"
GENERATE = ["--prompt", "hi", "--threads=1", "--max-new-tokens=4", "--no-cache"]


class Hub(ThreadingHTTPServer):
    """A repository of a folder's files, as huggingface.co answers for it; any other is not there."""

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {file.name: file for file in folder.glob("*") if file.is_file()}
        self.fetched: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        path, files = self.path.partition("?")[0], self.server.files
        name = path.rpartition("/")[2]
        if path.startswith(f"/api/models/{TALKER}/tree/"):
            self.answer(json.dumps(self.entries()).encode())
        elif path.startswith(f"/api/models/{TALKER}"):
            described = {"id": TALKER, "sha": COMMIT, "siblings": self.entries()}
            self.answer(json.dumps(described).encode())
        elif path.startswith(f"/{TALKER}/resolve/") and name in files:
            if self.command == "GET":
                self.server.fetched.append(name)
            self.answer(files[name].read_bytes())
        else:
            self.answer(b"", 404, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def entries(self) -> list[dict[str, object]]:
        return [
            {"path": name, "rfilename": name, "type": "file", "size": file.stat().st_size, "oid": "0" * 40}
            for name, file in self.server.files.items()
        ]  # fmt: skip

    def answer(self, body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        tag, length = f'"{hashlib.sha1(body).hexdigest()}"', str(len(body))
        self.send_response(status)
        for header in {
            "ETag": tag,
            "X-Repo-Commit": COMMIT,
            "Content-Length": length,
            **(headers or {}),
        }.items():
            self.send_header(*header)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Iterator[Hub]:
    source = Path(shutil.copytree(folder, tmp_path / "hub", ignore=shutil.ignore_patterns(".packed")))
    (source / "README.md").write_text("not needed")
    with Hub(source) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()


def use_hub(monkeypatch: pytest.MonkeyPatch, address: str, cache: Path) -> None:
    """What HF_ENDPOINT, HF_HUB_CACHE and HF_HUB_DISABLE_XET say at the start of a process."""
    template = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(names.constants, "ENDPOINT", address)
    monkeypatch.setattr(names.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(names.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(names.constants, "HF_HUB_DISABLE_XET", True)


@pytest.mark.job
def test_a_name_is_fetched_once_listed_and_told_where_it_cannot_be(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    addresses = f"http://127.0.0.1:{hub.server_port}", "http://127.0.0.1:9"
    printed = []
    for address, flags in zip((*addresses, addresses[1]), ([], [], ["--draft", TALKER]), strict=True):
        use_hub(monkeypatch, address, tmp_path / "cache")
        main(["generate", TALKER, *GENERATE, *flags])
        printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1, "without a network what is there is used"
    assert {"config.json", "model.safetensors"} < set(hub.fetched)
    assert len(set(hub.fetched)) == len(hub.fetched)
    assert "README.md" not in hub.fetched
    main(["models", "--json"])
    assert TALKER in [json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()]
    for address in addresses:
        use_hub(monkeypatch, address, tmp_path / "cache")
        with pytest.raises(SystemExit) as exit_info:
            main(["generate", "someone/else", *GENERATE])
        assert exit_info.value.code == 2
        assert "hf download someone/else --local-dir else" in capsys.readouterr().err


def test_models_of_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setattr(names.constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    blob = tmp_path / ".ollama/models/blobs/sha256-12"
    manifest = tmp_path / ".ollama/models/manifests/registry.ollama.ai/library/smollm2/135m"
    studio = tmp_path / ".lmstudio/models/someone/talker-GGUF/talker-Q4_K_M.gguf"
    for path in (blob, manifest, studio):
        path.parent.mkdir(parents=True)
    blob.write_bytes(b"GGUF....")
    studio.write_bytes(b"GGUF....")
    layers = [
        {"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:34"},
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:12"},
    ]
    manifest.write_text(json.dumps({"layers": layers}))
    manifest.with_name("unfinished").write_text('{"layers')
    assert locate_model("smollm2:135m") == blob
    assert locate_model("someone/talker-Q4_K_M") == studio
    with pytest.raises(ValueError, match="no model that `laneformer models` lists"):
        locate_model("smollm3")


def test_which_file_of_a_repository() -> None:
    files = ["m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-BF16-00001-of-00002.gguf", "m-BF16-00002-of-00002.gguf"]
    assert choose_gguf_file("o/m", files, "") == "m-Q4_K_M.gguf"
    assert choose_gguf_file("o/m", files, "q8_0") == "m-Q8_0.gguf"
    assert choose_gguf_file("o/m", ["model.safetensors", "config.json"], "") is None
    with pytest.raises(ValueError, match="has no Q2_K; it has BF16, Q4_K_M, Q8_0"):
        choose_gguf_file("o/m", files, "Q2_K")
    assert choose_gguf_file("o/m", files, "BF16") == "m-BF16-00001-of-00002.gguf"


def test_a_file_in_parts_is_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = []
    monkeypatch.setattr(names.huggingface_hub.HfApi, "list_repo_files", lambda *_: files)
    monkeypatch.setattr(
        names.huggingface_hub, "hf_hub_download", lambda _, name: fetched.append(name) or tmp_path / name
    )
    files = ["m-BF16-00002-of-00002.gguf", "m-Q8_0.gguf", "m-BF16-00001-of-00002.gguf"]
    assert names.download_model("o/m", "bf16") == tmp_path / files[2]
    assert fetched == [files[2], files[0]]
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    folder = tmp_path / ".lmstudio/models/o/m"
    folder.mkdir(parents=True)
    for file in files:
        (folder / file).write_bytes(b"GGUF")
    found = {model.name: (model.path.name, model.bytes) for model in names.list_lm_studio()}
    assert found == {"o/m-BF16": (files[2], 8), "o/m-Q8_0": (files[1], 4)}


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("m-IQ4_XS.gguf", "m"),
        ("o/Qwen3-0.6B", "Qwen3-0.6B"),
        ("smollm2:135m", "smollm2"),
        ("Q8_0.gguf", "Q8_0"),
        ("m-Q8_0-00001-of-00002.gguf", "m"),
    ],
)
def test_what_clients_call_it(path: str, name: str) -> None:
    assert display_name(Path(path)) == name
