"""Tests of system errors and readers that leave: one sentence or none, and never a traceback."""

import errno
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from laneformer.cli import main, names
from laneformer.engine import Engine
from tests.laneformer.serve.endpoint import parse_table

COMMAND = f"{sys.executable} -m laneformer.cli"
# root reads everything but for these two
DROP = "" if os.geteuid() else "setpriv --bounding-set=-dac_override,-dac_read_search "
NO_HOME = """import os, pwd
def refuse(uid): raise KeyError(uid)
pwd.getpwuid = refuse
del os.environ["HOME"]
from laneformer.cli import main
main()"""
FAST = "--threads 1 --no-cache"


@pytest.fixture
def model_copy(folder, tmp_path):
    """Return a copy that a test may damage."""
    return Path(shutil.copytree(folder, tmp_path / "own", ignore=shutil.ignore_patterns(".packed")))


def run(script: str, **environment: str) -> tuple[int, str]:
    """Return the status of the first command in a script's last pipeline, and its stderr."""
    script = f"{script}; exit ${{PIPESTATUS[0]}}"
    process = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=300,
        env=os.environ | environment,
    )
    assert "Traceback" not in process.stderr, process.stderr
    assert "Exception ignored" not in process.stderr, process.stderr
    return process.returncode, process.stderr


# shell script => status of its first command => what stderr says; null: anything
SCRIPTS = r"""
{command} --help | true => 141 => null
{command} models | true => 1 => null
{command} generate {own} {fast} --prompt a --max-new-tokens 4000 --ignore-eos | head -c 1 => 141 => null
{command} chat {own} {fast} < <(yes) | head -c 1 => 141 => null
{command} models > /dev/full => 2 => "laneformer: No space left on device\n"
{command} generate {own} {fast} --prompt a > /dev/full => 2 => "laneformer: No space left on device\n"
{command} --version >&- => 0 => ""
{command} chat {own} {fast} <&- => 0 => null
chmod 0 {own}/model.safetensors; {unprivileged} generate {own} {fast} --prompt a => 2 \
=> "laneformer: {own}/model.safetensors: Permission denied\n"
chmod 0 {own}; {unprivileged} generate {own} {fast} --prompt a => 2 \
=> "laneformer: {own}/adapter_config.json: Permission denied\n"
{no_home} generate {own} --threads 1 --prompt a => 0 => null
{no_home} models => 0 => ""
{no_home} chat {own} {fast} <<< '/save ~/x' => 0 => '~/x'
""".replace("\\\n", "")


@pytest.mark.job
@pytest.mark.parametrize(("script", "status", "sentence"), parse_table(SCRIPTS, " => "))
def test_a_command_ends_with_a_sentence_or_without_a_word(model_copy, script, status, sentence):
    words = {"own": model_copy, "fast": FAST, "command": COMMAND, "unprivileged": DROP + COMMAND}
    words["no_home"] = f"{sys.executable} -c {shlex.quote(NO_HOME)}"
    result, stderr = run(script.format_map(words), XDG_CACHE_HOME="")
    assert result == status, stderr
    # null: anything may be said; "": nothing
    if sentence is not None:
        assert sentence.format_map(words) in stderr
        assert sentence or not stderr


# words of a command | what stderr says
WORDS = r"""
["generate", "LONG", "--prompt", "a"] | LONG: File name too long
["generate", "{own}", "--prompt", "a\udce9"] | --prompt is not UTF-8: b'a\xe9'
["generate", "{own}", "--prompt", "a", "--stop", "b", "--stop", "\udcff"] | --stop is not UTF-8
["generate", "{own}", "--chat", "--prompt", "a", "--system", "\udcff"] | --system is not UTF-8
["serve", "{own}", "--model-name", "\udcff"] | --model-name is not UTF-8
["chat", "{own}", "--cache-dir", "/dev/null/x"] | /dev/null/x
["generate", "{own}/config.json/x", "--prompt", "a"] | not a folder
""".replace("LONG", "x" * 300)


@pytest.mark.parametrize(("words", "sentence"), parse_table(WORDS))
def test_what_the_system_or_the_shell_gets_wrong_is_named(model_copy, capsys, words, sentence):
    with pytest.raises(SystemExit) as stop:
        main([word.format(own=model_copy) for word in words])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err.removeprefix("laneformer: ")


class Gone(io.RawIOBase):
    """A closed terminal; reading on from it is interrupted."""

    reads = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        self.reads += 1
        raise KeyboardInterrupt if self.reads > 9 else OSError(errno.EIO, "Input/output error")


