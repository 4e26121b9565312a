"""A dense model cut into lanes is the same model; late shares move outputs and lose
none; training resumes exactly.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tomli
import torch
from torch import Tensor

from laneformer import Laneformer
from laneformer.engine.folder import Checkpoint
from tests.laneformer.llama.folders import Case, reference, relative_error, write_folder
from tests.tokenizer_assets import byte_level, save
from tools.delay_a_model.__main__ import Plan, cost, delay_a_model
from tools.delay_a_model.damage import damage_map, report, same_run
from tools.delay_a_model.lanes import ENDS, cut, dense_layers, logits_of, losses, run_late
from tools.delay_a_model.recovery import Recovery, Student, recover
from tools.delay_a_model.text import Text

ROOT = Path(__file__).parents[2]
DEPTH = 4
CASE = Case("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "vocab_size": 300,
                      "num_hidden_layers": DEPTH, "tie_word_embeddings": True})  # fmt: skip
WORDS = "the lanes of a model are late and its outputs arrive two layers later while nothing is ever lost or added twice"  # noqa: E501
SETTINGS = Recovery(
    delay=1, first_late_layer=1, end="dropped", steps=5, anneal_steps=1, layers_at_once=1, learning_rate=1e-3,
    checkpoint_steps=2, warmup_steps=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, and two texts beside it."""
    path = write_folder(CASE, tmp_path_factory.mktemp("llama"))
    save(byte_level([WORDS], ("<s>", "</s>"), 290), path, bos_token="<s>", eos_token="</s>")
    for name, step in (("held_out", 3), ("train", 5)):
        words = WORDS.split()
        (path / f"{name}.txt").write_text(" ".join(words[i * step % len(words)] for i in range(400)))
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Laneformer:
    return cut(folder, 3)[0].double()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))


def texts_of(folder: Path, checkpoint: Checkpoint) -> tuple[Text, Text]:
    """Held out, and to train on."""
    assert checkpoint.tokenizer is not None
    held_out, train = (
        Text([str(folder / f"{name}.txt")], checkpoint.tokenizer) for name in ("held_out", "train")
    )
    return held_out, train


def late_logits(model: Laneformer, ids: Tensor, late: list[float], delay: int, end: str) -> Tensor:
    """From embeddings of all lanes' own, so that no lane stands for another."""
    h = model.tok_embeddings(ids)[:, :, None].expand(-1, -1, model.config.num_lanes, -1)
    logits: Tensor = model.lm_head(*_ended(run_late(model, model.layers, h, 0, late, delay), end), model.norm,
                                   model.tok_embeddings.weight)  # fmt: skip
    return logits


def _ended(streams: tuple[Tensor, Tensor | None], end: str) -> tuple[Tensor]:
    h, under_way = streams
    return (h if end == "dropped" or under_way is None else h + under_way,)


