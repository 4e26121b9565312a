"""Tests that each bad setting is refused at launch by name, value and what is allowed."""

from __future__ import annotations

import copy
import operator
import re
import tomllib
from typing import Any

import pytest
import torch

from tests.train.runs import ROOT, run_forked
from train.job_checks import check_local_ranks
from train.job_config import check_with_model, load_job

TOY = (ROOT / "configs/debug_phase1.toml").read_text()
# a setting, its text in a job file, and what the refusal has to say beside both
BAD = (
    ("lr_scheduler.decay_type", '"lin"', "did you mean 'linear'"),
    ("resilience.on_bad_step", '"rolback"', "did you mean 'rollback'"),
    ("compile.backend", '"inductr"', "did you mean 'inductor'"),
    ("model.flavor", '"2B"', "did you mean '2b'"),
    ("training.mixed_precision_param", '"bf16"', "did you mean 'bfloat16'"),
    ("model.converters", '["float8"]', "did you mean 'quantize.linear.float8'"),
    (
        "quantize.linear.float8.recipe_name",
        '"rowwise_with_gw_hp"',
        "choose from tensorwise, rowwise",
    ),
    ("quantize.linear.float8.filter_fqns", '["w2"]', r"only \[\] is supported; w1, w2 and w3"),
    (
        "parallelism.tensor_parallel_degree",
        "3",
        "does not divide num_lanes = 4; choose from 1, 2, 4",
    ),
    ("parallelism.tensor_parallel_degree", "0", "at least 1"),
    ("checkpoint.initial_load_all_states", "true", "needs checkpoint.initial_load_path"),
    ("metrics.log_freq", "0", "at least 1"),
    ("checkpoint.keep_latest_k", "1", r"0 \(keep all\) or at least 2"),
    ("lr_scheduler.decay_ratio", "1.5", "between 0 and 1"),
    ("lr_scheduler.total_steps", "200", r"training.steps = 300 goes on after .* at most 201 steps"),
    ("training.steps", '"300"', "a whole number"),
    ("training.steps", "3e2", "a whole number"),
    ("training.seq_len", "1000", "use at most 512"),
    ("architecture.num_lanes", "3", "num_lanes"),
    (
        "checkpoint.allow_changes",
        '["num_lanes"]',
        "choose from max_position_embeddings, nope_layers, rope_scaling",
    ),
)
TOGETHER: tuple[tuple[dict[str, Any], str], ...] = (
    (
        {"training.global_batch_size": 9, "parallelism.data_parallel_shard_degree": 2},
        "training.global_batch_size = 9 is not a multiple of 2 GPUs x local_batch_size = 4; choose",
    ),
    (
        {"metrics.log_freq": 4, "validation.freq": 50},
        "validation.freq = 50 is not a multiple of metrics.log_freq = 4",
    ),
    (
        {"model.converters": ["quantize.linear.float8"]},
        "training.mixed_precision_param = 'float32' is not possible: float8 products give bfloat16; set it, or "
        "quantize.linear.float8.emulate = true",
    ),
    (
        {"lr_scheduler.total_steps": 300, "lr_scheduler.warmup_steps": 301},
        "lr_scheduler.warmup_steps = 301",
    ),
    (
        {
            "mtp.freeze_base": True,
            "checkpoint.initial_load_path": "x",
            "checkpoint.initial_load_model_only": False,
        },
        "needs checkpoint.initial_load_model_only = true",
    ),
    *(
        (
            {
                "checkpoint.interval": 5,
                "evals.in_loop": True,
                "evals.every_steps": every,
                "evals.commands": commands,
            },
            f"evals.every_steps = {every} must be a multiple of checkpoint.interval = 5",
        )
        for every, commands in ((0, ["x"]), (7, ["x"]), (10, []))
    ),
)


@pytest.fixture(scope="module")
def toy():
    return load_job(["--job.config_file", "configs/debug_phase1.toml"])


