"""README and docs: how the claim is computed, commands name modules that exist, links lead somewhere.

The claim itself is compared with the benchmark pages by `make nightly`, since measuring is not part of a change.
"""

from __future__ import annotations

import importlib.util
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.check import readme

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FROZEN = "Repeat at commit "
OURS = ("records", "laneformer", "data_mixtures", "train", "evals", "tools", "examples")


def test_the_first_screen() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")
    first, last = lines.index(readme.BEGIN), lines.index(readme.END)
    assert first < last < next(n for n, line in enumerate(lines) if line.startswith("make ")) < 20


def test_commands_and_links() -> None:
    faults = [f"{page.relative_to(ROOT)}: {fault}" for page in PAGES for fault in faults_of(page)]
    assert not faults


def faults_of(page: Path) -> Iterator[str]:
    """Commands whose module cannot be run, job files and links that lead nowhere; a page with a commit of its own
    has links alone.
    """
    text = page.read_text(encoding="utf-8")
    commands = "" if FROZEN in text else text
    modules = {name for name in re.findall(r"-m ([\w.]+\w)", commands) if name.split(".")[0] in OURS}
    yield from (name for name in modules if not exists(name) and not name.endswith(".NAME"))
    files = re.findall(r"(?:configs|data_mixtures|examples)/[\w-]+\.toml", commands)
    yield from (name for name in files if not (ROOT / name).is_file())
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]
    yield from (link for link in links if link and not (page.parent / link).exists())


def test_what_leads_nowhere_is_named(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`python -m tools.gone x`, configs/gone.toml, [here](page.md#a) and [there](gone.md)")
    assert list(faults_of(page)) == ["tools.gone", "configs/gone.toml", "gone.md"]


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
    assert exists("tools.check.readme")
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
    for command in ("tools.check", "tools.bench"):
        monkeypatch.setattr("sys.argv", [command, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"{command}.__main__", run_name="__main__")
        assert ended.value.code == 0


PAGE = """# Speed

## 2026-01-01 10:00 UTC: `300m` in bf16, 2 threads

| workload |  | tokens/s | % of probe | p10 | % of probe |
| --- | --- | ---: | ---: | ---: | ---: |
| decode at depth 0 | laneformer | 50 | 91 | 79 | 1 |
| decode at depth 0 | llamacpp | 30 | 62 | 60 | 2 |

| workload | ours | over | median |
| --- | --- | --- | ---: |
| decode at depth 0 | laneformer | llamacpp | 1.50 |
| prompt of 128 | laneformer | llamacpp | 0.10 |

## 2026-01-01 11:00 UTC: `300m` in int8, 2 threads

| workload | ours | over | median |
| --- | --- | --- | ---: |
| decode at depth 0 | laneformer | llamacpp | 7.00 |

## 2026-01-01 12:00 UTC: `300m` in bf16, 2 threads

no llama.cpp
"""


def checkout(root: Path, ratio: str) -> Path:
    """A README with an outdated claim, and two runs, the second one of this ratio."""
    page = root / "docs/benchmarks/2026-01-01-cpu-decode.md"
    page.parent.mkdir(parents=True)
    first = PAGE[PAGE.index("\n## ") : PAGE.index("\n## 2026-01-01 11")]
    page.write_text(PAGE + first.replace("1.50", ratio).replace("| 91 |", "| 75 |"))
    (root / "README.md").write_text(f"# Title\n{readme.BEGIN}\n99 times\n{readme.END}\nmore\n")
    return root


def test_the_claim_is_the_range_of_all_runs_and_not_the_best(tmp_path: Path) -> None:
    text = " ".join(readme.claim(checkout(tmp_path, "1.09")).split())
    assert "75 to 91% of the memory bandwidth probed in the same run, 1.09 to 1.50 times llama.cpp" in text
    with pytest.raises(ValueError, match="no page DATE-speed"):
        readme.newest_page(tmp_path, "speed")
    with pytest.raises(ValueError, match="has no run of `2b` in bf16"):
        readme.medians(readme.newest_page(tmp_path, "cpu-decode"), "`2b` in bf16")


def test_an_outdated_claim_is_found_and_rewritten(tmp_path: Path) -> None:
    checkout(tmp_path, "1.09")
    with pytest.raises(SystemExit, match=r"README\.md is out of date"):
        readme.main(["--check"], tmp_path)
    assert "99 times" in (tmp_path / "README.md").read_text(), "a check writes nothing"
    readme.main([], tmp_path)
    readme.main(["--check"], tmp_path)
    lines = (tmp_path / "README.md").read_text().split("\n")
    assert (lines[0], lines[-2]) == ("# Title", "more")
    (tmp_path / "README.md").write_text("no marks")
    with pytest.raises(ValueError, match="once each"):
        readme.updated(tmp_path)