def distance(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


def test_the_cut_loses_nothing(folder: Path, model: Laneformer, ids: Tensor) -> None:
    dense = cut(folder, 1)[0].double()
    assert model.config.num_lanes == 3
    assert model.config.tie_word_embeddings
    assert distance(model(ids), dense(ids)) < 1e-13  # float64, sums in another order
    one_stream = dense_layers(model, model.tok_embeddings(ids)[:, :, None], 0, DEPTH)
    assert one_stream.shape[2] == 1
    assert (
        distance(logits_of(model, (one_stream, None), "dropped").double(), dense(ids)) < 1e-6
    )  # logits in float32
    theirs = reference(folder)(ids).logits.detach().numpy()
    assert relative_error(cut(folder, 3)[0](ids).numpy(), theirs) < 1e-5  # float32


def test_impossible_lanes_name_the_possible_ones(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"lanes = 2 must divide 6 heads, 3 KV heads .* choose from \[1, 3\]"
    ):
        cut(folder, 2)


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_ends_of_the_share(model: Laneformer, ids: Tensor, delay: int) -> None:
    """All late from layer `delay` on is a Laneformer with that delay; none late is delay 0, in
    any mixture of lanes.
    """
    published = Laneformer(replace(model.config, broadcast_delay=delay)).double()
    published.load_state_dict(model.state_dict())
    late = [0.0] * delay + [1.0] * (DEPTH - delay)
    assert distance(late_logits(model, ids, late, delay, "dropped"), published(ids)) < 1e-13
    for end in ENDS:
        assert torch.equal(late_logits(model, ids, [0.0] * DEPTH, delay, end), model(ids))
    half = [share / 2 for share in late]
    assert distance(late_logits(model, ids, half, delay, "dropped"), model(ids)) > 1e-3
    assert distance(late_logits(model, ids, half, delay, "dropped"), published(ids)) > 1e-3


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_every_output_is_counted_once(delay: int) -> None:
    """With modules that write a one of their own, the streams are a table of what has arrived and how often."""
    depth, lanes = 5, 3
    late = [0.0, 0.25, 1.0, 1.0, 0.5]

    def module(slot: int) -> Callable[..., Tensor]:
        partial = torch.zeros(1, 1, lanes, 2 * depth * lanes, dtype=torch.float64)
        for lane in range(lanes):
            partial[0, 0, lane, slot * lanes + lane] = 1.0
        return lambda *_: partial

    same = torch.nn.Identity()
    layers: Any = [
        SimpleNamespace(
            attention_norm=same, ffn_norm=same, attention=module(2 * i), feed_forward=module(2 * i + 1)
        )
        for i in range(depth)
    ]
    model: Any = SimpleNamespace(config=SimpleNamespace(head_dim=2, rope_theta=1e4, rope_scaling=None),
                                 masks=lambda *_: [None] * depth)  # fmt: skip
    start = torch.zeros(1, 1, 1, 2 * depth * lanes, dtype=torch.float64)
    h, under_way = run_late(model, layers, start, 0, late, delay)
    assert under_way is not None
    assert torch.equal(h + under_way, torch.ones_like(h))
    for layer, share in enumerate(late):
        for lane in range(lanes):
            arrived = 1.0 if layer + delay < depth else 1.0 - share
            found = h[0, 0, lane].view(depth, 2, lanes)[layer]
            assert torch.equal(found[:, lane], torch.ones(2, dtype=torch.float64)), "its own at once"
            others = torch.cat((found[:, :lane], found[:, lane + 1 :]), 1)
            assert torch.equal(others, torch.full_like(others, arrived))


def test_a_flush_makes_the_lanes_equal(model: Laneformer, ids: Tensor) -> None:
    h = model.tok_embeddings(ids)[:, :, None]
    streams, under_way = run_late(model, model.layers, h, 0, [0.0, 1.0, 0.5, 1.0], 2)
    assert under_way is not None
    flushed = streams + under_way
    assert distance(flushed, flushed[:, :, :1].expand_as(flushed)) < 1e-13
    assert distance(streams, flushed) > 1e-2


def test_shares_grow_from_the_top_down() -> None:
    settings = replace(SETTINGS, first_late_layer=0, anneal_steps=2, layers_at_once=2, steps=4)
    found = [settings.late(step, DEPTH) for step in range(4)]
    assert found == [[0, 0, 0.5, 0.5], [0, 0, 1, 1], [0.5, 0.5, 1, 1], [1, 1, 1, 1]]
    wrong: list[tuple[str, Any]] = [("end", "lost"), ("first_late_layer", 4), ("delay", 0), ("steps", 3)]
    for name, value in wrong:
        with pytest.raises(ValueError, match=rf"\[recover\] needs end in .* not .*{value!r}"):
            replace(settings, **{name: value}).check(DEPTH)


def test_the_map_is_that_of_whole_runs(folder: Path, tmp_path: Path) -> None:
    """Prefixes that are computed once give what a run through all layers gives; a
    second call computes nothing.
    """
    model, checkpoint = cut(folder, 3)
    windows = texts_of(folder, checkpoint)[0].spread(4, 16)
    path = tmp_path / "damage.jsonl"
    rows = damage_map(model, windows, (1, 2), 2, path, {"lanes": 3})
    assert len(rows) == 2 * DEPTH
    for row in rows:
        late = [0.0] * row["first_late_layer"] + [1.0] * (DEPTH - row["first_late_layer"])
        h = model.tok_embeddings(windows[:, :-1])[:, :, None]
        whole = run_late(model, model.layers, h, 0, late, row["delay"])
        for end in ENDS:
            assert row[end] == pytest.approx(losses(model, [whole], [windows], end), rel=1e-5)
    before = path.read_bytes()
    assert damage_map(model, windows, (1, 2), 2, path, {"lanes": 3}) == rows
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="holds results of another lanes"):
        damage_map(model, windows, (1, 2), 2, path, {"lanes": 1})
    report(rows, ("first_late_layer", "delay"), tmp_path / "damage", "delay")
    svg = (tmp_path / "damage.svg").read_bytes()
    report(rows, ("first_late_layer", "delay"), tmp_path / "damage", "delay")
    assert (tmp_path / "damage.svg").read_bytes() == svg
    table = json.loads((tmp_path / "damage.json").read_text())
    assert [row["first_late_layer"] for row in table] == sorted(2 * list(range(DEPTH)))
    found = next(row for row in table if (row["first_late_layer"], row["delay"]) == (DEPTH - 1, 1))
    expected = [late - dense for late, dense in zip(rows[0]["flushed"], rows[0]["dense"], strict=True)]
    assert found["flushed_difference"] == pytest.approx(sum(expected) / 4)


