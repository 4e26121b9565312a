"""Writes the computed parts of the README: its measured claim and the picture of the lanes.

    python -m tools.check.readme [--check]

The claim is computed from the tables of the newest page of decode speed in docs/benchmarks. `make nightly`
checks that the files are up to date.
"""

from __future__ import annotations

import argparse
import random
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- figures: python -m tools.check.readme -->", "<!-- end of figures -->"
PICTURE = Path("docs/images/lanes.svg")

Row = dict[str, str]  # cells by the header of their column; the first column's header may be empty

# --- the claim
# ------------------------------------------------------------------------------------------------------


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


# --- the picture
# --------------------------------------------------------------------------------------------------

LANES, LAYERS, DELAY = 4, 7, 2
WIDTH, LANE_HEIGHT, GAP, LEFT, TOP = 960, 22, 6, 62, 46
COLORS = ("#3b6fb6", "#d9822b", "#2e9e6b", "#8e5bb5")
GRAY, INK = "#c9ced6", "#30363d"

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">
<style>
  text {{ font: 12px system-ui, sans-serif; fill: {ink} }}
  .title {{ font-size: 14px; font-weight: 600 }}
  .in {{ fill: #fff; font-weight: 600 }}
  .mail {{ fill: none; stroke: {ink}; stroke-width: 1.6; marker-end: url(#tip) }}
</style>
<defs>
  <pattern id="waits" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
    <rect width="6" height="6" fill="#eef0f3"/><line x1="0" y1="0" x2="0" y2="6" stroke="{gray}" stroke-width="3"/>
  </pattern>
  <marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
    <path d="M0 0 L8 4 L0 8 z" fill="{ink}"/>
  </marker>
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>"""

Schedule = list[list[tuple[float, float]]]  # (start, end) of layer n on lane l: schedule[l][n]


def schedule(durations: list[list[float]], delay: int) -> Schedule:
    """When each lane computes each layer, if it needs the others' outputs `delay` layers
    later (0: a barrier).
    """
    done: Schedule = [[] for _ in durations]
    for layer in range(len(durations[0])):
        needed = layer - 1 - delay
        arrived = max((lane[needed][1] for lane in done), default=0.0) if needed >= 0 else 0.0
        for lane, own in enumerate(done):
            start = max(own[-1][1] if own else 0.0, arrived)
            own.append((start, start + durations[lane][layer]))
    return done


def draw(plan: Schedule, top: float, scale: float, title: str) -> list[str]:
    """One panel: a bar for every layer of every lane, gray where the lane waits."""
    parts = [f'<text x="{LEFT}" y="{top - 10:.0f}" class="title">{title}</text>']
    for lane, layers in enumerate(plan):
        y, before = top + lane * (LANE_HEIGHT + GAP), 0.0
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15:.0f}" text-anchor="end">lane {lane}</text>')
        for layer, (start, end) in enumerate(layers):
            x, width = LEFT + start * scale, (end - start) * scale
            if start > before:
                wait = f'x="{LEFT + before * scale:.1f}" y="{y}" width="{(start - before) * scale:.1f}"'
                parts.append(f'<rect {wait} height="{LANE_HEIGHT}" fill="url(#waits)"/>')
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width - 1.5:.1f}" height="{LANE_HEIGHT}" rx="3" '
                         f'fill="{COLORS[lane]}"/>')  # fmt: skip
            parts.append(
                f'<text x="{x + width / 2:.1f}" y="{y + 15:.0f}" text-anchor="middle" class="in">{layer}</text>'
            )
            before = end
    return parts


def arrows(plan: Schedule, top: float, scale: float) -> list[str]:
    """From the end of one layer of one lane: its own next layer at once, the others'
    `DELAY` layers after that.
    """
    sender, layer, pitch = 1, 1, LANE_HEIGHT + GAP
    x, y = LEFT + plan[sender][layer][1] * scale, top + sender * pitch + LANE_HEIGHT / 2
    parts = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{INK}"/>']
    for lane in range(LANES):
        if lane != sender:
            to_x, to_y = LEFT + plan[lane][layer + 1 + DELAY][0] * scale, top + lane * pitch + LANE_HEIGHT / 2
            bend = f"C{x + 60:.1f} {y:.1f} {to_x - 60:.1f} {to_y:.1f}"
            parts.append(f'<path d="M{x:.1f} {y:.1f} {bend} {to_x:.1f} {to_y:.1f}" class="mail"/>')
    return parts


def picture() -> str:
    """The SVG: the same computations with a barrier after every layer, and with outputs that arrive later."""
    chance = random.Random(11)
    durations = [[chance.uniform(0.7, 1.3) for _ in range(LAYERS)] for _ in range(LANES)]
    blocking, delayed = schedule(durations, 0), schedule(durations, DELAY)
    longest = max(end for lane in blocking for _, end in lane)
    scale, panel = (WIDTH - LEFT - 14) / longest, LANES * (LANE_HEIGHT + GAP)
    second = TOP + panel + 44
    height = second + panel + 34
    body = [
        *draw(
            blocking,
            TOP,
            scale,
            "Tensor parallelism: all lanes wait (gray) for the slowest one in every layer",
        ),
        *draw(
            delayed,
            second,
            scale,
            f"Laneformer: a lane's own output joins at once, the others' {DELAY} layers later",
        ),
        *arrows(delayed, second, scale),
        f'<text x="{LEFT}" y="{height - 12}">Time runs to the right; both panels have the same computations, whose '
        "durations vary at random. The numbers are layers.</text>",
    ]
    return "\n".join([HEAD.format(width=WIDTH, height=height, ink=INK, gray=GRAY), *body, "</svg>\n"])


# --- the files
# ----------------------------------------------------------------------------------------------------


def generated(root: Path = ROOT) -> dict[Path, str]:
    """README.md and the picture as they should be. Raises ValueError when README lacks the marks of its claim."""
    text = (root / "README.md").read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN!r} and {END!r} once each")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return {Path("README.md"): f"{before}{BEGIN}\n{claim(root)}\n{after}", PICTURE: picture()}


def main(arguments: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser("python -m tools.check.readme", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 if a file is out of date"
    )
    check = parser.parse_args(arguments).check
    for path, text in generated(root).items():
        if (root / path).is_file() and (root / path).read_text(encoding="utf-8") == text:
            continue
        if check:
            raise SystemExit(f"{path} is out of date; run python -m tools.check.readme")
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
