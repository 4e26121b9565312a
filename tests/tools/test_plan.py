"""The plan reproduces the published sums, and its parts agree with each other and with the model."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from data_mixtures import recipe, recipe_file
from data_mixtures.shards import write_json
from data_mixtures.stages import stage
from laneformer import LaneformerConfig
from tests.tokenizer_assets import byte_level, save
from tools.cards import INPUTS
from tools.plan import preparation, sums

ROOT = Path(__file__).resolve().parents[2]
JOB = sums.Job(
    config=LaneformerConfig(), seq_len=4096, steps=620_000, global_batch=1536, local_batch=8, shard=8, replicate=24,
    checkpointing="selective", reshard=True, checkpoint_interval=500, keep_latest=5, keep_every=0,
)  # fmt: skip
CLUSTER = sums.Cluster(192, 8, INPUTS.card("h100"), 50e9, 17_000, 600)
NARROW = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048}
FLOAT8 = ("--model.converters", "quantize.linear.float8")
COMMANDS = {
    "published": ["configs/phase1.toml", "configs/phase2.toml", "--metrics.gpu_hour_price", "2.5", "--metrics.currency",
                  "EUR"],
    "with code": ["configs/phase1.toml", "configs/phase2.toml", "--mixture", *2 * ["data_mixtures/nemotron-code.toml"]],
    "long": ["configs/phase3.toml", "--gpus", "64", "--gpu", "h200", "--mfu", "25"],
    "one lane a GPU": ["configs/phase3.toml", "--gpus", "64", "--mfu", "25",
                       "--parallelism.tensor_parallel_degree", "8",
                       "--parallelism.data_parallel_replicate_degree", "1"],
    "float8": ["configs/phase1.toml", "--json", *FLOAT8, "--quantize.linear.float8.recipe_name", "rowwise"],
    "rubin": ["configs/phase1.toml", "--gpu", "rubin"],
    "other mesh": ["configs/phase1.toml", "--gpus", "64"],
    "odd batch": ["configs/phase1.toml", "--training.local_batch_size", "7"],
    "no file": ["configs/none.toml"],
    "dry run": ["configs/phase2.toml", "--dry-run", "--json", "--training.local_batch_size", "1", *FLOAT8,
                *(a for k, v in NARROW.items() for a in (f"--architecture.{k}", str(v)))],
}  # fmt: skip
# all commands in one process, since TorchTitan is slow to import; not in this one, since it
# keeps global state
RUN = """
import contextlib, io, json, sys
from tools.plan.__main__ import main
seen = {}
for name, arguments in json.loads(sys.argv[1]).items():
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try: main(arguments)
        except SystemExit as end: code = end.code
    seen[name] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[int, str, str]]:
    """Exit code, stdout and stderr of every command."""
    command = [sys.executable, "-c", RUN, json.dumps(COMMANDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def published(runs: dict[str, tuple[int, str, str]]) -> dict:
    code, said, error = runs["published"]
    assert code == 0, error
    assert "DOES NOT FIT" not in said
    return json.loads(said.splitlines()[-1])


@pytest.mark.rotate
def test_published_sums(published: dict) -> None:
    one, two = published["phases"]
    assert one["parameters"]["total"] == two["parameters"]["total"] == 2_320_069_632
    assert sum(v for k, v in one["parameters"].items() if k != "total") == 2_320_069_632
    assert one["compute"]["tokens_per_step"] == 6_291_456
    assert one["compute"]["tokens"] == 620_000 * 1536 * 4096 == 3_900_702_720_000  # "about 4T"
    assert two["compute"]["tokens"] == 310_000 * 1536 * 4096 == 1_950_351_360_000  # "about 2T"
    assert published["total"]["tokens"] == 5_851_054_080_000
    assert published["total"]["days"] == pytest.approx(5_851_054_080_000 / (192 * 17_000) / 86_400, rel=1e-12)
    assert round(published["total"]["days"]) == 21  # "about 21 days"
    assert round(one["compute"]["mfu_percent"]) == 25  # of an H100, as the authors say
    assert published["total"]["cost"] == pytest.approx(2.5 * published["total"]["gpu_hours"], rel=1e-12)


@pytest.mark.rotate
def test_shipped_jobs_fit_their_gpus_and_their_data(published: dict) -> None:
    for phase in published["phases"]:
        assert phase["memory"]["total"] <= phase["usable_bytes"]
        assert phase["job"]["local_batch"] <= phase["largest_local_batch"]
        assert math.isclose(sum(s["tokens"] for s in phase["data"]), phase["compute"]["tokens"], rel_tol=1e-9)
        assert all(s["epochs_so_far"] <= 4 for s in phase["data"]), "epoch_cap of the recipes"
    code = sum(s["tokens"] for s in published["phases"][1]["data"] if s["category"] == "code")
    assert code / published["phases"][1]["compute"]["tokens"] == pytest.approx(0.5901 / 1.0002)
    first, second = ({s["name"]: s["tokens_so_far"] for s in phase["data"]} for phase in published["phases"])
    assert all(second[name] >= tokens for name, tokens in first.items()), (
        "phase 2 goes on where phase 1 stopped"
    )


@pytest.mark.rotate
def test_long_windows_fit_an_h200_and_not_80_gb(runs: dict[str, tuple[int, str, str]]) -> None:
    """As the comment of configs/phase3.toml says; its recipe keeps what the plan says, and what nobody has counted
    stays unknown.
    """
    code, said, error = runs["long"]
    assert code == 0, error
    assert "DOES NOT FIT" not in said
    result = json.loads(said.splitlines()[-1])
    phase = result["phases"][0]
    assert phase["compute"]["tokens"] == 12_000 * 64 * 65_536 == pytest.approx(50e9, rel=0.01)
    unknown = {s["name"] for s in phase["data"] if s["epochs_so_far"] is None}
    assert unknown == {
        f"{kind}-{size}" for kind in ("cc2-hq", "cc-code", "cc-math") for size in ("8k", "16k", "32k")
    }
    known = {s.name: s.keep for s in recipe_file.load(ROOT / "data_mixtures/nemotron-64k.toml").sources}
    kept = {part["name"]: part["keep"] for part in result["preparation"]["parts"]}
    assert kept | dict.fromkeys(unknown, 1.0) == known
    memory = phase["memory"]
    assert memory["total"] > sums.USABLE * CLUSTER.gpu.memory_bytes, "as the file says"
    page = (ROOT / "configs/phase3.toml").read_text()
    for size in (memory["total"], memory["kept_activations"]):
        assert f"{size / 1e9:.0f} GB" in page, "its figures are those of this command"


@pytest.mark.rotate
def test_long_windows_fit_80_gb_with_one_lane_a_gpu(runs: dict[str, tuple[int, str, str]]) -> None:
    """What configs/phase3.toml says of it; a layer's sums by their definition."""
    code, said, error = runs["one lane a GPU"]
    assert code == 0, error
    assert "DOES NOT FIT" not in said
    assert "1 x 8 x 8 GPUs, the last ones by lane" in said
    phase = json.loads(said.splitlines()[-1])["phases"][0]
    assert phase["job"]["micro_batches"] == 8
    memory, traffic = phase["memory"], phase["traffic"]["1 x 8 x 8"]
    config, why = (
        (ROOT / name).read_text() for name in ("configs/phase3.toml", "docs/decisions/training.md")
    )
    for size in (memory["total"], memory["kept_activations"], traffic["lanes_bytes"]):
        assert f"{size / 1e9:.0f} GB" in config
    total = f"{memory['total'] / 1e9:.0f} GB"
    assert f"it is {total}" in (ROOT / "docs/long-context.md").read_text()
    assert f"{total} a GPU" in why
    assert f"{traffic['lanes_s']:.2f} s of {phase['compute']['step_s']:.1f} s if nothing hid them" in why
    stream = 65_536 * 3_072 * sums.BF16
    assert (
        traffic["lanes_of_a_layer_bytes"] == 4 * stream * 2 * 7 / 8
    )  # two modules, forward and backward, in a ring
    exchanged = 2 * 13  # of 15 layers: PRESENT 0 and 1, and 2 to 12, whose outputs still arrive
    embedding = 2 * 7 / 8 * sums.BF16 * (32_000 + 31) * 3_072
    assert traffic["lanes_bytes"] == pytest.approx(8 * (exchanged * 2 * stream * 2 * 7 / 8 + embedding))


def test_lanes_on_several_ranks_divide_what_is_theirs() -> None:
    job = dataclasses.replace(JOB, shard=1, replicate=1, checkpointing="full")
    whole, parts = (sums.memory(dataclasses.replace(job, lane_ranks=n)) for n in (1, 8))
    counts = JOB.config.parameter_count()
    common = counts["embedding"] + counts["norms"]
    assert parts["weights"] == 4 * (common + (counts["total"] - common) / 8)
    tokens, d = 8 * 4096, JOB.config.hidden_size
    kept = sum(sums.kept_per_token(job, i) - d * JOB.config.equal_streams(i) for i in range(15)) / 8
    kept += (
        sum(d * JOB.config.equal_streams(i) for i in range(15)) + 26 * d
    )  # sums that came from other ranks
    assert parts["kept_activations"] == pytest.approx(kept * tokens * sums.BF16)
    assert parts["total"] < whole["total"] / 3


@pytest.mark.rotate
@pytest.mark.parametrize(("name", "command"), [("nemotron", "published"), ("nemotron-code", "with code")])
def test_recipes_keep_what_their_runs_read_and_a_margin(runs, name: str, command: str) -> None:
    """The shipped `keep` is what the shipped jobs give, and no source is read more often for it
    than it would be.
    """
    code, said, error = runs[command]
    assert code == 0, error
    found = json.loads(said.splitlines()[-1])["preparation"]
    kept = {each.name: each.keep for each in recipe_file.load(ROOT / f"data_mixtures/{name}.toml").sources}
    assert {part["name"]: part["keep"] for part in found["parts"]} == kept
    for part in found["parts"]:
        assert part["kept_epochs"] <= max(1, part["need_tokens"] / part["pool_tokens"])
        assert part["keep"] == 1 or f"{part['name']} = {part['keep']}\n" in said, "to paste into the recipe"
    total = found["total"]
    assert total["need_tokens"] == pytest.approx(5_851_054_080_000)
    assert total["stored_tokens"] < 1.01 * total["need_tokens"], "not twice as much"
    assert total["shard_bytes"] <= total["peak_bytes"] < 1.05 * total["shard_bytes"], (
        "the largest sources come first"
    )
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    tokens = (f"{total[key] / 1e12:.2f}" for key in ("need_tokens", "stored_tokens"))
    sizes = (f"{total[key] / 1e12:.1f} TB" for key in ("fetched_bytes", "shard_bytes", "peak_bytes"))
    cells = [f"`{name}.toml`", *tokens, *sizes, f"{total['units']:,}", f"{total['core_hours']:,.0f}"]
    assert f"| {' | '.join(cells)} |" in page, "its figures are those of this command"


def test_a_listing_is_the_plan_of_a_data_folder(tmp_path: Path) -> None:
    hub = {"kind": "hub", "units": [{"bytes": 5}, {"bytes": 7}]}
    local = {"kind": "local", "units": [{"files": []}]}
    write_json(
        tmp_path / "plan.json", {"format": stage.PLAN_FORMAT, "sources": {"theirs": hub, "mine": local}}
    )
    assert preparation.listed_files(tmp_path) == {"theirs": [5, 7]}
    assert preparation.listed_files(None) == {}
    with pytest.raises(ValueError, match=r"plan.json does not exist; run"):
        preparation.listed_files(tmp_path / "none")


def test_the_speed_of_tokenizing_is_that_of_the_recipes_tokenizer(tmp_path: Path) -> None:
    """Byte-level BPE is several times as fast as sentencepiece, and what gigatoken refuses far slower."""
    training = recipe.TokenizerTraining(300, 1000)
    later = recipe.TokenizerFile(str(tmp_path / "none/tokenizer.model"))
    assert preparation.tokenize_bytes(training) == preparation.tokenize_bytes(later)
    path = save(byte_level(["a b"], ["<s>", "</s>"], 300), tmp_path)
    fast = preparation.tokenize_bytes(recipe.TokenizerFile(str(path)))
    spec = json.loads(path.read_text())
    path.write_text(json.dumps({**spec, "normalizer": {"type": "NFKC"}}))
    slow = preparation.tokenize_bytes(recipe.TokenizerFile(str(path)))
    assert fast > preparation.tokenize_bytes(later) > slow


def test_files_are_limited_where_a_listing_knows_them_and_much_is_left() -> None:
    def part(share: float, expected: float = 1e12, files: int | None = None, listed: int = 1000) -> dict:
        need = share * preparation.TOKENS_AS_COUNTED * expected / (1 + preparation.MARGIN)
        source = {
            "name": "s",
            "tokens_so_far": need,
            "expected_tokens": expected,
            "files": files,
            "prepared": False,
            "tokenize_bytes": preparation.TOKENIZE_BYTES[".json", True],
        }
        return preparation.parts([source], {"s": [10**9] * listed})[0]

    few = part(0.1)
    assert (few["files"], few["units"]) == (110, 110)
    assert few["fetched_bytes"] == pytest.approx(110e9)
    assert few["kept_epochs"] < 1
    most = part(0.7)
    assert (most["files"], most["keep"], most["fetched_bytes"]) == (None, 0.7, 1e12)
    assert part(0.95)["keep"] == part(0.1, expected=5e8)["keep"] == 1, "nearly all, and a small source"
    assert part(0.0)["keep"] > 0, "a source of the other phase"
    for listed in (358, 0):  # a fifth of the bytes, or of as many files of the usual size
        again = part(0.1, files=358 if listed else 224, listed=listed)
        assert again["keep"] == pytest.approx(0.5, abs=0.011), "of the files that the recipe takes"
        assert again["fetched_bytes"] == pytest.approx(358e9, rel=0.01)
    assert preparation.toml([few | {"keep": 0.5}]) == "[keep]\ns = 0.5\n\n[files]\ns = 110\n"


@pytest.mark.rotate
def test_float8_keeps_less(runs: dict[str, tuple[int, str, str]], published: dict) -> None:
    code, said, error = runs["float8"]
    assert code == 0, error
    phase, plain = json.loads(said)["phases"][0], published["phases"][0]
    assert phase["memory"]["kept_activations"] < plain["memory"]["kept_activations"]


def test_speed_follows_from_mfu() -> None:
    rate = sums.tokens_per_s_at(sums.compute(JOB, CLUSTER)["mfu_percent"], JOB, CLUSTER.gpu)
    assert rate == pytest.approx(17_000)


def test_memory_parts() -> None:
    memory = sums.memory(JOB)
    states = memory["weights"] + memory["moments"] + memory["gradients"]
    assert states == 16 * 2_320_069_632 / 8
    full = sums.memory(dataclasses.replace(JOB, checkpointing="full"))
    assert full["total"] < memory["total"]
    of_one_layer = max(sums.kept_per_token(JOB, i) for i in range(15)) * 8 * 4096 * sums.BF16
    assert full["working_set"] > of_one_layer / 2, "the layer that is computed again is there whole"
    assert memory["total"] <= sums.memory(dataclasses.replace(JOB, checkpointing="none"))["total"]
    assert memory["total"] > sums.USABLE * CLUSTER.gpu.memory_bytes, "eight sequences do not fit 80 GB"
    batch = sums.largest_local_batch(JOB, CLUSTER.gpu)
    fits = [
        sums.memory(dataclasses.replace(JOB, local_batch=n))["total"] <= 73.6e9 for n in (batch, 2 * batch)
    ]
    assert fits == [True, False]


def test_traffic_by_hand() -> None:
    """P = 2.32e9: weights gathered twice in bf16 (the head once), gradients scattered and reduced in fp32."""
    p, head = 2_320_069_632, 98_304_000
    hybrid = sums.traffic(JOB, CLUSTER, 8, 24)
    assert hybrid["all_gather_bytes"] == pytest.approx((2 * p - head) * 2 * 7 / 8)
    assert hybrid["reduce_scatter_bytes"] == pytest.approx(p * 4 * 7 / 8)
    assert hybrid["nic_bytes"] == hybrid["all_reduce_bytes"] == pytest.approx(p / 8 * 4 * 2 * 23 / 24)
    assert hybrid["nic_s"] == pytest.approx(0.0445, abs=1e-4)  # at 50 GB/s
    flat = sums.traffic(JOB, CLUSTER, 192, 1)
    assert flat["all_reduce_bytes"] == 0
    assert flat["nic_bytes_worst"] == pytest.approx(((2 * p - head) * 2 + p * 4) * 184 / 192)
    assert flat["nic_bytes"] == pytest.approx(flat["nic_bytes_worst"] / 8)
    twice = sums.traffic(dataclasses.replace(JOB, local_batch=4), CLUSTER, 8, 24)
    assert twice["reduce_scatter_bytes"] == 2 * hybrid["reduce_scatter_bytes"], "every micro-batch"
    assert twice["all_reduce_bytes"] == hybrid["all_reduce_bytes"], "once a step"


def test_checkpoints_and_failures() -> None:
    c = sums.checkpoints(JOB, CLUSTER)
    assert c["bytes"] == 12 * 2_320_069_632
    assert c["written"] == 1240
    assert c["bytes_kept"] == 6 * c["bytes"]
    kept = sums.checkpoints(dataclasses.replace(JOB, keep_every=10_000), CLUSTER)["bytes_kept"]
    assert kept == (5 + 62) * c["bytes"]
    step_s = 6_291_456 / (192 * 17_000)
    assert c["hours_lost_per_failure"] == pytest.approx((250 * step_s + 600) / 3600)


@pytest.mark.rotate
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("other mesh", "24 x 8 = 192 GPUs, --gpus is 64"),
        ("odd batch", "choose a local batch that divides 8"),
        ("no file", "does not exist"),
        ("rubin", "no datasheet with peak_flops"),
    ],
)
def test_what_does_not_fit_is_refused(runs: dict[str, tuple[int, str, str]], name: str, said: str) -> None:
    code, _, error = runs[name]
    assert code == 2
    assert said in error


@pytest.mark.rotate
def test_dry_run_of_the_whole_world(runs: dict[str, tuple[int, str, str]]) -> None:
    """192 ranks by a fake network, with the lanes, mesh and batch of phase 2; narrow, for CI's sake."""
    code, said, error = runs["dry run"]
    assert code == 0, error
    seen = json.loads(said.splitlines()[-1])["phases"][0]["dry_run"]
    assert seen["world_size"] == 192
    assert seen["step"] == 1
    assert seen["lr"] == pytest.approx(2e-4 / 1000), "the first of a thousand warm-up steps"
