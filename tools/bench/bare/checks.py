"""The verdict on one model: its logits, tokens and bits against what was packed (tools/check/cuda.py made the
bounds).

Weights and keys are rounded to 16 bits and nothing else is, so logits must be closer to float32's than those
of a model in bf16 are. A greedy token may differ only where float32's own lead over the second is below both
errors.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from laneformer.engine.cuda.structures import Column
from tools.bench.bare.contents import Contents, Facts
from tools.bench.bare.driver import Failure
from tools.bench.bare.model import GREEDY, Model

SHORT = 16  # ids of such a run
Check = tuple[str, bool, str]  # name, whether it holds, figures
Numbers = Sequence[float]


def relative_error(found: Numbers, expected: Numbers) -> float:
    """Distance of two logit vectors over the spread of the expected one's."""
    mean = math.fsum(expected) / len(expected)
    spread = math.sqrt(math.fsum((e - mean) ** 2 for e in expected))
    return math.dist(found, expected) / spread


def kl_divergence(expected: Numbers, found: Numbers) -> float:
    """KL(softmax(expected) || softmax(found)) in nats."""
    tops = max(expected), max(found)
    totals = [
        math.fsum(math.exp(x - top) for x in row) for row, top in zip((expected, found), tops, strict=True)
    ]
    shift = tops[1] + math.log(totals[1]) - tops[0] - math.log(totals[0])
    weights = (math.exp(e - tops[0]) for e in expected)
    terms = (w * (e - f + shift) for w, e, f in zip(weights, expected, found, strict=True))
    return math.fsum(terms) / totals[0]


class Reference:
    """What was packed of one model (bundle.reference_of): ids, some rows of logits, greedy continuations,
    bounds.
    """

    def __init__(self, contents: Contents, name: str):
        self.facts: Facts = contents.description["references"][name]
        values = contents.numbers(self.facts["logits"], "f")
        size = len(values) // len(self.facts["positions"])
        rows = (values[i : i + size] for i in range(0, len(values), size))
        self.rows = dict(zip(self.facts["positions"], rows, strict=True))

    def distance(self, found: dict[int, array[float]]) -> dict[str, float]:
        """Over the positions of `found`: the largest relative error, the mean KL, the largest difference."""
        pairs = [(self.rows[position], row) for position, row in found.items()]
        if not all(math.isfinite(x) for _, row in pairs for x in row):
            return dict.fromkeys(("error", "kl", "worst"), math.inf)
        return {
            "error": max(relative_error(row, expected) for expected, row in pairs),
            "kl": math.fsum(kl_divergence(*pair) for pair in pairs) / len(pairs),
            "worst": max(abs(a - b) for pair in pairs for a, b in zip(*pair, strict=True)),
        }  # fmt: skip

    def holds(self, distance: dict[str, float]) -> bool:
        return distance["error"] <= self.facts["error"] and distance["kl"] <= self.facts["kl"]


def checks(model: Model, reference: Reference) -> Iterator[Check]:
    """One after another; a Failure ends them."""
    yield weights_are_there(model, reference)
    distance = reference.distance(score(model, reference))
    bound = reference.facts
    figures = f"relative error {distance['error']:.2e} of {bound['error']:.2e}, "
    figures += f"KL {distance['kl']:.2e} of {bound['kl']:.2e}"
    yield "logits closer to float32 than bf16 is", reference.holds(distance), figures
    yield greedy_tokens(model, reference, distance["worst"])
    yield equal_bits(model, reference)
    prompt = bound["ids"][:4]
    tokens = [model.greedy(prompt, 20, most) for most in (16, 1)]
    yield (
        "one launch is many",
        tokens[0] == tokens[1],
        f"20 tokens of launches of up to 16 passes: {tokens[0]}",
    )
    yield planted_fault(model, reference)


def weights_are_there(model: Model, reference: Reference) -> Check:
    """Every byte of the tapes, as the host's rule has them; read by both probes."""
    found = {name: model.probe(name, 1)[1] for name in ("stream", "loads")}
    expected = reference.facts["tape_sum"]
    return "weights made and read", set(found.values()) == {expected}, f"sums {found}, expected {expected}"


def score(model: Model, reference: Reference, last: int | None = None) -> dict[int, array[float]]:
    """Logits after the reference's positions up to `last`, of a text that is read from its start."""
    found: dict[int, array[float]] = {}
    ids = reference.facts["ids"][: None if last is None else last + 1]
    for at in range(0, len(ids), model.columns):
        part = ids[at : at + model.columns]
        model.run([Column(t, at + i, 0, sampling=GREEDY) for i, t in enumerate(part)], logits=True)
        found |= {at + i: model.logits(i) for i in range(len(part)) if at + i in reference.rows}
    return found


def greedy_tokens(model: Model, reference: Reference, worst: float) -> Check:
    tie, wrong, parted = 2 * min(worst, reference.facts["worst"]), list[str](), 0
    for number, (prompt, tokens, leads) in enumerate(reference.facts["greedy"]):
        found = model.greedy(prompt, len(tokens))
        differs = [i for i, (a, b) in enumerate(zip(found, tokens, strict=True)) if a != b]
        parted += bool(differs)
        if differs and leads[differs[0]] > tie:
            wrong.append(f"prompt {number} at token {differs[0]} with a lead of {leads[differs[0]]:.2e}")
    said = f"{parted} of {len(reference.facts['greedy'])} prompts part at a tie (a lead below {tie:.2e})"
    return "greedy tokens", not wrong, "; ".join(wrong) or said


def equal_bits(model: Model, reference: Reference) -> Check:
    """Of a short text's last logits: in every run, and by the build of each count of columns."""
    ids, seen = reference.facts["ids"][:SHORT], set[bytes]()
    ways = [(0, -1)] * (runs := model.contents.effort["runs"]) + [
        (1, build) for build in range(len(model.shape["builds"]))
    ]
    for most, build in ways:
        model.read(ids[:-1], most=most, build=build)
        model.run([Column(ids[-1], len(ids) - 1, 0, sampling=GREEDY)], logits=True, build=build)
        seen.add(bytes(model.logits(0)))
    counts = [each["columns"] for each in model.shape["builds"]]
    return "equal bits", len(seen) == 1, f"{runs} runs and builds of {counts} columns: {len(seen)} results"


def planted_fault(model: Model, reference: Reference) -> Check:
    """The gate must refuse outputs of attention twice as large."""
    exponents, last = list(model.shape["exponents"]), list(reference.rows)[2]
    exponents[1] -= 1
    model.fill(exponents)
    distance = reference.distance(score(model, reference, last))
    model.fill(model.shape["exponents"])
    return (
        "a planted fault is refused",
        not reference.holds(distance),
        f"relative error {distance['error']:.2e}",
    )


def verdict(model: Model, reference: Reference, said: Callable[[str], None]) -> dict[str, Any]:
    """{"failed": names, "checks": {name: {"holds", "figures"}}}; what a Failure cuts off has failed."""
    found: dict[str, Any] = {}
    try:
        for name, held, figures in checks(model, reference):
            found[name] = {"holds": held, "figures": figures}
            said(f"{name}: {'holds' if held else 'FAILED'}, {figures}")
    except Failure as failure:
        found[failure.what] = {"holds": False, "figures": failure.why}
    return {"failed": [name for name, each in found.items() if not each["holds"]], "checks": found}
