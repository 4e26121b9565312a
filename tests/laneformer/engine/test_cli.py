"""The command line: text that streams without broken characters, the bench's JSON, and plain error messages."""

from __future__ import annotations

import json
import random
import shutil
import signal

import pytest

from laneformer.cli import main
from laneformer.engine import Engine, TextStream
from laneformer.engine.cpu.kept import FOLDER
from laneformer.engine.cpu.processes import ProcessesDecoder
from tests.laneformer.engine.assets import byte_tokenizer, fix_costs, random_model, small_config, write_folder

KEYS = {
    "tokens_per_s", "bytes_per_token", "probe_bytes_per_s", "percent_of_probe", "prefill_tokens_per_s", "ttft_s",
    "threads", "isa", "dtype", "math", "depth", "cpu", "probe_products_per_s", "percent_of_product_probe",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = write_folder(
        tmp_path_factory.mktemp("hf"), random_model(small_config(vocab_size=264)), eos_token_id=2
    )
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def test_generate_prints_the_decoded_tokens(folder, capsys):
    main(["generate", str(folder), "--prompt", "a é b", "--max-new-tokens", "40", "--threads", "2"])
    with Engine.from_pretrained(folder) as engine:
        prompt = engine.tokenizer.encode("a é b").ids
        tokens = engine.generate(prompt, max_new_tokens=40)
        text = TextStream(engine.tokenizer, prompt)
        expected = "".join([*map(text.push, tokens), text.finish()])
    assert len(expected) >= 20
    assert capsys.readouterr().out == expected + "\n"


def test_flags_reach_the_engine(folder, capsys, monkeypatch):
    fix_costs(monkeypatch)
    flags = ["--temperature", "0.9", "--seed", "3", "--repetition-penalty", "1.3", "--frequency-penalty", "0.2",
             "--presence-penalty", "0.1", "--min-new-tokens", "9", "--ignore-eos"]  # fmt: skip
    main(["generate", str(folder), "--prompt", "a b", "--max-new-tokens", "30", *flags, "--speculate", "4"])
    printed = capsys.readouterr()
    with Engine.from_pretrained(folder) as engine:
        expected = engine.generate_text(
            "a b", max_new_tokens=30, temperature=0.9, seed=3, repetition_penalty=1.3, frequency_penalty=0.2,
            presence_penalty=0.1, min_new_tokens=9, ignore_eos=True,
        )  # fmt: skip
    assert printed.out == expected + "\n"
    main(["generate", str(folder), "--prompt", "a b a b a b", "--max-new-tokens", "60", "--ignore-eos"])
    assert "draft tokens were right" in capsys.readouterr().err
    stop = expected[len(expected) // 2]
    main(
        [
            "generate",
            str(folder),
            "--prompt",
            "a b",
            "--max-new-tokens",
            "30",
            *flags,
            "--stop",
            "xyz",
            "--stop",
            stop,
        ]
    )
    assert capsys.readouterr().out == expected[: expected.index(stop)] + "\n"


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "a b", "--max-new-tokens", "2"], ["bench", "--json"]]
)
def test_packed_weights_are_kept_unless_told_not_to(tmp_path, monkeypatch, folder, command):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    copy = shutil.copytree(folder, tmp_path / "hf", ignore=shutil.ignore_patterns(FOLDER))
    main([command[0], str(copy), *command[1:], "--no-cache"])
    assert not (copy / FOLDER).exists()
    assert not (tmp_path / "user").exists()
    main([command[0], str(copy), *command[1:]])
    assert list((copy / FOLDER).iterdir())


def test_streamed_pieces_add_up_and_never_hold_half_a_character():
    tokenizer, rng = byte_tokenizer(), random.Random(0)
    for _ in range(50):
        text = "".join(rng.choice("ab é漢🙂\n") for _ in range(20))
        ids = tokenizer.encode(text).ids
        stream = TextStream(tokenizer, ids[:1] if text[0] in "ab " else [])
        prompt = tokenizer.decode(stream.ids)
        pieces = [stream.push(token) for token in ids[len(stream.ids) :]]
        assert not any("\ufffd" in piece for piece in pieces)
        assert prompt + "".join(pieces) + stream.finish() == text


def test_an_unfinished_character_appears_at_the_end():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, [])
    half = tokenizer.encode("é").ids[:1]
    assert [stream.push(token) for token in half] == [""]
    assert stream.finish() == "\ufffd"


def test_bytes_that_form_no_character_do_not_hold_the_text_back_for_ever():
    tokenizer = byte_tokenizer()
    stream = TextStream(tokenizer, [])
    pieces = [stream.push(token) for token in tokenizer.encode("é").ids[:1] * 50]
    assert len("".join(pieces)) >= 40
    assert len("".join(pieces)) + len(stream.finish()) == 50


def test_bench_ends_with_its_figures(capsys):
    drafts = ["--draft-head", "64", "--synthetic-acceptance", "0.9,0.8"]
    main(["bench", "--random-weights", "tiny", "--json", "--threads", "1", *drafts])
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert set(figures) >= KEYS
    assert figures["threads"] == 1
    assert figures["dtype"] == "bf16"
    assert figures["tokens_per_s"] > 0
    recomputed = 100 * figures["bytes_per_token"] * figures["tokens_per_s"] / figures["probe_bytes_per_s"]
    # the figure is a median of ratios, this a ratio of medians: on a busy machine they part, but not by units
    assert 0.2 < figures["percent_of_probe"] / recomputed < 5
    assert figures["draft_head"]["ids"] == 64
    assert 0 < figures["draft_head"]["weight_bytes"] < figures["bytes_per_token"]
    assert figures["draft_head"]["speed_up"] > 0
    assert 1 <= figures["synthetic_drafts"]["tokens_a_pass"] <= 3


