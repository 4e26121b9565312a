"""A layout keeps the dense model's function; the estimate is that of its definition, and swaps lower it."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from laneformer import Laneformer
from tests.laneformer.llama.folders import Case, write_folder
from tools.delay_a_model.lanes import cut, late_model, logits_of, run_late
from tools.delay_a_model.layout import (
    RULES,
    Layout,
    Module,
    Search,
    capture,
    identity,
    laid_out,
    random_layout,
    units_of,
)
from tools.delay_a_model.layouts import compare, kept_layout, layout_of, table_of

DEPTH, LANES, FIRST = 4, 3, 1
CASE = Case("Llama", {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 48, "vocab_size": 300,
                      "num_hidden_layers": DEPTH, "tie_word_embeddings": True})  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(CASE, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Laneformer:
    return cut(folder, LANES)[0]


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(300, (4, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def modules(folder: Path, ids: Tensor) -> list[Module]:
    return capture(cut(folder, 1)[0], ids.split(2))


def late_logits(model: Laneformer, ids: Tensor, late: float, delay: int = 1) -> Tensor:
    h = model.tok_embeddings(ids)[:, :, None]
    shares = [0.0] * FIRST + [late] * (DEPTH - FIRST)
    return logits_of(model, run_late(model, h, 0, shares, delay), "flushed")


@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_any_layout_is_the_same_dense_model(tmp_path: Path, ids: Tensor, family: str) -> None:
    """Biases of projections move with their rows; late, layouts differ."""
    model, _ = cut(write_folder(Case(family, CASE.values), tmp_path / family), LANES)
    other = late_model(model.config, laid_out(model.state_dict(), random_layout(model.config, 0, 1)))
    expected = late_logits(model, ids, 0.0)
    assert (late_logits(other, ids, 0.0) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (
        late_logits(other, ids, 1.0) - late_logits(model, ids, 1.0)
    ).abs().max() > 1e-2 * expected.abs().max()
    same = laid_out(model.state_dict(), identity(model.config))
    assert all(torch.equal(same[name], weight) for name, weight in model.state_dict().items())


def test_captured_modules_write_what_the_model_adds(
    model: Laneformer, modules: list[Module], ids: Tensor
) -> None:
    embedding = model.tok_embeddings(ids)
    written: Any = sum(m.written(torch.zeros(len(m.out), dtype=torch.int64), 1)[0] for m in modules)
    logits = model.lm_head(embedding[:, :, None] + written.view(*ids.shape, 1, -1), model.norm)
    expected = late_logits(model, ids, 0.0)
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("delay", [1, 2])
def test_the_estimate_is_its_definition(modules: list[Module], delay: int) -> None:
    """Loops over readers, lanes and writers: a module misses the others' outputs of 2 `delay` modules."""
    search, expected = Search(modules, LANES, delay, FIRST), 0.0
    for r, lane in itertools.product(range(len(modules)), range(LANES)):
        missing = torch.zeros(modules[0].values.shape[0], modules[0].out.shape[2])
        for w in range(max(2 * FIRST, r - 2 * delay), r):
            away = search.lanes[w] != lane
            missing += torch.einsum("tuw,uwd->td", modules[w].values[:, away], modules[w].out[away])
        felt = torch.einsum("urd,td->tur", modules[r].reads[search.lanes[r] == lane], missing)
        expected += float((felt * modules[r].scale[:, None, None]).square().sum((1, 2)).mean()) / 2
    assert search.total() == pytest.approx(expected, rel=1e-4)


def test_small_delays_cost_what_is_estimated(model: Laneformer, folder: Path) -> None:
    """With a share of 1% late the damage is of second order, and the estimate, times its square, is not far from it.

    It leaves out how the misses of different modules and tokens add up.
    """
    ids = torch.randint(300, (16, 24), generator=torch.Generator().manual_seed(1))
    modules = capture(cut(folder, 1)[0], ids.split(4))
    dense, late = (late_logits(model, ids, share).double().log_softmax(-1) for share in (0.0, 0.01))
    measured = float((dense.exp() * (dense - late)).sum(-1).mean())
    assert measured == pytest.approx(1e-4 * Search(modules, LANES, 1, FIRST).total(), rel=0.5)


@pytest.mark.parametrize(("rule", "delay"), [("affinity", 1), ("objective", 2), ("activations", 2)])
def test_costs_of_a_unit_are_differences_of_the_estimate(
    modules: list[Module], rule: str, delay: int
) -> None:
    search = Search(modules, LANES, delay, FIRST, rule)
    before, costs, lanes = search.total(), search.costs(3), search.lanes[3]
    for unit, lane in itertools.product((0, 40), range(LANES)):
        moved = lanes.clone()
        moved[unit] = lane
        search.place(3, moved)
        change = float(costs[unit, lane] - costs[unit, lanes[unit]]) / 2
        assert search.total() - before == pytest.approx(change, rel=2e-2, abs=2e-6 * before)


@pytest.mark.rotate
@pytest.mark.parametrize("rule", RULES[2:])
def test_the_search_lowers_its_estimate_and_repeats(
    model: Laneformer, modules: list[Module], rule: str
) -> None:
    search = Search(modules, LANES, 1, FIRST, rule)
    found = search.run()
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.95 * found[0]
    layout = search.layout()
    assert layout[: 2 * FIRST] == identity(model.config)[: 2 * FIRST]
    for at, order in enumerate(layout):
        assert sorted(order) == list(range(units_of(model.config, at)))
    assert layout_of(rule, model, modules, 1, FIRST)[0] == layout


@pytest.mark.rotate
def test_the_table_is_kept_and_reads_as_measured(
    model: Laneformer, modules: list[Module], ids: Tensor, tmp_path: Path
) -> None:
    path, about = tmp_path / "layouts.jsonl", {"windows": 4}
    rows = compare(model, modules, ids.split(2), (1,), (FIRST,), path, about)
    assert [(row["rule"], row["seed"]) for row in rows] == [
        ("identity", 0), *((rule, seed) for rule in RULES[1:] for seed in range(3))
    ]  # fmt: skip
    dense, late = (late_logits(model, ids[:, :-1], share).double().log_softmax(-1) for share in (0.0, 1.0))
    kl = (dense.exp() * (dense - late)).sum(-1).mean(1)
    assert rows[0]["kl"] == pytest.approx(kl.tolist(), rel=1e-3)
    before = path.read_bytes()
    assert compare(model, modules, ids.split(2), (1,), (FIRST,), path, about) == rows
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="holds results of another windows"):
        compare(model, modules, ids.split(2), (1,), (FIRST,), path, {"windows": 5})
    assert f"| identity | 0 | {FIRST} | 1 | {float(kl.mean()):.3f} ±" in table_of(rows, 1.0)


def test_a_layout_is_kept(tmp_path: Path, model: Laneformer) -> None:
    path, made = tmp_path / "layout.json", identity(model.config)
    calls: list[int] = []

    def make() -> tuple[Layout, dict[str, Any]]:
        calls.append(1)
        return made, {"seconds": 1}

    assert kept_layout(path, {"rule": "random"}, make) == kept_layout(path, {"rule": "random"}, make) == made
    assert len(calls) == 1
    assert json.loads(path.read_text())["seconds"] == 1
    with pytest.raises(ValueError, match="holds results of another rule"):
        kept_layout(path, {"rule": "affinity"}, make)
    with pytest.raises(ValueError, match=r"layout = 'best'; choose from \('identity', "):
        layout_of("best", model, [], 1, FIRST)
