"""Tests of the Dockerfile, in a container runtime or by its commands in a bare Debian tree."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.laneformer.serve.conftest import write_model

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = {"FROM", "RUN", "COPY", "ENV", "USER", "EXPOSE", "ENTRYPOINT", "CMD"}
INSTRUCTIONS = [
    tuple(line.split(maxsplit=1))
    for line in re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text()).splitlines()
    if line and not line.startswith("#")
]
RUNTIME = next(
    (
        name
        for name in ("docker", "podman")
        if subprocess.run(["sh", "-c", f"{name} info"], capture_output=True).returncode == 0
    ),
    None,
)
# of one command
LIMIT_S = 600


def test_its_instructions_name_what_is_there():
    allowed = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    for name, rest in INSTRUCTIONS:
        assert name in SUPPORTED, name
        if name == "COPY" and not rest.startswith("--from"):
            sources = rest.split()[:-1]
            assert set(sources) <= allowed, "what .dockerignore leaves out"
            assert all((ROOT / source).exists() for source in sources)
    assert {rest.split()[0] for name, rest in INSTRUCTIONS if name == "FROM"} == {
        "debian:trixie-slim"
    }
    assert json.loads(dict(INSTRUCTIONS)["ENTRYPOINT"]) == ["laneformer"]


def inside(tree: Path, command: list[str]) -> list[str]:
    """Return a command in a tree, with this machine's devices and processes while it runs."""
    mounts = f"mount --rbind /dev {tree}/dev && mount -t proc proc {tree}/proc"
    return ["unshare", "-m", "sh", "-c", f'{mounts} && exec chroot {tree} "$@"', "sh", *command]


def build(folder: Path) -> tuple[Path, dict[str, str]]:
    """Return the Dockerfile's last stage as a tree, and its environment."""
    # each stage begins with the bare system
    bare, stages, environment = folder / "bare", dict[str, Path](), dict[str, str]()
    run(["debootstrap", "--variant=minbase", "trixie", str(bare)])
    certificates = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
    for file in filter(os.path.exists, ("/etc/resolv.conf", certificates)):
        # as a runtime does, and as this machine needs
        (bare / file[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, bare / file[1:])
    tree = bare
    for name, rest in INSTRUCTIONS:
        match name:
            case "FROM":
                tree = folder / f"stage{len(stages)}"
                stages[rest.partition(" AS ")[2] or tree.name] = tree
                run(["cp", "-a", "--reflink=auto", str(bare), str(tree)])
            case "RUN":
                run(inside(tree, ["sh", "-ec", rest]), **environment)
            case "COPY":
                *sources, target = rest.split()
                from_stage = sources[0].startswith("--from")
                origin = stages[sources.pop(0).partition("=")[2]] if from_stage else ROOT
                for source in sources:
                    to = (
                        tree
                        / target.strip("/")
                        / (Path(source).name if target.endswith("/") else "")
                    )
                    to.parent.mkdir(parents=True, exist_ok=True)
                    run(["cp", "-a", str(origin / source.strip("/")), str(to)])
            case "ENV":
                key, _, environment[key] = rest.partition("=")
    return tree, environment


def run(command: list[str], **environment: str) -> None:
    outcome = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **environment}
    )
    assert outcome.returncode == 0, (
        f"{shlex.join(command)}\n{outcome.stdout[-3000:]}{outcome.stderr[-3000:]}"
    )


@pytest.fixture
def server_address(tmp_path):
    model = write_model(tmp_path / "model", max_position_embeddings=512)
    command = [*json.loads(dict(INSTRUCTIONS)["CMD"]), "--port", "8123"]
    if RUNTIME:
        run([RUNTIME, "build", "-t", "laneformer", str(ROOT)])
        start = [
            RUNTIME,
            "run",
            "--rm",
            "--network",
            "host",
            "-v",
            f"{model}:/model",
            "laneformer",
            *command,
        ]
        environment = {}
    else:
        tree, environment = build(tmp_path / "trees")
        shutil.copytree(model, tree / "model")
        user = [
            "setpriv",
            "--reuid",
            "nobody",
            "--regid",
            "nogroup",
            "--clear-groups",
            "laneformer",
        ]
        start = inside(tree, [*user, *command])
    process = subprocess.Popen(start, env={**os.environ, **environment})
    try:
        yield "http://127.0.0.1:8123"
    finally:
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.job
@pytest.mark.skipif("CONTAINER" not in os.environ, reason="minutes: `make nightly`, or CONTAINER=1")
@pytest.mark.skipif(
    RUNTIME is None
    and (shutil.which("debootstrap", path="/usr/sbin:/usr/bin") is None or os.geteuid() != 0),
    reason="no container runtime that answers, nor debootstrap as root",
)
def test_it_serves(server_address):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    # 64 s in all, in which the server starts
    client = httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=60)
    answer = client.post(f"{server_address}/v1/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["role"] == "assistant"