def test_a_conversation_ends_with_its_terminal(model_copy, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(Gone()), encoding="utf-8"))
    main(["chat", str(model_copy), *FAST.split()])


def test_a_folder_may_have_any_name(model_copy, tmp_path, monkeypatch, capsys):
    # packed weights go to the user's cache if its own folder takes none
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    odd = model_copy.rename(os.fsdecode(os.fsencode(model_copy) + b"\xe9"))
    (odd / ".packed").touch()
    for _ in range(2):
        main(["generate", str(odd), "--prompt", "a", "--threads", "1", "--max-new-tokens", "2"])
    assert len(list((tmp_path / "user/laneformer").glob("*/*.bin"))) == 1
    main(["models"])
    assert "1 files" in capsys.readouterr().out


# file => content; null: a link to a file that is gone
CACHES = r"""
hub/models--whole--m/snapshots/1/config.json => "{}"
hub/models--whole--m/snapshots/1/model.safetensors => "1234"
hub/models--whole--m/snapshots/1/README.md => null
hub/models--whole--m/refs/main => "1"
hub/models--lost--m/snapshots/1/config.json => "{}"
hub/models--lost--m/snapshots/1/model.safetensors => null
hub/models--lost--m/refs/main => "1"
hub/models--odd--m/refs/main => "\u00ff\u0000"
hub/models--part--m/snapshots/1/m-Q4_0.gguf => null
hub/models--part--m/refs/main => "1"
hub/models--folder--m/refs/main/x => ""
.lmstudio/models/o/m/lost.gguf => null
.lmstudio/models/o/m/whole.gguf => GGUF....
.ollama/models/manifests/r/l/m/0 => "null"
.ollama/models/manifests/r/l/m/1 => "{\"layers\": [1]}"
.ollama/models/manifests/r/l/m/2 => "{\"layers\": [{\"mediaType\": \"x\"}]}"
.ollama/models/manifests/r/l/m/3 => "\u00ff"
.ollama/models/manifests/r/l/m/4 => "{}"
.ollama/models/manifests/r/l/m/missing => LAYERS
.ollama/models/manifests/r/l/m/link => LAYERS
.ollama/models/manifests/r/l/m/folder => LAYERS
.ollama/models/manifests/r/l/m/8 => LAYERS
.ollama/models/blobs/sha256-link => null
.ollama/models/blobs/sha256-folder/x => ""
.ollama/models/blobs/sha256-8 => GGUF....
"""


def test_models_of_other_programs_beside_what_is_broken(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setattr(names.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    for name, content in parse_table(CACHES, " => "):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content == "LAYERS":
            # Ollama's manifest; the model is one of its layers, a blob named by its digest
            kinds = (("license", "34"), ("model", path.name))
            prefix = "application/vnd.ollama.image"
            layers = [{"mediaType": f"{prefix}.{k}", "digest": f"sha256:{d}"} for k, d in kinds]
            content = json.dumps({"layers": layers})
        if content is None:
            path.symlink_to(tmp_path / "gone")
        else:
            path.write_text(content, encoding="latin-1")
    main(["models", "--json"])
    listed = {json.loads(line)["name"] for line in capsys.readouterr().out.splitlines()}
    assert listed == {"whole/m", "o/whole", "m:8"}
    main(["models"])
    blob = "models/blobs/sha256-8"
    assert names.locate_model("m:8") == tmp_path / ".ollama" / blob
    # OLLAMA_MODELS moves Ollama's folder, and no other program's
    (tmp_path / ".ollama").rename(tmp_path / "other")
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "other/models"))
    assert names.locate_model("m:8") == tmp_path / "other" / blob
    assert names.locate_model("o/whole") == tmp_path / ".lmstudio/models/o/m/whole.gguf"
    with pytest.raises(ValueError, match="a model that `laneformer models` lists"):
        names.locate_model("smollm3")


def test_more_than_the_model_or_the_machine_has_is_said(folder, caplog):
    # a warning, not an error: the engine opens all the same
    for options, word in (
        ({"context_tokens": 4097}, "context_tokens = 4097: the model knows 4096"),
        ({"threads": 1 + (os.cpu_count() or 1)}, "threads = "),
        ({"context_tokens": 4096, "threads": 1}, ""),
    ):
        caplog.clear()
        Engine.from_pretrained(folder, cache=False, **options).close()
        assert word in caplog.text
        assert word or not caplog.text
