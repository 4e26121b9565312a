"""README and docs: commands name modules that exist, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tools.bench.__main__
import tools.check.__main__

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FROZEN = "Repeat at commit "
NAMES = {"tools.check": tools.check.__main__.CHECKS, "tools.bench": tools.bench.__main__.BENCHMARKS}
OURS = ("records", "laneformer", "data_mixtures", "train", "evals", "tools", "examples")


def test_commands_and_links() -> None:
    faults = [f"{page.relative_to(ROOT)}: {fault}" for page in PAGES for fault in faults_of(page)]
    assert not faults


def faults_of(page: Path) -> Iterator[str]:
    """Commands whose module cannot be run, job files and links that lead nowhere; a page with a commit of its own
    has links alone.
    """
    text = re.sub("<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    commands = "" if FROZEN in text else text
    modules = {name for name in re.findall(r"-m ([\w.]+\w)", commands) if name.split(".")[0] in OURS}
    yield from (name for name in modules if not exists(name) and not name.endswith(".NAME"))
    for command, names in NAMES.items():
        named = re.findall(rf"python -m {re.escape(command)} ([a-z]\w*)", commands)
        yield from (f"{command} {name}" for name in named if name not in names)
    files = re.findall(r"(?:configs|data_mixtures|examples)/[\w-]+\.toml", commands)
    yield from (name for name in files if not (ROOT / name).is_file())
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    yield from (link for link in links if link and not (page.parent / link).exists())


def test_what_leads_nowhere_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    commands = "`python -m tools.gone x`, `python -m tools.check int8`, configs/gone.toml"
    page.write_text(f"{commands}, [here](page.md#a) and [there](gone.md)")
    assert list(faults_of(page)) == ["tools.gone", "tools.check int8", "configs/gone.toml", "gone.md"]


def test_no_page_promises_an_index() -> None:
    """docs/release.md says what it takes; until then, `pip install laneformer` would install whatever somebody
    registers.
    """
    promise = re.compile(r"(pipx?|uv)\b.*\b(install|run)\b[^.\n]*?[\s\"']laneformer\b(?!-)")
    found = [f"{page.name}: {line}" for page in PAGES if page.name != "release.md"
             for line in page.read_text().splitlines() if promise.search(line)]  # fmt: skip
    assert found == [], "say `pip install .` from a checkout"


def test_files_named_by_the_architecture_page_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]*\w\.(?:py|cpp|h|cu|cuh))`", text))
    folders = [ROOT / top for top in (*OURS, "models", "tests")]
    files = [f"/{path.relative_to(ROOT)}" for folder in folders for path in folder.rglob("*.*")]
    assert len(named) > 30
    assert not [name for name in named if not any(file.endswith(f"/{name}") for file in files)]


def exists(module: str) -> bool:
    """Whether `python -m module` finds something that it would run."""
    try:
        spec = importlib.util.find_spec(module)
        if spec and spec.submodule_search_locations:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except ModuleNotFoundError:
        return False
    return bool(spec and spec.origin) and 'if __name__ == "__main__":' in Path(spec.origin).read_text(
        encoding="utf-8"
    )


def test_modules_that_are_gone_are_found() -> None:
    assert exists("tools.check.structure")
    assert exists("evals.core")
    assert not exists("tools.bench_decode")
    assert not exists("evals.gone.further")
    assert not exists("records"), "a package without a __main__ cannot be run"
    assert not exists("records.files"), "nor a module without a main"


def test_help_names_the_command_and_not_the_file_of_this_machine() -> None:
    ran = [path for top in ("tools", "examples", "train", "evals") for path in (ROOT / top).rglob("*.py")]
    calls = {p: re.findall(r"tyro\.cli\((?:[^()]|\([^()]*\))*\)", p.read_text(encoding="utf-8")) for p in ran}
    assert not [p for p, found in calls.items() if any("prog=" not in each for each in found)]


def test_a_list_of_commands_has_a_help(monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (tools.check.__main__, tools.bench.__main__):
        monkeypatch.setattr("sys.argv", [command.__name__, "--help"])
        with pytest.raises(SystemExit) as ended:
            command.main()
        assert ended.value.code == 0
