"""Where RULER's needles lay and whether they were found: counts by length and depth."""

from __future__ import annotations

from collections.abc import Iterable

from records.files import JsonObject

DEPTHS = 10  # equal parts of a prompt, the beginning first


def find_needles(document: JsonObject, answer: str) -> list[tuple[float, bool]]:
    """Return (depth from 0 to 1, whether the answer names it) of every needle that is asked for."""
    text: str = document.get("input", "")
    values: list[str] = document.get("outputs", [])
    if "special magic" not in text:
        return []
    # a share of the characters of the prompt
    return [(round(text.index(v) / len(text), 4), v.lower() in answer.lower()) for v in values]


def counts(lines: Iterable[JsonObject], lengths: Iterable[int]) -> dict[str, JsonObject]:
    """Count by length in tokens: documents by task, and needles as [found, asked] at each of DEPTHS parts."""
    by_length: dict[str, JsonObject] = {
        str(length): {"documents": {}, "depths": {}} for length in lengths
    }
    for line in lines:
        if (of_length := by_length.get(str(line.get("length")))) is None:
            continue
        task = line["task"]
        of_length["documents"][task] = of_length["documents"].get(task, 0) + 1
        # depth 1.0 belongs to the last part
        for depth, is_found in line["needles"]:
            parts = of_length["depths"].setdefault(task, [[0, 0] for _ in range(DEPTHS)])
            part = parts[min(int(DEPTHS * depth), DEPTHS - 1)]
            part[0], part[1] = part[0] + is_found, part[1] + 1
    return {length: of_length for length, of_length in by_length.items() if of_length["documents"]}