def test_int8_is_named_wherever_it_is_measured(folder, capsys):
    main(["bench", str(folder), "--dtype", "int8", "--threads", "1"])
    printed = capsys.readouterr()
    assert json.loads(printed.out.strip().splitlines()[-1])["dtype"] == "int8"
    assert "int8: " in printed.err
    command = ["generate", str(folder), "--prompt", "a b", "--max-new-tokens", "10", "--dtype", "int8"]
    for flags, math in ([], "int8"), (["--math", "exact"], "exact"):
        main([*command, *flags])
        with Engine.from_pretrained(folder, dtype="int8", math=math) as engine:
            assert capsys.readouterr().out == engine.generate_text("a b", max_new_tokens=10) + "\n"


def test_bench_of_a_folder_at_depths(folder, capsys):
    main(["bench", str(folder), "--depth", "20", "0", "--threads", "2"])
    figures = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (figures["depth"], figures["dtype"], figures["threads"]) == (20, "fp32", 2)
    assert [deeper["depth"] for deeper in figures["depths"]] == [0]
    assert figures["tokens_per_s_p10"] <= figures["tokens_per_s"] <= figures["tokens_per_s_p90"]
    assert figures["probe_bytes_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "/nowhere", "--prompt", "x"], "not a folder"),
        (["generate", "/nowhere", "--prompt", "x", "--top-p", "7"], "top_p = 7.0 is outside 0.0 to 1.0"),
        (
            ["generate", "/nowhere", "--prompt", "x", "--system", "y"],
            "--system is a message of a conversation; add",
        ),
        (
            ["generate", "/nowhere", "--prompt", "x", "--greedy", "--temperature", "1"],
            "contradict each other",
        ),
        (["bench"], "either a model folder or --random-weights"),
        (["bench", "/nowhere", "--draft-head", "64"], "a folder has its own, or none"),
        (["bench", "--random-weights", "tiny", "--device", "gpu"], "device = 'gpu' is unknown"),
        (["bench", "--random-weights", "tiny", "--depth", "500"], "depth = 500 is outside"),
        (
            ["bench", "--random-weights", "tiny", "--draft", "small"],
            "--draft small drafts for a model folder",
        ),
    ],
)
def test_mistakes_end_with_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.rotate
def test_a_lost_process_ends_with_a_message(folder, monkeypatch, capsys):
    join = ProcessesDecoder.join

    def lose(self, requests, alone=False):
        self._workers.processes[0].send_signal(
            signal.SIGSTOP
        )  # rank 0 decodes in the background: it must wait for it
        tickets = join(self, requests)
        self._workers.processes[0].kill()
        return tickets

    monkeypatch.setattr(ProcessesDecoder, "join", lose)
    with pytest.raises(SystemExit) as stop:
        main(
            [
                "generate",
                str(folder),
                "--prompt",
                "a b",
                "--processes",
                "2",
                "--max-new-tokens",
                "200",
                "--ignore-eos",
            ]
        )
    assert stop.value.code == 1
    assert "was killed by SIGKILL: the request has ended" in capsys.readouterr().err


TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}{{ m.role[0] + m.content }}{% endfor %}{{ add_generation_prompt }}"
)


@pytest.fixture
def sampled(tmp_path, folder):
    """The folder with a chat template, and with sampling as its default."""
    path = shutil.copytree(folder, tmp_path / "sampled", ignore=shutil.ignore_patterns(FOLDER))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "tokenizer_config.json").write_text('{"chat_template": "an older one", "bos_token": "<s>"}')
    said = {
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.9,
        "repetition_penalty": None,
        "eos_token_id": [2, 7],
    }
    (path / "generation_config.json").write_text(json.dumps(said))
    return path


def test_sampling_of_generation_config_is_the_default_and_said(sampled, capsys):
    command = ["generate", str(sampled), "--prompt", "a b", "--max-new-tokens", "20", "--seed", "5"]
    said = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
    with Engine.from_pretrained(sampled) as engine:
        assert engine.sampling_defaults == said
        assert engine.eos_ids == (2, 7)
        expected = {
            "": engine.generate_text("a b", max_new_tokens=20, seed=5, **said),
            "--greedy": engine.generate_text("a b", max_new_tokens=20),
            "--top-k=3": engine.generate_text("a b", max_new_tokens=20, seed=5, **said | {"top_k": 3}),
            "--temperature=0": engine.generate_text("a b", max_new_tokens=20),
        }
    assert len(set(expected.values())) == 3
    for option, text in expected.items():
        main([*command, *([option] if option else [])])
        printed = capsys.readouterr()
        assert printed.out == text + "\n"
        line = "from the model's generation_config.json: temperature 0.8, top_k 50, top_p 0.9 (--greedy turns it off)"
        assert (line in printed.err) == (option == "")
        assert ("generation_config" in printed.err) == (option != "--greedy")


def test_chat_sends_the_prompt_through_the_model_s_template(sampled, capsys):
    flags = ["--prompt", "hi", "--max-new-tokens", "20", "--greedy", "--chat"]
    with Engine.from_pretrained(sampled) as engine:
        for system, text in (([], "<s>uhiTrue"), (["--system", "b"], "<s>sb<s>uhiTrue")):
            ids = engine.tokenizer.encode(text, add_special_tokens=False).ids
            expected = engine.generate_text(ids, max_new_tokens=20)
            main(["generate", str(sampled), *flags, *system])
            assert capsys.readouterr().out == expected + "\n"