@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_resumed_recovery_is_bit_equal(folder: Path, tmp_path: Path, bfloat16: bool) -> None:
    model, checkpoint = cut(folder, 3)
    held_out, train = texts_of(folder, checkpoint)
    settings, written = replace(SETTINGS, bfloat16=bfloat16), []
    for stops in ((5,), (1, 3, 5)):
        out = tmp_path / str(len(stops))
        for stop in stops:  # each with a student of its own, as in a process of its own
            student = Student(model, settings, held_out.spread(4, 16))
            rows = recover(student, train, out, {}, stop, math.inf)
        written.append(
            (student.step, {name: p.clone() for name, p in student.layers.named_parameters()}, rows[-1])
        )
        assert [row["step"] for row in rows] == sorted({0, 2, 4, 5, *stops})
        assert rows[0]["late_layers"] == 0
        assert rows[-1]["late_layers"] == 3
    (once, weights, row), (again, others, row_again) = written
    assert once == again == 5
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert {**row, "seconds": 0} == {**row_again, "seconds": 0}
    assert not torch.equal(
        weights["0.attention.wq.weight"], model.state_dict()["layers.1.attention.wq.weight"]
    )  # it has learned
    with pytest.raises(ValueError, match="another recover"):
        recover(
            Student(model, replace(settings, seed=1), held_out.spread(4, 16)), train, out, {}, 5, math.inf
        )
    same_run([rows[0]], {"recover": asdict(settings)}, out)


def test_distillation_brings_the_loss_back(folder: Path, tmp_path: Path) -> None:
    model, checkpoint = cut(folder, 3)
    texts = texts_of(folder, checkpoint)
    settings = replace(SETTINGS, steps=60, learning_rate=3e-3, checkpoint_steps=60)
    student = Student(model, settings, texts[0].spread(4, 16))
    late = [student.train_step(texts[1].drawn(0, step, 4, 16)) for step in range(settings.steps)]
    assert max(late[:4]) > 2 * late[-1] > 0, late


