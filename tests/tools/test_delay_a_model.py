"""A dense model cut into lanes is the same model; late shares move outputs and lose
none; the shipped trainer distils the late layers.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import signal
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
import tomli_w
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from data_mixtures.mixture import Mixture
from laneformer import Engine, Laneformer
from laneformer.engine.folder import read_checkpoint
from laneformer.hf.export import load_weights
from records.checkpoints import newest_saved_step
from records.files import read_lines
from tests.laneformer.llama.folders import Case, reference, relative_error, write_folder
from tests.tokenizer_assets import byte_level, save
from tests.train.runs import run_job
from tools.ablate.trainer import write_job
from tools.delay_a_model import folder as late_folder
from tools.delay_a_model.__main__ import Plan, cost, delay_a_model, text
from tools.delay_a_model.damage import damage_map, report
from tools.delay_a_model.folder import bits_per_byte
from tools.delay_a_model.job_config import Late
from tools.delay_a_model.lanes import (
    ENDS,
    LateLayer,
    cut,
    held_out_losses,
    late_streams,
    logits_of,
    run_late,
    shares,
)
from tools.delay_a_model.recovery import check, job_of, measure, train, write_dense, write_tokenizer

ROOT = Path(__file__).parents[2]
DEPTH = 4
CASE = Case("Llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48, "vocab_size": 300,
                      "num_hidden_layers": DEPTH, "tie_word_embeddings": True})  # fmt: skip
WORDS = "the lanes of a model are late and its outputs arrive two layers later while nothing is ever lost or added twice"  # noqa: E501
SEQ_LEN, BATCH = 16, 2
LATE = Late(delay=1, first_late_layer=1, end="dropped", anneal_steps=1, layers_at_once=1)
CHANGES = {"late": asdict(LATE), "training.steps": 5, "training.seq_len": SEQ_LEN, "optimizer.lr": 1e-3,
           "lr_scheduler.total_steps": 5, "lr_scheduler.warmup_steps": 1, "checkpoint.interval": 2}  # fmt: skip


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    """The shipped config with CHANGES and these, whose names have __ for the dot."""
    tables = tomli.loads((ROOT / "configs/delay_smollm2.toml").read_text())
    tables["delay"] = {"lanes": 3, "recipe": str(folder / "recipe.toml"), "held_out_windows": 4}
    for name, value in {
        **CHANGES,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }.items():
        table, _, key = name.partition(".")
        tables[table] = {**tables[table], **({key: value} if key else value)}
    return tables


def for_steps(steps: int, interval: int) -> dict[str, int]:
    return {"training__steps": steps, "lr_scheduler__total_steps": steps, "checkpoint__interval": interval}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a tokenizer, and documents with their recipe beside it."""
    return with_text(write_folder(CASE, tmp_path_factory.mktemp("llama")))


