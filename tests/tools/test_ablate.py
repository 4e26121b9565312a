"""The ablation: what its variants compute, that runs are paired and resume, and that the report
finds what is there.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import t as student_t
from scipy.stats import ttest_ind

from data_mixtures import recipe_file
from data_mixtures.mixture import Mixture
from laneformer import Laneformer, LaneformerConfig
from laneformer.engine.folder import read_checkpoint
from laneformer.flops import flops_per_token
from laneformer.positions import rope_table
from records.events import DONE, STOPPED, read_outcome
from records.files import hold_lock
from tests.neighbours import build
from tests.train.runs import GLOBAL_BATCH, ask, succeed
from tests.train.runs import SMALL as TRAINED
from tools import export_hf
from tools.ablate.__main__ import check_origin
from tools.ablate.page import put_section
from tools.ablate.plan import Options, Plan, price_section
from tools.ablate.report import detectable, interval, noise_floor, paired, read_results, together
from tools.ablate.trainer import runs_side_by_side, train, write_job
from tools.ablate.training import Job, Training, job_file, run_job

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
    assert two["dunnett"] == {
        "late": pytest.approx(ttest_ind([4.1, 5.2, 6.3], [4.0, 5.0, 6.0]).pvalue, abs=1e-3)
    }
    more = [*results[:6], *(result("base", seed, 5.0) for seed in range(3, 9))]
    assert together(more, "base")["seeds"] == 3, "a baseline with more seeds is compared all the same"
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
        for i, v in enumerate(("base", "again", "lost", "handicap_large", "late"))
        for r in (1, 2, 3)
    ]
    for one in results:
        one |= {"seed_offset": 1000 * (one["variant"] == "again")}
        one |= {"joins": "lost_1" if one["variant"] == "lost" else None}
    rows = {row["variant"]: row for row in paired(results, "base")}
    roles = {"base": "baseline", "again": "noise floor", "lost": "planted fault", "late": None}
    roles["handicap_large"] = "planted fault"
    assert {name: row["role"] for name, row in rows.items()} == roles
    assert all(row["edge_of_sweep"] for row in rows.values())
    assert noise_floor(list(rows.values())) == pytest.approx(0.1)


def test_a_section_of_the_page_is_replaced_and_others_stay(tmp_path: Path):
    page = tmp_path / "docs" / "page.md"
    for section in ("## A\n\none\n\n### b\n\nx", "## B\n\ntwo", "## A\n\nthree"):
        put_section(page, section)
    assert page.read_text().startswith("# What the delay is worth\n")
    assert page.read_text().endswith("\n\n## A\n\nthree\n\n## B\n\ntwo\n")


def test_the_published_runs_can_be_gone_on_from_and_are_what_the_documents_say():
    published = Path("docs/benchmarks/2026-11-28-ablation.jsonl")
    plan, runs = Plan.read(Options(SHIPPED, Path("unused"))), read_results(published)
    training = json.loads(json.dumps(asdict(plan.training)))
    check_origin(runs, {"training": training, "data": runs[0]["data"]}, published)
    training["job"]["optimizer"]["lr"] = 1.0
    with pytest.raises(ValueError, match=r"another job; choose another --out"):
        check_origin(runs, {"training": training, "data": runs[0]["data"]}, published)
    said = Path("docs/dtp.md").read_text()
    nats_a_bit = 1.684 * math.log(2)  # 1.684 bytes a token
    for row in paired(runs, "delay_0"):
        by, half = row["difference"], row["half_width_95"]
        assert row["seeds"] == 5
        if row["variant"] != "delay_0":
            assert f"| {by:+.3f} ± {half:.3f} | {by / nats_a_bit:+.3f} |" in said, row["variant"]


def test_a_seed_has_batches_and_weights_of_its_own(prepared_data: Path):
    shape = {"seq_len": 32, "batch_sequences": 2, "lock": str(prepared_data / "phase1.lock.json")}
    training = Training(**shape, steps=5, job={"optimizer": {"lr": 9.0, "eps": 1e-8}})
    first, third = (
        job_file(Job("s", "again", seed, 1e-3, {}, None, 1000), training, Path("run")) for seed in (0, 2)
    )
    assert [job["resilience"]["skip_sequences"] for job in (first, third)] == [[], [[0, 2 * 5 * 2]]]
    assert [job["debug"]["seed"] for job in (first, third)] == [1000, 1002]
    assert third["optimizer"] == {"lr": 1e-3, "eps": 1e-8}


def test_the_plan_of_the_h100_runs_is_a_calculation_with_its_price():
    options = Options(SHIPPED, Path("unused"), sizes=("30m",), variants=("delay_0", "delay_2"), device="cuda")
    plan = Plan.read(options)
    assert (plan.training.bf16, plan.training.compile, plan.training.device) == (True, "inductor", "cuda")
    text = price_section(plan, mfu_percent=10, gpu_hour_price=3)
    flops = (
        2
        * 5
        * 3000
        * 8
        * 4096
        * flops_per_token(LaneformerConfig(**plan.job("30m", "delay_2", 0, 0).model), 4096)
    )
    assert f"| {flops / 98.9e12 / 3600:.2f} | {flops / 98.9e12 / 1200:.2f} |" in text
    assert "Calculated, not measured" in text


SIZES = ("0m5", "1m", "2m5", "10m", "30m", "100m")


@pytest.mark.rotate
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


def test_rates_and_seeds_that_are_asked_for_take_the_place_of_the_configs():
    asked: dict[str, Any] = {"learning_rates": (7e-4, 3e-3), "seeds": (0, 9)}
    jobs = Plan.read(Options(SHIPPED, Path("unused"), variants=("delay_0",), **asked)).jobs()
    assert {(job.learning_rate, job.seed) for job in jobs} == {(7e-4, 0), (7e-4, 9), (3e-3, 0), (3e-3, 9)}


@pytest.mark.rotate
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


def command(config: Path, out: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "tools.ablate", str(config), "--out", str(out), "--workers", "1", *flags]


def run(config: Path, out: Path, *flags: str) -> tuple[int, str]:
    """Exit status and output of one command, whose processes the fork server starts."""
    log = out.with_name(f"{out.name}.{time.monotonic_ns()}.log")
    job = {"command": command(config, out, *flags), "environment": {}, "log": str(log), "pid": f"{log}.pid"}
    return ask(job), log.read_text()


@pytest.mark.rotate
def test_one_command_at_a_time_trains_into_a_folder(tmp_path: Path):
    with hold_lock(tmp_path / ".lock", "held"):
        second = subprocess.run(command(SHIPPED, tmp_path), capture_output=True, text=True, timeout=900)
    assert second.returncode == 1
    assert (
        f"tools.ablate: another tools.ablate trains into {tmp_path}; choose another --out (held by"
        in second.stderr
    )


def toy(prepared_data: Path, path: Path, more: str = "", seeds: int = 2) -> Path:
    """The shipped ablation on the tests' data: one rate, six steps."""
    shrunk = {
        'lock = "data/ablation/phase1.lock.json"': f'lock = "{prepared_data}/phase1.lock.json"\n{more}',
        "steps = 1500": "steps = 6", "seq_len = 256 ": "seq_len = 32 ", "batch_sequences = 4": "batch_sequences = 2",
        "num_hidden_layers = 8": "num_hidden_layers = 3", "seeds = [0, 1, 2, 3, 4]": f"seeds = {list(range(seeds))}",
    }  # fmt: skip
    text = SHIPPED.read_text()
    for old, new in shrunk.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def losses(out: Path) -> dict[tuple[str, int], float]:
    rows = [
        json.loads(line) for line in (out / "results.jsonl").read_text().splitlines() if line.endswith("}")
    ]
    assert len({(row["variant"], row["seed"]) for row in rows}) == len(rows)
    return {(row["variant"], row["seed"]): row["valid_loss"] for row in rows}


