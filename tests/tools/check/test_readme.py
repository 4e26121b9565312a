"""README and docs: computed parts are up to date, commands name modules that exist, links lead somewhere."""

from __future__ import annotations

import importlib.util
import re
import runpy
from pathlib import Path

import pytest

from tools.check import readme

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
OURS = ("records", "laneformer", "data_mixtures", "train", "evals", "tools", "examples")


@pytest.mark.parametrize("path", [Path("README.md"), readme.PICTURE], ids=str)
def test_computed_parts_are_up_to_date(path: Path) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    assert readme.generated()[path] == text, f"{path} is out of date; run python -m tools.check.readme"


def test_the_first_screen() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")
    assert next(n for n, line in enumerate(lines, 1) if line.startswith("make ")) < 15
    assert lines.index(readme.END) < 25
    assert sum(line.startswith("| **") for line in lines[:25]) == 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_links(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    commands = {name for name in re.findall(r"-m ([\w.]+\w)", text) if name.split(".")[0] in OURS}
    assert not [name for name in commands if not exists(name) and not name.endswith(".NAME")], (
        "no such modules"
    )
    tomls = re.findall(r"(?:configs|data_mixtures|examples)/[\w-]+\.toml", text)
    assert not [name for name in tomls if not (ROOT / name).is_file()], "no such recipe or job file"
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    assert not [link for link in links if link and not (page.parent / link).exists()], "broken links"


def test_files_named_by_the_architecture_page_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./]*\w\.(?:py|cpp|h|cu|cuh))`", text))
    files = [
        f"/{path.relative_to(ROOT)}"
        for top in (*OURS, "models", "tests")
        for path in (ROOT / top).rglob("*.*")
    ]
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
    assert exists("tools.check.readme")
    assert exists("evals.core")
    assert not exists("tools.bench_decode")
    assert not exists("evals.gone.further")
    assert not exists("records"), "a package without a __main__ cannot be run"
    assert not exists("records.files"), "nor a module without a main"


def test_help_names_the_command_and_not_the_file_of_this_machine() -> None:
    ran = [path for top in ("tools", "examples", "train", "evals") for path in (ROOT / top).rglob("*.py")]
    calls = {p: re.findall(r"tyro\.cli\((?:[^()]|\([^()]*\))*\)", p.read_text(encoding="utf-8")) for p in ran}
    own_process = {"evals/commands.py", "tools/bench/decode_candidates.py"}  # no help is ever shown
    unnamed = {
        str(p.relative_to(ROOT)) for p, found in calls.items() if any("prog=" not in each for each in found)
    }
    assert unnamed == own_process


@pytest.mark.parametrize("command", ["tools.check", "tools.bench"])
def test_a_list_of_commands_has_a_help(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [command, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"{command}.__main__", run_name="__main__")
    assert ended.value.code == 0


PAGE = """# Speed

## 2026-01-01 10:00 UTC: old

| a | x | x |
| --- | ---: | ---: |
| `ours` | 1 | 2 |

## 2026-01-02 09:00 UTC: new, `300m`

--against b

| a | x | x |
| --- | ---: | ---: |
| ours | 3 | 4 |
"""


def test_tables_are_read_as_written(tmp_path: Path) -> None:
    page = tmp_path / "2026-01-02-speed.md"
    page.write_text(PAGE)
    old, new = readme.sections(page)
    assert (old.row("x", "ours")["x"], new.row("x", "ours")["x"]) == ("1", "3"), (
        "the first of two equal headers"
    )
    assert readme.newest_with([old, new], "--against b") is new
    with pytest.raises(ValueError, match="has no table with a column 'y'"):
        new.row("y", "ours")
    with pytest.raises(ValueError, match="no page DATE-speed"):
        readme.newest_page(tmp_path, "speed")


def test_delayed_lanes_do_not_wait_and_barriers_do() -> None:
    durations = [[1.0, 2.0, 1.0], [2.0, 1.0, 1.0]]
    assert readme.schedule(durations, 0) == [[(0, 1), (2, 4), (4, 5)], [(0, 2), (2, 3), (4, 5)]]
    assert readme.schedule(durations, 2) == [[(0, 1), (1, 3), (3, 4)], [(0, 2), (2, 3), (3, 4)]]
