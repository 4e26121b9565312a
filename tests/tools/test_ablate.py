"""The ablation: what its variants compute, that runs are paired and resume, and that the report
finds what is there.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tomli
import torch
from scipy.stats import t as student_t

from data_mixtures import recipe_file
from data_mixtures.mixture import Mixture
from laneformer import Laneformer, LaneformerConfig
from laneformer.config import flops_per_token
from laneformer.engine.folder import read_checkpoint
from laneformer.model import rope_table
from records.files import hold_lock
from tests.train.runs import GLOBAL_BATCH, succeed
from tests.train.runs import SMALL as TRAINED
from tools.ablate.page import put_section
from tools.ablate.plan import Options, Plan
from tools.ablate.price import price_section
from tools.ablate.report import detectable, interval, noise_floor, paired, together
from tools.ablate.training import Job, Training, run_job
from tools.ablate.variants import build

SHIPPED = Path("configs/ablation.toml")
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_lanes": 4, "swa_layers": (), "vocab_size": 52, "max_position_embeddings": 16,
    "broadcast_delay": 0,
}  # fmt: skip
CONFIG = LaneformerConfig(**SMALL)
IDS = torch.arange(12).reshape(1, 12) % 52


def reference(model: Laneformer, order: str) -> torch.Tensor:
    """Logits by the definitions, one stream, float64: every module's summed output P_n, and
    what module n reads.
    """
    h0 = model.tok_embeddings(IDS)[:, :, None].expand(-1, -1, 4, -1)
    sums: list[torch.Tensor] = []
    positions = torch.arange(IDS.shape[1])
    rope, masks = rope_table(model.config, positions), model.masks(positions, positions)
    for n in range(6):
        layer, late = model.layers[n // 2], {"ladder": 1, "parallel": n % 2, "plain": 0}[order]
        h = h0 + sum(sums[: max(0, n - late)])
        if n % 2:
            partial = layer.feed_forward(layer.ffn_norm(h))
        else:
            partial = layer.attention(layer.attention_norm(h), rope, masks[n // 2], None)
        sums.append(partial.sum(2, keepdim=True))
    return model.lm_head(h0 + sum(sums), model.norm)


@pytest.mark.parametrize("kind", ["ladder", "parallel"])
def test_a_neighbour_is_what_its_definition_says(kind: str):
    model = build(CONFIG, kind, seed=3).double()
    assert torch.allclose(model(IDS), reference(model, kind), rtol=0, atol=1e-12)
    assert not torch.allclose(model(IDS), reference(model, "plain"), rtol=0, atol=1e-6)


def test_desync_by_one_reduces_everywhere_and_is_tensor_parallelism():
    plain, desync = build(CONFIG, None, 1).double(), build(CONFIG, "desync_1", 1).double()
    assert torch.allclose(plain(IDS), desync(IDS), rtol=0, atol=1e-12)
    never = build(
        LaneformerConfig(**SMALL | {"use_attention_comm": False, "use_mlp_comm": False}), None, 1
    ).double()
    assert torch.allclose(
        never(IDS), build(CONFIG, "desync_7", 1).double()(IDS), rtol=0, atol=1e-12
    )  # of 6 modules
    assert not torch.allclose(plain(IDS), build(CONFIG, "desync_2", 1).double()(IDS), rtol=0, atol=1e-6)


def test_a_seed_gives_all_variants_the_same_weights():
    models = [build(CONFIG, kind, 5) for kind in (None, "ladder", "parallel", "desync_2", "lost_1")]
    for other in models[1:]:
        for (name, a), (same, b) in zip(models[0].named_parameters(), other.named_parameters(), strict=True):
            assert name == same
            assert torch.equal(a, b)


def test_what_is_unknown_is_refused():
    with pytest.raises(ValueError, match="joins = 'lader' is unknown; choose from ladder"):
        build(CONFIG, "lader", 0)
    with pytest.raises(ValueError, match="leave broadcast_delay at 0"):
        build(LaneformerConfig(**SMALL | {"broadcast_delay": 2}), "ladder", 0)


def result(variant: str, seed: int, loss: float, rate: float = 1.0) -> dict[str, object]:
    return {
        "size": "s", "variant": variant, "seed": seed, "learning_rate": rate, "valid_loss": loss, "parameters": 1,
        "tokens": 1, "model": {"num_lanes": 8, "broadcast_delay": 0}, "joins": None, "seed_offset": 0,
    }  # fmt: skip


def test_differences_are_paired_by_seed_at_each_variants_best_rate():
    worse = (("base", 2.0), ("late", 1.0))
    results = [result(variant, seed, 9.0, rate) for variant, rate in worse for seed in range(3)]
    results += [result("base", seed, loss) for seed, loss in enumerate((4.0, 5.0, 6.0))]
    results += [result("late", seed, loss, rate=2.0) for seed, loss in enumerate((4.1, 5.2, 6.3))]
    rows = {row["variant"]: row for row in paired(results, "base")}
    assert rows["late"]["learning_rate"] == 2.0
    assert rows["late"]["difference"] == pytest.approx(0.2)
    assert rows["late"]["half_width_95"] == pytest.approx(
        4.303 * 0.1 / 3**0.5, rel=1e-3
    )  # not the spread of the seeds
    assert rows["base"]["difference"] == rows["base"]["half_width_95"] == 0.0
    assert interval([1.0])[0] == 1.0


def test_the_best_rate_is_that_of_the_mean_over_seeds_and_not_of_one_lucky_seed():
    results = [result("base", seed, 4.0 if seed else 3.0, rate=2.0) for seed in (0, 1, 2)]
    results += [result("base", seed, 3.5, rate=1.0) for seed in (0, 1, 2)] + [
        result("base", 0, 1.0, rate=4.0)
    ]
    (row,) = paired(results, "base")
    assert (row["learning_rate"], row["seeds"], row["edge_of_sweep"]) == (1.0, 3, True)


def test_the_interval_divides_by_n_minus_1_and_the_power_is_what_experiments_find():
    assert interval([1.0, 2.0, 4.0])[2] == pytest.approx(1.5275, rel=1e-4)
    n, draws = 3, np.random.default_rng(0).normal(size=(20_000, 3)) + detectable(1.0, 3)
    half = 4.3027 * draws.std(1, ddof=1) / n**0.5
    assert np.mean(draws.mean(1) - half > 0) == pytest.approx(0.8, abs=0.01)
    assert math.isnan(detectable(0.1, 1))


def test_all_variants_in_one_analysis_of_variance():
    """Two variants: the paired t test. Three: as computed by hand."""
    losses = {"base": (4.0, 5.0, 6.0), "late": (4.1, 5.2, 6.3), "other": (4.2, 5.0, 6.1)}
    results = [
        result(variant, seed, loss) for variant, own in losses.items() for seed, loss in enumerate(own)
    ]
    two = together([*results[:6], result("base", 0, 4.0, 9.0)], "base")
    assert two["half_width_95"] == pytest.approx(interval([0.1, 0.2, 0.3])[1])
    assert two["half_width_95_of_all"] == two["half_width_95"]
    assert two["differences"] == {"late": pytest.approx(0.2)}
    three = together([*results, result("short", 0, 9.0)], "base")
    assert (three["degrees"], three["deviation"] ** 2) == (4, pytest.approx(1 / 30 / 4))
    assert student_t.sf(three["half_width_95_of_all"] / (2 / 30 / 4 / 3) ** 0.5, 4) == pytest.approx(
        0.025 / 2
    )
    assert together(results[:1], "base") is None


def test_a_variant_and_the_baseline_are_compared_at_their_best_of_the_rates_that_both_tried():
    """`one` was tried at rate 2 alone, where the baseline is not at its best; `both` at every rate."""
    losses = {
        ("base", 1.0): 4.0,
        ("base", 2.0): 4.5,
        ("one", 2.0): 4.4,
        ("both", 1.0): 4.3,
        ("both", 2.0): 4.2,
    }
    results = [
        result(variant, seed, loss, rate) for (variant, rate), loss in losses.items() for seed in range(2)
    ]
    results += [
        result("one", 0, 1.0, 1.0),
        result("alone", 0, 4.0, 3.0),
    ]  # not on all seeds; where the baseline is not
    rows = {row["variant"]: row for row in paired(results, "base")}
    said = {
        name: (row["learning_rate"], row["rates"], round(row["difference"], 6)) for name, row in rows.items()
    }
    assert said == {"base": (1.0, 2, 0.0), "one": (2.0, 1, -0.1), "both": (2.0, 2, 0.2)}


def test_controls_and_edges_are_marked():
    results = [
        result(v, 0, 4.0 + i / 10 + r, r)
        for i, v in enumerate(("base", "again", "lost", "late"))
        for r in (1, 2, 3)
    ]
    for one in results:
        one |= {"seed_offset": 1000 * (one["variant"] == "again")}
        one |= {"joins": "lost_1" if one["variant"] == "lost" else None}
    rows = {row["variant"]: row for row in paired(results, "base")}
    roles = {"base": "baseline", "again": "noise floor", "lost": "planted fault", "late": None}
    assert {name: row["role"] for name, row in rows.items()} == roles
    assert all(row["edge_of_sweep"] for row in rows.values())
    assert noise_floor(list(rows.values())) == pytest.approx(0.1)


def test_a_section_of_the_page_is_replaced_and_others_stay(tmp_path: Path):
    page = tmp_path / "docs" / "page.md"
    for section in ("## A\n\none\n\n### b\n\nx", "## B\n\ntwo", "## A\n\nthree"):
        put_section(page, section)
    assert page.read_text().startswith("# What the delay is worth\n")
    assert page.read_text().endswith("\n\n## A\n\nthree\n\n## B\n\ntwo\n")


def test_lines_from_before_a_field_existed_are_of_the_same_training():
    old = {"lock": "l", "steps": 3, "batch_sequences": 2, "seq_len": 8, "betas": [0.9, 0.95], "device": "cpu"}
    assert Training.of_result(old) == Training("l", 3, 2, 8)


def test_the_plan_of_the_h100_runs_is_a_calculation_with_its_price():
    options = Options(SHIPPED, Path("unused"), sizes=("30m",), variants=("delay_0", "delay_2"), device="cuda")
    plan = Plan.read(options)
    assert (plan.training.bf16, plan.training.compile, plan.training.device) == (True, "inductor", "cuda")
    text = price_section(plan, mfu_percent=10, gpu_hour_price=3)
    flops = (
        2
        * 9
        * 3000
        * 32
        * 1024
        * flops_per_token(LaneformerConfig(**plan.job("30m", "delay_2", 0, 0).model), 1024)
    )
    assert f"| {flops / 98.9e12 / 3600:.2f} | {flops / 98.9e12 / 1200:.2f} |" in text
    assert "Calculated, not measured" in text


@pytest.mark.slow
def test_the_gpus_path_at_toy_size_on_a_cpu(
    prepared_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 4)  # of graphs: no run may add to another's
    lock, model = next(prepared_data.glob("**/phase1.lock.json")), {**SMALL, "broadcast_delay": 1}
    del model["vocab_size"], model["max_position_embeddings"]
    plain = Training(str(lock), steps=3, batch_sequences=2, seq_len=16, valid_windows=3)
    job, losses = Job("s", "delay_1", 0, 1e-3, model), []
    for training in (
        plain,
        *[replace(plain, bf16=True, compile="aot_eager")] * 2,
    ):
        losses.append(run_job(job, training, tmp_path)["valid_loss"])
    assert len(set(losses[1:])) == 1
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2**-6)
    run_job(replace(job, variant="ladder", model={**model, "broadcast_delay": 0}, joins="ladder"), training)
    assert read_checkpoint(tmp_path / "s-delay_1-0-0.001").config.broadcast_delay == 1


SIZES = ("0m5", "1m", "2m5", "10m", "30m", "100m")


def test_every_variant_and_size_of_the_shipped_config_builds():
    plan = Plan.read(Options(SHIPPED, Path("unused"), sizes=SIZES))
    assert "512" in repr(recipe_file.load(Path("data_mixtures/ablation.toml")).tokenizer)
    parameters = {}
    for job in plan.jobs():
        if (job.seed, job.learning_rate) != (plan.seeds[0], plan.learning_rates[0]):
            continue
        config = LaneformerConfig(vocab_size=4096, max_position_embeddings=256, **job.model)
        with torch.device("meta"):
            Laneformer(config)
        if job.size == SIZES[0]:
            build(config, job.joins, 0)
        parameters[job.size] = config.parameter_count()["total"] - 2 * 4096 * config.hidden_size
    assert tuple(parameters) == SIZES
    assert sorted(parameters.values()) == list(parameters.values())


@pytest.mark.slow
def test_the_shipped_trainer_trains_neighbours_and_delay_0_to_the_last_bit(
    prepared_data: Path, tmp_path: Path
):
    """A job starts at the loss of the neighbour that it names; without one it is the shipped job."""
    lock = prepared_data / "phase1.lock.json"
    shape = ("--architecture.broadcast_delay", "0", "--parallelism.data_parallel_shard_degree", "1")
    shipped = [row["loss"] for row in succeed(tmp_path / "shipped", lock, *shape, ranks=1)]
    neighbours = (
        "--job.custom_config_module", "tools.ablate.job_config", "--experimental.custom_import", "tools.ablate.spec",
    )  # fmt: skip
    tokens = torch.from_numpy(Mixture.open(lock).sequences(0, GLOBAL_BATCH)[0])
    config = replace(TRAINED, broadcast_delay=0)
    for joins in ("", "ladder", "parallel", "desync_2", "lost_1"):
        own = ("--variant.joins", joins)
        found = [
            row["loss"] for row in succeed(tmp_path / f"as-{joins}", lock, *shape, *neighbours, *own, ranks=1)
        ]
        expected = loss_of(build(config, joins or None, 1), tokens)
        assert found[0] == pytest.approx(expected, abs=1e-5)
        assert (found == shipped) == (not joins)


def loss_of(model: Laneformer, tokens: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model.double()(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()


def run(config: Path, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.ablate", str(config), "--out", str(out), "--workers", "1", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_one_command_at_a_time_trains_into_a_folder(tmp_path: Path):
    with hold_lock(tmp_path / ".lock", "held"):
        second = run(SHIPPED, tmp_path)
    assert second.returncode == 1
    assert (
        f"tools.ablate: another tools.ablate trains into {tmp_path}; choose another --out (held by"
        in second.stderr
    )


@pytest.mark.slow
def test_the_shipped_ablation_at_toy_size_resumes_where_it_stopped(prepared_data: Path, tmp_path: Path):
    values = tomli.loads(SHIPPED.read_text())
    lock = next(prepared_data.glob("**/phase1.lock.json"))
    text = SHIPPED.read_text().replace(values["training"]["lock"], str(lock))
    shrunk = {
        "steps = 1500": "steps = 3", "seq_len = 128": "seq_len = 16", "batch_sequences = 8": "batch_sequences = 2",
        "num_hidden_layers = 8": "num_hidden_layers = 3", "[0, 1, 2]": "[0, 1]",
    }  # fmt: skip
    for old, new in shrunk.items():
        assert old in text
        text = text.replace(old, new)
    config = tmp_path / "toy.toml"
    config.write_text(text + "\n")
    out = tmp_path / "out"
    flags = ("--variants", "delay_0", "delay_2", "ladder", "lost_lane")
    page = ("--page", str(tmp_path / "page.md"), "--figure", str(out / "ablation.svg"))
    first = run(config, out, *flags, *page)
    assert first.returncode == 0, first.stderr
    lines = (out / "results.jsonl").read_text().splitlines()
    assert len(lines) == 4 * 3 * 2
    (out / "results.jsonl").write_text("\n".join(lines[:9]) + "\n" + lines[9][:40])  # cut off while it wrote
    again = run(config, out, *flags)
    assert again.returncode == 0, again.stderr
    key = ("variant", "seed", "learning_rate", "valid_loss")
    whole = [line for line in (out / "results.jsonl").read_text().splitlines() if line.endswith("}")]
    rows = [sorted(str([json.loads(line)[k] for k in key]) for line in part) for part in (lines, whole)]
    assert rows[0] == rows[1]  # the same losses to the last bit
    assert (out / "ablation.svg").read_text().lstrip().startswith("<?xml")
    assert "| delay 2 |" in (tmp_path / "page.md").read_text()
    assert "](out/ablation.svg)" in (tmp_path / "page.md").read_text()
    assert (tmp_path / "page.jsonl").read_text().splitlines() == lines
    other = run(config, out, *flags, "--device", "meta")
    assert other.returncode == 1
    assert "holds results of another training (device)" in other.stderr
    (out / "results.jsonl").write_text(json.dumps({**json.loads(lines[0]), "data": "0"}) + "\n")
    other = run(config, out, *flags)
    assert other.returncode == 1
    assert "holds results of other data" in other.stderr