def test_shipped_configs_and_their_price() -> None:
    shipped = {path.stem: path for path in (ROOT / "configs").glob("delay_*.toml")}
    plans = {name: Plan(**tomli.loads(path.read_text())) for name, path in shipped.items()}
    for plan in plans.values():
        Recovery(**plan.recover)
    with pytest.raises(ValueError, match="lacks"):
        cost(plans["delay_smollm2"], Recovery(**plans["delay_smollm2"].recover))
    llama = plans["delay_llama_1b"]
    settings = replace(Recovery(**llama.recover), first_late_layer=0)  # teacher and student run all layers
    found = cost(llama, settings)
    weights, head = 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192), 2048 * 128256
    attention = 16 * 4 * 2048 * 512.5  # two products with the keys that a query of 1,024 sees
    flops = 4 * (2 * weights + attention) + 3 * 2 * head  # student's head: forward, and backward to its input
    assert f"{flops / 1e9:.3f} GFLOP a token" in found
    tokens = settings.steps * 16 * 1024
    assert f"{tokens * flops / (0.3 * 989e12) / 3600:.3g} hours" in found


def test_text_that_is_in_both_is_refused(folder: Path, tmp_path: Path) -> None:
    config = write_config(folder, tmp_path, train_text="held_out.txt")
    with pytest.raises(ValueError, match=r"held_out\.txt is in held_out_text and in train_text"):
        delay_a_model(config, folder, tmp_path / "out")


def write_config(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    values = {"held_out_text": "held_out.txt", "train_text": "train.txt", **changes}
    lines = [f'{name} = ["{folder}/{value}"]' for name, value in values.items()]
    lines += ["lanes = 3", "held_out_windows = 4", "seq_len = 16", "[recover]"]
    lines += [f"{name} = {json.dumps(value)}" for name, value in asdict(SETTINGS).items()]
    path = tmp_path / "delay.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_results_of_another_model_are_not_taken(folder: Path, tmp_path: Path) -> None:
    """Folders of two runs often have one name: the second's map once was the first's, in silence."""
    config, other = write_config(folder, tmp_path), tmp_path / "other" / folder.name
    shutil.copytree(folder, other)
    (other / "config.json").write_text((folder / "config.json").read_text() + "\n")
    delay_a_model(config, folder, tmp_path / "out", ("map",))
    with pytest.raises(ValueError, match="holds results of another model_sha256"):
        delay_a_model(config, other, tmp_path / "out", ("map",))


@pytest.mark.slow
def test_the_whole_command_killed_resumed_and_exported(folder: Path, tmp_path: Path) -> None:
    config, out = write_config(folder, tmp_path), tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "tools.delay_a_model",
        str(folder),
        "--config",
        str(config),
        "--out",
        str(out),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (out / "damage.jsonl").exists() and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    there = (out / "damage.jsonl").read_text()
    part = subprocess.run([*command, "--steps", "3"], capture_output=True, text=True, timeout=600)
    assert part.returncode == 0, part.stderr
    assert "to be continued" in part.stdout
    assert (out / "damage.jsonl").read_text().startswith(there)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len((out / "damage.jsonl").read_text().splitlines()) == 2 * DEPTH
    assert [json.loads(line)["step"] for line in (out / "recovery.jsonl").read_text().splitlines()] == [
        0,
        2,
        3,
        4,
        5,
    ]
    assert f"checkpoint {out}/run/checkpoint/step-5" in done.stdout
    export = [sys.executable, "-m", "tools.export_hf", "--checkpoint", str(out / "run/checkpoint/step-5"),
              "--out", str(tmp_path / "hf"), "--dtype", "float32"]  # fmt: skip
    exported = subprocess.run(export, capture_output=True, text=True, timeout=600)
    assert exported.returncode == 0, exported.stderr
    assert json.loads((tmp_path / "hf/config.json").read_text())["broadcast_delay"] == 1
    generate = [sys.executable, "-m", "laneformer.cli", "generate", str(tmp_path / "hf"), "--prompt", "the lanes",
                "--max-new-tokens", "5"]  # fmt: skip
    told = subprocess.run(generate, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stderr
    other = subprocess.run([*command, "--steps", "x"], capture_output=True, text=True, timeout=600)
    assert other.returncode != 0
