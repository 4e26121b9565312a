"""Tests that fenced commands in README and docs parse, and that commands and links lead somewhere.

`python -m tests.test_documents [PAGE ...]` prints the faults of fenced commands; none is executed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from tyro._backends._tyro_backend import TyroBackend

import tools.bench.__main__
import tools.check.__main__
from tests.laneformer.serve.conftest import write_model
from tests.train.runs import run_forked
from train.supervise.workers import hold_port

ROOT = Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [*GUIDES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*/*.md"))]
FROZEN = "Repeat at commit "
NAMES = {"tools.check": tools.check.__main__.CHECKS, "tools.bench": tools.bench.__main__.BENCHMARKS}
OURS = ("records", "laneformer", "data_mixtures", "train", "evals", "tools", "examples")
# parses and checks the flags of `python -m train`
JOB = "train.job_config"


# --- fenced commands, which a process of its own parses, since TorchTitan keeps global state


class Parsed(BaseException):
    """Ends a program when its arguments are parsed. `rest`: those that it passes on to a job."""

    def __init__(self, rest: Sequence[str]):
        self.rest = rest


def stop_after_parsing() -> None:
    """Make programs of this process end where tyro or argparse has read their arguments."""
    for parser, name in (
        (TyroBackend, "parse_args"),
        (argparse.ArgumentParser, "parse_known_args"),
    ):
        setattr(parser, name, then_stop(getattr(parser, name)))


def then_stop(parse: Callable[..., tuple[Any, list[str] | None]]) -> Callable[..., NoReturn]:
    def parse_and_stop(*values: Any, **options: Any) -> NoReturn:
        raise Parsed(parse(*values, **options)[1] or ())

    return parse_and_stop


def list_fenced_commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield (module, or "make", and its arguments) of our programs in a page's fenced blocks."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    for language, block in blocks:
        for line in block.replace("\\\n", " ").splitlines() if language in ("", "bash") else ():
            # of `sbatch --wrap "..."` the command in quotes; a variable's value is not known
            line = re.sub(r'--wrap "(.*)"', r"; \1", re.sub(r"\$\w+", "1", line))
            start = re.search(
                r"(?:^|python3? |torchrun .*?|[|;] |=\S+ )((?:-m|laneformer|make) .*)", line
            )
            if start is None:
                continue
            words = shlex.shlex(start[1], posix=True, punctuation_chars="|&;")
            words.whitespace_split = True
            program, *arguments = itertools.takewhile(lambda word: not set(word) <= {*"|&;"}, words)
            if program == "-m":
                program, *arguments = arguments
            if program.split(".")[0] in (*OURS, "make"):
                yield program, arguments


def fault_of(program: str, arguments: list[str]) -> str | None:
    """Return the error of the program's parser, or of the job's parser for the job's arguments."""
    if program == "make":
        targets = re.findall(r"^([\w-]+)(?::|(?= [\w -]+:))", (ROOT / "Makefile").read_text(), re.M)
        return None if arguments[0] in targets else f"make has no target {arguments[0]}"
    is_of_job = [word.startswith("--") and "." in word.split("=")[0] for word in arguments]
    flags = arguments[is_of_job.index(True) :] if any(is_of_job) else []
    if program == "train":
        return run_parser(JOB, flags)
    fault = run_parser(program, arguments)
    if fault is None and flags:
        file = [] if "--job.config_file" in flags else ["--job.config_file", "configs/phase1.toml"]
        fault = run_parser(JOB, [*file, *flags])
    return fault


def run_parser(module: str, arguments: list[str]) -> str | None:
    output = io.StringIO()
    sys.argv = [module, *arguments]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            if module == "laneformer":
                module = "laneformer.cli"
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Parsed as parsed:
        # what has a dot in its name is the job's
        unread = [*parsed.rest][:1]
        return None if not unread or "." in unread[0] else f"unknown argument {unread[0]}"
    except SystemExit as end:
        return (
            None
            if end.code in (0, None)
            else " ".join(f"{end.code} {output.getvalue()}".split())[:300]
        )
    except ImportError as error:
        return str(error)
    return "ended without a parser"


def print_faults(pages: Sequence[Path]) -> None:
    stop_after_parsing()
    for page in pages:
        for program, arguments in list_fenced_commands(page):
            if fault := fault_of(program, arguments):
                print(f"{page.name}: {program} {shlex.join(arguments)}: {fault}")


@pytest.mark.job
def test_every_fenced_command_is_parsed_by_its_program(tmp_path):
    assert sum(len([*list_fenced_commands(page)]) for page in GUIDES) > 80
    planted = {
        "python -m tools.gone x": "No module named tools.gone",
        "torchrun ... -m train --job.config_file configs/phase1.toml --training.stepz 5": "stepz",
        "python -m tools.plan configs/phase1.toml --mixture.lok data/x": "lok",
        "printf 'Hi' | laneformer chat DIR --temperatur 1": "temperatur",
        "python -m evals.watch --run runs/x --onze": "unknown argument --onze",
        "make coffee": "make has no target coffee",
    }
    page = tmp_path / "planted.md"
    page.write_text("```\n" + "\n".join(planted) + "\n```\n")
    status, output = run_forked(tmp_path, "tests.test_documents", str(page), *map(str, GUIDES))
    assert status == 0, output
    faults = [line for line in output.splitlines() if line.startswith("planted.md")]
    assert len(faults) == len(planted), output
    assert all(words in output for words in planted.values()), output
    assert not [
        line
        for line in output.splitlines()
        if re.match(r"[\w-]+\.md: ", line) and line not in faults
    ]