@pytest.mark.rotate
def test_the_shipped_ablation_at_toy_size_resumes_where_it_stopped(prepared_data: Path, tmp_path: Path):
    config, out = toy(prepared_data, tmp_path / "toy.toml"), tmp_path / "out"
    flags = ("--variants", "delay_0", "delay_2", "ladder", "lost_lane")
    page = ("--page", str(tmp_path / "page.md"), "--figure", str(out / "ablation.svg"))
    status, said = run(config, out, *flags, *page)
    assert status == 0, said
    whole = losses(out)
    assert len(whole) == len(set(whole.values())) == 4 * 2
    assert (out / "ablation.svg").read_text().lstrip().startswith("<?xml")
    assert "| delay 2 |" in (tmp_path / "page.md").read_text()
    assert "](out/ablation.svg)" in (tmp_path / "page.md").read_text()
    lines = (out / "results.jsonl").read_text().splitlines()
    assert (tmp_path / "page.jsonl").read_text().splitlines() == lines
    # cut off while it wrote: what has ended is not trained again
    (out / "results.jsonl").write_text("\n".join(lines[:5]) + "\n" + lines[5][:40])
    status, said = run(config, out, *flags)
    assert status == 0, said
    assert losses(out) == whole
    assert all(
        len((run / "attempts.jsonl").read_text().splitlines()) == 1 for run in (out / "runs").iterdir()
    )
    other = run(config, out, *flags, "--device", "meta")
    assert other[0] == 1
    assert "holds results of another device" in other[1]
    (out / "results.jsonl").write_text(json.dumps({**json.loads(lines[0]), "data": "0"}) + "\n")
    other = run(config, out, *flags)
    assert other[0] == 1
    assert "holds results of another data" in other[1]
    # a run that was stopped goes on at its checkpoint, and ends as if it had not been: the same losses to the last bit
    stopped = tmp_path / "again" / "runs" / "1m-ladder-1-0.003"
    stopped.mkdir(parents=True)
    (stopped / "stop").touch()
    seed = ("--variants", "delay_0", "ladder")
    status, said = run(config, tmp_path / "again", *seed)
    assert status == 1
    assert f"its log is {stopped}/train.log" in said
    with pytest.raises(ValueError, match="'ladder', which a Hugging Face config cannot express"):
        export_hf.check_joins(stopped / "checkpoint" / "step-1")
    status, said = run(config, tmp_path / "again", *seed)
    assert status == 0, said
    assert losses(tmp_path / "again") == {key: loss for key, loss in whole.items() if key[0] in seed}
    attempts = [json.loads(line) for line in (stopped / "attempts.jsonl").read_text().splitlines()]
    assert [attempt["step"] for attempt in attempts] == [0, 1]
    status, said = run(toy(prepared_data, config, "warmup_ratio = 0.5"), tmp_path / "again", *seed)
    assert "holds results of another warmup_ratio" in said


