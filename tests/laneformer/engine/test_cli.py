"""Tests of the command line: text that streams in whole characters, the bench's JSON, error messages."""

from __future__ import annotations

import json
import shutil

import pytest

from laneformer.cli import main
from laneformer.engine import Engine, bench
from laneformer.engine.cpu.decoder import CpuDecoder
from laneformer.engine.cpu.packed_files import FOLDER
from laneformer.engine.decoder import EngineLost
from tests.laneformer.engine.assets import (
    byte_tokenizer,
    fix_costs,
    small_model,
    write_folder,
)

KEYS = {
    "tokens_per_s",
    "bytes_per_token",
    "probe_bytes_per_s",
    "percent_of_probe",
    "prefill_tokens_per_s",
    "ttft_s",
    "threads",
    "isa",
    "dtype",
    "math",
    "depth",
    "cpu",
    "probe_products_per_s",
    "percent_of_product_probe",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_folder(tmp_path_factory.mktemp("hf"), small_model(vocab_size=264), eos_token_id=2)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def short_bench(monkeypatch):
    for name, value in {
        "SEGMENTS": 4,
        "MIN_SEGMENT_S": 0.05,
        "PROMPTS": 2,
        "DRAFTED_ROUNDS": 1,
    }.items():
        monkeypatch.setattr(bench, name, value)


def generate(folder, capsys, prompt, *flags) -> tuple[str, str]:
    """Return the command's stdout without the last line end, and its stderr."""
    main(["generate", str(folder), "--prompt", prompt, *flags])
    printed = capsys.readouterr()
    assert printed.out.endswith("\n")
    return printed.out[:-1], printed.err


def test_flags_reach_the_engine(folder, capsys, monkeypatch):
    fix_costs(monkeypatch)
    options = {
        "temperature": 0.9,
        "seed": 3,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "min_new_tokens": 9,
        "max_new_tokens": 30,
    }
    flags = [
        "--ignore-eos",
        *(f"--{name.replace('_', '-')}={value}" for name, value in options.items()),
    ]
    with Engine.from_pretrained(folder) as engine:
        expected = engine.generate_text("a é b", **options, ignore_eos=True)
    assert generate(folder, capsys, "a é b", *flags, "--speculate=4", "--threads=2")[0] == expected
    # a character from the middle of the text
    stop = expected[len(expected) // 2]
    stopped, _ = generate(folder, capsys, "a é b", *flags, "--stop", "xyz", "--stop", stop)
    assert stopped == expected[: expected.index(stop)]
    # a prompt that repeats itself, so that drafts occur
    _, notes = generate(folder, capsys, "a b a b a b", "--max-new-tokens", "60", "--ignore-eos")
    assert "draft tokens were right" in notes


@pytest.mark.job
def test_packed_weights_are_kept_unless_told_not_to(tmp_path, monkeypatch, folder, short_bench):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    commands = ["generate", "--prompt", "a b", "--max-new-tokens", "2"], ["bench", "--json"]
    for number, (command, *flags) in enumerate(commands):
        copy = shutil.copytree(
            folder, tmp_path / str(number), ignore=shutil.ignore_patterns(FOLDER)
        )
        main([command, str(copy), *flags, "--no-cache"])
        assert not (copy / FOLDER).exists()
        assert number or not (tmp_path / "user").exists()
        main([command, str(copy), *flags])
        assert list((copy / FOLDER).iterdir())


def test_bench_ends_with_its_figures(capsys, short_bench):
    main(["bench", "--random-weights", "tiny", "--json", "--threads", "1"])
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert set(figures) >= KEYS
    assert figures["tokens_per_s"] > 0
    recomputed = (
        100 * figures["bytes_per_token"] * figures["tokens_per_s"] / figures["probe_bytes_per_s"]
    )
    # the figure is a median of ratios, this a ratio of medians: on a busy machine they part, but
    # not by units
    assert 0.2 < figures["percent_of_probe"] / recomputed < 5


@pytest.mark.job
def test_a_folder_is_measured_at_depths_and_int8_is_named(folder, capsys, short_bench):
    main(
        [
            "bench",
            str(folder),
            "--depth",
            "20",
            "0",
            "--threads",
            "2",
            "--dtype",
            "int8",
        ]
    )
    printed = capsys.readouterr()
    figures = json.loads(printed.out.strip().splitlines()[-1])
    assert (figures["depth"], figures["dtype"], figures["threads"]) == (20, "int8", 2)
    assert [deeper["depth"] for deeper in figures["depths"]] == [0]
    assert figures["tokens_per_s_p10"] <= figures["tokens_per_s"] <= figures["tokens_per_s_p90"]
    assert figures["probe_bytes_per_s"] > 0
    assert "int8: " in printed.err
    # the command uses int8 arithmetic for int8 weights unless asked otherwise
    for flags, math in ([], "int8"), (["--math", "exact"], "exact"):
        with Engine.from_pretrained(folder, dtype="int8", math=math) as engine:
            expected = engine.generate_text("a b", max_new_tokens=10)
        flags = ["--max-new-tokens", "10", "--dtype", "int8", *flags]
        assert generate(folder, capsys, "a b", *flags)[0] == expected


NOWHERE = ["generate", "/nowhere", "--prompt", "x"]
TINY = ["bench", "--random-weights", "tiny"]


def test_mistakes_end_with_a_message(capsys):
    for arguments, message in (
        (NOWHERE, "not a folder"),
        ([*NOWHERE, "--top-p", "7"], "top_p = 7.0 is outside 0.0 to 1.0"),
        ([*NOWHERE, "--system", "y"], "--system is a message of a conversation; add"),
        ([*NOWHERE, "--greedy", "--temperature", "1"], "contradict each other"),
        (["bench"], "either a model folder or --random-weights"),
        ([*TINY, "--device", "gpu"], "device = 'gpu' is unknown"),
        ([*TINY, "--depth", "500"], "depth = 500 is outside"),
        ([*TINY, "--draft", "small"], "--draft small drafts for a model folder"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err


def test_a_failure_of_the_engine_ends_with_a_message(folder, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise EngineLost("the device has failed")

    monkeypatch.setattr(CpuDecoder, "join", fail)
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(folder), "--prompt", "a b"])
    assert stop.value.code == 1
    assert capsys.readouterr().err.endswith("laneformer: the device has failed\n")


TEMPLATE = "{% for m in messages %}{{ bos_token }}{{ m.role[0] + m.content }}{% endfor %}{{ add_generation_prompt }}"


@pytest.fixture
def sampling_folder(tmp_path, folder):
    path = shutil.copytree(folder, tmp_path / "sampled", ignore=shutil.ignore_patterns(FOLDER))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text(
        '{"chat_template": "an older one", "bos_token": "<s>"}'
    )
    defaults = {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.9,
        # null values, as Transformers writes them, set nothing
        "repetition_penalty": None,
        "eos_token_id": [2, 7],
    }
    (path / "generation_config.json").write_text(json.dumps(defaults))
    return path


def test_sampling_of_generation_config_is_the_default_and_said(sampling_folder, capsys):
    defaults = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    options = {"max_new_tokens": 20, "seed": 5}
    with Engine.from_pretrained(sampling_folder) as engine:
        assert engine.sampling_defaults == defaults
        assert engine.eos_ids == (2, 7)
        greedy = engine.generate_text("a b", max_new_tokens=20)
        expected = {
            "": engine.generate_text("a b", **options, **defaults),
            "--greedy": greedy,
            "--top-k=3": engine.generate_text("a b", **options, **defaults | {"top_k": 3}),
            "--temperature=0": greedy,
        }
    # texts differ by sampling, so each shows what was in force
    assert len(set(expected.values())) == 3
    line = "from the model's generation_config.json: temperature 0.8, top_k 50, top_p 0.9 (--greedy turns it off)"
    for option, text in expected.items():
        flags = ["--max-new-tokens", "20", "--seed", "5", *([option] if option else [])]
        printed, notes = generate(sampling_folder, capsys, "a b", *flags)
        assert printed == text
        assert (line in notes) == (option == "")
        assert ("generation_config" in notes) == (option != "--greedy")


def test_chat_sends_the_prompt_through_the_model_s_template(sampling_folder, capsys):
    with Engine.from_pretrained(sampling_folder) as engine:
        for system, text in (([], "<s>uhiTrue"), (["--system", "b"], "<s>sb<s>uhiTrue")):
            ids = engine.tokenizer.encode(text, add_special_tokens=False).ids
            expected = engine.generate_text(ids, max_new_tokens=20)
            flags = ["--max-new-tokens", "20", "--greedy", "--chat", *system]
            assert generate(sampling_folder, capsys, "hi", *flags)[0] == expected