# --- names and links anywhere on a page


def test_commands_and_links():
    faults = [f"{page.relative_to(ROOT)}: {fault}" for page in PAGES for fault in faults_of(page)]
    assert not faults


def faults_of(page: Path) -> Iterator[str]:
    """Yield modules that cannot be run, and job files and links that lead nowhere."""
    text = re.sub("<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    # of a page with a commit of its own, only links count
    commands = "" if FROZEN in text else text
    modules = {
        name for name in re.findall(r"-m ([\w.]+\w)", commands) if name.split(".")[0] in OURS
    }
    yield from (name for name in modules if not exists(name) and not name.endswith(".NAME"))
    for command, names in NAMES.items():
        arguments = re.findall(rf"python -m {re.escape(command)} ([a-z]\w*)", commands)
        yield from (f"{command} {name}" for name in arguments if name not in names)
    files = re.findall(r"(?:configs|data_mixtures|examples)/[\w-]+\.toml", commands)
    yield from (name for name in files if not (ROOT / name).is_file())
    links = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link
    ]
    yield from (link for link in links if link and not (page.parent / link).exists())


def exists(module: str) -> bool:
    """Return whether `python -m module` finds something to run."""
    try:
        spec = importlib.util.find_spec(module)
        if spec and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return False
    main = 'if __name__ == "__main__":'
    return bool(spec and spec.origin) and main in Path(spec.origin).read_text(encoding="utf-8")


def test_what_leads_nowhere_is_named(tmp_path):
    page = tmp_path / "page.md"
    commands = "`python -m tools.gone x`, `python -m tools.check int8`, configs/gone.toml"
    page.write_text(f"{commands}, [here](page.md#a) and [there](gone.md)")
    assert list(faults_of(page)) == [
        "tools.gone",
        "tools.check int8",
        "configs/gone.toml",
        "gone.md",
    ]
    # a package without a __main__ cannot be run, nor a module without a main
    modules = ("evals.core", "evals.gone.further", "records", "records.files")
    assert [exists(module) for module in modules] == [True, False, False, False]


def test_no_page_promises_an_index():
    # until docs/release.md is done, `pip install laneformer` would install what anybody registers
    promise = re.compile(r"(pipx?|uv)\b.*\b(install|run)\b[^.\n]*?[ \"']laneformer\b(?!-)")
    pages = [page for page in PAGES if page.name != "release.md"]
    promises = [
        f"{page.name}: {match[0]}" for page in pages for match in promise.finditer(page.read_text())
    ]
    assert promises == [], "say `pip install .` from a checkout"


def test_files_named_by_the_architecture_page_exist():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    names = set(re.findall(r"`([\w./]*\w\.(?:py|cpp|h|cu|cuh))`", text))
    folders = [ROOT / top for top in (*OURS, "models", "tests")]
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.*")]
    assert len(names) > 30
    assert not [name for name in names if not any(file.endswith(f"/{name}") for file in files)]


def test_help_names_the_command_and_not_the_file_of_this_machine():
    programs = [
        path
        for top in ("tools", "examples", "train", "evals")
        for path in (ROOT / top).rglob("*.py")
    ]
    calls = {
        p: re.findall(r"tyro\.cli\((?:[^()]|\([^()]*\))*\)", p.read_text(encoding="utf-8"))
        for p in programs
    }
    assert not [p for p, texts in calls.items() if any("prog=" not in text for text in texts)]


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("strucure", 2)])
@pytest.mark.parametrize("command", [tools.check.__main__, tools.bench.__main__])
def test_a_list_of_commands_names_them(command, word, status, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["command", word])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == status
    package = command.__name__.removesuffix(".__main__")
    printed = capsys.readouterr().err
    assert all(
        name in printed and importlib.util.find_spec(f"{package}.{name}") for name in NAMES[package]
    )


# --- docs/start.md

SECTIONS = re.findall(
    r"^## ([^\n]*)\n.*?^```\n(.*?)^```", (ROOT / "docs/start.md").read_text(), re.M | re.S
)


def test_the_first_page_has_ten_lines_for_each_kind_of_machine():
    assert [name for name, _ in SECTIONS] == [
        "Chat",
        "Serving",
        "A laptop",
        "One GPU",
        "Eight GPUs",
        "Slurm",
    ]
    assert all(len(block.splitlines()) <= 10 for _, block in SECTIONS)


@pytest.mark.rotate
@pytest.mark.parametrize("name", ["Chat", "Serving"])
def test_chat_and_serving_are_executed(name, tmp_path):
    model = write_model(tmp_path, max_position_embeddings=512)
    # `make chat` has its own test; serving goes on with the model of the chat
    lines = [
        line
        for line in dict(SECTIONS)[name].splitlines()
        if not line.startswith(("make", "MODEL="))
    ]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with hold_port() as holder:
        script = "\n".join([f"MODEL={model}", *lines]).replace("8000", str(holder.getsockname()[1]))
        outcome = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    if name == "Serving":
        assert '{"status":"ok"}' in outcome.stdout
        assert '"role":"assistant"' in outcome.stdout
        assert re.search(r"^laneformer_generated_tokens_total [1-9]", outcome.stdout, re.MULTILINE)


if __name__ == "__main__":
    print_faults([Path(page) for page in sys.argv[1:]] or GUIDES)
