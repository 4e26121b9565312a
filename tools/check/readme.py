"""Writes the parts of README.md that are computed: the table of figures and the picture of the lanes.

    python -m tools.check.readme    (rewrites README.md and docs/images/lanes.svg)

The figures are read from the tables of the newest pages in docs/benchmarks and from the fault tests, so that
README repeats no number that it could get wrong. tests/tools/check/test_readme.py holds both.
"""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- figures: python -m tools.check.readme -->", "<!-- end of figures -->"
PICTURE = Path("docs/images/lanes.svg")
FAULT_TESTS = Path("tests/train/test_faults.py")

Row = dict[str, str]  # cells by the header of their column; the first column's header may be empty

# --- figures
# ------------------------------------------------------------------------------------------------------


@dataclass
class Section:
    """One `##` section of a page: its heading, its prose and its Markdown tables."""

    heading: str
    text: str
    tables: list[list[Row]] = field(default_factory=list)

    def row(self, column: str, *names: str) -> Row:
        """The row that begins with the cells `names` in the table that has `column`. Raises ValueError."""
        for table in self.tables:
            for row in table:
                if column in row and tuple(c.strip("`") for c in row.values())[: len(names)] == names:
                    return row
        raise ValueError(f"section {self.heading!r} has no table with a column {column!r} and a row {names}")


def newest_page(root: Path, topic: str) -> Path:
    """The benchmark page of a topic with the latest date. Raises ValueError without one."""
    pages = sorted((root / "docs/benchmarks").glob(f"????-??-??-{topic}.md"))
    if not pages:
        raise ValueError(f"docs/benchmarks has no page DATE-{topic}.md")
    return pages[-1]


def sections(page: Path) -> list[Section]:
    """The dated sections of a page, oldest first."""
    found = []
    for part in re.split(r"(?m)^## ", page.read_text(encoding="utf-8"))[1:]:
        heading, _, text = part.partition("\n")
        blocks = re.findall(r"(?m)(?:^\|.*\n?)+", text)
        found.append(Section(heading, text, [table(block) for block in blocks]))
    return sorted(found, key=lambda section: section.heading[:20])


def table(block: str) -> list[Row]:
    """The rows of a Markdown table; of columns with the same header the first one counts."""
    lines = [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.strip().split("\n")
    ]
    header, _, *body = lines
    named = [(i, name) for i, name in enumerate(header) if name not in header[:i]]
    return [{name: cells[i] for i, name in named} for cells in body]


def newest_with(found: list[Section], needed: str) -> Section:
    """The newest section whose heading or text has `needed`. Raises ValueError without one."""
    for section in reversed(found):
        if needed in section.heading or needed in section.text:
            return section
    raise ValueError(f"no section holds {needed!r}")


def fault_kinds(root: Path) -> list[str]:
    """The kinds of fault that one run of the fault tests goes through."""
    for node in ast.parse((root / FAULT_TESTS).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "FAULTS" and node.value:
            return sorted({fault["kind"] for fault in ast.literal_eval(node.value)})
    raise ValueError(f"{FAULT_TESTS} has no list FAULTS")


def first(pattern: str, text: str) -> str:
    """The first match's group. Raises ValueError without a match."""
    if found := re.search(pattern, text, re.MULTILINE):
        return found[1]
    raise ValueError(f"no match of {pattern!r} in {text[:200]!r}...")


def figures(root: Path = ROOT) -> str:
    """The table of README's first screen, in Markdown."""
    decode, loader = newest_page(root, "cpu-decode"), newest_page(root, "loader")
    alone = "decode at depth 0"
    of_300m = [section for section in sections(decode) if "`300m` in bf16" in section.heading]
    paired = newest_with(of_300m, f"| {alone} | laneformer | llamacpp |")
    ours, ratio = (
        paired.row("% of probe", alone, "laneformer"),
        paired.row("median", alone, "laneformer", "llamacpp"),
    )
    large = newest_with(sections(decode), "`2b` in bf16").row("% of probe", alone, "laneformer")
    loading = sections(loader)[-1]
    speeds = {row["loader"]: float(row["M tokens/s/core"]) for row in loading.tables[0]}
    others = [speed for name, speed in speeds.items() if not name.startswith("Mix")]
    kinds = fault_kinds(root)
    setting, rounds = paired.heading.partition(": ")[2], first(r"(\d+) rounds of", paired.text)
    windows = first(r"of (\d+) tokens from", loading.text)
    rows = [
        (
            f"{ours['% of probe']}%",
            f"of the machine's read bandwidth, probed in the same run: decoding one request, {setting}, {alone[10:]} "
            f"({first(r'^(.+?, [0-9]+ CPUs)', paired.text)}; {rounds} rounds). `2b`: {large['% of probe']}%",
            decode,
        ),
        (
            f"{ratio['median']}x",
            f"llama.cpp's tokens/s in the same rounds, ahead in {ratio['ahead in']}",
            decode,
        ),
        (
            f"{speeds['MixtureLoader']:.0f} M",
            f"tokens/s per core from the data loader, windows of {windows} tokens in the page cache; "
            f"{speeds['MixtureLoader'] / max(others):.1f}x the fastest of {len(others)} other loaders",
            loader,
        ),
        (
            f"{len(kinds)}",
            "kinds of fault in one training run (killed ranks, a hang, NaN, a full disk, a truncated checkpoint, ...): "
            "it restarts by itself and ends in the weights of an undisturbed run, bit for bit",
            root / FAULT_TESTS,
        ),
    ]
    lines = [
        f"| **{number}** | {what} | [{page.name}]({page.relative_to(root)}) |" for number, what, page in rows
    ]
    return "\n".join(["| measured | what, and where | source |", "|---:|---|---|", *lines])


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
    """README.md and the picture as they should be. Raises ValueError when README lacks the
    marks of its table.
    """
    text = (root / "README.md").read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN!r} and {END!r} once each")
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    return {Path("README.md"): f"{before}{BEGIN}\n\n{figures(root)}\n\n{after}", PICTURE: picture()}


def main() -> None:
    """Write the computed parts of README.md."""
    for path, text in generated().items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
        print(f"written: {path}")


if __name__ == "__main__":
    main()