@pytest.mark.rotate
def test_where_a_run_fails_only_runs_are_ended(tmp_path: Path):
    """Other children of this process, as a server of other tests, go on."""
    child = subprocess.Popen(["sleep", "600"])
    job, log = tmp_path / "run" / "job.toml", tmp_path / "log"
    write_job(job, {"job": {"config_file": "none"}})
    with pytest.raises(ValueError, match="run has failed"), runs_side_by_side(1) as pool:
        pool.submit(train, job, ends=[0], log=log).result()
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.3)
    child.kill()


@pytest.mark.rotate
def test_an_interrupted_ablation_leaves_no_run_behind_and_its_runs_have_saved(
    prepared_data: Path, tmp_path: Path
):
    config, out = toy(prepared_data, tmp_path / "toy.toml"), tmp_path / "out"
    config.write_text(config.read_text().replace("steps = 6", "steps = 500"))
    log, pid, trained = tmp_path / "log", tmp_path / "pid", out / "runs" / "1m-delay_0-0-0.003"

    def interrupt() -> None:
        while not (trained / "metrics.jsonl").exists():
            time.sleep(0.01)
        os.kill(int(pid.read_text()), signal.SIGINT)

    job = {"command": command(config, out, "--variants", "delay_0"), "environment": {}}
    assert ask({**job, "log": str(log), "pid": str(pid)}, interrupt) == 130, log.read_text()
    assert "interrupted; the same command goes on" in log.read_text()
    outcome = read_outcome(trained)
    assert outcome["code"] == STOPPED
    assert (trained / "checkpoint" / f"step-{outcome['step']}").exists()
    assert not (out / "results.jsonl").exists()


@pytest.mark.rotate
def test_branches_leave_the_baseline_with_all_that_it_has(prepared_data: Path, tmp_path: Path):
    """One with the baseline's own joins ends as it does, to the last bit."""
    config = toy(prepared_data, tmp_path / "toy.toml")
    same = "same = { broadcast_delay = 0 }\ndelay_1 = {"
    config.write_text(config.read_text().replace("delay_1 = {", same))
    variants, page = ("delay_2_flushed", "same", "ladder", "delay_0"), tmp_path / "page.md"
    flags = ("--branch-at", "0.5", "--seeds", "1", "--page", str(page), "--variants", *variants)
    status, said = run(config, tmp_path / "out", *flags)
    assert status == 0, said
    found = {variant: loss for (variant, _), loss in losses(tmp_path / "out").items()}
    assert found["same"] == found["delay_0"]
    assert len({*found.values()}) == 3
    for variant in variants:
        folder = tmp_path / "out/runs" / f"1m-{variant}-1-0.003"
        (attempt,) = (folder / "attempts.jsonl").read_text().splitlines()
        assert json.loads(attempt)["step"] == (0 if variant == "delay_0" else 3)
        assert not (folder / "checkpoint").exists()
    assert "leaves it after 50% of the steps" in page.read_text()
    status, said = run(config, tmp_path / "out", "--variants", "delay_0")
    assert "holds results of another branch_at" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {
                "branch_at": 0.8,
                "variants": ("delay_0", "delay_0_again"),
            },  # it would seem to be a noise floor of 0
            "variant 'delay_0_again' cannot branch off 'delay_0': it has seed_offset of its own",
        ),
        ({"branch_at": 1.0}, "branch_at = 1 is step 1500 of 1500; choose one between"),
        (
            {"branch_at": 0.8, "variants": ("delay_0", "handicap")},
            "variant 'handicap' cannot branch off 'delay_0': it has intermediate_share of its own; leave it out",
        ),
    ],
)
def test_what_cannot_branch_is_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Plan.read(Options(SHIPPED, Path("unused"), **options))


