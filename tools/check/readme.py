"""Writes the computed part of the README, its measured claim.

    python -m tools.check.readme [--check]

The claim is computed from the tables of the newest page of decode speed in docs/benchmarks. `make nightly`
checks that it is up to date.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- figures: python -m tools.check.readme -->", "<!-- end of figures -->"

Row = dict[str, str]  # cells by the header of their column; the first column's header may be empty


def newest_page(root: Path, topic: str) -> Path:
    """The benchmark page of a topic with the latest date. Raises ValueError without one."""
    pages = sorted((root / "docs/benchmarks").glob(f"????-??-??-{topic}.md"))
    if not pages:
        raise ValueError(f"docs/benchmarks has no page DATE-{topic}.md")
    return pages[-1]


def rows_of(section: str) -> Iterator[Row]:
    """The rows of a section's Markdown tables; of columns with the same header the first one counts."""
    for block in re.findall(r"(?m)(?:^\|.*\n?)+", section):
        header, _, *body = (
            [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
            for line in block.strip().split("\n")
        )
        for cells in body:
            yield dict(reversed(list(zip(header, cells, strict=True))))


def medians(page: Path, heading: str) -> list[tuple[int, float]]:
    """Percent of the probe and ratio to llama.cpp of each run whose heading has `heading`.

    Left out: runs without llama.cpp, and those of other workloads.
    """
    found = []
    for section in re.split(r"(?m)^## ", page.read_text(encoding="utf-8"))[1:]:
        if heading in section.partition("\n")[0]:
            rows = [row for row in rows_of(section) if row.get("workload") == "decode at depth 0"]
            percents = [row["% of probe"] for row in rows if row.get("") == "laneformer"]
            ratios = [
                row["median"] for row in rows if row.get("over") == "llamacpp" and row["ours"] == "laneformer"
            ]
            found += [(int(percents[0]), float(ratio)) for ratio in ratios]
    if not found:
        raise ValueError(f"{page.name} has no run of {heading} beside llama.cpp")
    return found


def claim(root: Path = ROOT) -> str:
    """README's measured claim: the range over all runs on the newest page of decode speed, not the best one."""
    page = newest_page(root, "cpu-decode")
    percents, ratios = zip(*medians(page, "`300m` in bf16"), strict=True)
    text = (
        f"Two CPU cores, `300m` in bf16, one request, medians of several runs: {min(percents)} to {max(percents)}% of "
        f"the memory bandwidth probed in the same run, {min(ratios):.2f} to {max(ratios):.2f} times llama.cpp "
        f"([runs]({page.relative_to(root)})). Not yet run on a GPU."
    )
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def updated(root: Path = ROOT) -> str:
    """README.md as it should be. Raises ValueError when it lacks the marks of its claim."""
    text = (root / "README.md").read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN!r} and {END!r} once each")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{before}{BEGIN}\n{claim(root)}\n{after}"


def main(arguments: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser("python -m tools.check.readme", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if it is out of date"
    )
    check, path, text = parser.parse_args(arguments).check, root / "README.md", updated(root)
    if path.read_text(encoding="utf-8") == text:
        return
    if check:
        raise SystemExit("README.md is out of date; run python -m tools.check.readme")
    path.write_text(text, encoding="utf-8")
    print("written: README.md")


if __name__ == "__main__":
    main()
