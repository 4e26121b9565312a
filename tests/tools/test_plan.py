"""Tests that the plan gives the published sums, and that its parts agree with the model."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from data_mixtures import recipe_file
from data_mixtures.shards import write_json
from data_mixtures.stages import stage
from laneformer import LaneformerConfig
from laneformer.engine.cuda.cards import card_named
from tools.plan import preparation, sums

ROOT = Path(__file__).resolve().parents[2]
PARAMETERS = 2_320_069_632
JOB = sums.Job(
    LaneformerConfig(),
    4096,
    620_000,
    global_batch=1536,
    local_batch=8,
    shard=8,
    replicate=24,
    checkpoint_interval=500,
    keep_latest=5,
)
CLUSTER = sums.Cluster(192, 8, card_named("h100"), 17_000)
BOTH, LONG = "configs/phase1.toml configs/phase2.toml", "configs/phase3.toml --gpus 64 --mfu 25"
COMMANDS = {
    "nemotron": f"{BOTH} --metrics.gpu_hour_price 2.5",
    "nemotron-code": f"{BOTH} --mixture.lock data/nemotron-code/phase.lock.json",
    "nemotron-64k": f"{LONG} --gpu h200",
    "one lane a GPU": f"{LONG} --parallelism.tensor_parallel_degree 8 --parallelism.data_parallel_replicate_degree 1",
    # narrow, for CI's sake
    "dry run": "configs/phase2.toml --dry-run --training.local_batch_size 1 --model.converters quantize.linear.float8 "
    "--architecture.hidden_size 512 --architecture.intermediate_size 1024 --architecture.vocab_size 2048",
}
REFUSED = {
    "--mfu 0.0: it should be greater than 0": "configs/phase1.toml --mfu 0",
    "--mfu -5.0: it should be greater than 0": "configs/phase1.toml --mfu -5",
    "--gpus-per-node 0: it should be": "configs/phase1.toml --gpus-per-node 0",
    "--gpus is 64": "configs/phase1.toml --gpus 64",
    "states no FLOP/s": "configs/phase1.toml --gpu rubin",
    "no job file given": "",
}
# all commands in one process, since TorchTitan is slow to import; not in this one, since it keeps
# global state
RUN = """
import contextlib, io, json, sys
from records.command import run_command
from tools.plan.__main__ import main
results = {}
for name, line in json.loads(sys.argv[1]).items():
    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try: run_command("tools.plan", lambda: main(line.split()), status=2)
        except SystemExit as end: code = end.code
    results[name] = [code, out.getvalue()]
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def outputs():
    # exit code and output by command
    command = [sys.executable, "-c", RUN, json.dumps(COMMANDS | REFUSED)]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    return json.loads(outcome.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def plans(outputs):
    assert not [outputs[name] for name in COMMANDS if outputs[name][0]]
    return {name: json.loads(outputs[name][1].splitlines()[-1]) for name in COMMANDS}


@pytest.mark.rotate
def test_published_sums(plans):
    one, two = plans["nemotron"]["phases"]
    assert one["parameters"]["total"] == two["parameters"]["total"] == PARAMETERS
    # "about 4T", "about 2T", and 25 % of an H100: as the authors say
    assert one["compute"]["tokens"] == 620_000 * 1536 * 4096 == 3_900_702_720_000
    assert two["compute"]["tokens"] == 310_000 * 1536 * 4096 == 1_950_351_360_000
    assert round(one["compute"]["mfu_percent"]) == 25
    total = plans["nemotron"]["total"]
    # "about 21"
    assert total["days"] == pytest.approx(5_851_054_080_000 / (192 * 17_000) / 86_400, rel=1e-12)
    assert total["cost"] == pytest.approx(2.5 * total["gpu_hours"], rel=1e-12)
    for phase in (one, two):
        assert phase["gpu"]["verdict"] == "fits"
        assert phase["job"]["local_batch"] <= phase["gpu"]["largest_local_batch"]
        assert math.isclose(
            sum(s["tokens"] for s in phase["data"]), phase["compute"]["tokens"], rel_tol=1e-9
        )
        assert all(s["epochs_so_far"] <= 4 for s in phase["data"]), "epoch_cap of the recipes"
    code = sum(s["tokens"] for s in two["data"] if s["category"] == "code")
    assert code / two["compute"]["tokens"] == pytest.approx(0.5901 / 1.0002)


@pytest.mark.rotate
def test_long_windows_fit_an_h200_or_80_gb_with_one_lane_a_gpu(plans):
    # as configs/phase3.toml and the docs state; a layer's sums by their definition
    comments, page = (
        (ROOT / p).read_text() for p in ("configs/phase3.toml", "docs/decisions/training.md")
    )
    (whole,), (lanes,) = (plans[name]["phases"] for name in ("nemotron-64k", "one lane a GPU"))
    assert whole["memory"]["total"] > sums.USABLE * CLUSTER.gpu.memory_bytes
    for phase in (whole, lanes):
        assert phase["gpu"]["verdict"] == "fits"
        for size in (phase["memory"]["total"], phase["memory"]["kept_activations"]):
            assert f"{size / 1e9:.0f} GB" in comments
    traffic = lanes["traffic"]
    assert f"{traffic['lanes_bytes'] / 1e9:.0f} GB" in comments
    assert (
        f"it is {lanes['memory']['total'] / 1e9:.0f} GB"
        in (ROOT / "docs/long-context.md").read_text()
    )
    assert (
        f"{traffic['lanes_s']:.2f} s of {lanes['compute']['step_s']:.1f} s if nothing hid them"
        in page
    )
    stream = 65_536 * 3_072 * sums.BF16
    # two modules, both ways, in a ring
    assert traffic["lanes_of_a_layer_bytes"] == 4 * stream * 2 * 7 / 8
    # of 15 layers: PRESENT 0 and 1, and 2 to 12, whose outputs still arrive
    exchanged = 2 * 13
    embedding = 2 * 7 / 8 * sums.BF16 * (32_000 + 31) * 3_072
    assert traffic["lanes_bytes"] == pytest.approx(
        8 * (exchanged * 2 * stream * 2 * 7 / 8 + embedding)
    )


@pytest.mark.rotate
@pytest.mark.parametrize("name", ["nemotron", "nemotron-code", "nemotron-64k"])
def test_recipes_keep_what_their_runs_read_and_a_margin(outputs, plans, name):
    # the shipped `keep` fits the shipped jobs, and makes no source repeat more often
    parts, total = (plans[name]["preparation"][key] for key in ("parts", "total"))
    shipped = {
        source.name: source.keep
        for source in recipe_file.load(ROOT / f"data_mixtures/{name}.toml").sources
    }
    unknown = [s["name"] for s in plans[name]["phases"][0]["data"] if s["epochs_so_far"] is None]
    assert len(unknown) == (9 if name == "nemotron-64k" else 0), (
        "nobody has counted its buckets of pages"
    )
    assert {part["name"]: part["keep"] for part in parts} | dict.fromkeys(unknown, 1.0) == shipped
    for part in parts:
        need, stored, pool = (part[f"{of}_tokens"] for of in ("need", "stored", "pool"))
        assert need / stored <= max(1, need / pool)
        assert part["keep"] == 1 or f"{part['name']} = {part['keep']}\n" in outputs[name][1], (
            "to paste"
        )
    if not unknown:
        assert total["stored_tokens"] < 1.01 * total["need_tokens"], "not twice as much"
        assert total["shard_bytes"] <= total["peak_bytes"] < 1.05 * total["shard_bytes"]
        tokens = (f"{total[key] / 1e12:.2f}" for key in ("need_tokens", "stored_tokens"))
        sizes = (
            f"{total[key] / 1e12:.1f} TB" for key in ("fetched_bytes", "shard_bytes", "peak_bytes")
        )
        row = " | ".join([f"`{name}.toml`", *tokens, *sizes, f"{total['units']:,}"])
        assert f"| {row} |" in (ROOT / "docs/data.md").read_text(encoding="utf-8")


@pytest.mark.rotate
def test_the_dry_run_takes_a_step_of_192_ranks_and_what_does_not_fit_is_refused(outputs, plans):
    # of a thousand steps of warm-up
    first_of_a_thousand = pytest.approx(2e-4 / 1000)
    step = {"world_size": 192, "step": 1, "lr": first_of_a_thousand}
    assert plans["dry run"]["phases"][0]["dry_run"] == step
    for sentence in REFUSED:
        code, output = outputs[sentence]
        assert code == 2
        assert sentence in output


def test_files_are_limited_where_a_listing_knows_them_and_much_is_left(tmp_path):
    def part(
        share: float, expected: float = 1e12, files: int | None = None, listed: int = 1000
    ) -> dict:
        need = share * preparation.TOKENS_AS_COUNTED * expected / (1 + preparation.MARGIN)
        source = {
            "name": "s",
            "tokens_so_far": need,
            "expected_tokens": expected,
            "files": files,
            "prepared": False,
        }
        return preparation.parts([source], {"s": [10**9] * listed})[0]

    few, most = part(0.1), part(0.7)
    assert (few["files"], few["units"], few["fetched_bytes"]) == (110, 110, pytest.approx(110e9))
    assert (most["files"], most["keep"], most["fetched_bytes"]) == (None, 0.7, 1e12)
    assert part(0.95)["keep"] == part(0.1, expected=5e8)["keep"] == 1, (
        "nearly all, and a small source"
    )
    assert part(0.0)["keep"] > 0, "a source of the other phase"
    # a fifth of the bytes, or of as many files of the usual size
    for listed in (358, 0):
        again = part(0.1, files=358 if listed else 224, listed=listed)
        assert again["keep"] == pytest.approx(0.5, abs=0.011), "of the files that the recipe takes"
    assert preparation.toml([few | {"keep": 0.5}]) == "[keep]\ns = 0.5\n\n[files]\ns = 110\n"
    hub = {"kind": "hub", "units": [{"bytes": 5}, {"bytes": 7}]}
    sources = {"theirs": hub, "mine": {"kind": "local", "units": [{"files": []}]}}
    write_json(tmp_path / "plan.json", {"format": stage.PLAN_FORMAT, "sources": sources})
    assert preparation.list_files(tmp_path) == {"theirs": [5, 7]}
    assert preparation.list_files(None) == {}


def test_help_does_not_wait_for_torch():
    command = [sys.executable, "-X", "importtime", "-m", "tools.plan", "--help"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--tokens-per-s-per-gpu" in outcome.stdout
    assert not re.search(r"\| +torch\b", outcome.stderr)


def test_memory_parts():
    memory = sums.memory(JOB)
    assert memory["weights"] + memory["moments"] + memory["gradients"] == 16 * PARAMETERS / 8
    full, none, float8 = (
        sums.memory(replace(JOB, **changes))
        for changes in ({"checkpointing": "full"}, {"checkpointing": "none"}, {"float8": "rowwise"})
    )
    one_layer = max(sums.count_kept_values(JOB, i) for i in range(15)) * 8 * 4096 * sums.BF16
    assert full["working_set"] > one_layer / 2, "the layer that is computed again is there whole"
    assert full["total"] < memory["total"] <= none["total"]
    assert float8["kept_activations"] < memory["kept_activations"]
    # 92 % of 80 GB
    batch = sums.largest_local_batch(JOB, CLUSTER.gpu)
    fits = [
        sums.memory(replace(JOB, local_batch=n))["total"] <= 73.6e9 for n in (batch, 2 * batch, 8)
    ]
    assert fits == [True, False, False]


def test_traffic_and_checkpoints_by_hand():
    # weights are gathered twice in bf16 (the head once), gradients scattered and reduced in fp32
    p, head = PARAMETERS, 98_304_000
    hybrid, flat, small = (
        sums.traffic(replace(JOB, **changes), CLUSTER)
        for changes in ({}, {"shard": 192, "replicate": 1}, {"local_batch": 4})
    )
    assert hybrid["all_gather_bytes"] == pytest.approx((2 * p - head) * 2 * 7 / 8)
    assert hybrid["reduce_scatter_bytes"] == pytest.approx(p * 4 * 7 / 8)
    assert (
        hybrid["nic_bytes"] == hybrid["all_reduce_bytes"] == pytest.approx(p / 8 * 4 * 2 * 23 / 24)
    )
    # at 50 GB/s
    assert hybrid["nic_s"] == pytest.approx(0.0445, abs=1e-4)
    assert flat["nic_bytes"] == pytest.approx(((2 * p - head) * 2 + p * 4) * 184 / 192 / 8), (
        "eight NICs a node"
    )
    assert small["reduce_scatter_bytes"] == 2 * hybrid["reduce_scatter_bytes"], "every micro-batch"
    assert small["all_reduce_bytes"] == hybrid["all_reduce_bytes"], "once a step"
    saved = sums.checkpoints(JOB, CLUSTER)
    assert (saved["bytes"], saved["written"], saved["bytes_kept"]) == (12 * p, 1240, 6 * 12 * p)
    for changes, stored in (
        ({"keep_every": 10_000}, 5 + 62),
        ({"keep_latest": 0}, 1240),
        ({"keep_latest": 0, "keep_every": 10_000}, 1240),
        ({"keep_latest": 5000}, 1240),
        # every one is a milestone
        ({"keep_every": 500}, 1240),
        # multiples of 1,500, as others are not saved
        ({"keep_every": 750}, 5 + 413),
        # checkpoint.enable = false
        ({"checkpoint_interval": 0}, 0),
    ):
        kept_bytes = sums.checkpoints(replace(JOB, **changes), CLUSTER)["bytes_kept"]
        assert kept_bytes == stored * 12 * p, changes
    lanes = replace(JOB, shard=1, replicate=24, lane_ranks=8)
    assert sums.traffic(lanes, replace(CLUSTER, gpus_per_node=4))["all_gather_bytes"] == 0
    step_s = 6_291_456 / (192 * 17_000)
    assert saved["hours_lost_per_failure"] == pytest.approx((250 * step_s + 600) / 3600)
    rate = sums.tokens_per_s_at(sums.compute(JOB, CLUSTER)["mfu_percent"], JOB, CLUSTER.gpu)
    assert rate == pytest.approx(17_000)