def test_a_run_that_nothing_can_leave_is_named(tmp_path: Path):
    plan = Plan.read(Options(SHIPPED, Path("unused"), variants=("delay_0", "delay_1"), branch_at=0.8))
    with pytest.raises(ValueError, match=r"cannot leave 1m-delay_0-0-.*, which has diverged or was trained"):
        run_job(plan.job("1m", "delay_1", 0, 3e-3), plan.training, tmp_path, keep_weights=False)


@pytest.mark.rotate
def test_a_run_that_diverges_has_no_loss_and_ends_nothing(prepared_data: Path, tmp_path: Path):
    config = toy(prepared_data, tmp_path / "toy.toml")
    config.write_text(config.read_text().replace("learning_rates = [3e-3]", "learning_rates = [1e30, 3e-3]"))
    status, said = run(config, tmp_path / "out", "--variants", "delay_0")
    assert status == 0, said
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [(row["learning_rate"], row["valid_loss"] is None) for row in rows] == [
        (1e30, True), (1e30, True), (3e-3, False), (3e-3, False),
    ]  # fmt: skip


@pytest.mark.rotate
def test_runs_that_end_at_once_are_exported_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    plan, alone = Plan.read(Options(SHIPPED, tmp_path)), threading.Lock()
    jobs = list(plan.jobs())[:2]

    def export(*_: object, **__: object) -> None:
        assert alone.acquire(blocking=False), "two exports at once"
        time.sleep(0.1)
        alone.release()

    for job in jobs:
        (tmp_path / "runs" / job.name / "checkpoint").mkdir(parents=True)
        (tmp_path / "runs" / job.name / "metrics.jsonl").write_text('{"loss": 2.0, "valid_loss": 2.0}\n')
        (tmp_path / "runs" / job.name / "model.json").write_text(json.dumps(CONFIG.to_dict()))
    monkeypatch.setattr("laneformer.hf.export.export", export)
    monkeypatch.setattr("tools.ablate.training.write_job", lambda *_: None)
    monkeypatch.setattr("tools.ablate.training.job_file", lambda *_: {})
    monkeypatch.setattr("tools.ablate.training.read_outcome", lambda _: {"code": DONE})
    with ThreadPoolExecutor(2) as pool:
        each = list(pool.map(lambda job: run_job(job, plan.training, tmp_path, keep_weights=True), jobs))
    assert [one["valid_loss"] for one in each] == [2.0, 2.0]


@pytest.mark.rotate
def test_the_gpus_path_at_toy_size_on_a_cpu(prepared_data: Path, tmp_path: Path):
    found = []
    for name, more in {"plain": "", "gpu": 'bf16 = true\ncompile = "aot_eager"'}.items():
        config = toy(prepared_data, tmp_path / f"{name}.toml", more, seeds=1)
        flags = ("--variants", "delay_0", "delay_1", "ladder", "--keep-weights")
        status, said = run(config, tmp_path / name, *flags)
        assert status == 0, said
        found.append(losses(tmp_path / name))
    plain, gpu = found
    for key, loss in plain.items():
        assert gpu[key] != loss
        assert gpu[key] == pytest.approx(loss, rel=2**-6)
    assert sorted(path.name for path in (tmp_path / "gpu" / "weights").iterdir()) == [
        f"1m-delay_{delay}-0-0.003" for delay in (0, 1)
    ]
    folder = tmp_path / "plain" / "weights" / "1m-delay_1-0-0.003"
    assert read_checkpoint(folder).config.broadcast_delay == 1