def with_text(path: Path) -> Path:
    save(byte_level([WORDS], ("<s>", "</s>"), 290), path, bos_token="<s>", eos_token="</s>")
    words = WORDS.split()
    documents = [
        " ".join(words[5 * i % len(words)] for i in range(n, n + 40 + n // len(words))) for n in range(200)
    ]
    (path / "text.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    source = {"category": "web", "inputs": [{"kind": "jsonl", "paths": [str(path / "text.jsonl")]}]}
    recipe = {"tokenizer": "unused", "valid_per_10000": 2000, "epoch_cap": 100}
    recipe |= {"sources": {"words": source}, "phase1": {"words": 1}}
    (path / "recipe.toml").write_text(tomli_w.dumps(recipe))
    return path


@pytest.fixture
def model(folder: Path) -> Laneformer:
    return cut(folder, 3)[0].double()


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(300, (2, 20), generator=torch.Generator().manual_seed(0))


def late_logits(model: Laneformer, ids: Tensor, late: list[float], delay: int, end: str) -> Tensor:
    """From embeddings of all lanes' own, so that no lane stands for another."""
    h = model.tok_embeddings(ids)[:, :, None].expand(-1, -1, model.config.num_lanes, -1)
    streams, in_flight = run_late(model, h, 0, late, delay)
    logits: Tensor = model.lm_head(
        streams if end == "dropped" or in_flight is None else streams + in_flight, model.norm
    )
    return logits


def distance(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).detach())


def test_the_cut_loses_nothing(folder: Path, model: Laneformer, ids: Tensor) -> None:
    dense = cut(folder, 1)[0].double()
    assert model.config.num_lanes == 3
    assert not model.config.tie_word_embeddings
    assert distance(model(ids), dense(ids)) < 1e-13  # float64, sums in another order
    one_stream, _ = run_late(model, model.tok_embeddings(ids)[:, :, None], 0, [0.0] * DEPTH, 1)
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
    dense, published = (
        Laneformer(replace(model.config, broadcast_delay=each)).double() for each in (0, delay)
    )
    for plain in (dense, published):
        plain.load_state_dict(model.state_dict())
    late = [0.0] * delay + [1.0] * (DEPTH - delay)
    assert distance(late_logits(model, ids, late, delay, "dropped"), published(ids)) < 1e-13
    for end in ENDS:
        assert torch.equal(late_logits(model, ids, [0.0] * DEPTH, delay, end), dense(ids))
    half = [share / 2 for share in late]
    assert distance(late_logits(model, ids, half, delay, "dropped"), dense(ids)) > 1e-3
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
    modules: list[Any] = [
        SimpleNamespace(
            attention_norm=same, ffn_norm=same, attention=module(2 * i), feed_forward=module(2 * i + 1),
            late=late[i],
        )
        for i in range(depth)
    ]  # fmt: skip
    layers: Any = [functools.partial(LateLayer.forward, each) for each in modules]
    start, rope = (
        torch.zeros(1, 1, 1, 2 * depth * lanes, dtype=torch.float64),
        (torch.empty(0), torch.empty(0)),
    )
    h, under_way = late_streams(layers, start, rope, [None] * depth, delay)
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
    streams, under_way = run_late(model, h, 0, [0.0, 1.0, 0.5, 1.0], 2)
    assert under_way is not None
    flushed = streams + under_way
    assert distance(flushed, flushed[:, :, :1].expand_as(flushed)) < 1e-13
    assert distance(streams, flushed) > 1e-2


def test_shares_grow_from_the_top_down() -> None:
    late = Late(anneal_steps=2, layers_at_once=2)
    found = [shares(step, DEPTH, 2, 2) for step in range(1, 5)]
    assert found == [[0, 0, 0.5, 0.5], [0, 0, 1, 1], [0.5, 0.5, 1, 1], [1, 1, 1, 1]]
    wrong: list[tuple[str, Any]] = [("end", "lost"), ("first_late_layer", 4), ("delay", 0)]
    for name, value in wrong:
        with pytest.raises(ValueError, match=rf"\[late\] needs end in .* not .*{value!r}"):
            check(replace(late, **{name: value}), DEPTH, 4)
    with pytest.raises(ValueError, match=r"training.steps >= 4 .* not .*, 3$"):
        check(late, DEPTH, 3)


@pytest.mark.rotate
def test_the_map_is_that_of_whole_runs(folder: Path, tmp_path: Path) -> None:
    """Prefixes that are computed once give what a run through all layers gives; a
    second call computes nothing.
    """
    model, _ = cut(folder, 3)
    windows = torch.randint(300, (4, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    path = tmp_path / "damage.jsonl"
    rows = damage_map(model, windows.split(2), (1, 2), path, {"lanes": 3})
    assert len(rows) == 2 * DEPTH
    for row in rows:
        late = [0.0] * row["first_late_layer"] + [1.0] * (DEPTH - row["first_late_layer"])
        h = model.tok_embeddings(windows[:, :-1])[:, :, None]
        whole = held_out_losses(model, [h], [windows], 0, late, row["delay"])
        for end in ENDS:
            assert row[end] == pytest.approx(whole[end], rel=1e-5)
    before = path.read_bytes()
    assert damage_map(model, windows.split(2), (1, 2), path, {"lanes": 3}) == rows
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match="holds results of another lanes"):
        damage_map(model, windows.split(2), (1, 2), path, {"lanes": 1})
    report(rows, ("first_late_layer", "delay"), tmp_path / "damage", "delay")
    svg = (tmp_path / "damage.svg").read_bytes()
    report(rows, ("first_late_layer", "delay"), tmp_path / "damage", "delay")
    assert (tmp_path / "damage.svg").read_bytes() == svg
    table = json.loads((tmp_path / "damage.json").read_text())
    assert [row["first_late_layer"] for row in table] == sorted(2 * list(range(DEPTH)))
    found = next(row for row in table if (row["first_late_layer"], row["delay"]) == (DEPTH - 1, 1))
    expected = [late - dense for late, dense in zip(rows[0]["flushed"], rows[0]["dense"], strict=True)]
    assert found["flushed_difference"] == pytest.approx(sum(expected) / 4)


@pytest.fixture(scope="module")
def prepared(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command leaves before the recovery: the cut model, and data in its tokens."""
    out = tmp_path_factory.mktemp("prepared")
    model, checkpoint = cut(folder, 3)
    write_tokenizer(checkpoint, out / "dense")
    write_dense(model, LATE, out / "dense")
    text(Plan.read(write_config(folder, out)), out)
    return out


def recovered(prepared: Path, out: Path, tables: dict[str, Any], *stops: int) -> list[dict[str, Any]]:
    """Train in one process for each stop, as `recovery.train` does; the rows of metrics.jsonl."""
    shutil.copytree(prepared, out)
    job = out / "run" / "job.toml"
    write_job(job, job_of(tables, out, out / "data/phase1.lock.json"))
    for stop in stops:
        ran = run_job(out / "run", ["--job.config_file", str(job), "--training.steps", str(stop)], 1)
        assert ran.returncode == 0, ran.stdout[-3000:]
    return read_lines(out / "run" / "metrics.jsonl")


def weights_of(out: Path, step: int, model: Laneformer) -> dict[str, Tensor]:
    return load_weights(out / f"run/checkpoint/step-{step}", model.config)


@pytest.mark.rotate
@pytest.mark.parametrize(("bfloat16", "end"), [(False, "dropped"), (True, "flushed")])
def test_the_shipped_trainer_distils_late_layers_and_resumes(
    folder: Path, prepared: Path, tmp_path: Path, bfloat16: bool, end: str
) -> None:
    tables, (model, _) = config_of(folder, late__end=end), cut(folder, 3)
    tables["training"]["mixed_precision_param"] = "bfloat16" if bfloat16 else "float32"
    del tables["delay"]
    rows = recovered(prepared, tmp_path / "once", tables, 5)
    again = recovered(prepared, tmp_path / "again", tables, 1, 3, 5)
    assert [row["loss"] for row in rows] == [row["loss"] for row in again]
    once, parts = (weights_of(tmp_path / name, 5, model) for name in ("once", "again"))
    assert all(torch.equal(once[name], parts[name]) for name in once)
    dense = model.state_dict()
    moved = {name for name in once if not torch.equal(once[name], dense[name])}
    assert moved == {name for name in once if name.startswith(("layers.1.", "layers.2.", "layers.3."))}
    for row in rows:
        assert row["layer_grad_norm"][0] == 0
        assert min(row["layer_grad_norm"][1:]) > 0
    # the first step's loss, before anything has moved; 8 bits of mantissa in streams, over 8 modules, are
    # a few percent of a divergence, which is quadratic in the difference
    tokens = Mixture.open(prepared / "data/phase1.lock.json").sequences(0, BATCH)[0].astype("int64")
    expected = divergence(model.double(), torch.from_numpy(tokens)[:, :-1], shares(1, 3, 1, 1), end)
    assert rows[0]["loss"] == pytest.approx(expected, rel=0.1 if bfloat16 else 1e-4)
    assert rows[0]["loss"] != pytest.approx(divergence(model, torch.from_numpy(tokens)[:, :-1], [0.0, 1.0, 1.0], end), rel=0.2)  # fmt: skip  # noqa: E501


def divergence(model: Laneformer, ids: Tensor, late: list[float], end: str) -> float:
    """Mean KL to the dense model with these shares in layers 1 to 3, by its definition."""
    h = model.tok_embeddings(ids)[:, :, None]
    dense, student = (
        logits_of(model, run_late(model, h, 0, [0.0, *each], 1), end).double().log_softmax(-1)
        for each in ([0.0] * 3, late)
    )
    return (dense.exp() * (dense - student)).sum(-1).mean().item()


@pytest.mark.rotate
def test_distillation_brings_the_loss_back(folder: Path, prepared: Path, tmp_path: Path) -> None:
    """On the text that it learns from, and, with all layers late, on the text that is held out."""
    plan = Plan.read(write_config(folder, tmp_path, **for_steps(60, 60), optimizer__lr=3e-3,
                                  training__global_batch_size=4))  # fmt: skip
    out = tmp_path / "out"
    late = [row["loss"] for row in recovered(prepared, out, plan.job, 60)]
    assert max(late[:4]) > 2 * late[-1] > 0, late
    (model, _), (lock, windows) = cut(folder, 3), text(plan, out)
    parts = windows.split(BATCH)
    rows = measure(model, parts, plan.late, out, {"lanes": 3})
    assert [(row["step"], row["late_layers"]) for row in rows] == [(0, 0), (60, 3)]
    before, after = (sum(row["dropped"]) - sum(row["dense"]) for row in rows)
    assert before > 2 * after
    assert rows[1]["kl"] == late[-1]
    assert measure(model, parts, plan.late, out, {"lanes": 3}) == rows
    with pytest.raises(ValueError, match="holds results of another lanes"):
        measure(model, parts, plan.late, out, {"lanes": 1})
    other = {**plan.job, "optimizer": {"lr": 1e-3}}
    with pytest.raises(ValueError, match="was trained with other settings; choose another --out"):
        train(job_of(other, out, lock), out, 5, 1.0)


@pytest.mark.parametrize(
    "late",
    [
        Late("", 1, 3, "flushed"),
        Late("", 2, 2, "flushed"),
        Late("", 1, 1, "dropped"),
        Late("", 1, 2, "dropped"),
    ],
    ids=str,
)
def test_the_folder_is_the_late_model(
    folder: Path, prepared: Path, tmp_path: Path, late: Late, ids: Tensor
) -> None:
    """Transformers and the engine compute what the recovery measures, with the dense model's own text files."""
    (model, checkpoint), out = cut(folder, 3), tmp_path / "hf"
    shares = [0.0] * late.first_late_layer + [1.0] * (DEPTH - late.first_late_layer)
    expected = late_logits(model, ids, shares, late.delay, late.end).numpy()
    made = late_folder.write_folder(late, checkpoint, model.state_dict(), out, "a card", "float32")
    assert made["out"] == str(out)
    theirs = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, dtype=torch.float32).eval()
    with torch.no_grad():
        assert relative_error(theirs(ids).logits.numpy(), expected) < 1e-5  # float32
    with (
        Engine.from_pretrained(out, dtype="fp32", threads=2) as engine,
        Engine.from_pretrained(folder) as dense,
    ):
        for row, logits in zip(ids.tolist(), expected, strict=True):
            assert relative_error(engine.logits(row), logits) < 1e-5
            assert relative_error(dense.logits(row), logits) > 1e-2
        assert engine.eos_ids == dense.eos_ids
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert checkpoint.tokenizer is not None
    assert tokenizer(WORDS)["input_ids"] == checkpoint.tokenizer.encode(WORDS).ids
    assert tokenizer.eos_token == "</s>"


def test_bits_per_byte_of_a_uniform_guess(folder: Path) -> None:
    """Of a loss of ln 256 a byte where every token is a byte: 8."""
    tokenizer = read_checkpoint(folder, lanes=1).tokenizer
    assert tokenizer is not None
    ids = torch.tensor([[tokenizer.token_to_id(each) for each in "xqzxqz"]])
    assert math.log(256) * bits_per_byte(tokenizer, ids) == pytest.approx(8)


@pytest.mark.rotate
def test_what_cannot_be_recovered_says_why_and_keeps_its_map(tmp_path: Path) -> None:
    values = {**CASE.values, "num_hidden_layers": 2}
    qwen = with_text(write_folder(Case("Qwen2", values), tmp_path / "qwen"))
    config = write_config(qwen, tmp_path)
    with pytest.raises(
        ValueError, match=r"recovery \(`--stages map` works\) does not support attention_bias"
    ):
        delay_a_model(config, qwen, tmp_path / "out")
    delay_a_model(config, qwen, tmp_path / "out", ("map",))
    assert len(read_lines(tmp_path / "out/damage.jsonl")) == 2 * 2


def test_shipped_configs_and_their_price() -> None:
    shipped = {path.stem: path for path in (ROOT / "configs").glob("delay_*.toml")}
    plans = {name: Plan.read(path) for name, path in shipped.items()}
    for name, path in shipped.items():
        assert plans[name].job["lr_scheduler"]["total_steps"] == plans[name].steps, path
    with pytest.raises(ValueError, match="lacks"):
        cost(plans["delay_smollm2"])
    llama = plans["delay_llama_1b"]
    found = cost(llama)
    weights, head = 16 * (2 * 2048**2 + 2 * 2048 * 512 + 3 * 2048 * 8192), 2048 * 128256
    attention = 16 * 4 * 2048 * 512.5  # two products with the keys that a query of 1,024 sees
    late = (
        14 / 16
    )  # of the layers, which teacher and student run; its head: forward, and backward to the input
    flops = (1 + 3 * late) * (2 * weights + attention) + 3 * 2 * head
    assert f"{flops / 1e9:.3f} GFLOP a token" in found
    tokens = llama.steps * 16 * 1024
    assert f"{tokens * flops / (0.3 * 989e12) / 3600:.3g} hours" in found


def write_config(folder: Path, tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "delay.toml"
    path.write_text(tomli_w.dumps(config_of(folder, **changes)))
    return path


@pytest.mark.rotate
def test_results_of_another_model_are_not_taken(folder: Path, tmp_path: Path) -> None:
    """Folders of two runs often have one name: the second's map once was the first's, in silence."""
    config, other = write_config(folder, tmp_path), tmp_path / "other" / folder.name
    shutil.copytree(folder, other)
    (other / "config.json").write_text((folder / "config.json").read_text() + "\n")
    delay_a_model(config, folder, tmp_path / "out", ("map",))
    with pytest.raises(ValueError, match="holds results of another model_sha256"):
        delay_a_model(config, other, tmp_path / "out", ("map",))


@pytest.mark.rotate
@pytest.mark.timeout(2400)  # five starts of the command, four of a trainer
def test_the_whole_command_killed_resumed_and_exported(folder: Path, tmp_path: Path) -> None:
    config, out = write_config(folder, tmp_path, **for_steps(400, 100)), tmp_path / "out"
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
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_for(process, lambda: (out / "damage.jsonl").exists())
        process.kill()
    there = (out / "damage.jsonl").read_text()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_for(process, lambda: (out / "run/checkpoint/step-100/.metadata").exists())
        os.kill(trainer_of(process.pid), signal.SIGKILL)
        _, errors = process.communicate(timeout=900)
    assert process.returncode == 1, errors[-3000:]
    assert "has failed (signal 9, SIGKILL" in errors
    logged = len(read_lines(out / "run/metrics.jsonl"))  # maybe beyond the checkpoint at which it was killed
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        wait_for(process, lambda: len(read_lines(out / "run/metrics.jsonl")) > logged + 5)
        process.terminate()
        _, errors = process.communicate(timeout=900)
    assert process.returncode == 130, errors[-3000:]
    stopped = newest_saved_step(out / "run/checkpoint")
    assert 100 < stopped < 200, "the trainer has not saved"
    part = subprocess.run([*command, "--steps", "300"], capture_output=True, text=True, timeout=600)
    assert part.returncode == 0, part.stderr[-3000:]
    assert "to be continued" in part.stdout
    assert (out / "damage.jsonl").read_text().startswith(there)
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(read_lines(out / "damage.jsonl")) == 2 * DEPTH
    assert [row["step"] for row in read_lines(out / "recovery.jsonl")] == [0, 100, stopped, 200, 300, 400]
    assert json.loads(done.stdout.splitlines()[-1])["out"] == str(out / "hf")
    config_values = json.loads((out / "hf/config.json").read_text())
    assert config_values["broadcast_delay"] == 1
    assert config_values["tie_word_embeddings"]
    generate = [sys.executable, "-m", "laneformer.cli", "generate", str(out / "hf"), "--prompt", "the lanes",
                "--max-new-tokens", "5"]  # fmt: skip
    told = subprocess.run(generate, capture_output=True, text=True, timeout=600)
    assert told.returncode == 0, told.stderr
    other = subprocess.run([*command, "--steps", "x"], capture_output=True, text=True, timeout=600)
    assert other.returncode != 0


def wait_for(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    while not happened():
        assert process.poll() is None, process.communicate()[1][-3000:]
        time.sleep(0.02)


def trainer_of(pid: int) -> int:
    """The rank below the command."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())
