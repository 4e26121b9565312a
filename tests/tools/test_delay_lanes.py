"""Tests that lanes of a dense model, late shares and adapters are exact."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from laneformer import Engine, Laneformer
from laneformer.config import hf_name
from laneformer.positions import rope_table
from tests.laneformer.llama.folders import Case, reference, relative_error, write_folder
from tests.tokenizer_assets import byte_level, save
from tools.delay_a_model import adapter, export
from tools.delay_a_model.apply import apply, sha256_of
from tools.delay_a_model.export import late_architecture
from tools.delay_a_model.job_config import Late
from tools.delay_a_model.lanes import LateLayer, cut, late_model, late_streams, logits_of, shares
from tools.delay_a_model.recovery import check

DEPTH, LANES = 4, 3
SIZES = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "hidden_size": 48,
    "vocab_size": 300,
    "num_hidden_layers": DEPTH,
    "tie_word_embeddings": True,
}
WORDS = "the lanes of a model are late and its outputs arrive two layers later while nothing is lost or added twice"
LORA = Late(lanes=LANES, lora_rank=4)


def write_llama(folder: Path, **sizes: int) -> Path:
    write_folder(Case("Llama", SIZES | sizes), folder)
    save(byte_level([WORDS], ("<s>", "</s>"), 290), folder, bos_token="<s>", eos_token="</s>")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder):
    return cut(folder, LANES)[0].double()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))


def run_late(
    model: Laneformer, ids: Tensor, late: list[float], delay: int
) -> tuple[Tensor, Tensor | None]:
    positions = torch.arange(ids.shape[1])
    layers: Any = model.layers
    for layer, share in zip(layers, late, strict=True):
        layer.late = share
    # no lane stands for another
    h = model.tok_embeddings(ids)[:, :, None].expand(-1, -1, model.config.num_lanes, -1)
    return late_streams(
        layers, h, rope_table(model.config, positions), model.masks(positions, positions), delay
    )


def late_logits(
    model: Laneformer, ids: Tensor, late: list[float], delay: int = 1, flush: bool = False
) -> Tensor:
    streams, in_flight = run_late(model, ids, late, delay)
    logits: Tensor = model.lm_head(
        streams + in_flight if flush and in_flight is not None else streams, model.norm
    )
    return logits


def distance(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).abs().max() / expected.abs().max()).detach())


def late_from(first: int) -> list[float]:
    return [0.0] * first + [1.0] * (DEPTH - first)


def test_the_cut_loses_nothing(folder, model, ids):
    dense = cut(folder, 1)[0].double()
    assert model.config.num_lanes == LANES
    assert not model.config.tie_word_embeddings
    # float64, sums in another order
    assert distance(model(ids), dense(ids)) < 1e-13
    theirs = reference(folder)(ids).logits.detach().numpy()
    # float32
    assert relative_error(cut(folder, LANES)[0](ids).numpy(), theirs) < 1e-5


def test_what_cannot_be_cut_or_trained_is_refused(folder, tmp_path):
    with pytest.raises(
        ValueError, match="num_key_value_heads = 3 is not divisible by num_lanes = 2"
    ):
        cut(folder, 2)
    with pytest.raises(ValueError, match="training does not support attention_bias = True"):
        cut(write_folder(Case("Qwen2", SIZES), tmp_path / "qwen"), LANES)
    for change in ({"first_late_layer": DEPTH}, {"delay": 0}, {"delay": 2}):
        with pytest.raises(ValueError, match=f"1 <= delay <= first_late_layer < {DEPTH}, not"):
            check(replace(Late(), **change), DEPTH, 100)
    with pytest.raises(ValueError, match=r"training\.steps = 5 ends before all 3 layers are late"):
        check(Late(anneal_steps=2), DEPTH, 5)
    check(Late(anneal_steps=2), DEPTH, 6)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_ends_of_the_share(model, ids, delay):
    # all late from layer `delay` on is a Laneformer with that delay; none late is delay 0; half
    # late is neither
    dense, published = (
        Laneformer(replace(model.config, broadcast_delay=layers)).double() for layers in (0, delay)
    )
    for plain in (dense, published):
        plain.load_state_dict(model.state_dict())
    late = late_from(delay)
    assert distance(late_logits(model, ids, late, delay), published(ids)) < 1e-13
    for flush in (False, True):
        assert torch.equal(late_logits(model, ids, late_from(DEPTH), delay, flush), dense(ids))
        logits = logits_of(model, run_late(model, ids, late, delay), flush)
        # float32
        assert distance(logits, late_logits(model, ids, late, delay, flush)) < 1e-6
    half = late_logits(model, ids, [share / 2 for share in late], delay)
    assert min(distance(half, plain(ids)) for plain in (dense, published)) > 1e-3


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_every_output_is_counted_once(delay):
    # modules write a one of their own, so the streams count what has arrived and how often
    late = [0.0, 0.25, 1.0, 1.0, 0.5]
    depth = len(late)

    def module(slot: int) -> Callable[..., Tensor]:
        partial = torch.zeros(1, 1, LANES, 2 * depth * LANES, dtype=torch.float64)
        for lane in range(LANES):
            partial[0, 0, lane, slot * LANES + lane] = 1.0
        return lambda *_: partial

    same, layers = torch.nn.Identity(), []
    for i, share in enumerate(late):
        parts = {"attention": module(2 * i), "feed_forward": module(2 * i + 1)}
        layer: Any = SimpleNamespace(attention_norm=same, ffn_norm=same, late=share, **parts)
        layers.append(functools.partial(LateLayer.forward, layer))
    start, rope = (
        torch.zeros(1, 1, 1, 2 * depth * LANES, dtype=torch.float64),
        (torch.empty(0),) * 2,
    )
    h, in_flight = late_streams(layers, start, rope, [None] * depth, delay)  # type: ignore[arg-type]
    assert in_flight is not None
    assert torch.equal(h + in_flight, torch.ones_like(h))
    for layer, share in enumerate(late):
        arrived = 1.0 if layer + delay < depth else 1.0 - share
        for lane in range(LANES):
            expected = torch.full((2, LANES), arrived, dtype=torch.float64)
            # a lane adds its own output at once
            expected[:, lane] = 1.0
            assert torch.equal(h[0, 0, lane].view(depth, 2, LANES)[layer], expected)


def test_shares_grow_from_the_top_down():
    assert [shares(step, 3, 2) for step in range(1, 7)] == [
        [0, 0, 0.5], [0, 0, 1], [0, 0.5, 1], [0, 1, 1], [0.5, 1, 1], [1, 1, 1]
    ]  # fmt: skip


@pytest.mark.parametrize("late", [(1, 3, True), (2, 2, True), (1, 1, False), (1, 2, False)])
def test_the_folder_is_the_late_model(folder, tmp_path, late, ids):
    # Transformers and the engine compute it, with the dense model's own text files
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (model, checkpoint), out, (delay, first, flush) = cut(folder, LANES), tmp_path / "hf", late
    architecture = late_architecture(Late(delay=delay, first_late_layer=first, flush=flush))
    export.write_folder(architecture, checkpoint, model.state_dict(), out, "a card")
    stored = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    expected = late_logits(
        late_model(model.config, stored), ids, late_from(first), delay, flush
    ).numpy()
    theirs = AutoModelForCausalLM.from_pretrained(
        out, trust_remote_code=True, dtype=torch.float32
    ).eval()
    with torch.no_grad(), Engine.from_pretrained(out, dtype="fp32", threads=2) as engine:
        # float32
        assert relative_error(theirs(ids).logits.numpy(), expected) < 1e-5
        for row, logits in zip(ids.tolist(), expected, strict=True):
            assert relative_error(engine.logits(row), logits) < 1e-5
        assert engine.eos_ids == checkpoint.eos_ids
    assert distance(model(ids), torch.from_numpy(expected)) > 1e-2, "nothing was late"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert checkpoint.tokenizer is not None
    assert tokenizer(WORDS)["input_ids"] == checkpoint.tokenizer.encode(WORDS).ids
    assert tokenizer.eos_token == "</s>"


@pytest.fixture(scope="module")
def random_adapter(folder):
    # a new one changes nothing, since B is zero
    first = adapter.first_adapter(cut(folder, LANES)[0].config, LORA)
    assert all(w.any() == name.endswith(".a") for name, w in first.items()), (
        "it begins as the dense model"
    )
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(w.shape, generator=generator) for name, w in first.items()}


def test_applied_is_merged(model, random_adapter, ids):
    # matrices called with their changes, and weights with the changes added; late and not
    dense = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights = adapter.merge(dense, random_adapter)
    matrices = {f"layers.{i}.{name}.weight" for i in range(1, DEPTH) for name in adapter.MATRICES}
    assert {name for name in dense if not torch.equal(dense[name], weights[name])} == matrices
    other, before = (late_model(model.config, state).double() for state in (weights, dense))
    changes = adapter.adapt(model, LORA).double()
    assert {f"{adapter.PREFIX}{name}" for name in changes.state_dict()} == random_adapter.keys()
    changes.load_state_dict(
        {name.removeprefix(adapter.PREFIX): w for name, w in random_adapter.items()}
    )
    for late in (late_from(DEPTH), late_from(1)):
        applied = late_logits(model, ids, late)
        # products of A and B are in float32
        assert distance(applied, late_logits(other, ids, late)) < 1e-5
        assert distance(applied, late_logits(before, ids, late)) > 1e-2


def test_a_saved_adapter_gives_the_folder(folder, random_adapter, tmp_path):
    # with its norm scales; another model, or a damaged file, is refused
    model, _ = cut(folder, LANES)
    scales = adapter.names_in_late_layers(model.config, LORA, adapter.SCALES)
    changes = {name: w.bfloat16() for name, w in random_adapter.items()} | {
        name: torch.full((48,), 0.5) for name in scales
    }
    saved, about = tmp_path / "adapter", {"model": folder.name, "model_sha256": sha256_of(folder)}
    adapter.write(saved, changes, about | {"lanes": LANES, "architecture": late_architecture(LORA)})
    (saved / "README.md").write_text("a card")
    apply(saved, folder, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    expected = adapter.merge(model.state_dict(), changes)
    # tied to the embedding, so not stored
    del expected["lm_head.weight"]
    assert stored.keys() == {hf_name(name) for name in expected}
    assert all(
        torch.equal(stored[hf_name(name)], weight.bfloat16()) for name, weight in expected.items()
    )
    other = shutil.copytree(folder, tmp_path / "other" / folder.name)
    (other / "config.json").write_text((folder / "config.json").read_text() + "\n")
    with pytest.raises(ValueError, match=f"model_sha256 is .*; the model is {folder.name}"):
        apply(saved, other, tmp_path / "hf")
    data = bytearray((saved / adapter.ADAPTER).read_bytes())
    # one bit of the last weight
    data[-1] ^= 1
    (saved / adapter.ADAPTER).write_bytes(data)
    with pytest.raises(ValueError, match="adapter_sha256 is"):
        apply(saved, folder, tmp_path / "hf")