def check(toy: Any, settings: dict[str, Any]) -> None:
    job = copy.deepcopy(toy)
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        setattr(operator.attrgetter(section)(job), key, value)
    check_with_model(job)


@pytest.mark.parametrize(("name", "text", "says"), BAD)
def test_it_is_refused_with_one_sentence(toy, name, text, says):
    with pytest.raises(ValueError, match=says) as refused:
        check(toy, {name: tomllib.loads(f"value = {text}")["value"]})
    output = str(refused.value)
    assert name.rpartition(".")[2] in output
    assert text.strip('[]"').lower() in output.lower() or name == "training.steps"
    assert "\n" not in output


def test_contradictions(toy):
    for settings, says in TOGETHER:
        with pytest.raises(ValueError, match=re.escape(says)):
            check(toy, settings)


def test_the_step_after_the_schedule_is_allowed(toy):
    # a decay branch reaches the minimum in it
    check(toy, {"lr_scheduler.total_steps": toy.training.steps - 1})


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ("[mixture]", "[mixture]\nlok = 1", "^mixture.lok is no key; nearest: mixture.lock$"),
        ("[mixture]", "[mixtur]", "^mixtur is no section; nearest: mixture$"),
        ("[mixture]", "[mixture]\nlr = 1", "^mixture.lr is no key; nearest: optimizer.lr$"),
        ("[mixture]", "[zzz]", "^zzz is no section; nearest: job, "),
        (
            "steps = 300",
            'steps = "300"',
            "training.steps = '300' is not possible: must be a whole number",
        ),
        ('decay_type = "linear"', 'decay_type = "lin"', "did you mean 'linear'"),
    ],
)
def test_a_job_file_is_refused_as_it_is_written(tmp_path, was, now, says):
    assert was in TOY
    (tmp_path / "job.toml").write_text(TOY.replace(was, now, 1))
    with pytest.raises(ValueError, match=says):
        load_job(["--job.config_file", str(tmp_path / "job.toml")])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--validation.frek 3", "^validation.frek is no key; nearest: validation.freq$"),
        ("--validation.no-enabl", "nearest: validation.enable$"),
        ("--mixtur.lock=x", "^mixtur.lock is no key; nearest: mixture.lock$"),
        ("--quantize.linear.float8.emulat", "nearest: quantize.linear.float8.emulate$"),
    ],
)
def test_a_flag_is_refused_with_the_nearest(flags, says):
    with pytest.raises(ValueError, match=says):
        load_job(["--job.config_file", "configs/debug_phase1.toml", *flags.split()])


def test_flags_of_either_form_are_known():
    flags = "--validation.no-enable --metrics.log-freq=5 --training.steps 7"
    job = load_job(["--job.config_file", "configs/debug_phase1.toml", *flags.split()])
    assert (job.validation.enable, job.metrics.log_freq, job.training.steps) == (False, 5, 7)


@pytest.mark.job
def test_the_supervisor_starts_nothing_that_the_workers_would_refuse(tmp_path):
    path, run = tmp_path / "job.toml", tmp_path / "run"
    path.write_text(TOY.replace('decay_type = "linear"', 'decay_type = "lin"'))
    flags = ("--job.config_file", str(path), "--job.dump_folder", str(run))
    status, output = run_forked(tmp_path, "train.supervise", *flags)
    assert status == 2
    assert "did you mean 'linear'?" in output.splitlines()[-1]
    # no attempt was made
    assert not (run / "events.jsonl").exists()


@pytest.mark.parametrize(("ranks", "gpus"), [(2, 0), (1, 1), (8, 8), (1, 8), (2, 1)])
def test_each_worker_needs_a_gpu_or_a_cpu(monkeypatch, ranks, gpus):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if ranks <= gpus or not gpus:
        check_local_ranks()
        return
    refusal = (
        "torchrun has started 2 workers on this machine, which has 1 GPU(s), and each worker needs one of "
        "its own; start it with --nproc_per_node=1"
    )
    with pytest.raises(ValueError, match=re.escape(refusal)):
        check_local_ranks()
